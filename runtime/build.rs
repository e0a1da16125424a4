//! Generates the client and server of the control service; no protobuf compiler is involved.

fn main() {
    let method = tonic_build::manual::Method::builder()
        .name("attach")
        .route_name("Attach")
        .input_type("crate::control::RankEvent")
        .output_type("crate::control::CoordinatorCommand")
        .codec_path("crate::control::BincodeCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let service = tonic_build::manual::Service::builder()
        .name("Control")
        .package("eaglet")
        .comment("One stream per rank incarnation.")
        .method(method)
        .build();
    tonic_build::manual::Builder::new().compile(&[service]);
}

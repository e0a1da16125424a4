//! Generates the client and server of the control service; no protobuf compiler is involved.

fn main() {
    let attach = tonic_build::manual::Method::builder()
        .name("attach")
        .route_name("Attach")
        .input_type("crate::control::RankEvent")
        .output_type("crate::control::CoordinatorCommand")
        .codec_path("crate::control::BincodeCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let join = tonic_build::manual::Method::builder()
        .name("join")
        .route_name("Join")
        .input_type("crate::control::HostEvent")
        .output_type("crate::control::HostCommand")
        .codec_path("crate::control::BincodeCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let operate = tonic_build::manual::Method::builder()
        .name("operate")
        .route_name("Operate")
        .input_type("crate::control::OperatorCall")
        .output_type("crate::control::OperatorReply")
        .codec_path("crate::control::BincodeCodec")
        .build();
    let service = tonic_build::manual::Service::builder()
        .name("Control")
        .package("eaglet")
        .comment("One stream per rank incarnation, one per host, and single calls of operators.")
        .method(attach)
        .method(join)
        .method(operate)
        .build();
    tonic_build::manual::Builder::new().compile(&[service]);
}

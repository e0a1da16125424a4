//! NVIDIA's own compiler on our kernels, where it is installed: it needs no GPU.

use eaglet_runtime::cuda::{Nvrtc, Program, SearchPath};

#[test]
fn nvrtc_compiles_every_program_for_every_generation() {
    let nvrtc = match Nvrtc::open(&SearchPath::here()) {
        Ok(nvrtc) => nvrtc,
        Err(error) => return println!("skipped: {error}"),
    };
    let (major, minor) = nvrtc.version();
    println!("NVRTC {major}.{minor}, {}", nvrtc.path().display());
    let heads = [(64, 64), (128, 128), (192, 128), (256, 256)];
    let attention = heads.map(|(head_dim, value_dim)| Program::Attention { head_dim, value_dim });
    let mut done = 0;
    for capability in [(8, 0), (9, 0), (10, 0), (12, 0)] {
        let architecture = match nvrtc.architecture(capability) {
            Ok(architecture) => architecture,
            // An NVRTC of CUDA 12.0 knows nothing newer than 9.0.
            Err(error) => {
                println!("{capability:?}: {error}");
                continue;
            }
        };
        for program in Program::GENERAL.into_iter().chain(attention) {
            let code = nvrtc
                .compile(
                    &program.name(),
                    &program.text(),
                    &architecture,
                    &program.options(),
                )
                .unwrap_or_else(|error| panic!("{error}"));
            assert!(
                code.starts_with(b"\x7fELF"),
                "{} for {architecture}",
                program.name()
            );
            done += 1;
        }
    }
    assert!(
        done >= 2 * (Program::GENERAL.len() + heads.len()),
        "{done} programs"
    );
}

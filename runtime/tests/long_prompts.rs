//! A long prompt in bounded memory. A test of its own, because it looks at the peak of the whole process.

use std::error::Error;
use std::path::Path;

use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::verifier::{Alone, Verifier, VerifierOptions};

/// Tokens of the prompt. One head's scores of all tokens against all would take 4 GiB.
const TOKENS: usize = 32 * 1024;
/// What the pass may add to the process's peak. Activations take about 100 MB, a block of scores 8 MB a thread.
const ALLOWED_BYTES: usize = 300 << 20;

/// Peak resident memory of this process, in bytes.
fn peak_bytes() -> Result<usize, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .ok_or("no VmHWM")?;
    Ok(kib.trim().parse::<usize>()? * 1024)
}

#[test]
#[cfg(target_os = "linux")]
fn thirty_two_thousand_tokens_take_linear_memory() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/verifiers/gemma3");
    let options = VerifierOptions {
        threads: 2,
        aux_layers: Some(vec![1, 2]),
        ..VerifierOptions::default()
    };
    let mut verifier = Verifier::load(folder, options)?;
    let vocab = verifier.vocab_size();
    let tokens: Vec<u32> = (0..TOKENS).map(|i| ((i * i + 7 * i) % vocab) as u32).collect();
    let mut row = PackedRow::default();
    row.push(&Sample {
        loss_mask: vec![1; TOKENS],
        tokens,
    });
    let before = peak_bytes()?;
    let states = verifier.extract(&row, HiddenDtype::Bf16, &mut Alone)?;
    let added = peak_bytes()? - before;
    assert_eq!(states.tokens(), TOKENS);
    assert!(added < ALLOWED_BYTES, "{TOKENS} tokens took {} MB", added >> 20);
    Ok(())
}

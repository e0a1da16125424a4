#!/usr/bin/env bash
# What a machine with a GPU can prove so far, in some minutes: devices, and every kernel, product and row against the CPU.
# Set EAGLET_CUDA_PATH if the CUDA libraries are not where the loader looks, see docs/cuda.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

cargo build --release --workspace
target/release/eaglet devices
cargo test --release --workspace --no-run
export EAGLET_TEST_GPU=1
cargo test --release --workspace --test cuda -- --nocapture --test-threads=1
cargo test --release --workspace --test golden_draft --test golden_verifier -- --nocapture --test-threads=1 cuda

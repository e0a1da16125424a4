//! Whole-cluster tests live in `tests/`; this library is their shared harness.

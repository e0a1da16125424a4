//! Checkpoints: what vLLM serves, and what a run resumes from.

//! `cluster.toml`: read, layered, checked.

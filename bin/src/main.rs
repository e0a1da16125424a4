//! The `eaglet` command.

fn main() {}

//! Where numbers are computed: one trait, and the CPU behind it.

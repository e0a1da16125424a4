//! The large model whose hidden states are distilled.

//! The control plane: messages between the coordinator and its ranks, and the link that carries them.

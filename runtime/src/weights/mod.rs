//! Tensors in safetensors files, mapped and read by name.

//! The bulk plane: tensors between processes of one host through shared memory.

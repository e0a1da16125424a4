//! What of a shard lies where its device computes, for as long as the shard is loaded.

use super::{Shard, VerifierFiles};
use crate::cuda::{GpuMatrix, UNPACKED_BYTES};
use crate::device::{Buffer, Device, Products, StoredMatrix, WeightUse};

/// Who is shown all vectors and matrices of a shard.
pub(super) trait Residence {
    /// A norm or bias.
    fn vector(&mut self, vector: &mut Buffer);

    /// Weights of products, or the embedding.
    fn matrix(&mut self, matrix: &dyn StoredMatrix, purpose: WeightUse);
}

/// Brings vectors to a device.
pub(super) struct VectorsOn<'a, D>(pub(super) &'a D);

impl<D: Device> Residence for VectorsOn<'_, D> {
    fn vector(&mut self, vector: &mut Buffer) {
        *vector = self.0.place(std::mem::take(vector), "vectors of layers");
    }

    fn matrix(&mut self, _: &dyn StoredMatrix, _: WeightUse) {}
}

/// Shows matrices to somebody.
pub(super) struct Matrices<'a>(pub(super) &'a mut dyn FnMut(&dyn StoredMatrix, WeightUse));

impl Residence for Matrices<'_> {
    fn vector(&mut self, _: &mut Buffer) {}

    fn matrix(&mut self, matrix: &dyn StoredMatrix, purpose: WeightUse) {
        (self.0)(matrix, purpose);
    }
}

/// Bytes of a GPU's memory that a shard takes for as long as it is loaded, its activations and caches not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuBytes {
    /// Of matrices: those of the files, but for forms that have to be unpacked.
    pub weights: u64,
    /// Of norms and biases.
    pub vectors: u64,
    /// At most, of tiles that are unpacked for a product.
    pub unpacked: u64,
}

impl GpuBytes {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.weights + self.vectors + self.unpacked
    }
}

/// Counts what everything would take on a GPU.
struct Counted {
    products: Products,
    bytes: GpuBytes,
}

impl Residence for Counted {
    fn vector(&mut self, vector: &mut Buffer) {
        self.bytes.vectors += (vector.len() * size_of::<f32>()) as u64;
    }

    fn matrix(&mut self, matrix: &dyn StoredMatrix, _: WeightUse) {
        self.bytes.weights += GpuMatrix::bytes_of(matrix, self.products) as u64;
    }
}

impl VerifierFiles {
    /// What a shard takes of a GPU's memory when it is loaded, with products of this kind. Only headers are read, and
    /// scales of fp8 weights. Nothing of tensors that are missing or cannot be used is counted.
    pub fn gpu_bytes(&self, shard: Shard, products: Products) -> GpuBytes {
        let mut counted = Counted {
            products,
            bytes: GpuBytes {
                // Tiles of different sizes are kept beside each other, each as large as a power of two.
                unpacked: 2 * UNPACKED_BYTES as u64,
                ..GpuBytes::default()
            },
        };
        self.any_decoder(shard).place(&mut counted);
        counted.bytes
    }
}

//! Products of bf16 matrices by the AMX unit of newer Intel processors, sums in f32.
//!
//! Both operands are packed into tiles, in whatever order they are stored ([`pack`]), and multiplied block by block
//! ([`product`]) by one micro-kernel of 32 x 32 outputs ([`tiles`]). The micro-kernel is inline assembly, because the
//! compiler's own functions for AMX are not stable yet.
//!
//! Invariants:
//! - AMX-1: both operands are rounded to bf16, to the nearest and ties to even, and NaN stays NaN. Nothing else is rounded
//!   that the instruction itself does not round.
//! - AMX-2: an element of the output is summed along k in ascending order from zero, 32 terms an instruction; the block
//!   sizes, the number of threads and the other rows and columns of the call change nothing. So rows are independent.
//! - AMX-3: `alpha` and what the output held before are applied to the finished sum, in f32.
//! - AMX-4: tiles are configured and released within one task, which waits for nobody.
//! - AMX-5: what is used beyond the operands is bounded: packed panels of [`product::SLAB_BYTES`] a side, and a block of
//!   sums per thread. Both are kept for the next product.
//!
//! As the instruction is defined, it takes subnormal numbers for zero, operands and sums alike.
//!
//! What was shown how: the tests run these very instructions, natively where the machine has AMX, else one by one in
//! software (`tests/emulator.rs`), from what Intel's manual says of them. This has only happened in software so far: no
//! machine with AMX was at hand. So the encoding, the order of tiles, strides, edges, blocking and results are tested;
//! speed, the request for the tile state and the detection's positive outcome on a real processor are not. A machine whose
//! unit does not multiply as it should is recognised by [`self_check`], at the first use in every process.

mod cache;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[path = "absent.rs"]
mod hardware;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod hardware;
mod pack;
mod packed;
mod product;
mod self_check;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
pub(crate) mod tests;
mod tiles;

pub(in crate::device::cpu) use self::cache::PackedCache;
pub use self::packed::PackedMatrix;
pub use self::tiles::NoAmx;

use std::sync::OnceLock;

use half::bf16;

use self::hardware::Amx;
use self::packed::Source;
use self::product::{Right, SLAB_BYTES, Workspace, product};
use crate::device::{HostMatrix, HostMatrixMut, Kept, StoredMatrix};

/// Whether this process can use AMX: processor, operating system, permission, and a product whose result is known.
///
/// Asked and tried once per process.
fn amx() -> Result<Amx, NoAmx> {
    static FOUND: OnceLock<Result<Amx, NoAmx>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let amx = Amx::request()?;
            self_check::check(amx)?;
            Ok(amx)
        })
        .clone()
}

/// Products through AMX, and the memory they use.
#[derive(Debug)]
pub(super) struct Engine {
    amx: Amx,
    workspace: Workspace,
}

impl Engine {
    /// The engine of this machine.
    ///
    /// # Errors
    /// Why it has none.
    pub(super) fn new() -> Result<Self, NoAmx> {
        amx().map(Self::on)
    }

    fn on(amx: Amx) -> Self {
        Self {
            amx,
            workspace: Workspace::new(SLAB_BYTES),
        }
    }

    /// `c = alpha · a·b` or `c += alpha · a·b` over the threads of the current pool.
    pub(super) fn gemm(
        &self,
        c: HostMatrixMut<'_>,
        a: HostMatrix<'_>,
        b: HostMatrix<'_>,
        alpha: f32,
        accumulate: bool,
    ) {
        let right = Right::Source(b.transposed().into());
        product(self.amx, &self.workspace, c, a, right, alpha, accumulate);
    }

    /// `c = alpha · a·b` or `c += alpha · a·b` with packed `b`.
    pub(super) fn gemm_packed(
        &self,
        c: HostMatrixMut<'_>,
        a: HostMatrix<'_>,
        b: &PackedMatrix,
        alpha: f32,
        accumulate: bool,
    ) {
        product(
            self.amx,
            &self.workspace,
            c,
            a,
            Right::Packed(b),
            alpha,
            accumulate,
        );
    }

    /// `c = a·wᵀ` or `c += a·wᵀ`; weights that have a place for it are packed once and kept.
    pub(super) fn gemm_stored(
        &self,
        c: HostMatrixMut<'_>,
        a: HostMatrix<'_>,
        weights: &dyn StoredMatrix,
        accumulate: bool,
    ) {
        let right = match (Source::in_place(weights), weights.kept()) {
            (Some(plain), Some(place)) => {
                // Not inside `get_or_init`: a task that a waiting thread steals meanwhile could come here again.
                if place.get().is_none() {
                    let _ = place.set(Kept::Amx(PackedMatrix::new(plain)));
                }
                match place.get() {
                    Some(Kept::Amx(packed)) => {
                        packed.check(plain);
                        Right::Packed(packed)
                    }
                    // Another device has it.
                    _ => Right::Source(plain),
                }
            }
            (Some(plain), None) => Right::Source(plain),
            (None, _) => Right::Source(weights.into()),
        };
        product(self.amx, &self.workspace, c, a, right, 1.0, accumulate);
    }

    /// The right operand of products, `[k, n]`, packed.
    pub(super) fn pack(&self, b: HostMatrix<'_>) -> PackedMatrix {
        PackedMatrix::new(b.transposed().into())
    }

    /// [`Self::pack`] of bf16.
    pub(super) fn pack_bf16(&self, b: HostMatrix<'_, bf16>) -> PackedMatrix {
        PackedMatrix::new(b.transposed().into())
    }
}

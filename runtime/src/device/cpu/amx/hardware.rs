//! The AMX unit itself: whether it is there, its configuration, and the micro-kernel.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::io;
use std::marker::PhantomData;

use super::tiles::{BLOCK_SUMS, Line, NoAmx, STEP_LINES, TILE_ROWS};

/// Leaf 1, ECX: the operating system has enabled XSAVE, so XCR0 can be read.
const OSXSAVE: u32 = 1 << 27;
/// Leaf 7, EDX.
const AMX_BF16: u32 = 1 << 22;
/// Leaf 7, EDX.
const AMX_TILE: u32 = 1 << 24;
/// Leaf of the palettes of tiles.
const TILE_LEAF: u32 = 0x1d;
/// XCR0: tile configuration and tile data.
const XCR0_TILES: u64 = 0b11 << 17;
/// `arch_prctl` of Linux: asks for a part of the register state that costs every thread memory.
const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
/// The part: tile data.
const XFEATURE_XTILEDATA: libc::c_ulong = 18;

/// The palette of 8 tiles of 16 rows of 64 bytes.
const PALETTE: u8 = 1;
const TILES: usize = 8;

/// That this process may use the AMX unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amx(());

impl Amx {
    /// Asks processor and operating system. The permission holds for all threads of the process, earlier ones too.
    pub(super) fn request() -> Result<Self, NoAmx> {
        if !processor_has_it() {
            return Err(NoAmx::Processor);
        }
        let has_xgetbv = __cpuid(1).ecx & OSXSAVE != 0;
        // SAFETY: OSXSAVE says that XGETBV can be executed.
        if !has_xgetbv || unsafe { enabled_state() } & XCR0_TILES != XCR0_TILES {
            return Err(NoAmx::System);
        }
        // SAFETY: this call takes two numbers and touches no memory of ours.
        let refused =
            unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } != 0;
        if refused {
            return Err(NoAmx::Permission(io::Error::last_os_error().to_string()));
        }
        Ok(Self(()))
    }

    /// The unit as software has it; see the emulator.
    #[cfg(test)]
    pub(super) const fn emulated() -> Self {
        Self(())
    }

    /// Configures the tiles of this thread until the result is dropped.
    pub(super) fn configure(self) -> Tiles {
        let mut configuration = Configuration {
            palette: PALETTE,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        configuration.row_bytes[..TILES].fill(size_of::<Line>() as u16);
        configuration.rows[..TILES].fill(TILE_ROWS as u8);
        // SAFETY: `Amx` exists only where the instruction does and the process has the permission; it reads 64 bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, readonly, preserves_flags));
        }
        Tiles(PhantomData)
    }
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

fn processor_has_it() -> bool {
    // Leaves are asked only up to the highest one.
    let highest = __cpuid(0).eax;
    if highest < TILE_LEAF || __cpuid_count(7, 0).edx & (AMX_TILE | AMX_BF16) != AMX_TILE | AMX_BF16 {
        return false;
    }
    if __cpuid_count(TILE_LEAF, 0).eax < u32::from(PALETTE) {
        return false;
    }
    let palette = __cpuid_count(TILE_LEAF, u32::from(PALETTE));
    let (row_bytes, tiles, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
    row_bytes as usize == size_of::<Line>() && tiles as usize >= TILES && rows as usize >= TILE_ROWS
}

/// XCR0: what of the register state the operating system has enabled.
#[target_feature(enable = "xsave")]
fn enabled_state() -> u64 {
    // SAFETY: the caller has looked at OSXSAVE; register 0 exists then.
    unsafe { _xgetbv(0) }
}

/// The configured tiles of a thread.
pub(super) struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// `sums = left·right`, or `sums += left·right` with `add`; `sums` `[32, 32]`, the panels `[32, k]` and `[k, 32]` as
    /// [`Line`] describes them.
    ///
    /// # Panics
    /// If the panels are empty, not of one length, or end within a step.
    #[inline]
    pub(super) fn multiply(
        &mut self,
        left: &[Line],
        right: &[Line],
        sums: &mut [f32; BLOCK_SUMS],
        add: bool,
    ) {
        assert!(
            !left.is_empty() && left.len() == right.len() && left.len().is_multiple_of(STEP_LINES),
            "panels of {} and {} lines",
            left.len(),
            right.len()
        );
        let steps = left.len() / STEP_LINES;
        // All of it is one block, so that nobody but these lines touches a tile between its first and its last use.
        // tmm0 to tmm3 are the four tiles of sums; tmm4 and tmm5 are left, tmm6 and tmm7 right.
        // SAFETY: the tiles are configured as long as `self` lives, on this thread, since `Tiles` is not `Send`. Each step
        // reads 2 KiB of each panel, which has `steps` of them; `sums` has 32 rows of 128 bytes.
        unsafe {
            asm!(
                "test {add}, {add}",
                "jnz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{sums} + {pitch}*1]",
                "tileloadd tmm1, [{sums} + {pitch}*1 + 64]",
                "tileloadd tmm2, [{sums} + {pitch}*1 + 2048]",
                "tileloadd tmm3, [{sums} + {pitch}*1 + 2112]",
                "2:",
                "tileloadd tmm4, [{left} + {line}*1]",
                "tileloadd tmm6, [{right} + {line}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {line}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{left} + {line}*1 + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, 2048",
                "add {right}, 2048",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{sums} + {pitch}*1], tmm0",
                "tilestored [{sums} + {pitch}*1 + 64], tmm1",
                "tilestored [{sums} + {pitch}*1 + 2048], tmm2",
                "tilestored [{sums} + {pitch}*1 + 2112], tmm3",
                add = in(reg) usize::from(add),
                left = inout(reg) left.as_ptr() => _,
                right = inout(reg) right.as_ptr() => _,
                steps = inout(reg) steps => _,
                sums = in(reg) sums.as_mut_ptr(),
                pitch = in(reg) 2 * size_of::<Line>(),
                line = in(reg) size_of::<Line>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    /// Gives the tiles back: a thread with live tiles makes every change of threads save 8 KiB more.
    fn drop(&mut self) {
        // SAFETY: the instruction exists where `configure` ran, and changes tiles only.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}

//! The AMX unit in software, for machines that have none.
//!
//! Without AMX its instructions are illegal, and the kernel says so by SIGILL. A handler decodes the instruction that the
//! program stands at, does to memory and to the thread's own tiles what Intel's manual (volume 2) says of it, and lets the
//! program go on behind it. So the very machine code of the product runs, unchanged.
//!
//! Known are the instructions that the micro-kernel uses: `ldtilecfg`, `tilerelease`, `tilezero`, `tileloadd`,
//! `tilestored` and `tdpbf16ps`. Anything else, and anything that the unit would refuse (no configuration, shapes that do
//! not fit, one tile twice), ends the process as before.
//!
//! `tdpbf16ps`, for each row of sums: all first elements of the pairs along k are added up from zero by fused
//! multiply-adds in ascending order, all second elements likewise; the two are added, and that is added to the sum. Every
//! step rounds to the nearest f32, ties to even, and takes subnormal operands and results for zero.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::Once;

use libc::{c_int, c_void, greg_t, siginfo_t, ucontext_t};

const TILES: usize = 8;
const ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// Where memory is: registers by their number in machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) base: usize,
    pub(super) index: Option<(usize, u8)>,
    pub(super) displacement: i32,
}

/// An instruction, tiles by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    LoadConfiguration(Address),
    Release,
    Zero(usize),
    Load(usize, Address),
    Store(Address, usize),
    Multiply { sums: usize, left: usize, right: usize },
}

/// The instruction that begins at the first byte, and its length.
pub(super) fn decode(byte: impl Fn(usize) -> u8) -> Option<(Instruction, usize)> {
    // VEX in three bytes: inverted upper bits of register numbers, opcode map 0F38; no W, inverted vvvv, 128 bits, prefix.
    if byte(0) != 0xc4 || byte(1) & 0x1f != 2 || byte(2) & 0x84 != 0 {
        return None;
    }
    let upper = |bit: u8| usize::from(!byte(1) >> bit & 1) << 3;
    let (prefix, second) = (byte(2) & 3, usize::from(!byte(2) >> 3 & 15));
    let modrm = byte(4);
    let (mode, register, rm) = (
        modrm >> 6,
        usize::from(modrm >> 3 & 7) | upper(7),
        usize::from(modrm & 7),
    );
    let memory = || address(&byte, mode, rm, upper(5), upper(6));
    let (instruction, length) = match (byte(3), prefix, mode) {
        (0x49, 0, 3) if modrm == 0xc0 => (Instruction::Release, 5),
        (0x49, 0, 0..=2) if register == 0 => {
            let (address, end) = memory()?;
            (Instruction::LoadConfiguration(address), end)
        }
        (0x49, 3, 3) if rm == 0 => (Instruction::Zero(register), 5),
        // Tiles in memory always have a base and an index, which is the distance of their rows.
        (0x4b, 2 | 3, 0..=2) if rm == 4 => {
            let (address, end) = memory()?;
            let loads = prefix == 3;
            let instruction = if loads {
                Instruction::Load(register, address)
            } else {
                Instruction::Store(address, register)
            };
            (instruction, end)
        }
        (0x5c, 2, 3) => (
            Instruction::Multiply {
                sums: register,
                left: rm | upper(5),
                right: second,
            },
            5,
        ),
        _ => return None,
    };
    let is_vex_whole = second == 0 || matches!(instruction, Instruction::Multiply { .. });
    is_vex_whole.then_some((instruction, length))
}

/// A memory operand whose ModRM is byte 4, and where it ends.
fn address(
    byte: &impl Fn(usize) -> u8,
    mode: u8,
    rm: usize,
    base_upper: usize,
    index_upper: usize,
) -> Option<(Address, usize)> {
    let (mut base, mut index, mut end) = (rm | base_upper, None, 5);
    if rm == 4 {
        let sib = byte(5);
        end = 6;
        base = usize::from(sib & 7) | base_upper;
        let number = usize::from(sib >> 3 & 7) | index_upper;
        index = (number != 4).then_some((number, sib >> 6));
    }
    // Addresses without a base are not used.
    if mode == 0 && base & 7 == 5 {
        return None;
    }
    let displacement = match mode {
        0 => 0,
        1 => i32::from(byte(end) as i8),
        _ => i32::from_le_bytes(std::array::from_fn(|i| byte(end + i))),
    };
    end += [0, 1, 4][usize::from(mode)];
    let address = Address {
        base,
        index,
        displacement,
    };
    Some((address, end))
}

/// The unit of one thread.
pub(super) struct Unit {
    /// Rows and bytes of a row of each tile; nothing before it is configured.
    shapes: Option<[(usize, usize); TILES]>,
    tiles: [[[u8; ROW_BYTES]; ROWS]; TILES],
}

impl Unit {
    pub(super) const NEW: Self = Self {
        shapes: None,
        tiles: [[[0; ROW_BYTES]; ROWS]; TILES],
    };

    fn shape(&self, tile: usize) -> Option<(usize, usize)> {
        self.shapes
            .as_ref()?
            .get(tile)
            .copied()
            .filter(|&(rows, _)| rows > 0)
    }

    /// Does what an instruction does; `None` if the unit would refuse it.
    ///
    /// # Safety
    /// The memory at addresses must be what the instruction takes it for.
    unsafe fn execute(&mut self, instruction: Instruction, registers: &[greg_t; 23]) -> Option<()> {
        match instruction {
            Instruction::LoadConfiguration(address) => {
                let (start, _) = resolve(address, registers);
                // SAFETY: as the caller says.
                let bytes = unsafe { (start as *const [u8; 64]).read_unaligned() };
                self.configure(&bytes)?;
            }
            Instruction::Release => *self = Self::NEW,
            Instruction::Zero(tile) => {
                self.shape(tile)?;
                self.tiles[tile] = [[0; ROW_BYTES]; ROWS];
            }
            Instruction::Load(tile, address) => {
                let (rows, len) = self.shape(tile)?;
                let (start, pitch) = resolve(address, registers);
                self.tiles[tile] = [[0; ROW_BYTES]; ROWS];
                for (row, bytes) in self.tiles[tile][..rows].iter_mut().enumerate() {
                    let source = start.wrapping_add(row.wrapping_mul(pitch)) as *const u8;
                    // SAFETY: as the caller says.
                    unsafe { source.copy_to(bytes.as_mut_ptr(), len) };
                }
            }
            Instruction::Store(address, tile) => {
                let (rows, len) = self.shape(tile)?;
                let (start, pitch) = resolve(address, registers);
                for (row, bytes) in self.tiles[tile][..rows].iter().enumerate() {
                    let target = start.wrapping_add(row.wrapping_mul(pitch)) as *mut u8;
                    // SAFETY: as the caller says.
                    unsafe { target.copy_from(bytes.as_ptr(), len) };
                }
            }
            Instruction::Multiply { sums, left, right } => self.multiply(sums, left, right)?,
        }
        Some(())
    }

    fn configure(&mut self, bytes: &[u8; 64]) -> Option<()> {
        let (palette, start_row) = (bytes[0], bytes[1]);
        if palette != 1 || start_row != 0 || bytes[2..16].iter().any(|&byte| byte != 0) {
            return None;
        }
        let mut shapes = [(0, 0); TILES];
        for (tile, shape) in shapes.iter_mut().enumerate() {
            let len = u16::from_le_bytes([bytes[16 + 2 * tile], bytes[17 + 2 * tile]]);
            *shape = (usize::from(bytes[48 + tile]), usize::from(len));
        }
        let is_used = |shape: &(usize, usize)| shape.0 > 0 && shape.1 > 0;
        let beyond = bytes[32..48].iter().chain(&bytes[56..64]).any(|&byte| byte != 0);
        let too_large = shapes.iter().any(|&(rows, len)| rows > ROWS || len > ROW_BYTES);
        if beyond || too_large || !shapes.iter().all(|shape| is_used(shape) || *shape == (0, 0)) {
            return None;
        }
        *self = Self {
            shapes: Some(shapes),
            ..Self::NEW
        };
        Some(())
    }

    pub(super) fn set(&mut self, tile: usize, values: [[u8; ROW_BYTES]; ROWS]) {
        self.tiles[tile] = values;
    }

    pub(super) fn get(&self, tile: usize) -> [[u8; ROW_BYTES]; ROWS] {
        self.tiles[tile]
    }

    /// All tiles as large as they can be.
    pub(super) fn configured() -> Self {
        Self {
            shapes: Some([(ROWS, ROW_BYTES); TILES]),
            ..Self::NEW
        }
    }

    pub(super) fn multiply(&mut self, sums: usize, left: usize, right: usize) -> Option<()> {
        let (shape, of_left, of_right) = (self.shape(sums)?, self.shape(left)?, self.shape(right)?);
        let fits = shape.0 == of_left.0 && shape.1 == of_right.1 && of_left.1 == 4 * of_right.0;
        if sums == left || sums == right || left == right || !fits {
            return None;
        }
        let (left, right) = (self.tiles[left], self.tiles[right]);
        let target = &mut self.tiles[sums];
        if is_x86_feature_detected!("fma") {
            // SAFETY: the machine has the feature.
            unsafe { multiply_fused(target, &left, &right, shape, of_right.0) };
        } else {
            multiply_rows(target, &left, &right, shape, of_right.0);
        }
        target[shape.0..].fill([0; ROW_BYTES]);
        Some(())
    }
}

type Tile = [[u8; ROW_BYTES]; ROWS];

#[target_feature(enable = "fma")]
fn multiply_fused(sums: &mut Tile, left: &Tile, right: &Tile, shape: (usize, usize), pairs: usize) {
    multiply_rows(sums, left, right, shape, pairs);
}

#[inline(always)]
fn multiply_rows(sums: &mut Tile, left: &Tile, right: &Tile, (rows, len): (usize, usize), pairs: usize) {
    for (row, sums) in sums.iter_mut().enumerate().take(rows) {
        let mut partial = [[0.0_f32; ROW_BYTES / 4]; 2];
        for (pair, right) in right.iter().enumerate().take(pairs) {
            for (place, partial) in partial.iter_mut().enumerate() {
                let x = element(&left[row], pair, place);
                for (col, partial) in partial[..len / 4].iter_mut().enumerate() {
                    *partial = flush(x.mul_add(element(right, col, place), *partial));
                }
            }
        }
        let (sums, _) = sums.as_chunks_mut::<4>();
        for (col, sum) in sums.iter_mut().enumerate().take(len / 4) {
            let added = flush(partial[0][col] + partial[1][col]);
            *sum = flush(flush(f32::from_le_bytes(*sum)) + added).to_le_bytes();
        }
    }
}

/// Of a pair of bf16 in a row of a tile, one, as f32.
#[inline(always)]
fn element(row: &[u8; ROW_BYTES], pair: usize, place: usize) -> f32 {
    let at = 4 * pair + 2 * place;
    flush(f32::from_bits(
        u32::from(u16::from_le_bytes([row[at], row[at + 1]])) << 16,
    ))
}

/// Subnormal numbers are zero.
#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

/// An address, and the distance of rows.
fn resolve(address: Address, registers: &[greg_t; 23]) -> (usize, usize) {
    /// Where the kernel saves the registers, in the order of their numbers.
    const PLACES: [c_int; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    let value = |register: usize| registers[PLACES[register] as usize] as usize;
    let start = value(address.base).wrapping_add(address.displacement as usize);
    let pitch = address
        .index
        .map_or(0, |(register, scale)| value(register) << scale);
    (start, pitch)
}

thread_local! {
    // Nothing is allocated or dropped: a signal handler reaches it.
    static UNIT: UnsafeCell<Unit> = const { UnsafeCell::new(Unit::NEW) };
}

extern "C" fn on_illegal_instruction(signal: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO its context, and nobody else has it.
    let registers = unsafe { &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    let start = registers[libc::REG_RIP as usize];
    // SAFETY: the processor has just read this instruction; bytes are asked for in order, as far as it goes.
    let decoded = decode(|index| unsafe { *(start as *const u8).add(index) });
    let done = decoded.and_then(|(instruction, length)| {
        UNIT.with(|unit| {
            // SAFETY: the thread is in this handler and nowhere else, and SIGILL is blocked in it; addresses are those
            // that the micro-kernel vouches for.
            unsafe { (*unit.get()).execute(instruction, registers) }
        })?;
        Some(length)
    });
    match done {
        Some(length) => registers[libc::REG_RIP as usize] = start + length as greg_t,
        // Back to the instruction, now with the default: the process ends.
        // SAFETY: `signal` may be called in a handler.
        None => unsafe {
            libc::signal(signal, libc::SIG_DFL);
        },
    }
}

/// From now on this process has an AMX unit.
pub(super) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // What the handler needs is looked up before it is needed there.
        let _ = is_x86_feature_detected!("fma");
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_illegal_instruction;
        // SAFETY: a zeroed `sigaction` is one; the handler has the signature that SA_SIGINFO asks for and calls nothing
        // that a handler must not call.
        let installed = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut())
        };
        assert_eq!(installed, 0, "a handler of SIGILL");
    });
}

//! The double itself.

use half::bf16;

use super::emulator::{Address, Instruction, Unit, decode};

fn decoded(bytes: &[u8]) -> Option<(Instruction, usize)> {
    decode(|index| bytes[index])
}

#[test]
fn instructions_are_read_as_they_are_encoded() {
    let at = |base, index, displacement| Address {
        base,
        index,
        displacement,
    };
    let multiply = |sums, left, right| Instruction::Multiply { sums, left, right };
    let cases: [(&[u8], Instruction); 11] = [
        (&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Instruction::Release),
        (
            &[0xc4, 0xe2, 0x78, 0x49, 0x00],
            Instruction::LoadConfiguration(at(0, None, 0)),
        ),
        (
            &[0xc4, 0xe2, 0x78, 0x49, 0x44, 0x24, 0x40],
            Instruction::LoadConfiguration(at(4, None, 64)),
        ),
        (&[0xc4, 0xe2, 0x7b, 0x49, 0xc0], Instruction::Zero(0)),
        (&[0xc4, 0xe2, 0x7b, 0x49, 0xf8], Instruction::Zero(7)),
        // rax + rcx
        (
            &[0xc4, 0xe2, 0x7b, 0x4b, 0x04, 0x08],
            Instruction::Load(0, at(0, Some((1, 0)), 0)),
        ),
        // r8 + 2·r9 + 1024
        (
            &[0xc4, 0x82, 0x7b, 0x4b, 0xb4, 0x48, 0x00, 0x04, 0x00, 0x00],
            Instruction::Load(6, at(8, Some((9, 1)), 1024)),
        ),
        // rdi + rsi - 64
        (
            &[0xc4, 0xe2, 0x7a, 0x4b, 0x5c, 0x37, 0xc0],
            Instruction::Store(at(7, Some((6, 0)), -64), 3),
        ),
        (&[0xc4, 0xe2, 0x4a, 0x5c, 0xc4], multiply(0, 4, 6)),
        (&[0xc4, 0xe2, 0x42, 0x5c, 0xdd], multiply(3, 5, 7)),
        // r13 as a base needs a displacement, even if it is 0.
        (
            &[0xc4, 0xc2, 0x7b, 0x4b, 0x6c, 0x05, 0x00],
            Instruction::Load(5, at(13, Some((0, 0)), 0)),
        ),
    ];
    for (bytes, instruction) in cases {
        assert_eq!(decoded(bytes), Some((instruction, bytes.len())), "{bytes:x?}");
    }
}

#[test]
fn other_instructions_are_not_taken_for_one_of_them() {
    let others: [&[u8]; 6] = [
        &[0x0f, 0x0b, 0, 0, 0],             // ud2
        &[0xc4, 0xe2, 0x79, 0x49, 0x00],    // sttilecfg
        &[0xc4, 0xe2, 0x4b, 0x5e, 0xc4],    // tdpbssd
        &[0xc4, 0xe3, 0x7b, 0x49, 0xc0],    // another map
        &[0xc4, 0xe2, 0xfb, 0x49, 0xc0],    // W
        &[0xc4, 0xe2, 0x79, 0x4b, 0x04, 8], // tileloaddt1
    ];
    for bytes in others {
        assert_eq!(decoded(bytes), None, "{bytes:x?}");
    }
}

/// A tile of pairs of bf16: the same pair everywhere in a row.
fn rows_of(pair: impl Fn(usize) -> [f32; 2]) -> [[u8; 64]; 16] {
    std::array::from_fn(|row| {
        std::array::from_fn(|byte| {
            let value = bf16::from_f32(pair(row)[byte / 2 % 2]);
            value.to_bits().to_le_bytes()[byte % 2]
        })
    })
}

fn first_sum(unit: &Unit) -> f32 {
    f32::from_le_bytes(std::array::from_fn(|byte| unit.get(0)[0][byte]))
}

fn multiplied(sum: f32, left: [f32; 2], right: impl Fn(usize) -> [f32; 2]) -> f32 {
    let mut unit = Unit::configured();
    let mut sums = [[0; 64]; 16];
    sums[0][..4].copy_from_slice(&sum.to_le_bytes());
    unit.set(0, sums);
    unit.set(1, rows_of(|_| left));
    unit.set(2, rows_of(right));
    unit.multiply(0, 1, 2).expect("tiles that fit");
    first_sum(&unit)
}

#[test]
fn first_and_second_elements_are_summed_apart_before_the_sum_is_added_to() {
    let two24 = 16_777_216.0;
    // Each half of the pairs gives 2^24 and then 1: the 1 is lost, twice, though two of them together would not be.
    let one_by_one = |row| match row {
        0 => [two24, two24],
        1 => [1.0, 1.0],
        _ => [0.0, 0.0],
    };
    assert_eq!(multiplied(0.0, [1.0, 1.0], one_by_one), 2.0 * two24);
    // The two halves meet before they meet the old sum, which holds 2^24.
    assert_eq!(
        multiplied(two24, [1.0, 1.0], |row| if row == 0 {
            [1.0, 1.0]
        } else {
            [0.0, 0.0]
        }),
        two24 + 2.0
    );
    // 32 ones.
    assert_eq!(multiplied(0.5, [1.0, 1.0], |_| [1.0, 1.0]), 32.5);
}

#[test]
fn subnormal_numbers_are_zero_and_nan_stays_nan() {
    let small = f32::from_bits(0x0080_0000);
    let subnormal = f32::from_bits(0x0040_0000);
    let first = |x: f32| move |row: usize| if row == 0 { [x, 0.0] } else { [0.0, 0.0] };
    assert_eq!(multiplied(0.0, [1.0, 1.0], first(subnormal)), 0.0);
    assert_eq!(multiplied(0.0, [1.0, 1.0], first(small)), small);
    assert_eq!(multiplied(0.0, [0.5, 0.5], first(small)), 0.0);
    assert_eq!(multiplied(subnormal, [1.0, 1.0], first(0.0)), 0.0);
    assert!(multiplied(0.0, [1.0, 1.0], first(f32::NAN)).is_nan());
    assert!(multiplied(0.0, [0.0, 1.0], first(f32::INFINITY)).is_nan());
}

#[test]
fn what_the_unit_refuses_is_refused() {
    assert_eq!(Unit::configured().multiply(0, 0, 1), None);
    assert_eq!(Unit::configured().multiply(0, 1, 1), None);
    let mut unconfigured = Unit::NEW;
    assert_eq!(unconfigured.multiply(0, 1, 2), None);
}

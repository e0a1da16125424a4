//! Weights in the memory of a GPU, or of what stands in for one, against the CPU.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use super::linear::{Linear, Stored};
use super::stored::Form;
use super::tests::pack;
use super::tiny::{HIDDEN, Tiny};
use super::{Alone, Shard, Verifier, VerifierError};
use crate::contract::HiddenDtype;
use crate::cuda::{Cuda, CudaError, GpuMatrix, Precision};
use crate::device::{Cpu, Device, Matrix, MatrixMut, Products, Sought, StoredMatrix};
use crate::weights::{BlockFormat, Dtype, Encoding, MappedFile, RowOrder, TensorView};

#[path = "../../tests/cuda/stack.rs"]
#[allow(dead_code)]
mod stack;

/// A form and the bytes that files hold of it.
struct Case {
    name: String,
    stored: Stored,
    /// Rows and columns.
    shape: [usize; 2],
    /// Bytes that a GPU is to hold of all of it, but for alignment; for products in f32 and in bf16.
    bytes: [usize; 2],
}

/// Noise without a pattern (xorshift64*).
struct Noise(u64);

impl Noise {
    fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.word() >> 32) as u8).collect()
    }

    /// Between -1 and 1.
    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len)
            .map(|_| (self.word() >> 40) as f32 / (1 << 23) as f32 - 1.0)
            .collect()
    }
}

/// A tensor in a file of its own, which is gone from its folder once it is mapped.
fn tensor(encoding: Encoding, shape: &[usize], bytes: &[u8]) -> TensorView {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(bytes).expect("written");
    let map = MappedFile::open(file.path()).expect("mapped");
    let name = format!("{encoding} {shape:?}");
    TensorView::new(Arc::new(map), name, encoding, shape.to_vec(), 0..bytes.len())
}

fn floats(dtype: Dtype, shape: &[usize], values: &[f32]) -> TensorView {
    let bytes: Vec<u8> = match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::BF16 => values
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        _ => values
            .iter()
            .flat_map(|&x| f16::from_f32(x).to_le_bytes())
            .collect(),
    };
    tensor(Encoding::Plain(dtype), shape, &bytes)
}

const ROWS: usize = 150;
const COLS: usize = 512;

/// Blocks with any integers, and scales that are numbers.
fn blocks(format: BlockFormat, rows: usize, cols: usize, noise: &mut Noise) -> TensorView {
    let count = rows * cols / format.elements();
    let mut bytes = noise.bytes(count * format.bytes());
    let halves: &[usize] = match format {
        BlockFormat::Q4_0 | BlockFormat::Q5_0 | BlockFormat::Q8_0 => &[0],
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4_K | BlockFormat::Q5_K => &[0, 2],
        BlockFormat::Q2_K => &[80, 82],
        BlockFormat::Q3_K => &[108],
        BlockFormat::Q6_K => &[208],
    };
    for block in bytes.chunks_exact_mut(format.bytes()) {
        for (&at, value) in halves.iter().zip(noise.floats(2)) {
            block[at..at + 2].copy_from_slice(&f16::from_f32(value / 64.0).to_le_bytes());
        }
    }
    tensor(Encoding::Block(format), &[rows, cols], &bytes)
}

/// Every form there is, `[ROWS, COLS]`, and some with odd sizes.
fn cases() -> Vec<Case> {
    let noise = &mut Noise(7);
    let mut all = Vec::new();
    let mut add = |name: &str, form: Form, shape: [usize; 2], bytes: [usize; 2]| {
        all.push(Case {
            name: name.to_owned(),
            stored: Stored::new(form, shape[0], shape[1]),
            shape,
            bytes,
        });
    };
    let odd = [ROWS - 3, COLS - 5];
    for (dtype, size) in [(Dtype::F32, 4), (Dtype::BF16, 2), (Dtype::F16, 2)] {
        for shape in [[ROWS, COLS], odd] {
            let values = noise.floats(shape[0] * shape[1]);
            let view = floats(dtype, &shape, &values);
            let bytes = shape[0] * shape[1] * size;
            add(
                &format!("{dtype} {shape:?}"),
                Form::Plain(view),
                shape,
                [bytes; 2],
            );
        }
        let values = noise.floats(ROWS * COLS);
        let view = floats(dtype, &[COLS, ROWS], &values);
        let f32_bytes = if dtype == Dtype::BF16 { 2 } else { 4 };
        add(
            &format!("{dtype}, transposed"),
            Form::Transposed(view),
            [ROWS, COLS],
            [ROWS * COLS * f32_bytes, ROWS * COLS * 2],
        );
    }
    // 96 columns share a scale: a part may begin at neither a word nor a scale.
    for (bits, group, dtype, size) in [
        (4, 32, Dtype::BF16, 2),
        (8, 96, Dtype::F16, 2),
        (4, COLS, Dtype::F32, 4),
    ] {
        let groups = COLS.div_ceil(group);
        let word_bytes = ROWS * COLS * bits / 8;
        let packed = tensor(
            Encoding::Plain(Dtype::I32),
            &[ROWS, COLS * bits / 32],
            &noise.bytes(word_bytes),
        );
        let scales = floats(dtype, &[ROWS, groups], &noise.floats(ROWS * groups));
        let form = Form::Packed {
            packed,
            scales,
            bits,
            group,
        };
        let bytes = word_bytes + ROWS * groups * size;
        add(
            &format!("int{bits}, groups of {group}"),
            form,
            [ROWS, COLS],
            [bytes; 2],
        );
    }
    for block in [[16, 32], [1, COLS], [ROWS, COLS], [48, COLS]] {
        // No code that is no number.
        let codes: Vec<u8> = noise
            .bytes(ROWS * COLS)
            .into_iter()
            .map(|code| if code & 127 == 127 { 0 } else { code })
            .collect();
        let (scale_rows, scale_cols) = (ROWS.div_ceil(block[0]), COLS.div_ceil(block[1]));
        let form = Form::Fp8 {
            bytes: tensor(Encoding::Plain(Dtype::F8_E4M3), &[ROWS, COLS], &codes),
            scales: noise.floats(scale_rows * scale_cols),
            scale_cols,
            block,
        };
        let bytes = ROWS * COLS + 4 * scale_rows * scale_cols;
        add(
            &format!("fp8, blocks of {block:?}"),
            form,
            [ROWS, COLS],
            [bytes; 2],
        );
    }
    let exponents: Vec<u8> = noise
        .bytes(ROWS * COLS / 32)
        .into_iter()
        .map(|byte| 117 + byte % 16)
        .collect();
    let groups = COLS / 32;
    let form = Form::Mxfp4 {
        blocks: tensor(
            Encoding::Plain(Dtype::U8),
            &[ROWS, groups, 16],
            &noise.bytes(ROWS * COLS / 2),
        ),
        scales: tensor(Encoding::Plain(Dtype::U8), &[ROWS, groups], &exponents),
    };
    add("mxfp4", form, [ROWS, COLS], [ROWS * COLS / 2 + ROWS * groups; 2]);
    for format in [
        BlockFormat::Q4_0,
        BlockFormat::Q4_1,
        BlockFormat::Q5_0,
        BlockFormat::Q5_1,
        BlockFormat::Q8_0,
        BlockFormat::Q2_K,
        BlockFormat::Q3_K,
        BlockFormat::Q4_K,
        BlockFormat::Q5_K,
        BlockFormat::Q6_K,
    ] {
        let view = blocks(format, ROWS, COLS, noise);
        let bytes = ROWS * COLS / format.elements() * format.bytes();
        add(
            &format!("{format:?}"),
            Form::Plain(view),
            [ROWS, COLS],
            [bytes; 2],
        );
    }
    // Heads of queries as llama.cpp stores them.
    let view = blocks(BlockFormat::Q4_0, ROWS, COLS, noise);
    let order = RowOrder::Interleaved { head_dim: 10 };
    let bytes = ROWS * COLS / 32 * 18;
    add(
        "Q4_0, rows interleaved",
        Form::Plain(view.in_order(order)),
        [ROWS, COLS],
        [bytes; 2],
    );
    // An element that is not in the file.
    let view = floats(Dtype::F32, &[ROWS, COLS], &noise.floats(ROWS * COLS)).shifted(0.25);
    add(
        "f32, shifted",
        Form::Plain(view),
        [ROWS, COLS],
        [ROWS * COLS * 4, ROWS * COLS * 2],
    );
    all
}

/// Parts of a matrix as slices of verifiers take them, and odder ones.
fn parts(stored: &Stored, [rows, cols]: [usize; 2]) -> Vec<(String, Linear)> {
    let part = |rows: Range<usize>, cols: Range<usize>| {
        let name = format!("rows {rows:?}, columns {cols:?}");
        (name, stored.part(rows, cols))
    };
    vec![
        part(0..rows, 0..cols),
        part(48..96, 0..cols),
        part(3..rows - 8, 0..cols),
        part(70..71, 0..cols),
        part(0..rows, cols / 2..cols),
        part(0..rows, 0..256),
        part(0..rows, 7..cols - 3),
        part(17..80, 101..102),
        part(9..9, 0..cols),
        ("every second row".to_owned(), stored.every_second(0..rows, 0)),
        (
            "every second row of some".to_owned(),
            stored.every_second(5..rows - 2, 1),
        ),
    ]
}

fn gpu(precision: Precision) -> Option<Cuda> {
    let (search, cache) = (stack::search()?, stack::cache()?);
    // Compiled once for all tests.
    drop(stack::Stack::open()?);
    Some(Cuda::new(&search, 0, cache, precision).expect("a gpu"))
}

/// Nobody waits for the answer between layers, and it names the first one all the same.
#[test]
fn a_gpu_finds_states_that_are_not_finite() {
    let Some(first) = gpu(Precision::F32) else { return };
    let values = [1.0, 2.0, 3.0, f32::NAN, 5.0, 6.0];
    let sought = first.seek_beyond(Matrix::new(&values, 3, 2), f32::MAX);
    assert!(matches!(sought, Sought::UnderWay(_)), "{sought:?}");
    assert_eq!(sought.first(), Some(1));
    for (largest, row) in [(3.0, Some(2)), (6.0, None)] {
        let values = [1.0, -2.0, 3.0, -3.0, 5.0, -6.0];
        assert_eq!(
            first.seek_beyond(Matrix::new(&values, 3, 2), largest).first(),
            row
        );
    }

    let row = pack(&[vec![1, 2, 3], vec![4, 5], vec![6]]);
    let spoiled = [
        (
            "model.embed_tokens.weight",
            Some(5 * HIDDEN + 3),
            f32::NAN,
            (1, 0),
        ),
        ("model.embed_tokens.weight", Some(6 * HIDDEN), 3.4e38, (2, 0)),
        ("model.layers.3.mlp.down_proj.weight", None, f32::INFINITY, (0, 4)),
    ];
    for (name, place, value, expected) in spoiled {
        let mut tiny = Tiny::llama();
        match place {
            Some(place) => tiny.values(name)[place] = value,
            None => tiny.values(name).fill(value),
        }
        let Some(gpu) = gpu(Precision::F32) else { return };
        let mut verifier =
            Verifier::load_on(gpu, tiny.folder().path(), None, Shard::WHOLE).expect("it can be loaded");
        let error = verifier
            .extract(&row, HiddenDtype::Bf16, &mut Alone)
            .expect_err("not finite");
        assert!(
            matches!(error, VerifierError::NonFinite { document, layer } if (document, layer) == expected),
            "{name}: {error}"
        );
        if place.is_some() {
            // It is as good as before.
            let row = pack(&[vec![1, 2, 3]]);
            verifier
                .extract(&row, HiddenDtype::Bf16, &mut Alone)
                .expect("finite");
        }
    }
}

fn product(device: &impl Device, x: &[f32], weights: &Linear) -> Vec<f32> {
    let rows = x.len() / weights.cols();
    let mut y = vec![f32::NAN; rows * weights.rows()];
    device.gemm_stored(
        MatrixMut::new(&mut y, rows, weights.rows()),
        Matrix::new(x, rows, weights.cols()),
        weights,
        false,
    );
    y
}

fn gathered(device: &impl Device, weights: &Linear, rows: &[u32]) -> Vec<u32> {
    let mut out = vec![f32::NAN; rows.len() * weights.cols()];
    weights.gather(device, rows, MatrixMut::new(&mut out, rows.len(), weights.cols()));
    out.iter().map(|value| value.to_bits()).collect()
}

/// Largest difference over the largest exact value.
fn difference(ours: &[f32], exact: &[f32]) -> f32 {
    assert_eq!(ours.len(), exact.len());
    let top = exact.iter().fold(f32::MIN_POSITIVE, |top, x| top.max(x.abs()));
    let worst = ours.iter().zip(exact).map(|(a, b)| (a - b).abs() / top);
    worst.fold(0.0, |worst, x| if x <= worst { worst } else { x })
}

/// STORED-1, ENCODED-1
#[test]
fn every_part_of_every_form_is_on_the_gpu_what_it_is_on_the_cpu() {
    let Some(gpu) = gpu(Precision::F32) else { return };
    let cpu = Cpu::new(1).expect("a thread");
    for case in cases() {
        for (part, weights) in parts(&case.stored, case.shape) {
            let name = format!("{}, {part}", case.name);
            gpu.keep(&weights);
            if weights.rows() > 0 {
                let rows: Vec<u32> = (0..weights.rows() as u32).rev().step_by(3).collect();
                assert!(
                    gathered(&gpu, &weights, &rows) == gathered(&cpu, &weights, &rows),
                    "{name}: rows"
                );
            }
            let x = Noise(3).floats(4 * weights.cols());
            let (ours, exact) = (product(&gpu, &x, &weights), product(&cpu, &x, &weights));
            let error = difference(&ours, &exact);
            assert!(error < 2e-6, "{name}: {error:e}");
        }
    }
}

/// Products of bf16: those of factors that were rounded once each.
#[test]
fn bf16_products_are_those_of_rounded_weights() {
    let Some(gpu) = gpu(Precision::Bf16) else { return };
    let cpu = Cpu::new(1).expect("a thread");
    let round = |x: &mut [f32]| x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
    for case in cases() {
        for (part, weights) in parts(&case.stored, case.shape) {
            let (rows, cols) = (weights.rows(), weights.cols());
            let mut x = Noise(3).floats(4 * cols);
            let mut whole = vec![0.0; rows * cols];
            weights.unpack(0..rows, &mut whole);
            let ours = product(&gpu, &x, &weights);
            round(&mut x);
            round(&mut whole);
            let mut exact = vec![0.0; 4 * rows];
            cpu.gemm(
                MatrixMut::new(&mut exact, 4, rows),
                Matrix::new(&x, 4, cols),
                Matrix::new(&whole, rows, cols).transposed(),
                1.0,
                false,
            );
            let error = difference(&ours, &exact);
            assert!(error < 2e-6, "{}, {part}: {error:e}", case.name);
        }
    }
}

/// WEIGHTS-2
#[test]
fn a_row_has_the_same_bits_however_many_share_a_product_and_however_it_is_tiled() {
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(whole) = gpu(precision) else { return };
        let tiled = gpu(precision).expect("as before").with_unpacked_bytes(1);
        for case in cases() {
            let (weights, cut) = (case.stored.whole(), case.stored.whole());
            let cols = case.shape[1];
            let x = Noise(5).floats(7 * cols);
            let all = product(&whole, &x, &weights);
            assert!(product(&tiled, &x, &cut) == all, "{}: in tiles", case.name);
            for rows in [0..1, 2..4, 6..7] {
                let some = product(&whole, &x[rows.start * cols..rows.end * cols], &weights);
                let outputs = case.shape[0];
                assert!(
                    some == all[rows.start * outputs..rows.end * outputs],
                    "{}: rows {rows:?}",
                    case.name
                );
            }
        }
    }
}

/// WEIGHTS-1
#[test]
fn a_gpu_holds_what_the_files_hold_of_the_part() {
    for (precision, products) in [(Precision::F32, Products::F32), (Precision::Bf16, Products::Bf16)] {
        let Some(gpu) = gpu(precision) else { return };
        let held = || {
            let holders = gpu.holders().0;
            let found = holders.iter().find(|(name, _)| *name == "weights");
            found.map_or(0, |&(_, bytes)| bytes)
        };
        for case in cases() {
            let bytes = case.bytes[usize::from(products == Products::Bf16)];
            for (share, weights) in [
                (1.0, case.stored.whole()),
                // Borders of every form's words, blocks and scales, but for groups of 96 and blocks of 48 rows.
                (0.5, case.stored.part(0..case.shape[0], 0..COLS / 2)),
                (
                    48.0 / case.shape[0] as f64,
                    case.stored.part(48..96, 0..case.shape[1]),
                ),
                (0.5, case.stored.every_second(0..case.shape[0], 1)),
            ] {
                let name = &case.name;
                let before = held();
                gpu.keep(&weights);
                let taken = held() - before;
                assert_eq!(taken, GpuMatrix::bytes_of(&weights, products), "{name}");
                // Of rows that share scales the ones between are taken along.
                let shares_rows = ["fp8, blocks of [16", "fp8, blocks of [48"];
                if shares_rows.iter().any(|fp8| name.starts_with(fp8)) && weights.rows() == ROWS / 2 {
                    continue;
                }
                let own = (bytes as f64 * share) as usize;
                // A row or column more of odd sizes, a group that is cut, scales that all rows or columns share.
                let slack = 256 + case.shape[0] * 16 + case.shape[1] * 4;
                assert!(
                    taken + slack >= own && taken <= own + slack,
                    "{name}: {taken} bytes for {own}"
                );
                if share == 1.0 {
                    assert!(
                        (bytes..bytes + 256).contains(&taken),
                        "{name}: {taken} bytes for {bytes}"
                    );
                }
            }
            assert_eq!(held(), 0, "{}: weights that nobody has", case.name);
        }
    }
}

/// UPLOAD-1
#[test]
fn weights_larger_than_the_pinned_pieces_arrive_whole() {
    let Some(gpu) = gpu(Precision::F32) else { return };
    let cpu = Cpu::new(1).expect("a thread");
    // 20 MB: the pieces are filled again, and rows cross their borders.
    let (rows, cols) = (4900, 1021);
    let values = Noise(11).floats(rows * cols);
    let stored = Stored::new(
        Form::Plain(floats(Dtype::F32, &[rows, cols], &values)),
        rows,
        cols,
    );
    for weights in [stored.whole(), stored.part(0..rows, 1..cols)] {
        let list: Vec<u32> = (0..weights.rows() as u32).step_by(7).collect();
        gpu.keep(&weights);
        assert!(gathered(&gpu, &weights, &list) == gathered(&cpu, &weights, &list));
    }
}

/// MEMORY-1
#[test]
fn want_of_room_at_load_says_that_weights_have_it() {
    if stack::stand_ins().is_none() || gpu(Precision::F32).is_none() {
        return;
    }
    let said = stack::child(
        "verifier::gpu_tests::load_without_room",
        &[("EAGLET_STANDIN_MEMORY", "50000000"), ("EAGLET_TEST_GPU", "0")],
    );
    for part in ["this rank holds", "for weights"] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
}

/// The child of the test above.
#[test]
#[allow(clippy::print_stdout, reason = "its parent reads what it says")]
fn load_without_room() {
    if !stack::is_child() {
        return;
    }
    let Some(gpu) = gpu(Precision::F32) else { return };
    let values = Noise(11).floats(1000 * 1000);
    let stored = Stored::new(
        Form::Plain(floats(Dtype::F32, &[1000, 1000], &values)),
        1000,
        1000,
    );
    let kept: Vec<Linear> = (0..20).map(|_| stored.whole()).collect();
    let loading = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        kept.iter().for_each(|weights| gpu.keep(weights));
    }));
    let why = loading.expect_err("there is no room for all");
    println!(
        "{}",
        why.downcast_ref::<CudaError>().expect("the driver's answer")
    );
}

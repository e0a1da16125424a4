//! Gather, scatter, packed weights, experts.

use eaglet_runtime::cuda::{
    DeviceForm, Indices, MatrixView, MatrixViewMut, RowChoice, Scales, ScatterList, View,
};
use eaglet_runtime::device::{Device, ExpertGroups, Matrix, MatrixMut, Routing, Scoring};
use half::{bf16, f16};

use crate::cases::{Cases, wave};

pub(crate) fn all(cases: &mut Cases<'_>) {
    moves(cases);
    plain_forms(cases);
    integer_form(cases, 4, 32);
    integer_form(cases, 8, 48);
    fp8_form(cases);
    mxfp4_form(cases);
    routes(cases);
}

fn moves(cases: &mut Cases<'_>) {
    let stack = cases.stack;
    let (kernels, stream) = (&stack.kernels, &stack.stream);
    let (rows, cols) = (40, 300);
    let table = wave(rows * cols, 1.0);
    let list: Vec<u32> = (0..55).map(|i| (i * 17 + 3) % rows as u32).collect();
    let factors = wave(list.len(), 2.0);
    let table_gpu = stack.upload(&table);
    let mut places = stack.upload(&list);
    let places = Indices::upload(stream, &list, places.view_mut()).expect("sent");

    let mut exact = vec![0.0; list.len() * cols];
    cases.cpu.gather(
        Matrix::new(&table, rows, cols),
        &list,
        MatrixMut::new(&mut exact, list.len(), cols),
    );
    let mut gathered = stack.upload(&vec![f32::NAN; list.len() * cols]);
    kernels
        .gather(
            stream,
            MatrixView::new(table_gpu.view(), rows, cols),
            places,
            MatrixViewMut::new(gathered.view_mut(), list.len(), cols),
        )
        .expect("launched");
    cases.same("gather", &stack.download(&gathered), &exact);

    let sorted = ScatterList::new(&list);
    let mut scratch = stack.upload(&vec![0_u32; sorted.words()]);
    let source = MatrixView::new(gathered.view(), list.len(), cols);
    let mut target = stack.upload(&table);
    let mut exact_target = table.clone();
    let from = Matrix::new(&exact, list.len(), cols);
    cases
        .cpu
        .scatter_add(from, &list, MatrixMut::new(&mut exact_target, rows, cols));
    let to = MatrixViewMut::new(target.view_mut(), rows, cols);
    kernels
        .scatter_add(stream, source, &sorted, View::empty(), to, scratch.view_mut())
        .expect("launched");
    cases.same("scatter_add", &stack.download(&target), &exact_target);
    let factors_gpu = stack.upload(&factors);
    cases.cpu.scatter_add_scaled(
        from,
        &list,
        &factors,
        MatrixMut::new(&mut exact_target, rows, cols),
    );
    let to = MatrixViewMut::new(target.view_mut(), rows, cols);
    kernels
        .scatter_add(
            stream,
            source,
            &sorted,
            factors_gpu.view(),
            to,
            scratch.view_mut(),
        )
        .expect("launched");
    cases.close(
        "scatter_add_scaled",
        &stack.download(&target),
        &exact_target,
        1e-6,
    );
}

/// Unpacks all rows, some rows and some columns, as f32 and as bf16, and compares with `exact` `[rows, cols]`.
fn unpack(cases: &mut Cases<'_>, name: &str, form: &DeviceForm<'_>, exact: &[f32], rows: usize, cols: usize) {
    let stack = cases.stack;
    let (kernels, stream) = (&stack.kernels, &stack.stream);
    let list: Vec<u32> = (0..rows as u32).rev().step_by(2).collect();
    let mut places = stack.upload(&list);
    let places = Indices::upload(stream, &list, places.view_mut()).expect("sent");
    let (first, step) = (1, 3);
    let stepped: Vec<u32> = (first..rows as u32).step_by(step as usize).collect();
    let (from, some) = (cols / 4, cols / 2);
    for (how, choice, which, first_col, width) in [
        (
            "all",
            RowChoice::Stepped { first: 0, step: 1 },
            (0..rows as u32).collect(),
            0,
            cols,
        ),
        ("listed", RowChoice::Listed(places), list.clone(), 0, cols),
        ("a part", RowChoice::Stepped { first, step }, stepped, from, some),
    ] {
        let which: Vec<u32> = which;
        let expected: Vec<f32> = which
            .iter()
            .flat_map(|&row| &exact[row as usize * cols + first_col..][..width])
            .copied()
            .collect();
        // Bits, for some codes are no number.
        let bits: Vec<u32> = expected.iter().map(|x| x.to_bits()).collect();
        let mut out = stack.upload(&vec![7.0_f32; which.len() * width]);
        let to = MatrixViewMut::new(out.view_mut(), which.len(), width);
        kernels
            .unpack(stream, form, choice, first_col, to)
            .expect("launched");
        let ours: Vec<u32> = stack.download(&out).iter().map(|x| x.to_bits()).collect();
        cases.same(format!("unpack {name}, {how}"), &ours, &bits);
        let mut out = stack.upload(&vec![7_u16; which.len() * width]);
        let to = MatrixViewMut::new(out.view_mut(), which.len(), width);
        kernels
            .unpack_bf16(stream, form, choice, first_col, to)
            .expect("launched");
        let narrow: Vec<u16> = expected.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        cases.same(
            format!("unpack {name} to bf16, {how}"),
            &stack.download(&out),
            &narrow,
        );
    }
}

fn plain_forms(cases: &mut Cases<'_>) {
    let stack = cases.stack;
    let (rows, cols) = (19, 70);
    let values = wave(rows * cols, 1.0);
    let buffer = stack.upload(&values);
    let form = DeviceForm::F32(MatrixView::new(buffer.view(), rows, cols));
    unpack(cases, "f32", &form, &values, rows, cols);

    // Every pattern of 16 bits, but the bits of what is no number: there is more than one way to widen those.
    let (rows, cols) = (256, 256);
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let codes: Vec<u16> = all
        .iter()
        .map(|&code| {
            if bf16::from_bits(code).is_nan() {
                0x7fc0
            } else {
                code
            }
        })
        .collect();
    let buffer = stack.upload(&codes);
    let exact: Vec<f32> = codes.iter().map(|&code| bf16::from_bits(code).to_f32()).collect();
    let form = DeviceForm::Bf16(MatrixView::new(buffer.view(), rows, cols));
    unpack(cases, "bf16", &form, &exact, rows, cols);
    let codes: Vec<u16> = all
        .iter()
        .map(|&code| {
            if f16::from_bits(code).is_nan() {
                0x7e00
            } else {
                code
            }
        })
        .collect();
    let buffer = stack.upload(&codes);
    let exact: Vec<f32> = codes.iter().map(|&code| f16::from_bits(code).to_f32()).collect();
    let form = DeviceForm::F16(MatrixView::new(buffer.view(), rows, cols));
    unpack(cases, "f16", &form, &exact, rows, cols);
}

/// A generator of bits without a pattern (xorshift32).
fn noise(words: usize) -> Vec<u32> {
    let mut state = 0x9e37_79b9_u32;
    (0..words)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        })
        .collect()
}

fn integer_form(cases: &mut Cases<'_>, bits: u32, group: u32) {
    let stack = cases.stack;
    let (rows, cols) = (11, 96);
    let per_word = (32 / bits) as usize;
    let words = noise(rows * cols / per_word);
    let groups = cols.div_ceil(group as usize);
    let scales = wave(rows * groups, 1.0);
    let exact: Vec<f32> = (0..rows * cols)
        .map(|i| {
            let (row, col) = (i / cols, i % cols);
            let word = words[i / per_word];
            let code = i64::from(word >> (col % per_word * bits as usize)) & ((1 << bits) - 1);
            (code - (1 << (bits - 1))) as f32 * scales[row * groups + col / group as usize]
        })
        .collect();
    let (words, scales) = (stack.upload(&words), stack.upload(&scales));
    let form = DeviceForm::Packed {
        words: MatrixView::new(words.view(), rows, cols / per_word),
        scales: Scales::F32(MatrixView::new(scales.view(), rows, groups)),
        bits,
        group,
        cols: cols as u32,
    };
    unpack(cases, &format!("int{bits}"), &form, &exact, rows, cols);
}

fn fp8_form(cases: &mut Cases<'_>) {
    let stack = cases.stack;
    let (rows, cols, block) = (16_usize, 48_usize, [5_u32, 20_u32]);
    // No code that is no number.
    let codes: Vec<u8> = (0..rows * cols)
        .map(|i| (i * 37) as u8)
        .map(|code| if code & 127 == 127 { 0 } else { code })
        .collect();
    let scale_cols = cols.div_ceil(block[1] as usize);
    let scales = wave(rows.div_ceil(block[0] as usize) * scale_cols, 1.0);
    let exact: Vec<f32> = codes
        .iter()
        .enumerate()
        .map(|(i, &code)| {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let magnitude = if exponent == 0 {
                mantissa / 8.0 * 2f64.powi(-6)
            } else {
                (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
            };
            let sign = if code >= 128 { -1.0 } else { 1.0 };
            let (row, col) = (i / cols, i % cols);
            let scale = scales[row / block[0] as usize * scale_cols + col / block[1] as usize];
            (sign * magnitude) as f32 * scale
        })
        .collect();
    let scale_rows = rows.div_ceil(block[0] as usize);
    let (codes, scales) = (stack.upload(&codes), stack.upload(&scales));
    let form = DeviceForm::Fp8 {
        codes: MatrixView::new(codes.view(), rows, cols),
        scales: MatrixView::new(scales.view(), scale_rows, scale_cols),
        block,
    };
    unpack(cases, "fp8", &form, &exact, rows, cols);
}

fn mxfp4_form(cases: &mut Cases<'_>) {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let stack = cases.stack;
    let (rows, cols) = (9, 128);
    let blocks: Vec<u8> = noise(rows * cols / 2).iter().map(|&word| word as u8).collect();
    // From the subnormal power to large ones.
    let scales: Vec<u8> = (0..rows * cols / 32).map(|i| (i * 7 % 250) as u8).collect();
    let exact: Vec<f32> = (0..rows * cols)
        .map(|i| {
            let code = blocks[i / 2] >> (i % 2 * 4) & 15;
            let value = VALUES[usize::from(code & 7)];
            let power = 2f64.powi(i32::from(scales[i / 32]) - 127) as f32;
            (if code >= 8 { -value } else { value }) * power
        })
        .collect();
    let (blocks, scales) = (stack.upload(&blocks), stack.upload(&scales));
    let form = DeviceForm::Mxfp4 {
        blocks: MatrixView::new(blocks.view(), rows, cols / 2),
        scales: MatrixView::new(scales.view(), rows, cols / 32),
    };
    unpack(cases, "mxfp4", &form, &exact, rows, cols);
}

fn routes(cases: &mut Cases<'_>) {
    let stack = cases.stack;
    let tokens = 13;
    for (experts, top, groups) in [
        (4, 2, None),
        (60, 8, None),
        (64, 6, Some(ExpertGroups { count: 8, chosen: 3 })),
        (16, 4, Some(ExpertGroups { count: 16, chosen: 7 })),
    ] {
        let mut logits: Vec<f32> = wave(tokens * experts, 1.0).iter().map(|x| 4.0 * x).collect();
        // Equal ones: the first is taken.
        (logits[1], logits[2]) = (5.0, 5.0);
        let bias = wave(experts, 2.0);
        for scoring in [Scoring::Softmax, Scoring::SoftmaxOfChosen, Scoring::Sigmoid] {
            for (normalised, with_bias) in [(false, false), (true, true)] {
                let routing = Routing {
                    top,
                    scoring,
                    choice_bias: if with_bias { &bias } else { &[] },
                    groups,
                    normalised,
                    factor: 2.5,
                };
                let (mut chosen, mut weights) = (vec![0; tokens * top], vec![0.0; tokens * top]);
                let view = Matrix::new(&logits, tokens, experts);
                cases.cpu.route(&routing, view, &mut chosen, &mut weights);
                let logits_gpu = stack.upload(&logits);
                let bias_gpu = stack.upload(routing.choice_bias);
                let mut chosen_gpu = stack.upload(&vec![9999_u32; chosen.len()]);
                let mut weights_gpu = stack.upload(&vec![f32::NAN; weights.len()]);
                stack
                    .kernels
                    .route(
                        &stack.stream,
                        &routing,
                        bias_gpu.view(),
                        MatrixView::new(logits_gpu.view(), tokens, experts),
                        chosen_gpu.view_mut(),
                        weights_gpu.view_mut(),
                    )
                    .expect("launched");
                let name = format!("route {top} of {experts}, {scoring:?}, bias {with_bias}");
                cases.same(format!("{name}, experts"), &stack.download(&chosen_gpu), &chosen);
                cases.close(
                    format!("{name}, weights"),
                    &stack.download(&weights_gpu),
                    &weights,
                    2e-6,
                );
            }
        }
    }
}

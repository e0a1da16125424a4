//! Attention, forward and backward.

use std::ops::Range;

use eaglet_runtime::cuda::{AttentionOperands, AttentionTables};
use eaglet_runtime::device::{
    Attention, AttentionGradients, AttentionInputs, AttentionPlan, AttentionShape, Device,
};

use crate::cases::{Cases, wave};

/// One attention call.
struct Call<'a> {
    name: &'a str,
    shape: AttentionShape,
    documents: &'a [Range<usize>],
    rows: Vec<u32>,
    window: Option<usize>,
    diagonals: usize,
    sinks: Vec<f32>,
    softcap: Option<f32>,
}

fn shape(heads: usize, kv_heads: usize, head_dim: usize, value_dim: usize) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        value_dim,
        scale: 1.3 / (head_dim as f32).sqrt(),
    }
}

pub(crate) fn all(cases: &mut Cases<'_>) {
    let small = shape(4, 2, 16, 16);
    let plain = |name, documents, rows, window, diagonals| Call {
        name,
        shape: small,
        documents,
        rows,
        window,
        diagonals,
        sinks: vec![],
        softcap: None,
    };
    let three = [0..5, 5..6, 6..13];
    for call in [
        plain("documents", &three, (0..13).collect(), None, 0),
        plain("window and diagonals", &three, (0..13).collect(), Some(3), 2),
        plain("some rows", &three, vec![1, 3, 9, 12], None, 1),
        plain("no query", &three, vec![], None, 1),
        plain(
            "several tiles",
            &[0..140, 140..150],
            (0..150).filter(|row| row % 3 != 1).collect(),
            Some(50),
            1,
        ),
    ] {
        backward(cases, &call);
    }
    // The wide form of the kernels, whose tiles are smaller.
    backward(
        cases,
        &Call {
            shape: shape(2, 1, 136, 136),
            ..plain("wide", &[0..40, 40..75], (0..75).collect(), None, 2)
        },
    );
    // More shared memory than a block has without asking.
    backward(
        cases,
        &Call {
            shape: shape(2, 1, 128, 128),
            ..plain("128 wide", &[0..70, 70..75], (0..75).collect(), None, 1)
        },
    );
    let call = Call {
        shape: shape(4, 2, 24, 20),
        sinks: vec![0.5, -1.0, 3.0, 0.0],
        softcap: Some(5.0),
        ..plain(
            "sinks, cap, narrow values",
            &[0..70, 70..75],
            (0..75).collect(),
            Some(40),
            0,
        )
    };
    forward(cases, &call);
    rows_alone(cases);
}

/// Result and statistics of the device, checked against the CPU's.
fn forward(cases: &mut Cases<'_>, call: &Call<'_>) -> (Vec<f32>, Vec<f32>) {
    let stack = cases.stack;
    let plan = AttentionPlan::new(call.documents.iter().cloned(), &call.rows, call.window);
    let (shape, queries) = (call.shape, plan.queries());
    let inputs = operands(call, &plan);
    let (mut out, mut lse) = (
        vec![9.0; queries * shape.output_width()],
        vec![9.0; queries * shape.heads],
    );
    let attention = Attention {
        diagonals: call.diagonals,
        sinks: &call.sinks,
        softcap: call.softcap,
        ..Attention::plain(shape, &plan)
    };
    cases.cpu.attention(
        &attention,
        &borrowed(&inputs),
        (&mut out).into(),
        (&mut lse).into(),
    );
    let tables = AttentionTables::new(&stack.context, &stack.stream, shape, &plan).expect("room");
    let on_device = inputs.each_ref().map(|x| stack.upload(x));
    let sinks = stack.upload(&call.sinks);
    let mut out_gpu = stack.upload(&vec![f32::NAN; out.len()]);
    let mut lse_gpu = stack.upload(&vec![f32::NAN; lse.len()]);
    let [q, k, v, k_diagonal, v_diagonal] = on_device.each_ref().map(|x| x.view());
    let operands = AttentionOperands {
        q,
        k,
        v,
        k_diagonal,
        v_diagonal,
        diagonals: call.diagonals,
    };
    stack
        .kernels
        .attention(
            &stack.stream,
            &tables,
            &operands,
            sinks.view(),
            call.softcap,
            out_gpu.view_mut(),
            lse_gpu.view_mut(),
        )
        .expect("launched");
    let ours = stack.download(&out_gpu);
    cases.close(format!("attention {}", call.name), &ours, &out, 3e-6);
    cases.close(
        format!("attention {}, lse", call.name),
        &stack.download(&lse_gpu),
        &lse,
        2e-6,
    );
    (ours, lse)
}

/// Queries, keys, values, diagonal keys and values.
fn operands(call: &Call<'_>, plan: &AttentionPlan) -> [Vec<f32>; 5] {
    let (shape, diagonals) = (call.shape, call.diagonals * plan.queries());
    [
        wave(plan.queries() * shape.query_width(), 1.0),
        wave(plan.keys() * shape.key_width(), 2.0),
        wave(plan.keys() * shape.value_width(), 3.0),
        wave(diagonals * shape.key_width(), 4.0),
        wave(diagonals * shape.value_width(), 5.0),
    ]
}

fn borrowed(operands: &[Vec<f32>; 5]) -> AttentionInputs<'_> {
    let [q, k, v, k_diagonal, v_diagonal] = operands.each_ref().map(|x| x.as_slice());
    AttentionInputs {
        q: q.into(),
        k: k.into(),
        v: v.into(),
        k_diagonal: k_diagonal.into(),
        v_diagonal: v_diagonal.into(),
    }
}

fn backward(cases: &mut Cases<'_>, call: &Call<'_>) {
    let (_, lse) = forward(cases, call);
    let stack = cases.stack;
    let plan = AttentionPlan::new(call.documents.iter().cloned(), &call.rows, call.window);
    let inputs = operands(call, &plan);
    let dout = wave(inputs[0].len(), 6.0);
    // dq is written, the others are added to.
    let start = inputs
        .each_ref()
        .map(|x| wave(x.len(), 7.0).iter().map(|x| 0.1 * x).collect::<Vec<f32>>());
    let mut exact = start.clone();
    let [dq, dk, dv, dk_diagonal, dv_diagonal] = &mut exact;
    let gradients = AttentionGradients {
        dq: dq.into(),
        dk: dk.into(),
        dv: dv.into(),
        dk_diagonal: dk_diagonal.into(),
        dv_diagonal: dv_diagonal.into(),
    };
    let attention = Attention {
        diagonals: call.diagonals,
        ..Attention::plain(call.shape, &plan)
    };
    cases.cpu.attention_backward(
        &attention,
        &borrowed(&inputs),
        (&lse).into(),
        (&dout).into(),
        gradients,
    );

    let tables = AttentionTables::new(&stack.context, &stack.stream, call.shape, &plan).expect("room");
    let on_device = inputs.each_ref().map(|x| stack.upload(x));
    let [q, k, v, k_diagonal, v_diagonal] = on_device.each_ref().map(|x| x.view());
    let operands = AttentionOperands {
        q,
        k,
        v,
        k_diagonal,
        v_diagonal,
        diagonals: call.diagonals,
    };
    let (lse_gpu, dout_gpu) = (stack.upload(&lse), stack.upload(&dout));
    let mut delta = stack.upload(&vec![f32::NAN; lse.len()]);
    let mut ours = start.each_ref().map(|x| stack.upload(x));
    let gradients = ours.each_mut().map(|x| x.view_mut());
    stack
        .kernels
        .attention_backward(
            &stack.stream,
            &tables,
            &operands,
            lse_gpu.view(),
            dout_gpu.view(),
            gradients,
            delta.view_mut(),
        )
        .expect("launched");
    for (name, (ours, exact)) in ["dq", "dk", "dv", "dk_diagonal", "dv_diagonal"]
        .iter()
        .zip(ours.iter().zip(&exact))
    {
        cases.close(
            format!("attention {}, {name}", call.name),
            &stack.download(ours),
            exact,
            5e-6,
        );
    }
}

/// A query's result has the same bits whatever other queries share the call.
fn rows_alone(cases: &mut Cases<'_>) {
    for window in [None, Some(37)] {
        let call = |rows: Vec<u32>| Call {
            name: "rows alone",
            shape: shape(4, 2, 16, 16),
            documents: &[0..20, 20..150],
            rows,
            window,
            diagonals: 0,
            sinks: vec![],
            softcap: None,
        };
        let width = call(vec![]).shape.output_width();
        let (all, _) = whole(cases, &call((0..150).collect()));
        for rows in [
            vec![149],
            vec![19, 20, 90],
            (75..140).step_by(2).collect::<Vec<u32>>(),
        ] {
            let (some, _) = whole(cases, &call(rows.clone()));
            for (place, &row) in rows.iter().enumerate() {
                assert_eq!(
                    some[place * width..][..width],
                    all[row as usize * width..][..width],
                    "row {row} of {rows:?}"
                );
            }
        }
    }
}

/// The device's result for queries whose values depend on their row only.
fn whole(cases: &mut Cases<'_>, call: &Call<'_>) -> (Vec<f32>, usize) {
    let stack = cases.stack;
    let plan = AttentionPlan::new(call.documents.iter().cloned(), &call.rows, call.window);
    let shape = call.shape;
    let all = wave(plan.keys() * shape.query_width(), 1.0);
    let q: Vec<f32> = call
        .rows
        .iter()
        .flat_map(|&row| &all[row as usize * shape.query_width()..][..shape.query_width()])
        .copied()
        .collect();
    let [_, k, v, ..] = operands(call, &plan);
    let [q, k, v] = [&q, &k, &v].map(|x| stack.upload(x));
    let none = stack.upload::<f32>(&[]);
    let mut out = stack.upload(&vec![f32::NAN; call.rows.len() * shape.output_width()]);
    let mut lse = stack.upload(&vec![f32::NAN; call.rows.len() * shape.heads]);
    let tables = AttentionTables::new(&stack.context, &stack.stream, shape, &plan).expect("room");
    let operands = AttentionOperands {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        k_diagonal: none.view(),
        v_diagonal: none.view(),
        diagonals: 0,
    };
    stack
        .kernels
        .attention(
            &stack.stream,
            &tables,
            &operands,
            none.view(),
            None,
            out.view_mut(),
            lse.view_mut(),
        )
        .expect("launched");
    (stack.download(&out), shape.output_width())
}

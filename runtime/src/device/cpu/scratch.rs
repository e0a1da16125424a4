//! Per-thread scratch that outlives the operation, so that a training step allocates nothing.

use std::cell::RefCell;

thread_local! {
    static POOL: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Lends buffers of these lengths to `work`; their contents are whatever was left in them.
///
/// Calls may nest, and a task that a waiting thread steals meanwhile takes another buffer.
pub(super) fn with_scratch<const N: usize, R>(
    lengths: [usize; N],
    work: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    let mut buffer = POOL.with_borrow_mut(|pool| pool.pop()).unwrap_or_default();
    let total: usize = lengths.iter().sum();
    if buffer.len() < total {
        buffer.resize(total, 0.0);
    }
    let mut rest = buffer.as_mut_slice();
    let parts = lengths.map(|length| {
        let (part, others) = std::mem::take(&mut rest).split_at_mut(length);
        rest = others;
        part
    });
    let result = work(parts);
    POOL.with_borrow_mut(|pool| pool.push(buffer));
    result
}

//! Per-thread scratch that outlives the operation, so that a training step allocates nothing.

use std::cell::RefCell;

/// Elements of the smallest buffer: 64 KiB.
const LEAST_ELEMENTS: usize = 16 * 1024;

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
    let total: usize = lengths.iter().sum();
    let mut buffer = POOL.with_borrow_mut(|pool| take(pool, total));
    if buffer.len() < total {
        // Generously, so that the next one who is given it hardly ever needs more.
        buffer.resize(total.next_power_of_two().max(LEAST_ELEMENTS), 0.0);
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

/// The smallest buffer that is long enough, or else the longest one, which has least to grow.
fn take(pool: &mut Vec<Vec<f32>>, length: usize) -> Vec<f32> {
    let fits = (0..pool.len())
        .filter(|&place| pool[place].len() >= length)
        .min_by_key(|&place| pool[place].len());
    let longest = || (0..pool.len()).max_by_key(|&place| pool[place].len());
    fits.or_else(longest)
        .map(|place| pool.swap_remove(place))
        .unwrap_or_default()
}

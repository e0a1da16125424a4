//! Tensors from one process's link to another's listener. Both ends are threads of this process: what a link does is the
//! same.

use std::hint::black_box;

use anyhow::Result;
use bytes::Bytes;
use eaglet_runtime::link::SenderOptions;
use serde::Serialize;

use super::Plan;
use super::link::{Link, Way};
use crate::bench::facts::Spread;

/// Rates at one size of tensors, in GB/s.
#[derive(Debug, Serialize)]
pub(super) struct SameHost {
    pub(super) bytes: usize,
    /// From one vector into another.
    pub(super) memcpy_gb_s: Spread,
    pub(super) crc32c_gb_s: Spread,
    /// Copied into the heap of the link and read there, with checksums.
    pub(super) copied_gb_s: Spread,
    /// The same without checksums.
    pub(super) unchecked_gb_s: Spread,
    /// Made in the heap of the link, with checksums.
    pub(super) in_place_gb_s: Spread,
    /// Copied into slots and out of them, as what finds no room in the heap is, with checksums.
    pub(super) slots_gb_s: Spread,
}

pub(super) fn measure(bytes: usize, plan: &Plan<'_>) -> Result<SameHost> {
    // A tensor of a message is f32.
    let bytes = bytes.next_multiple_of(4);
    let source: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 7) as u8).collect();
    let mut target = vec![1; bytes];
    let part = Bytes::from(source.clone());
    let with_heap = SenderOptions::default();
    let checked = Link::open(Way::Memory, with_heap)?;
    let unchecked = Link::open(
        Way::Memory,
        SenderOptions {
            checksum: false,
            ..with_heap
        },
    )?;
    let without_heap = Link::open(
        Way::Memory,
        SenderOptions {
            heap_bytes: 0,
            ..with_heap
        },
    )?;
    let copied = |_: &Link| Some(part.clone());
    let in_place = |link: &Link| {
        // Too small a tensor has no place of its own: it is copied.
        let made = || link.buffer(bytes).map(Bytes::from);
        if bytes < eaglet_runtime::link::MIN_PLACED_BYTES {
            Some(part.clone())
        } else {
            made()
        }
    };
    let [
        memcpy_gb_s,
        crc32c_gb_s,
        copied_gb_s,
        unchecked_gb_s,
        in_place_gb_s,
        slots_gb_s,
    ] = plan.rates(
        bytes,
        &mut [
            &mut |count| {
                for _ in 0..count {
                    target.copy_from_slice(black_box(&source));
                    black_box(&mut target);
                }
                Ok(())
            },
            &mut |count| {
                for _ in 0..count {
                    black_box(crc32c::crc32c(black_box(&source)));
                }
                Ok(())
            },
            &mut |count| checked.carry(count, bytes, &copied),
            &mut |count| unchecked.carry(count, bytes, &copied),
            &mut |count| checked.carry(count, bytes, &in_place),
            &mut |count| without_heap.carry(count, bytes, &copied),
        ],
    )?;
    Ok(SameHost {
        bytes,
        memcpy_gb_s,
        crc32c_gb_s,
        copied_gb_s,
        unchecked_gb_s,
        in_place_gb_s,
        slots_gb_s,
    })
}

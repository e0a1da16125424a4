//! How a flat tensor is cut among the seats.

use std::ops::Range;

/// Elements of a cache line of f32. Segments begin at multiples of it, so that no two seats share a line.
const ALIGN_ELEMENTS: usize = 16;

/// The cut of `elements` f32 into one contiguous segment a seat; segment `i` is finished by seat `i`.
///
/// The segments cover everything without overlap, and differ by at most 16 elements but for the last one's odd end. Some
/// are empty if there are fewer cache lines than seats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    elements: usize,
    seats: u16,
}

impl Segments {
    /// A cut for `seats` seats, of which there is at least one.
    pub fn new(elements: usize, seats: u16) -> Self {
        Self {
            elements,
            seats: seats.max(1),
        }
    }

    /// Number of seats and of segments.
    pub fn seats(&self) -> u16 {
        self.seats
    }

    /// Elements of the whole.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements of segment `segment`; empty beyond the last one.
    pub fn range(&self, segment: u16) -> Range<usize> {
        self.bound(segment)..self.bound(segment.saturating_add(1))
    }

    fn bound(&self, segment: u16) -> usize {
        let lines = self.elements.div_ceil(ALIGN_ELEMENTS) as u128;
        let line = lines * u128::from(segment.min(self.seats)) / u128::from(self.seats);
        // At most `lines`, which came from a usize.
        (line as usize).saturating_mul(ALIGN_ELEMENTS).min(self.elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_cover_everything_once_and_are_aligned() {
        for seats in 1..=9 {
            for elements in (0..400).chain([4096, 100_003]) {
                let segments = Segments::new(elements, seats);
                let mut next = 0;
                for segment in 0..seats {
                    let range = segments.range(segment);
                    assert_eq!(range.start, next);
                    assert!(
                        range.start.is_multiple_of(ALIGN_ELEMENTS) || range.is_empty(),
                        "{elements} / {seats}"
                    );
                    let share = elements as f64 / f64::from(seats);
                    assert!((range.len() as f64 - share).abs() <= 2.0 * ALIGN_ELEMENTS as f64);
                    next = range.end;
                }
                assert_eq!(next, elements);
                assert!(segments.range(seats).is_empty());
            }
        }
    }
}

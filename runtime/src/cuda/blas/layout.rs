//! A row-major product in cuBLASLt's column-major words.

/// The largest alignment that the choice of an algorithm asks for, in bytes.
const MAX_ALIGNMENT: u64 = 256;

/// Types of the elements of a product; sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProductKind {
    /// f32 factors, f32 result.
    F32,
    /// bf16 factors, f32 result.
    Bf16,
}

/// The largest power of two that divides an address, as far as anybody asks.
pub(super) fn alignment(address: u64) -> u64 {
    (1 << address.trailing_zeros().min(63)).min(MAX_ALIGNMENT)
}

/// How a factor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) transposed: bool,
    pub(super) stride: u64,
    pub(super) alignment: u64,
}

/// Everything that the choice of an algorithm may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) kind: ProductKind,
    /// Rows that the algorithm is chosen for.
    pub(super) rows: u64,
    pub(super) cols: u64,
    pub(super) depth: u64,
    pub(super) a: Place,
    pub(super) b: Place,
    pub(super) c: Place,
    pub(super) accumulate: bool,
}

/// A column-major matrix as cuBLASLt is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    pub(super) rows: u64,
    pub(super) cols: u64,
    pub(super) stride: u64,
    /// It is transposed before it is multiplied.
    pub(super) transposed: bool,
}

/// The product `cᵀ = bᵀ·aᵀ`, in cuBLASLt's words: first factor, second factor, result.
pub(super) fn columns(key: &Key, rows: u64) -> [Columns; 3] {
    // A row-major [x, y] is a column-major [y, x]; a factor that is stored transposed lies the other way round.
    let factor = |x: u64, y: u64, place: Place| {
        let (rows, cols) = if place.transposed { (x, y) } else { (y, x) };
        Columns {
            rows,
            cols,
            stride: place.stride,
            transposed: place.transposed,
        }
    };
    [
        factor(key.depth, key.cols, key.b),
        factor(rows, key.depth, key.a),
        Columns {
            rows: key.cols,
            cols: rows,
            stride: key.c.stride,
            transposed: false,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Element (row, col) of a column-major matrix, after its transposition.
    fn element(of: Columns, row: u64, col: u64) -> u64 {
        if of.transposed {
            col + row * of.stride
        } else {
            row + col * of.stride
        }
    }

    #[test]
    fn the_transposed_product_reads_and_writes_the_right_elements() {
        let (rows, cols, depth) = (3, 4, 5);
        for layout in 0..4 {
            let place = |transposed: bool, x: u64, y: u64| Place {
                transposed,
                stride: if transposed { x } else { y } + 2,
                alignment: 4,
            };
            let key = Key {
                kind: ProductKind::F32,
                rows,
                cols,
                depth,
                a: place(layout & 1 == 1, rows, depth),
                b: place(layout & 2 == 2, depth, cols),
                c: place(false, rows, cols),
                accumulate: false,
            };
            let [first, second, result] = columns(&key, rows);
            // Where a row-major factor has element (x, y).
            let at = |place: Place, x: u64, y: u64| {
                if place.transposed {
                    y * place.stride + x
                } else {
                    x * place.stride + y
                }
            };
            for (i, j, p) in
                (0..rows).flat_map(|i| (0..cols).flat_map(move |j| (0..depth).map(move |p| (i, j, p))))
            {
                assert_eq!(element(first, j, p), at(key.b, p, j), "b, layout {layout}");
                assert_eq!(element(second, p, i), at(key.a, i, p), "a, layout {layout}");
                assert_eq!(element(result, j, i), at(key.c, i, j), "c, layout {layout}");
            }
        }
    }

    #[test]
    fn alignment_is_the_power_of_two_that_divides_the_address() {
        assert_eq!([4, 24, 4096, 0x7f00_0000_0100].map(alignment), [4, 8, 256, 256]);
    }
}

//! What an attention call sees: which queries, which keys, in which blocks.
//!
//! Keys are a packed row of documents. A query looks at the keys of its own document up to itself, at most `window`
//! back, and — in the later steps of training-time test — at one *diagonal* key per earlier step that belongs to it
//! alone. So nothing quadratic in the number of steps exists, and keys of other documents are never touched.

use std::ops::Range;

use super::floats::{Floats, FloatsMut};

/// Rows of queries that are computed together.
pub(crate) const QUERY_BLOCK: usize = 64;
/// Keys whose gradients are computed together.
pub(crate) const KEY_BLOCK: usize = 64;

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values and of the result.
    pub value_dim: usize,
    /// Factor of the scores, usually `head_dim^-½`.
    pub scale: f32,
}

impl AttentionShape {
    /// Width of a query row.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of a key row.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of a value row.
    pub fn value_width(&self) -> usize {
        self.kv_heads * self.value_dim
    }

    /// Width of a row of the result.
    pub fn output_width(&self) -> usize {
        self.heads * self.value_dim
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueryBlock {
    /// Queries of the block.
    pub(crate) queries: Range<usize>,
    /// Keys that any of them sees.
    pub(crate) keys: Range<usize>,
    /// First key of their document.
    pub(crate) document: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyBlock {
    /// Keys of the block, all of one document.
    pub(crate) keys: Range<usize>,
    /// Query blocks that see any of them.
    pub(crate) blocks: Range<usize>,
}

/// Which keys each query sees, cut into blocks at document boundaries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionPlan {
    /// Visible keys of each query.
    pub(crate) visible: Vec<Range<u32>>,
    pub(crate) query_blocks: Vec<QueryBlock>,
    pub(crate) key_blocks: Vec<KeyBlock>,
    pub(crate) keys: usize,
}

impl AttentionPlan {
    /// Queries at `rows` (ascending) of a packed row with these documents; `window` counts the query's own key.
    ///
    /// # Panics
    /// If `rows` is not ascending or leaves the documents.
    pub fn new(
        documents: impl IntoIterator<Item = Range<usize>>,
        rows: &[u32],
        window: Option<usize>,
    ) -> Self {
        let mut plan = Self::default();
        plan.set(documents, rows, window);
        plan
    }

    /// Makes it what [`Self::new`] would make, in the memory that it has.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn set(
        &mut self,
        documents: impl IntoIterator<Item = Range<usize>>,
        rows: &[u32],
        window: Option<usize>,
    ) {
        self.visible.clear();
        self.query_blocks.clear();
        self.key_blocks.clear();
        self.keys = 0;
        let mut next = 0;
        for document in documents {
            let first = next;
            while next < rows.len() && (rows[next] as usize) < document.end {
                let row = rows[next] as usize;
                assert!(
                    row >= document.start && (next == 0 || rows[next - 1] < rows[next]),
                    "rows must ascend"
                );
                let start = window.map_or(document.start, |window| {
                    document.start.max((row + 1).saturating_sub(window))
                });
                self.visible.push(start as u32..row as u32 + 1);
                next += 1;
            }
            let first_block = self.query_blocks.len();
            for start in (first..next).step_by(QUERY_BLOCK) {
                let queries = start..(start + QUERY_BLOCK).min(next);
                let keys =
                    self.visible[queries.start].start as usize..self.visible[queries.end - 1].end as usize;
                self.query_blocks.push(QueryBlock {
                    queries,
                    keys,
                    document: document.start,
                });
            }
            for start in (document.start..document.end).step_by(KEY_BLOCK) {
                let keys = start..(start + KEY_BLOCK).min(document.end);
                let blocks = &self.query_blocks[first_block..];
                let from = first_block + blocks.partition_point(|block| block.keys.end <= keys.start);
                let to = first_block + blocks.partition_point(|block| block.keys.start < keys.end);
                self.key_blocks.push(KeyBlock {
                    keys,
                    blocks: from..to.max(from),
                });
            }
            self.keys = document.end;
        }
        assert_eq!(next, rows.len(), "a query lies outside all documents");
    }

    /// Number of queries.
    pub fn queries(&self) -> usize {
        self.visible.len()
    }

    /// Number of keys.
    pub fn keys(&self) -> usize {
        self.keys
    }
}

/// Sizes and visibility of one attention call.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Sizes.
    pub shape: AttentionShape,
    /// Visibility.
    pub plan: &'a AttentionPlan,
    /// Diagonal keys per query.
    pub diagonals: usize,
    /// A score per head that takes its share of every softmax and has no value, `[heads]`; empty if there is none.
    pub sinks: &'a [f32],
    /// Scores are bent below this: `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
}

impl<'a> Attention<'a> {
    /// Causal attention without anything special.
    pub fn plain(shape: AttentionShape, plan: &'a AttentionPlan) -> Self {
        Self {
            shape,
            plan,
            diagonals: 0,
            sinks: &[],
            softcap: None,
        }
    }
}

/// Operands of an attention call, wherever they lie.
pub type AttentionInputs<'a> = InputsOf<Floats<'a>>;
/// Where the gradients of an attention call go.
pub type AttentionGradients<'a> = GradientsOf<FloatsMut<'a>>;

/// Operands of an attention call.
#[derive(Clone, Copy, Debug)]
pub struct InputsOf<S> {
    /// Rotated queries, `[queries, heads · head_dim]`.
    pub q: S,
    /// Rotated keys, `[keys, kv_heads · head_dim]`.
    pub k: S,
    /// Values, `[keys, kv_heads · value_dim]`.
    pub v: S,
    /// Rotated diagonal keys, `[diagonals, queries, kv_heads · head_dim]`; may be longer.
    pub k_diagonal: S,
    /// Diagonal values, likewise.
    pub v_diagonal: S,
}

/// Where the gradients of an attention call go; shapes as in [`InputsOf`].
#[derive(Debug)]
pub struct GradientsOf<S> {
    /// Written.
    pub dq: S,
    /// Added to.
    pub dk: S,
    /// Added to.
    pub dv: S,
    /// Added to.
    pub dk_diagonal: S,
    /// Added to.
    pub dv_diagonal: S,
}

impl<'a> AttentionInputs<'a> {
    /// The operands for a device that computes on the host.
    #[track_caller]
    pub(crate) fn host(self) -> InputsOf<&'a [f32]> {
        InputsOf {
            q: self.q.host(),
            k: self.k.host(),
            v: self.v.host(),
            k_diagonal: self.k_diagonal.host(),
            v_diagonal: self.v_diagonal.host(),
        }
    }
}

impl<'a> AttentionGradients<'a> {
    /// The targets for a device that computes on the host.
    #[track_caller]
    pub(crate) fn host(self) -> GradientsOf<&'a mut [f32]> {
        GradientsOf {
            dq: self.dq.host(),
            dk: self.dk.host(),
            dv: self.dv.host(),
            dk_diagonal: self.dk_diagonal.host(),
            dv_diagonal: self.dv_diagonal.host(),
        }
    }
}

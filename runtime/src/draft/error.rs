//! Why a draft cannot be built or a row cannot be trained.

/// A draft's configuration, weights or input do not fit together.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The shape of the draft contradicts itself.
    #[error("draft configuration: {0}")]
    Spec(String),
    /// A frozen tensor has another size than the configuration says.
    #[error("frozen tensor `{tensor}` has {found} elements; the draft configuration needs {expected}")]
    Frozen {
        /// Which tensor.
        tensor: &'static str,
        /// Its elements.
        found: usize,
        /// What they should be.
        expected: usize,
    },
    /// A row of hidden states does not fit the draft.
    #[error("row of hidden states: {0}")]
    Batch(String),
    /// A flat vector has another length than the layout.
    #[error("{what} has {found} elements; the draft has {expected} parameters")]
    Length {
        /// Which vector.
        what: &'static str,
        /// Its elements.
        found: usize,
        /// The layout's length.
        expected: usize,
    },
}

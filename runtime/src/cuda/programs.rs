//! The texts of the kernels and how they are compiled.

/// What stands before every program.
const COMMON: &str = include_str!("kernels/common.cuh");

/// A group of kernels that are compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Program {
    /// Operations on single elements.
    Elementwise,
    /// Norms.
    Norm,
    /// Gather, scatter, unpack.
    Rows,
    /// Experts of tokens.
    Route,
    /// Softmax, divergence, arg-max.
    Loss,
    /// AdamW and checks of whole buffers.
    Optimizer,
    /// Attention with heads of these widths.
    Attention {
        /// Width of a head of queries and keys.
        head_dim: u32,
        /// Width of a head of values.
        value_dim: u32,
    },
}

impl Program {
    /// Those that every model needs.
    pub const GENERAL: [Self; 6] = [
        Self::Elementwise,
        Self::Norm,
        Self::Rows,
        Self::Route,
        Self::Loss,
        Self::Optimizer,
    ];

    /// Its name, for files and errors.
    pub fn name(self) -> String {
        match self {
            Self::Elementwise => "elementwise".to_owned(),
            Self::Norm => "norm".to_owned(),
            Self::Rows => "rows".to_owned(),
            Self::Route => "route".to_owned(),
            Self::Loss => "loss".to_owned(),
            Self::Optimizer => "optimizer".to_owned(),
            Self::Attention { head_dim, value_dim } => format!("attention-{head_dim}-{value_dim}"),
        }
    }

    /// Its whole text.
    pub fn text(self) -> String {
        let own = match self {
            Self::Elementwise => include_str!("kernels/elementwise.cu"),
            Self::Norm => include_str!("kernels/norm.cu"),
            Self::Rows => include_str!("kernels/rows.cu"),
            Self::Route => include_str!("kernels/route.cu"),
            Self::Loss => include_str!("kernels/loss.cu"),
            Self::Optimizer => include_str!("kernels/optimizer.cu"),
            Self::Attention { .. } => include_str!("kernels/attention.cu"),
        };
        [COMMON, own].concat()
    }

    /// Options of the compiler but the architecture.
    pub fn options(self) -> Vec<String> {
        let mut options = vec!["--std=c++17".to_owned()];
        if let Self::Attention { head_dim, value_dim } = self {
            options.push(format!("-DHEAD_DIM={head_dim}"));
            options.push(format!("-DVALUE_DIM={value_dim}"));
        }
        options
    }
}

//! What distinguishes one family of models from another.
//!
//! All families are the same decoder; a family is a short description of what it adds to or leaves out of it. A new one
//! of the same parts is an entry of [`FAMILIES`].

use crate::device::Scoring;

/// Which layers see only a window of the tokens before, unless `layer_types` says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// None, whatever the file says.
    Never,
    /// All, if `sliding_window` is set.
    EveryLayer,
    /// Those from `max_window_layers` on, if `use_sliding_window` is set.
    LaterLayers,
    /// All but every n-th one; n is `sliding_window_pattern`, or this.
    AllBut(usize),
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bias {
    /// Never.
    Never,
    /// Always.
    Always,
    /// If this key is true.
    If(&'static str),
}

/// How attention projects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Projection {
    /// One matrix each for queries, keys and values.
    Separate,
    /// One matrix for the three, and one for gate and up.
    Fused,
    /// Through low-rank latents (DeepSeek's MLA).
    Latent,
}

/// How the tensors of experts are named and laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertLayout {
    /// `mlp.gate` and `mlp.experts.E.{gate,up,down}_proj`.
    Each,
    /// `block_sparse_moe.gate` and `block_sparse_moe.experts.E.{w1,w3,w2}`.
    Mixtral,
    /// `mlp.router` and one tensor for all experts, gate and up interleaved, inputs before outputs unless packed.
    Together,
}

/// Mixtures of experts of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Experts {
    /// Names and layout.
    pub(super) layout: ExpertLayout,
    /// From logits to weights.
    pub(super) scoring: Scoring,
    /// Keys that hold the number of experts, the first one that is there.
    pub(super) count_keys: &'static [&'static str],
    /// Key that holds an expert's width.
    pub(super) inner_key: &'static str,
    /// Weights of the chosen are divided by their sum, unless `norm_topk_prob` says otherwise.
    pub(super) normalised: bool,
}

/// A family of verifiers: its name and its differences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// `model_type` in config.json.
    pub(super) model_type: &'static str,
    /// How attention projects.
    pub(super) projection: Projection,
    /// Where `sliding_window` applies.
    pub(super) window: Window,
    /// Biases of queries, keys and values.
    pub(super) qkv_bias: Bias,
    /// Bias of attention's output.
    pub(super) output_bias: Bias,
    /// Biases of a dense MLP.
    pub(super) mlp_bias: Bias,
    /// Every head of queries and keys is normed.
    pub(super) qk_norm: bool,
    /// Attention has a sink per head.
    pub(super) sinks: bool,
    /// Attention and MLP are normed before and after.
    pub(super) sandwich: bool,
    /// A norm multiplies by its weight plus one.
    pub(super) norm_adds_one: bool,
    /// The embedding is multiplied by the root of its width.
    pub(super) scaled_embedding: bool,
    /// The head is the embedding where the file says nothing.
    pub(super) tied: bool,
    /// Mixtures of experts.
    pub(super) experts: Option<Experts>,
}

const LLAMA: Family = Family {
    model_type: "llama",
    projection: Projection::Separate,
    window: Window::Never,
    qkv_bias: Bias::If("attention_bias"),
    output_bias: Bias::If("attention_bias"),
    mlp_bias: Bias::If("mlp_bias"),
    qk_norm: false,
    sinks: false,
    sandwich: false,
    norm_adds_one: false,
    scaled_embedding: false,
    tied: false,
    experts: None,
};

const QWEN3: Family = Family {
    model_type: "qwen3",
    window: Window::LaterLayers,
    mlp_bias: Bias::Never,
    qk_norm: true,
    ..LLAMA
};

const GEMMA: Family = Family {
    model_type: "gemma",
    mlp_bias: Bias::Never,
    norm_adds_one: true,
    scaled_embedding: true,
    tied: true,
    ..LLAMA
};

const DEEPSEEK: Family = Family {
    model_type: "deepseek_v3",
    projection: Projection::Latent,
    mlp_bias: Bias::Never,
    experts: Some(Experts {
        layout: ExpertLayout::Each,
        scoring: Scoring::Sigmoid,
        count_keys: &["n_routed_experts"],
        inner_key: "moe_intermediate_size",
        normalised: true,
    }),
    ..LLAMA
};

/// The families that can be loaded.
const FAMILIES: &[Family] = &[
    LLAMA,
    Family {
        model_type: "mistral",
        window: Window::EveryLayer,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        ..LLAMA
    },
    Family {
        model_type: "mixtral",
        window: Window::EveryLayer,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        experts: Some(Experts {
            layout: ExpertLayout::Mixtral,
            scoring: Scoring::Softmax,
            count_keys: &["num_local_experts"],
            inner_key: "intermediate_size",
            normalised: true,
        }),
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        window: Window::LaterLayers,
        tied: true,
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        window: Window::LaterLayers,
        qkv_bias: Bias::Always,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        ..LLAMA
    },
    QWEN3,
    Family {
        model_type: "qwen3_moe",
        experts: Some(Experts {
            layout: ExpertLayout::Each,
            scoring: Scoring::Softmax,
            count_keys: &["num_experts", "num_local_experts"],
            inner_key: "moe_intermediate_size",
            normalised: false,
        }),
        ..QWEN3
    },
    Family {
        model_type: "phi3",
        projection: Projection::Fused,
        window: Window::EveryLayer,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        ..LLAMA
    },
    GEMMA,
    Family {
        model_type: "gemma2",
        window: Window::AllBut(2),
        sandwich: true,
        ..GEMMA
    },
    Family {
        model_type: "gemma3_text",
        window: Window::AllBut(6),
        qk_norm: true,
        sandwich: true,
        ..GEMMA
    },
    Family {
        model_type: "gpt_oss",
        window: Window::AllBut(2),
        sinks: true,
        mlp_bias: Bias::Never,
        experts: Some(Experts {
            layout: ExpertLayout::Together,
            scoring: Scoring::SoftmaxOfChosen,
            count_keys: &["num_local_experts", "num_experts"],
            inner_key: "intermediate_size",
            normalised: true,
        }),
        ..LLAMA
    },
    DEEPSEEK,
    Family {
        model_type: "kimi_k2",
        ..DEEPSEEK
    },
];

impl Family {
    /// The family of a `model_type`.
    pub(super) fn named(model_type: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.model_type == model_type)
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        FAMILIES
            .iter()
            .map(|family| family.model_type)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

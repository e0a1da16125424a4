//! What distinguishes one family of models from another.
//!
//! All families are the same decoder; a family is a short description of what it adds to or leaves out of it. A new one
//! is an entry of [`FAMILIES`], with a field here for each thing it does differently.

/// Which layers see only a window of the tokens before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// None, whatever the file says.
    Never,
    /// All, if `sliding_window` is set.
    EveryLayer,
}

/// A family of verifiers: its name and its differences.
#[derive(Debug)]
pub(super) struct Family {
    /// `model_type` in config.json.
    pub(super) model_type: &'static str,
    /// Switches that must be off, because they add tensors that are not computed.
    pub(super) must_be_false: &'static [&'static str],
    /// Where `sliding_window` applies.
    pub(super) window: Window,
}

/// The families that can be loaded.
const FAMILIES: &[Family] = &[
    Family {
        model_type: "llama",
        must_be_false: &["attention_bias", "mlp_bias"],
        window: Window::Never,
    },
    Family {
        model_type: "mistral",
        must_be_false: &[],
        window: Window::EveryLayer,
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

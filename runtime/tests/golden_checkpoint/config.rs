//! `config.json`: against the golden ones, through its own JSON, and with keys missing or wrong.

use std::fs;

use eaglet_runtime::checkpoint::{CONFIG_FILE, DraftConfig, ExportInfo};
use eaglet_runtime::draft::{DraftSpec, LayerKind};
use eaglet_runtime::rope::{Rope, RopeScaling};
use serde_json::{Value, json};

use crate::{case, json_of};

/// The draft of the case `default`, built from what the tests' verifier is.
pub(crate) fn default_spec() -> DraftSpec {
    DraftSpec {
        layer: LayerKind::Llama,
        hidden_size: 64,
        intermediate_size: 160,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab_size: 320,
        draft_vocab_size: 96,
        aux_layers: 3,
        rms_norm_eps: 1e-5,
        rope: Rope::new(10_000.0, 16),
        sliding_window: Some(2048),
        norm_before_residual: true,
        norm_before_fc: true,
        fc_norm: false,
        norm_output: true,
    }
}

pub(crate) fn default_info() -> ExportInfo {
    ExportInfo {
        verifier_name_or_path: "../verifier".to_owned(),
        verifier_architectures: vec!["LlamaForCausalLM".to_owned()],
        aux_layer_ids: vec![2, 3, 5],
        ttt_steps: 3,
        max_position_embeddings: 512,
        initializer_range: 0.02,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
        pad_token_id: None,
    }
}

#[test]
fn a_configuration_built_by_hand_is_the_golden_one() {
    let config = DraftConfig::new(default_spec(), default_info()).expect("a configuration");
    let golden = json_of(&case("default").join("ckpt_bf16").join(CONFIG_FILE));
    assert_eq!(config.to_json(), golden);

    let spec = DraftSpec {
        layer: LayerKind::Qwen3,
        ..default_spec()
    };
    let info = ExportInfo {
        bos_token_id: None,
        eos_token_ids: vec![],
        ..default_info()
    };
    let config = DraftConfig::new(spec, info).expect("a configuration");
    let golden = json_of(&case("qwen3_arch").join("ckpt_bf16").join(CONFIG_FILE));
    assert_eq!(config.to_json(), golden);
}

#[test]
fn every_setting_survives_its_json() {
    let scalings = [
        RopeScaling::None,
        RopeScaling::Linear { factor: 2.5 },
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        },
        RopeScaling::Yarn {
            factor: 64.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 4096.0,
            attention_factor: None,
            truncate: true,
        },
        RopeScaling::Yarn {
            factor: 32.0,
            beta_fast: 32.0,
            beta_slow: 1.5,
            original_max_position_embeddings: 4096.0,
            attention_factor: Some(1.25),
            truncate: false,
        },
    ];
    for layer in [LayerKind::Llama, LayerKind::Qwen3] {
        for scaling in &scalings {
            for bits in 0..16u32 {
                let on = |bit: u32| bits >> bit & 1 == 1;
                let spec = DraftSpec {
                    layer,
                    rope: Rope {
                        scaling: scaling.clone(),
                        ..Rope::new(500_000.0, 16)
                    },
                    sliding_window: on(0).then_some(77),
                    norm_before_residual: on(1),
                    norm_before_fc: on(2) && !on(3),
                    fc_norm: on(3),
                    norm_output: on(0) != on(1),
                    rms_norm_eps: 1e-6,
                    aux_layers: 4,
                    ..default_spec()
                };
                let info = ExportInfo {
                    aux_layer_ids: vec![2, 3, 4, 5],
                    eos_token_ids: vec![2, 9],
                    ..default_info()
                };
                let config = DraftConfig::new(spec, info).expect("a configuration");
                let json = config.to_json();
                assert_eq!(json["norm_before_residual"], json!(on(1)));
                let layers = if on(0) {
                    "sliding_attention"
                } else {
                    "full_attention"
                };
                assert_eq!(json["transformer_layer_config"]["layer_types"], json!([layers]));
                // Four aux layers: vLLM's Llama draft has to be told, its Qwen3 draft counts them.
                let told = json["transformer_layer_config"].get("num_aux_hidden_states");
                assert_eq!(told, (layer == LayerKind::Llama).then_some(&json!(4)));
                assert_eq!(DraftConfig::from_json(&json).expect("its own JSON"), config);
            }
        }
    }
}

/// The golden configuration with one key changed or removed; dots descend.
pub(crate) fn altered(key: &str, value: Option<Value>) -> Value {
    let mut json = json_of(&case("default").join("ckpt_bf16").join(CONFIG_FILE));
    let mut parts: Vec<&str> = key.split('.').collect();
    let last = parts.pop().expect("a key");
    let mut object = &mut json;
    for part in parts {
        object = match part.parse::<usize>() {
            Ok(index) => &mut object[index],
            Err(_) => &mut object[part],
        };
    }
    let map = object.as_object_mut().expect("an object");
    match value {
        Some(value) => map.insert(last.to_owned(), value),
        None => map.shift_remove(last),
    };
    json
}

#[test]
fn a_missing_key_is_named_with_its_path() {
    let needed = [
        ("speculators_model_type", "speculators_model_type"),
        ("norm_before_residual", "norm_before_residual"),
        ("draft_vocab_size", "draft_vocab_size"),
        (
            "eagle_aux_hidden_state_layer_ids",
            "eagle_aux_hidden_state_layer_ids",
        ),
        ("speculators_config", "speculators_config"),
        (
            "speculators_config.verifier.name_or_path",
            "speculators_config.verifier.name_or_path",
        ),
        (
            "speculators_config.proposal_methods.0.speculative_tokens",
            "speculators_config.proposal_methods[0].speculative_tokens",
        ),
        ("transformer_layer_config", "transformer_layer_config"),
        (
            "transformer_layer_config.model_type",
            "transformer_layer_config.model_type",
        ),
        (
            "transformer_layer_config.hidden_size",
            "transformer_layer_config.hidden_size",
        ),
        (
            "transformer_layer_config.rope_parameters",
            "transformer_layer_config.rope_parameters",
        ),
        (
            "transformer_layer_config.rope_parameters.rope_theta",
            "transformer_layer_config.rope_parameters.rope_theta",
        ),
        (
            "transformer_layer_config.sliding_window",
            "transformer_layer_config.sliding_window",
        ),
    ];
    for (key, named) in needed {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(CONFIG_FILE);
        fs::write(&path, altered(key, None).to_string()).expect("a file");
        let message = DraftConfig::read(&path).expect_err(key).to_string();
        assert!(
            message.starts_with(&format!("{}: `{named}` is missing", path.display())),
            "{key}: {message}"
        );
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn what_no_draft_of_ours_can_be_is_refused() {
    let wrong = [
        ("speculators_model_type", json!("eagle"), "only eagle3"),
        ("target_hidden_size", json!(128), "width of their verifier"),
        ("draft_vocab_size", json!(321), "larger than the verifier's 320"),
        ("draft_vocab_size", json!(0), "whole number"),
        ("draft_vocab_size", json!("many"), "whole number"),
        (
            "eagle_aux_hidden_state_layer_ids",
            json!([5, 3, 2]),
            "must ascend",
        ),
        ("eagle_aux_hidden_state_layer_ids", json!([2, -1]), "list of them"),
        ("fc_norm", json!(true), "exclude each other"),
        ("norm_output", json!(1), "true or false"),
        (
            "transformer_layer_config.model_type",
            json!("deepseek_v3"),
            "llama or qwen3",
        ),
        (
            "transformer_layer_config.attention_bias",
            json!(true),
            "no biases",
        ),
        ("transformer_layer_config.hidden_act", json!("gelu"), "silu"),
        ("transformer_layer_config.num_hidden_layers", json!(2), "1 layer"),
        (
            "transformer_layer_config.num_key_value_heads",
            json!(3),
            "does not divide",
        ),
        ("transformer_layer_config.head_dim", json!(15), "even"),
        (
            "transformer_layer_config.layer_types",
            json!(["chunked_attention"]),
            "sliding_attention",
        ),
        (
            "transformer_layer_config.rope_parameters.rope_type",
            json!("longrope"),
            "default, linear, llama3 or yarn",
        ),
        (
            "transformer_layer_config.rope_parameters.rope_type",
            json!("linear"),
            "factor` is missing",
        ),
        (
            "transformer_layer_config.rope_parameters.rope_theta",
            json!(0),
            "above 0",
        ),
        (
            "transformer_layer_config.rope_parameters.partial_rotary_factor",
            json!(0.5),
            "whole heads",
        ),
    ];
    for (key, value, expected) in wrong {
        let message = DraftConfig::from_json(&altered(key, Some(value)))
            .expect_err(key)
            .to_string();
        assert!(message.contains(expected), "{key}: {message}");
    }
    assert!(DraftConfig::from_json(&json!([])).is_err());
}

#[test]
fn other_spellings_are_understood() {
    // Keys nobody knows.
    let config =
        DraftConfig::from_json(&altered("some_new_key", Some(json!({ "a": 1 })))).expect("a configuration");
    assert_eq!(config.spec(), &default_spec());
    // Llama's head width follows from the others; no layer_types means full attention.
    let config =
        DraftConfig::from_json(&altered("transformer_layer_config.head_dim", None)).expect("a configuration");
    assert_eq!(config.spec().head_dim, 16);
    let config = DraftConfig::from_json(&altered("transformer_layer_config.layer_types", None))
        .expect("a configuration");
    assert_eq!(config.spec().sliding_window, None);
    // The rotary embedding as transformers 4 wrote it.
    let mut json = altered("transformer_layer_config.rope_parameters", None);
    json["transformer_layer_config"]["rope_theta"] = json!(500_000.0);
    json["transformer_layer_config"]["rope_scaling"] = json!({ "type": "linear", "factor": 4.0 });
    let rope = DraftConfig::from_json(&json)
        .expect("a configuration")
        .spec()
        .rope
        .clone();
    assert_eq!(
        rope,
        Rope {
            scaling: RopeScaling::Linear { factor: 4.0 },
            ..Rope::new(500_000.0, 16)
        }
    );
}

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::tiny::Tiny;
use super::*;
use crate::rope::RopeScaling;

fn parse(config: &Value) -> Result<VerifierConfig, ConfigError> {
    VerifierConfig::parse(Path::new("config.json"), config.to_string().as_bytes())
}

fn problems(config: &Value) -> Vec<String> {
    let error = parse(config).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("`config.json`: ") && !text.contains('\n'),
        "{text}"
    );
    match error {
        ConfigError::Keys { problems, .. } => problems.iter().map(ToString::to_string).collect(),
        other => panic!("{other}"),
    }
}

#[test]
fn old_and_new_spellings_say_the_same() {
    let mut old = Tiny::llama().config;
    old["torch_dtype"] = json!("bfloat16");
    old["rope_theta"] = json!(500000.0);
    old["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let mut new = Tiny::llama().config;
    new.as_object_mut().unwrap().remove("rope_theta");
    new["dtype"] = json!("bfloat16");
    new["rope_parameters"] = old["rope_scaling"].clone();
    new["rope_parameters"]["rope_theta"] = json!(500000.0);
    let (old, new) = (parse(&old).unwrap(), parse(&new).unwrap());
    assert_eq!(old, new);
    assert_eq!((new.rope.theta, new.rope.dim), (500000.0, 8));
    assert_eq!(
        new.rope.scaling,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0
        }
    );
}

#[test]
fn absent_and_null_keys_have_the_defaults_of_transformers() {
    let mut config = Tiny::llama().config;
    config["head_dim"] = Value::Null;
    config["rope_scaling"] = Value::Null;
    for key in [
        "num_key_value_heads",
        "rope_theta",
        "tie_word_embeddings",
        "eos_token_id",
        "architectures",
    ] {
        config.as_object_mut().unwrap().remove(key);
    }
    let config = parse(&config).unwrap();
    assert_eq!(
        (config.head_dim, config.kv_heads, config.rope.theta),
        (6, 4, 10000.0)
    );
    assert_eq!(config.rope.scaling, RopeScaling::None);
    assert!(!config.tied_embeddings && config.eos_token_ids.is_empty() && config.architecture.is_empty());
}

#[test]
fn the_older_key_of_a_linear_scaling_is_read() {
    let mut config = Tiny::llama().config;
    config["rope_scaling"] = json!({ "type": "linear", "factor": 4 });
    assert_eq!(
        parse(&config).unwrap().rope.scaling,
        RopeScaling::Linear { factor: 4.0 }
    );
}

#[test]
fn only_families_with_a_window_have_one() {
    let mut config = Tiny::mistral(9).config;
    assert_eq!(windows(&config), [Some(9); 7]);
    config["sliding_window"] = Value::Null;
    assert_eq!(windows(&config), [None; 7]);
    let mut config = Tiny::llama().config;
    config["sliding_window"] = json!(9);
    assert_eq!(windows(&config), [None; 7]);
    // The order of layers is the file's, else the family's.
    config["model_type"] = json!("gemma3_text");
    let some = Some(9);
    assert_eq!(windows(&config), [some, some, some, some, some, None, some]);
    config["layer_types"] = json!([vec!["full_attention"; 2], vec!["sliding_attention"; 5]].concat());
    assert_eq!(windows(&config), [None, None, some, some, some, some, some]);
    config["model_type"] = json!("qwen3");
    assert_eq!(windows(&config), [None; 7], "switched off");
    config["use_sliding_window"] = json!(true);
    assert_eq!(windows(&config), [None, None, some, some, some, some, some]);
}

fn windows(config: &Value) -> Vec<Option<usize>> {
    let config = parse(config).unwrap();
    config
        .blocks
        .iter()
        .map(|layer| layer.attention.window())
        .collect()
}

#[test]
fn every_wrong_key_is_reported_at_once() {
    let mut config = Tiny::llama().config;
    config.as_object_mut().unwrap().remove("hidden_size");
    config["vocab_size"] = json!("many");
    config["num_hidden_layers"] = json!(0);
    config["attention_bias"] = json!("yes");
    config["hidden_act"] = json!("gelu");
    config["num_key_value_heads"] = json!(3);
    config["quantization_config"] = json!({ "quant_method": "gptq" });
    config["rope_scaling"] = json!({ "rope_type": "longrope" });
    let problems = problems(&config);
    assert_eq!(problems.len(), 8, "{problems:?}");
    for expected in [
        "key `hidden_size` is missing; add a whole number from 1 to 2^26",
        "key `vocab_size` is \"many\"; it must be a whole number from 1 to 2^26",
        "key `num_hidden_layers` is 0; it must be a whole number from 1 to 2^26",
        "key `attention_bias` is \"yes\"; it must be true or false",
        "key `hidden_act` is \"gelu\", which is not supported; supported: silu, gelu_pytorch_tanh",
        "key `quantization_config.quant_method` is \"gptq\", which is not supported; supported: compressed-tensors, fp8, mxfp4",
        "key `num_key_value_heads` is 3, which does not divide num_attention_heads 4",
        "key `rope_scaling.rope_type` is \"longrope\", which is not supported; supported: default, linear, llama3, yarn",
    ] {
        assert!(
            problems.iter().any(|problem| problem == expected),
            "{expected} in {problems:?}"
        );
    }
}

#[test]
fn scalings_need_their_numbers() {
    let mut config = Tiny::llama().config;
    config["rope_scaling"] = json!({ "rope_type": "llama3", "factor": 8.0 });
    let missing = problems(&config);
    assert_eq!(missing.len(), 3);
    assert!(
        missing[0].contains("`rope_scaling.low_freq_factor` is missing"),
        "{missing:?}"
    );
}

#[test]
fn head_dims_must_work_out() {
    let mut config = Tiny::llama().config;
    config.as_object_mut().unwrap().remove("head_dim");
    config["hidden_size"] = json!(30);
    assert!(problems(&config)[0].contains("`hidden_size` is 30, no multiple of num_attention_heads 4"));
    config["head_dim"] = json!(7);
    assert!(problems(&config)[0].contains("`head_dim` is 7; rotary embedding needs an even one"));
}

#[test]
fn an_unknown_family_is_told_the_known_ones() {
    let mut config = Tiny::llama().config;
    config["model_type"] = json!("mamba");
    let error = parse(&config).unwrap_err().to_string();
    assert_eq!(
        error,
        "`config.json`: model_type `mamba` is not supported; supported: llama, mistral, mixtral, smollm3, qwen2, qwen3, \
         qwen3_moe, phi3, gemma, gemma2, gemma3_text, gpt_oss, deepseek_v3, kimi_k2"
    );
    config.as_object_mut().unwrap().remove("model_type");
    assert!(problems(&config)[0].contains("`model_type` is missing"));
}

#[test]
fn files_that_are_no_objects_are_errors() {
    for broken in ["", "[1]", "{\"a\": ", "3"] {
        let error = VerifierConfig::parse(Path::new("config.json"), broken.as_bytes()).unwrap_err();
        assert!(matches!(error, ConfigError::Json { .. }), "{broken}: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = VerifierConfig::read(folder.path()).unwrap_err();
    assert!(matches!(error, ConfigError::Missing { .. }), "{error}");
    assert!(error.to_string().contains("config.json"));
}

#[test]
fn stop_tokens_come_from_the_generation_config_first() {
    let folder = Tiny::llama().folder();
    let read = || VerifierConfig::read(folder.path());
    let generation = folder.path().join("generation_config.json");
    assert_eq!(read().unwrap().eos_token_ids, [2]);
    fs::write(&generation, r#"{"eos_token_id": [5, 6]}"#).unwrap();
    assert_eq!(read().unwrap().eos_token_ids, [5, 6]);
    fs::write(&generation, r#"{"temperature": 1}"#).unwrap();
    assert_eq!(read().unwrap().eos_token_ids, [2]);
    fs::write(&generation, r#"{"eos_token_id": "stop"}"#).unwrap();
    let error = read().unwrap_err().to_string();
    assert!(
        error.contains("generation_config.json`: key `eos_token_id` is \"stop\""),
        "{error}"
    );
}

//! Checkpoints against those that speculators 0.9 wrote, and through round trips.

#![allow(clippy::print_stdout, reason = "a test says which cases it ran")]

mod config;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use eaglet_runtime::checkpoint::{
    CONFIG_FILE, CheckpointError, DraftConfig, LoadedDraft, MODEL_FILE, export, load, tensor_table,
};
use eaglet_runtime::draft::DraftSpec;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use config::{altered, default_info, default_spec};

/// Folders of cases with a checkpoint: those of the repository, and those of `$EAGLET_GOLDEN_DIR` if it is set.
fn cases() -> Vec<PathBuf> {
    let mut roots = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/eagle3")];
    if let Some(more) = std::env::var_os("EAGLET_GOLDEN_DIR") {
        roots.push(Path::new(&more).join("eagle3"));
    }
    let entries = roots.iter().flat_map(|root| {
        fs::read_dir(root)
            .unwrap_or_else(|error| panic!("{}: {error}", root.display()))
            .map(|entry| entry.expect("entry").path())
    });
    let mut cases: Vec<PathBuf> = entries.filter(|case| case.join("ckpt_bf16").is_dir()).collect();
    cases.sort();
    assert!(
        cases.len() >= 2,
        "the repository carries two cases, found {cases:?}"
    );
    cases
}

fn case(name: &str) -> PathBuf {
    let case = cases().into_iter().find(|case| case.ends_with(name));
    case.unwrap_or_else(|| panic!("the repository carries {name}"))
}

/// The weights that a case's checkpoint was written from, in f32.
#[derive(Clone)]
struct Weights {
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    d2t: Option<Vec<i64>>,
    t2d: Option<Vec<bool>>,
}

impl Weights {
    /// The checkpoint was saved after an AdamW step; what that step did not train is as in the beginning.
    fn read(case: &Path) -> Self {
        let mut weights = Self {
            tensors: BTreeMap::new(),
            d2t: None,
            t2d: None,
        };
        for file in ["init_full.safetensors", "after_adamw.safetensors"] {
            weights.add(&fs::read(case.join(file)).expect(file));
        }
        weights
    }

    fn add(&mut self, bytes: &[u8]) {
        for (name, view) in SafeTensors::deserialize(bytes)
            .expect("a safetensors file")
            .iter()
        {
            let data = view.data();
            match name {
                // The verifier's head and norm are not part of a checkpoint.
                "verifier_lm_head.weight" | "verifier_norm.weight" => {}
                "t2d" => self.t2d = Some(data.iter().map(|byte| *byte == 1).collect()),
                "d2t" => {
                    let offset = |chunk: &[u8]| i64::from_le_bytes(chunk.try_into().expect("8 bytes"));
                    self.d2t = Some(data.chunks_exact(8).map(offset).collect());
                }
                _ => {
                    let float = |chunk: &[u8]| f32::from_le_bytes(chunk.try_into().expect("4 bytes"));
                    let values = data.chunks_exact(4).map(float).collect();
                    self.tensors
                        .insert(name.to_owned(), (view.shape().to_vec(), values));
                }
            }
        }
    }

    fn fc(&mut self) -> &mut (Vec<usize>, Vec<f32>) {
        self.tensors.get_mut("fc.weight").expect("every draft has it")
    }

    fn export(&self, folder: &Path, config: &DraftConfig) -> Result<(), CheckpointError> {
        let tensors = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| (name.as_str(), shape.as_slice(), values.as_slice()));
        export(folder, config, tensors, self.d2t.as_deref(), self.t2d.as_deref())
    }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON")
}

/// Differences of two JSON values, each with its key.
fn differences(ours: &Value, theirs: &Value, key: &str, into: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) => {
            let mut keys: Vec<&String> = a.keys().chain(b.keys()).collect();
            keys.sort();
            keys.dedup();
            for name in keys {
                let (a, b) = (
                    a.get(name).unwrap_or(&Value::Null),
                    b.get(name).unwrap_or(&Value::Null),
                );
                differences(a, b, &format!("{key}.{name}"), into);
            }
            for name in a
                .keys()
                .filter(|name| !b.contains_key(*name))
                .chain(b.keys().filter(|name| !a.contains_key(*name)))
            {
                into.push(format!("{key}.{name} is in one of them only"));
            }
        }
        _ if ours == theirs => {}
        _ => into.push(format!("{key}: {ours} and {theirs}")),
    }
}

#[test]
fn export_writes_what_speculators_writes() {
    for case in cases() {
        let golden = case.join("ckpt_bf16");
        let config = DraftConfig::read(&golden.join(CONFIG_FILE)).expect("the golden configuration");
        let folder = tempfile::tempdir().expect("a folder");
        Weights::read(&case)
            .export(folder.path(), &config)
            .expect("an export");

        let mut found = Vec::new();
        differences(
            &json_of(&folder.path().join(CONFIG_FILE)),
            &json_of(&golden.join(CONFIG_FILE)),
            "",
            &mut found,
        );
        assert_eq!(
            found,
            Vec::<String>::new(),
            "{}: no difference is allowed",
            case.display()
        );

        let (ours, theirs) = (
            fs::read(folder.path().join(MODEL_FILE)),
            fs::read(golden.join(MODEL_FILE)),
        );
        let (ours, theirs) = (ours.expect("ours"), theirs.expect("theirs"));
        let (a, b) = (
            SafeTensors::deserialize(&ours).expect("ours"),
            SafeTensors::deserialize(&theirs).expect("theirs"),
        );
        let names = |file: &SafeTensors<'_>| {
            let mut names: Vec<String> = file.names().into_iter().map(str::to_owned).collect();
            names.sort();
            names
        };
        assert_eq!(names(&a), names(&b), "{}", case.display());
        for name in names(&b) {
            let (a, b) = (a.tensor(&name).expect("ours"), b.tensor(&name).expect("theirs"));
            assert_eq!(
                (a.dtype(), a.shape()),
                (b.dtype(), b.shape()),
                "{}: {name}",
                case.display()
            );
            assert!(a.data() == b.data(), "{}: bytes of {name} differ", case.display());
        }
        // Order, metadata and padding of the header too.
        assert!(
            ours == theirs,
            "{}: the files differ outside the tensors",
            case.display()
        );
        println!(
            "{}: {} tensors, {} bytes equal",
            case.display(),
            b.len(),
            theirs.len()
        );
    }
}

#[test]
fn loading_and_exporting_again_changes_nothing() {
    for case in cases() {
        let golden = case.join("ckpt_bf16");
        let draft = load(&golden).expect("the golden checkpoint");
        let folder = tempfile::tempdir().expect("a folder");
        export_loaded(&draft, folder.path()).expect("an export");
        assert_eq!(
            load(folder.path()).expect("our own checkpoint"),
            draft,
            "{}",
            case.display()
        );
        let (ours, theirs) = (
            fs::read(folder.path().join(MODEL_FILE)),
            fs::read(golden.join(MODEL_FILE)),
        );
        assert!(
            ours.expect("ours") == theirs.expect("theirs"),
            "{}",
            case.display()
        );
    }
}

fn export_loaded(draft: &LoadedDraft, folder: &Path) -> Result<(), CheckpointError> {
    let tensors = draft
        .tensors
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor.shape.as_slice(), tensor.values.as_slice()));
    export(
        folder,
        &draft.config,
        tensors,
        draft.d2t.as_deref(),
        draft.t2d.as_deref(),
    )
}

#[test]
fn an_export_is_exactly_the_tensors_of_its_draft() {
    let config = DraftConfig::new(default_spec(), default_info()).expect("a configuration");
    let original = Weights::read(&case("default"));
    let weights = || original.clone();
    let folder = tempfile::tempdir().expect("a folder");
    let fails = |weights: Weights, expected: &str| {
        let message = weights
            .export(folder.path(), &config)
            .expect_err(expected)
            .to_string();
        assert!(message.contains(expected), "{message}");
        assert!(message.contains(MODEL_FILE), "{message}");
    };
    let mut missing = weights();
    missing.tensors.remove("fc.weight");
    fails(missing, "`fc.weight` is missing");

    let mut unknown = weights();
    let extra = unknown.fc().clone();
    unknown.tensors.insert("fc.bias".to_owned(), extra);
    fails(
        unknown,
        "`fc.bias` does not belong to this draft, or is given twice",
    );

    let twice = weights();
    let once = twice
        .tensors
        .iter()
        .map(|(name, (shape, values))| (name.as_str(), &shape[..], &values[..]));
    let result = export(
        folder.path(),
        &config,
        once.clone().chain(once),
        twice.d2t.as_deref(),
        twice.t2d.as_deref(),
    );
    assert!(
        result
            .expect_err("all twice")
            .to_string()
            .contains("or is given twice")
    );

    let mut shape = weights();
    shape.fc().0.reverse();
    fails(shape, "has shape [192, 64] where [64, 192] is needed");

    let mut short = weights();
    short.fc().1.pop();
    fails(short, "`fc.weight` has 12287 values");

    // The largest f32 is finite, but not in bf16.
    for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
        let mut diverged = weights();
        diverged.fc().1[70] = bad;
        fails(diverged, "at index 70: training diverged");
    }

    let mut no_map = weights();
    no_map.d2t = None;
    fails(no_map, "`d2t` is missing");
    let mut no_mask = weights();
    no_mask.t2d = None;
    fails(no_mask, "`t2d` is missing");
    let mut descending = weights();
    descending.d2t.as_mut().expect("a map")[5] -= 1000;
    fails(descending, "`d2t` maps draft token 5");
    let mut beyond = weights();
    beyond.d2t.as_mut().expect("a map")[95] = i64::MAX;
    fails(beyond, "`d2t` maps draft token 95");
    let mut other = weights();
    let mask = other.t2d.as_mut().expect("a mask");
    let (set, unset) = (
        mask.iter().position(|m| *m).expect("set"),
        mask.iter().position(|m| !*m).expect("unset"),
    );
    mask.swap(set, unset);
    fails(other, "`t2d` marks other verifier tokens");
}

#[test]
fn a_full_vocabulary_needs_no_maps() {
    let spec = DraftSpec {
        draft_vocab_size: 320,
        ..default_spec()
    };
    let config = DraftConfig::new(spec, default_info()).expect("a configuration");
    let halves = tensor_table(config.spec()).into_iter().map(|(name, shape)| {
        let count = shape.iter().product();
        (name, (shape, vec![0.5; count]))
    });
    let mut weights = Weights {
        tensors: halves.collect(),
        d2t: None,
        t2d: None,
    };
    let folder = tempfile::tempdir().expect("a folder");
    weights.export(folder.path(), &config).expect("without maps");
    let without = fs::read(folder.path().join(MODEL_FILE)).expect("a file");
    // The identity is the same as none; anything else is an error.
    weights.d2t = Some(vec![0; 320]);
    weights.t2d = Some(vec![true; 320]);
    weights.export(folder.path(), &config).expect("with the identity");
    assert_eq!(fs::read(folder.path().join(MODEL_FILE)).expect("a file"), without);
    let draft = load(folder.path()).expect("a checkpoint");
    assert_eq!((draft.d2t, draft.t2d), (None, None));
    weights.d2t = Some(vec![1; 320]);
    assert!(weights.export(folder.path(), &config).is_err());
}

#[test]
fn a_large_tensor_is_rounded_in_all_its_parts() {
    // 192,000 values are more than are rounded at a time.
    let spec = DraftSpec {
        vocab_size: 3000,
        draft_vocab_size: 3000,
        ..default_spec()
    };
    let config = DraftConfig::new(spec, default_info()).expect("a configuration");
    let values = |count: usize| -> Vec<f32> { (0..count).map(|i| (i as f32 - 1e5) * 1.000_7e-5).collect() };
    let tensors = tensor_table(config.spec()).into_iter().map(|(name, shape)| {
        let count = shape.iter().product();
        (name, (shape, values(count)))
    });
    let mut weights = Weights {
        tensors: tensors.collect(),
        d2t: None,
        t2d: None,
    };
    let folder = tempfile::tempdir().expect("a folder");
    weights.export(folder.path(), &config).expect("an export");
    let draft = load(folder.path()).expect("a checkpoint");
    assert_eq!(draft.tensors.len(), weights.tensors.len());
    for (name, tensor) in &draft.tensors {
        let (shape, values) = &weights.tensors[name];
        assert_eq!(&tensor.shape, shape, "{name}");
        let rounded: Vec<f32> = values
            .iter()
            .map(|value| half::bf16::from_f32(*value).to_f32())
            .collect();
        assert_eq!(tensor.values, rounded, "{name}");
    }
    let embedding = weights
        .tensors
        .get_mut("embed_tokens.weight")
        .expect("every draft has it");
    embedding.1[150_001] = f32::NEG_INFINITY;
    let message = weights
        .export(folder.path(), &config)
        .expect_err("a diverged draft")
        .to_string();
    assert!(message.contains("holds -inf at index 150001"), "{message}");
}

#[test]
fn fc_norms_and_four_aux_layers_have_their_tensors() {
    let spec = DraftSpec {
        norm_before_fc: false,
        fc_norm: true,
        aux_layers: 4,
        ..default_spec()
    };
    let table = tensor_table(&spec);
    let shape = |name: &str| {
        table
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, shape)| shape.clone())
    };
    assert_eq!(shape("fc_norm.3.weight"), Some(vec![64]));
    assert_eq!(shape("fc_norm.4.weight"), None);
    assert_eq!(shape("input_norm.weight"), None);
    assert_eq!(shape("fc.weight"), Some(vec![64, 256]));
}

#[test]
fn loading_refuses_what_does_not_fit_its_configuration() {
    let golden = case("default").join("ckpt_bf16");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(MODEL_FILE);
    let write = |json: &Value, model: &[u8]| {
        fs::write(folder.path().join(CONFIG_FILE), json.to_string()).expect("a file");
        fs::write(&path, model).expect("a file");
    };
    let model = fs::read(golden.join(MODEL_FILE)).expect("the golden weights");
    let json = json_of(&golden.join(CONFIG_FILE));
    let fails = |expected: &str| {
        let message = load(folder.path()).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
        assert!(message.contains(MODEL_FILE), "{message}");
    };
    write(&json, &model);
    load(folder.path()).expect("the golden checkpoint");
    // The weights have an input_norm that this configuration does not.
    write(&altered("norm_before_fc", Some(json!(false))), &model);
    fails("tensor `input_norm.weight` is none that a draft of this config.json has");
    write(
        &altered("transformer_layer_config.model_type", Some(json!("qwen3"))),
        &model,
    );
    fails("q_norm.weight` is missing");
    write(
        &altered("transformer_layer_config.intermediate_size", Some(json!(96))),
        &model,
    );
    fails("[160, 64] where [96, 64] is needed");
    write(&altered("draft_vocab_size", Some(json!(95))), &model);
    fails("`lm_head.weight` has shape [96, 64]");
    for sixteenth in 0..16 {
        write(&json, &model[..model.len() * sixteenth / 16]);
        fails("is damaged");
    }
    let longer: Vec<u8> = model.iter().copied().chain([0]).collect();
    write(&json, &longer);
    fails("is damaged");
    // A byte of the mask that is neither 0 nor 1.
    let mut mask = model.clone();
    *mask.last_mut().expect("bytes") = 7;
    write(&json, &mask);
    fails("`t2d` of booleans holds 7");
    fs::remove_file(&path).expect("removed");
    fails("cannot read");
}

mod hosts;

use std::fs;

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::device::Products;
use serde_json::Value as Json;
use tempfile::TempDir;

use super::*;
use crate::recipe;

/// The smallest cluster file that loads; each test spoils it.
const GOOD: &str = r#"[run]
name = "demo"

[verifier]
path = "verifier"

[samples]
files = ["chats.jsonl"]

[[ranks]]
role = "verifier"

[[ranks]]
role = "draft"

[[ranks]]
role = "draft"
"#;

/// A folder with a verifier, two sample files and a cluster file.
fn folder(text: &str) -> TempDir {
    let folder = TempDir::new().expect("a temporary folder");
    fs::create_dir(folder.path().join("verifier")).expect("writable");
    fs::create_dir(folder.path().join("empty")).expect("writable");
    fs::write(folder.path().join("verifier/config.json"), "{}").expect("writable");
    fs::write(folder.path().join("chats.jsonl"), "").expect("writable");
    fs::write(folder.path().join("more.jsonl"), "").expect("writable");
    fs::write(folder.path().join("cluster.toml"), text).expect("writable");
    folder
}

fn load_layers(
    text: &str,
    environment: &[(&str, &str)],
    sets: &[&str],
) -> Result<ClusterConfig, Vec<String>> {
    let folder = folder(text);
    let environment = environment
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    ClusterConfig::load(&folder.path().join("cluster.toml"), environment, sets).map_err(|error| {
        let shown = error
            .to_string()
            .replace(&format!("{}/", folder.path().display()), "");
        assert_eq!(
            shown.lines().count(),
            error.problems().len(),
            "one line per problem"
        );
        shown.lines().map(str::to_owned).collect()
    })
}

fn problems(text: &str) -> Vec<String> {
    load_layers(text, &[], &[]).expect_err("it is wrong")
}

/// Problems of the good file with further lines at its end, which belong to the last rank unless they open a section.
fn problems_with(lines: &str) -> Vec<String> {
    problems(&format!("{GOOD}{lines}"))
}

fn load(text: &str) -> ClusterConfig {
    load_layers(text, &[], &[]).expect("it is right")
}

#[test]
fn the_smallest_file_loads_with_defaults_and_numbered_seats() {
    let config = load(GOOD);
    assert_eq!(config.draft_seats(), [Seat::draft(0), Seat::draft(1)]);
    assert_eq!(config.verifier_seats(), [Seat::verifier(0)]);
    assert!(config.run.directory.is_absolute() && config.run.directory.ends_with("runs/demo"));
    assert!(config.verifier.path.is_absolute() && config.samples.files[0].ends_with("chats.jsonl"));
    let training = TrainingConfig {
        rows_per_step: Some(2),
        ..TrainingConfig::default()
    };
    assert_eq!(config.training, training);
    assert_eq!(config.rank(Seat::draft(1)).expect("seated").threads, 0);
    assert_eq!(config.rank(Seat::draft(2)), None);
    assert_eq!(config.threads(&config.ranks[0], 7), 2);
    assert_eq!(config.threads(&config.ranks[0], 1), 1);
}

#[test]
fn sums_are_exact_over_links_unless_said_and_only_their_order_decides_the_weights() {
    let plain = load(GOOD);
    let said = |config: &ClusterConfig| (config.training.collective, config.training.sums);
    assert_eq!(said(&plain), (Collective::Links, SumMode::Exact));
    let (mut nccl, mut fast) = (plain.clone(), plain.clone());
    nccl.training.collective = Collective::Nccl;
    (fast.training.collective, fast.training.sums) = (Collective::Nccl, SumMode::Fast);
    assert_eq!(recipe::digest(&nccl), recipe::digest(&plain), "the same bits");
    assert_eq!(recipe::differing_keys(&nccl, &fast), ["training.sums"]);
    assert_ne!(recipe::digest(&fast), recipe::digest(&plain));
    let wrong = problems_with("[training]\ncollective = \"nccl\"\n");
    assert!(
        wrong[0].contains("draft-0 is on \"cpu\"; give each draft rank a device"),
        "{wrong:?}"
    );
    let wrong = problems_with("[training]\nsums = \"fast\"\n");
    assert!(
        wrong[0].contains("training.sums = \"fast\" is for training.collective = \"nccl\""),
        "{wrong:?}"
    );
}

#[test]
fn sums_of_slices_are_exact_over_links_unless_said_and_only_their_order_decides_the_weights() {
    let mut plain = load(GOOD);
    plain.verifier.tensor = 2;
    let (mut nccl, mut fast) = (plain.clone(), plain.clone());
    nccl.verifier.collective = Collective::Nccl;
    (fast.verifier.collective, fast.verifier.sums) = (Collective::Nccl, SumMode::Fast);
    assert_eq!(recipe::digest(&nccl), recipe::digest(&plain), "the same bits");
    assert_eq!(recipe::differing_keys(&nccl, &fast), ["verifier.sums"]);
    let changed = |from: &str, to: &str| problems(&GOOD.replacen(from, to, 1));
    let wrong = changed("[verifier]", "[verifier]\ncollective = \"nccl\"");
    assert!(
        wrong
            .iter()
            .any(|problem| problem.contains("verifier.tensor = 1 makes none")),
        "{wrong:?}"
    );
    assert!(
        wrong
            .iter()
            .any(|problem| problem.contains("is for verifier ranks on GPUs, and verifier-0 is on \"cpu\"")),
        "{wrong:?}"
    );
    let wrong = changed("[verifier]", "[verifier]\nsums = \"fast\"");
    assert!(
        wrong[0].contains("verifier.sums = \"fast\" is for verifier.collective = \"nccl\""),
        "{wrong:?}"
    );
}

#[test]
fn named_seats_are_kept_and_the_others_fill_up() {
    let config = load(&format!("{GOOD}seat = 0\n[[ranks]]\nrole = \"draft\"\n"));
    let seats: Vec<_> = config.ranks.iter().map(|rank| rank.seat().to_string()).collect();
    assert_eq!(seats, ["verifier-0", "draft-1", "draft-0", "draft-2"]);
}

#[test]
fn keys_are_the_fields_of_the_sections_in_order_and_defaults_are_allowed() {
    let mut config = load(GOOD);
    config.ranks.truncate(1);
    config.hosts.push(HostConfig {
        name: "b".to_owned(),
        address: "10.0.0.2".parse().ok(),
        start: vec!["ssh".to_owned()],
    });
    let json = serde_json::to_value(&config).expect("plain data");
    let mut fields = Vec::new();
    for (section, values) in json.as_object().expect("a table") {
        let values = values.as_array().map_or(values, |ranks| &ranks[0]);
        for (name, value) in values.as_object().expect("a table") {
            let path = format!("{section}.{name}");
            let key = keys::find(&path).unwrap_or_else(|| panic!("{path} is a field but no key"));
            if !value.is_null() {
                let text = toml_text(value);
                let toml = text.parse::<toml_edit::Value>().expect("a TOML value");
                assert_eq!(
                    key.kind.convert(&path, &toml).map(|_| ()),
                    Ok(()),
                    "default of {path}"
                );
            }
            fields.push(path);
        }
    }
    let known: Vec<_> = keys::KEYS.iter().map(|key| key.path.to_owned()).collect();
    assert_eq!(fields, known);
}

#[test]
fn products_are_f32_unless_said_and_decide_the_weights() {
    let plain = load(GOOD);
    let products = |config: &ClusterConfig| (config.verifier.products, config.draft.products);
    assert_eq!(products(&plain), (Products::F32, Products::F32));
    let said = load(&format!("{GOOD}[draft]\nproducts = \"bf16\"\n"));
    assert_eq!(products(&said), (Products::F32, Products::Bf16));
    let (mut verifier, mut draft) = (plain.clone(), plain.clone());
    verifier.verifier.products = Products::Bf16;
    draft.draft.products = Products::Bf16;
    for (key, other) in [("verifier.products", verifier), ("draft.products", draft)] {
        assert_eq!(recipe::differing_keys(&plain, &other), [key]);
        assert_eq!(recipe::differing_keys(&other, &plain), [key]);
        assert_ne!(recipe::digest(&other), recipe::digest(&plain));
    }
    let wrong = problems_with("[draft]\nproducts = \"fp16\"\n");
    assert!(
        wrong[0].contains("draft.products must be one of \"f32\", \"bf16\""),
        "{wrong:?}"
    );
}

/// JSON scalars and lists of them are TOML as they stand.
fn toml_text(json: &Json) -> String {
    json.to_string()
}

#[test]
fn later_layers_win() {
    let text = format!("{GOOD}[training]\nttt_steps = 2\npasses = 2\nlearning_rate = 1\n");
    let config = load_layers(
        &text,
        &[
            ("EAGLET__TRAINING__PASSES", "3"),
            ("EAGLET__TRAINING__STEPS", "30"),
            ("EAGLET__RUN__NAME", "7"),
            ("OTHER", "x"),
        ],
        &[
            "training.steps=40",
            "ranks[2].threads=5",
            "samples.held_out=more.jsonl",
            "training.schedule=cosine",
        ],
    )
    .expect("it is right");
    let training = &config.training;
    assert_eq!(
        (training.ttt_steps, training.passes, training.steps),
        (2, 3, Some(40))
    );
    assert_eq!(
        (training.learning_rate, training.schedule),
        (1.0, Schedule::Cosine)
    );
    assert_eq!(config.run.name, "7");
    assert_eq!(
        config.ranks.iter().map(|rank| rank.threads).collect::<Vec<_>>(),
        [0, 0, 5]
    );
    assert!(config.samples.held_out[0].ends_with("more.jsonl"));
    let ranks = "[{role = \"draft\"}, {role = \"verifier\", threads = 2}]";
    let config = load_layers(GOOD, &[("EAGLET__RANKS", ranks)], &[]).expect("it is right");
    assert_eq!(
        config.ranks.iter().map(RankConfig::seat).collect::<Vec<_>>(),
        [Seat::draft(0), Seat::verifier(0)]
    );
}

#[test]
fn unknown_keys_are_refused_with_the_nearest_known_one() {
    let lines = "[training]\nttt_stepz = 3\nsliding_window = 8\nxyzzy = 1\n[trainning]\nlearning_rate = 1.0\n[run.more]\n";
    assert_eq!(
        problems_with(lines),
        [
            "cluster.toml:19: training.ttt_stepz is no key; did you mean training.ttt_steps?",
            "cluster.toml:20: training.sliding_window is no key; did you mean draft.sliding_window?",
            "cluster.toml:21: training.xyzzy is no key",
            "cluster.toml:22: [trainning] is no section; did you mean [training]?",
        ]
        .into_iter()
        .chain(["cluster.toml:24: run.more is no key"])
        .collect::<Vec<_>>()
    );
}

#[test]
fn the_other_layers_name_the_variable_or_the_flag() {
    let environment = [
        ("EAGLET__TRAINING__TTT_STEPZ", "3"),
        ("EAGLET__TRAINING", "3"),
        ("EAGLET__TRAINING__TTT_STEPS", "three"),
    ];
    let sets = [
        "training.passes=0",
        "draft.fc_norm=true",
        "training",
        "ranks[9].threads=1",
        "ranks.threads=1",
    ];
    assert_eq!(
        load_layers(GOOD, &environment, &sets).expect_err("it is wrong"),
        [
            "EAGLET__TRAINING: training is a section; name one of its keys",
            "EAGLET__TRAINING__TTT_STEPS: training.ttt_steps must be a whole number, 1 to 16, found \"three\"",
            "EAGLET__TRAINING__TTT_STEPZ: training.ttt_stepz is no key; did you mean training.ttt_steps?",
            "--set draft.fc_norm=true: draft.fc_norm and draft.norm_before_fc exclude each other; \
             set one of them to false",
            "--set ranks.threads=1: ranks.threads names no rank; write ranks[0].threads, for example",
            "--set ranks[9].threads=1: there is no ranks[9]; the cluster has 3 ranks",
            "--set training: must be written section.key=value",
            "--set training.passes=0: training.passes must be a whole number, 1 to 2147483648, found 0",
        ]
    );
}

#[test]
fn wrong_types_and_ranges_are_all_reported() {
    let lines = "threads = -1\n[training]\nttt_steps = 0\npasses = \"two\"\nwarmup_ratio = 1.0\nlearning_rate = nan\n\
                 schedule = \"linaer\"\n[draft]\nfc_norm = 1\nhead_dim = 3\n[verifier.aux_layers]\n\
                 [draft_restarts]\nmax = []\n";
    assert_eq!(
        problems_with(lines),
        [
            "cluster.toml:18: ranks[2].threads must be a whole number, 0 to 4096, found -1",
            "cluster.toml:20: training.ttt_steps must be a whole number, 1 to 16, found 0",
            "cluster.toml:21: training.passes must be a whole number, 1 to 2147483648, found \"two\"",
            "cluster.toml:22: training.warmup_ratio must be a number from 0 to below 1, found 1.0",
            "cluster.toml:23: training.learning_rate must be a number above 0 and up to 1, found nan",
            "cluster.toml:24: training.schedule must be one of \"linear\", \"cosine\", \"constant\", \
             found \"linaer\"; did you mean \"linear\"?",
            "cluster.toml:26: draft.fc_norm must be true or false, found 1",
            "cluster.toml:27: draft.head_dim = 3 must be even; rotary embeddings turn pairs of dimensions",
            "cluster.toml:28: verifier.aux_layers is a key, not a section",
            "cluster.toml:30: draft_restarts.max must be a whole number, 0 to 1000000, found []",
        ]
    );
}

#[test]
fn texts_lists_names_and_addresses_are_checked() {
    let text = GOOD
        .replace(
            "name = \"demo\"",
            "name = \"../demo\"\nlisten = \"localhost\"\ndirectory = \"\"",
        )
        .replace("[\"chats.jsonl\"]", "\"chats.jsonl\"");
    assert_eq!(
        problems(&text),
        [
            "cluster.toml:2: run.name must be a text of letters, digits, `.`, `_` and `-` that starts with a letter \
             or digit, found \"../demo\"",
            "cluster.toml:3: run.listen must be an address and a port, like \"127.0.0.1:0\", found \"localhost\"",
            "cluster.toml:4: run.directory must be a text in quotes, found \"\"",
            "cluster.toml:10: samples.files must be a list of texts, like [\"a\", \"b\"], found \"chats.jsonl\"",
        ]
    );
}

#[test]
fn rules_across_keys_are_reported_at_the_key_that_was_written() {
    let lines = "[draft]\nheads = 6\nkv_heads = 4\n[training]\ndecay_ratio = 0.5\nschedule = \"linear\"\n\
                 [supervision]\nsuspect_after_ms = 200\ncoordinator_lease_ms = 1000\n\
                 [draft_restarts]\nbackoff_initial_ms = 60000\n[checkpoints]\nkeep = 0\n";
    assert_eq!(
        problems_with(lines),
        [
            "cluster.toml:20: draft.kv_heads = 4 must divide draft.heads = 6",
            "cluster.toml:22: training.decay_ratio is only for training.schedule = \"constant\"; the others fall anyway",
            "cluster.toml:25: supervision.suspect_after_ms = 200 must be at least three beats of 100 ms, else one \
             late beat makes a rank suspect",
            "cluster.toml:26: supervision.coordinator_lease_ms = 1000 must be at least supervision.dead_after_ms = \
             2000, else ranks leave before they are missed",
            "cluster.toml:28: draft_restarts.backoff_initial_ms = 60000 must not exceed draft_restarts.backoff_max_ms = 10000",
            "cluster.toml:30: checkpoints.keep must be a whole number, 1 to 10000, found 0",
        ]
    );
    assert_eq!(
        problems_with("[training]\nschedule = \"constant\"\nwarmup_ratio = 0.6\ndecay_ratio = 0.5\n"),
        [
            "cluster.toml:21: training.warmup_ratio = 0.6 and training.decay_ratio = 0.5 must not exceed 1 together"
        ]
    );
    assert_eq!(
        problems_with("[supervision]\ndead_after_ms = 500\n"),
        [
            "cluster.toml:19: supervision.dead_after_ms = 500 must be above supervision.suspect_after_ms = 1000"
        ]
    );
    assert_eq!(
        problems_with("[training]\ntokens_per_row = 32\n[draft]\nfc_norm = true\n"),
        [
            "cluster.toml:21: draft.fc_norm and draft.norm_before_fc exclude each other; set one of them to false"
        ]
    );
}

#[test]
fn folders_and_files_must_exist() {
    let text = GOOD.replace("\"verifier\"\n\n[samples]", "\"nowhere\"\naux_layers = [3, 3]\n\n[samples]").replace(
        "[\"chats.jsonl\"]",
        "[\n  \"chats.jsonl\",\n  \"gone.jsonl\",\n  \"./chats.jsonl\",\n]\nheld_out = [\"more.jsonl\", \"verifier\"]\nheld_out_every = 1",
    );
    assert_eq!(
        problems(&text),
        [
            "cluster.toml:5: verifier.path: there is no folder nowhere; paths are relative to the cluster file",
            "cluster.toml:6: verifier.aux_layers = [3, 3] must name at least one layer, ascending and without repeats",
            "cluster.toml:11: samples.files: there is no file gone.jsonl; paths are relative to the cluster file",
            "cluster.toml:12: samples.files: chats.jsonl is samples.files[0] already; name each file once",
            "cluster.toml:14: samples.held_out: verifier is no regular file; name the .jsonl or .json file itself",
            "cluster.toml:15: samples.held_out_every = 1 holds every sample out; take 2 or more, or 0 to hold none out",
            "cluster.toml:15: samples.held_out_every is for runs without samples.held_out; drop one of them",
        ]
    );
    assert_eq!(
        problems(
            &GOOD
                .replace("[\"chats.jsonl\"]", "[]")
                .replace("\"verifier\"\n\n[samples]", "\"empty\"\n\n[samples]")
        ),
        [
            "cluster.toml:5: verifier.path: empty holds no config.json; it must be a model in the Hugging Face layout, or name a .gguf file",
            "cluster.toml:8: samples.files is empty; name at least one JSONL file, or a folder in samples.watch",
        ]
    );
}

#[test]
fn a_run_may_begin_with_nothing_but_a_watched_folder() {
    let watched = load(&GOOD.replace("files = [\"chats.jsonl\"]", "watch = [\"empty\"]"));
    assert!(watched.samples.is_open() && watched.samples.watch[0].is_absolute());
    let with = |lines: &str| load(&GOOD.replace("[samples]", &format!("[samples]\n{lines}"))).samples;
    assert!(with("follow = true").is_open() && with("open = true").is_open());
    assert!(!with("poll_interval_ms = 20").is_open());
    assert_eq!(
        problems(&GOOD.replace(
            "files = [\"chats.jsonl\"]",
            "watch = [\"empty\", \"nowhere\", \"./empty\", \"chats.jsonl\"]"
        )),
        [
            "cluster.toml:8: samples.watch: empty is named twice",
            "cluster.toml:8: samples.watch: there is no folder chats.jsonl; make it first, paths are relative to the \
             cluster file",
            "cluster.toml:8: samples.watch: there is no folder nowhere; make it first, paths are relative to the cluster \
             file",
        ]
    );
    assert_eq!(
        problems(&GOOD.replace("files = [\"chats.jsonl\"]", "files = []\nopen = true")),
        [
            "cluster.toml:8: samples.files is empty; name at least one JSONL file, or a folder in samples.watch"
        ]
    );
}

#[test]
fn ranks_are_checked() {
    assert_eq!(
        problems_with(
            "seat = 0\n[[ranks]]\nrole = \"draft\"\nseat = 0\ndevice = \"cuda:0\"\n[[ranks]]\nrole = \"draft\"\n\
             seat = 7\ndevice = \"gpu\"\nhost = \"other\"\nshard = \"0/1\"\n"
        ),
        [
            "cluster.toml:21: ranks[3].seat: draft-0 is the seat of ranks[2] already",
            "cluster.toml:22: ranks[3].device = \"cuda:0\" beside draft-1 on \"cpu\": CPUs and GPUs round differently, so \
             all draft ranks must be on one kind; use \"cpu\" for all of them, or \"cuda:N\"",
            "cluster.toml:25: ranks[4].seat = 7 leaves a gap; 4 draft ranks have seats 0 to 3",
            "cluster.toml:26: ranks[4].device = \"gpu\" is no device; use \"cpu\", or \"cuda:N\" for the N-th GPU that \
             `eaglet devices` lists, from 0",
            "cluster.toml:27: ranks[4].host = \"other\" is no host; use \"local\" for this machine, or add [[hosts]] with name = \
             \"other\"",
            "cluster.toml:28: ranks[4].shard is no key any more; remove it, and set verifier.pipeline and \
             verifier.tensor: which part a verifier rank holds follows from its seat",
        ]
    );
    let draft_only = GOOD.replace("role = \"verifier\"", "role = \"draft\"");
    assert_eq!(
        problems(&draft_only),
        [
            "cluster.toml:10: no rank has the role \"verifier\", so nothing would extract hidden states; \
          add [[ranks]] with role = \"verifier\""
        ]
    );
    let verifier_only = GOOD.replace("role = \"draft\"", "role = \"verifier\"");
    assert_eq!(
        problems(&verifier_only),
        [
            "cluster.toml:10: no rank has the role \"draft\", so nothing would be trained; \
          add [[ranks]] with role = \"draft\""
        ]
    );
    assert_eq!(
        problems_with("[[ranks]]\nthreads = 1\n[[ranks]]\nrole = \"drafts\"\n"),
        [
            "cluster.toml:18: ranks[3].role is missing; it is \"verifier\" or \"draft\"",
            "cluster.toml:21: ranks[4].role must be one of \"verifier\", \"draft\", found \"drafts\"; \
             did you mean \"draft\"?",
        ]
    );
    let (start, _) = GOOD.split_once("[[ranks]]").expect("it has ranks");
    assert_eq!(
        problems(&format!("{start}[ranks]\nrole = \"draft\"\n")),
        ["cluster.toml:10: ranks must be a list, each one written under [[ranks]]"]
    );
}

#[test]
fn what_is_missing_and_what_is_no_toml_is_said() {
    assert_eq!(
        problems("training = 3\n"),
        [
            "cluster.toml: no rank has the role \"draft\", so nothing would be trained; \
             add [[ranks]] with role = \"draft\"",
            "cluster.toml: no rank has the role \"verifier\", so nothing would extract hidden states; \
             add [[ranks]] with role = \"verifier\"",
            "cluster.toml: run.name is missing; a run needs one, for example name = \"demo\"",
            "cluster.toml: samples.files is missing; name at least one JSONL file, or a folder in samples.watch",
            "cluster.toml: verifier.path is missing; name the verifier's folder, .gguf file, or OWNER/NAME on the hub",
            "cluster.toml:1: training must be a section, written [training]",
        ]
    );
    let broken = problems(&GOOD.replace("name = \"demo\"", "name = demo"));
    assert_eq!(broken.len(), 1, "{broken:?}");
    assert!(
        broken[0].starts_with("cluster.toml:2: is no valid TOML: "),
        "{broken:?}"
    );
    let twice = problems_with("role = \"draft\"\n");
    assert!(
        twice.len() == 1 && twice[0].starts_with("cluster.toml:18: is no valid TOML: duplicate key"),
        "{twice:?}"
    );
    let error =
        ClusterConfig::load(Path::new("no/such/cluster.toml"), [], &[""; 0]).expect_err("there is none");
    assert_eq!(
        error.to_string(),
        "no/such/cluster.toml: cannot be read: No such file or directory (os error 2)"
    );
}

#[test]
fn the_resolved_form_and_json_give_the_same_value_again() {
    let folder = folder(GOOD);
    let path = folder.path().join("cluster.toml");
    let sets = [
        "training.learning_rate=0.00030000000000000003",
        "training.steps=12",
        "verifier.aux_layers=[1, 2]",
        "draft.heads=8",
        "run.seed=9223372036854775807",
    ];
    let config = ClusterConfig::load(&path, [], &sets).expect("it is right");
    let resolved = folder.path().join("resolved.toml");
    fs::write(&resolved, config.to_toml().expect("its paths are UTF-8")).expect("writable");
    assert_eq!(
        ClusterConfig::load(&resolved, [], &[""; 0]).expect("it is right"),
        config
    );
    let json = serde_json::to_string(&config).expect("plain data");
    assert_eq!(
        serde_json::from_str::<ClusterConfig>(&json).expect("it was written so"),
        config
    );
}

proptest::proptest! {
    #[test]
    fn the_resolved_form_keeps_every_bit_of_a_float(rate in proptest::num::f64::POSITIVE, decay in proptest::num::f64::ANY) {
        let mut config = ClusterConfig::default();
        config.training.learning_rate = rate;
        config.training.step_loss_decay = if decay.is_nan() { 0.5 } else { decay };
        let text = config.to_toml().expect("its paths are UTF-8");
        let again = ClusterConfig::from_resolved(&text).expect("it was written so");
        proptest::prop_assert_eq!(again, config);
    }
}

#[test]
fn the_default_cluster_is_right() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cluster.toml");
    let config = ClusterConfig::load(&path, [], &[""; 0]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(config.draft_seats().len(), 2);
}

#[test]
fn the_default_cluster_names_every_key_and_the_commented_ones_show_their_default() {
    let text = include_str!("../../../../cluster.toml");
    let mut defaults = ClusterConfig::default();
    defaults.ranks.push(RankConfig::new(Role::Draft));
    let defaults = serde_json::to_value(defaults).expect("plain data");
    let mut section = "";
    let mut named = Vec::new();
    for line in text.lines() {
        // A list that the default cluster does not have is an example, its header too.
        if let Some(header) = line.trim_start_matches("# ").strip_prefix('[') {
            section = header
                .trim_start_matches('[')
                .split(']')
                .next()
                .unwrap_or_default();
        }
        let bare = line.trim_start_matches("# ");
        let Some(key) = bare
            .split_once(" = ")
            .and_then(|(name, _)| keys::find(&format!("{section}.{name}")))
        else {
            continue;
        };
        named.push(key.path);
        let (section, name) = keys::split(key.path);
        let values = if section == "ranks" {
            &defaults["ranks"][0]
        } else {
            &defaults[section]
        };
        // Keys whose default depends on others show an example instead.
        let depends = values[name].is_null() || key.path == "run.directory";
        if bare != line && !depends {
            let document = toml_edit::Document::parse(bare).expect("a key and its value");
            let shown = key
                .kind
                .convert(key.path, document[name].as_value().expect("a value"))
                .expect("allowed");
            let default = toml_text(&values[name])
                .parse::<toml_edit::Value>()
                .expect("a TOML value");
            let default = key.kind.convert(key.path, &default).expect("allowed");
            assert_eq!(shown.kind, default.kind, "{} in cluster.toml", key.path);
        }
    }
    let missing: Vec<_> = keys::KEYS
        .iter()
        .map(|key| key.path)
        .filter(|path| !named.contains(path))
        .collect();
    assert!(missing.is_empty(), "cluster.toml does not name {missing:?}");
}

#[test]
fn a_verifier_may_be_a_gguf_file_or_a_model_on_the_hub() {
    let with =
        |verifier: &str| GOOD.replace("\"verifier\"\n\n[samples]", &format!("{verifier}\n\n[samples]"));
    let config = load(&with("\"org/name\"\nrevision = \"v1.0\"\nname = \"other\""));
    let model = config.verifier.hub_model().expect("nothing local has this name");
    assert_eq!(
        (model.repo.as_str(), model.revision.as_str()),
        ("org/name", "v1.0")
    );
    assert_eq!(config.verifier.served_name(), "other");
    assert_eq!(
        load(&with("\"org/name/m.gguf\""))
            .verifier
            .hub_model()
            .and_then(|model| model.file)
            .as_deref(),
        Some("m.gguf")
    );
    // What is there is no name.
    let config = load(GOOD);
    assert_eq!(config.verifier.hub_model(), None);
    assert_eq!(
        config.verifier.served_name(),
        config.verifier.path.display().to_string()
    );

    assert_eq!(
        problems(&with("\"m.gguf\"")),
        ["cluster.toml:5: verifier.path: there is no file m.gguf; paths are relative to the cluster file"]
    );
    assert_eq!(
        problems(&with("\"verifier\"\nrevision = \"v1\"")),
        [
            "cluster.toml:6: verifier.revision is for models on the hub, and verifier is a local path; drop one of them"
        ]
    );
    assert_eq!(
        problems(&with("\"verifier\"\nrevision = \"../x\"")),
        [
            "cluster.toml:6: verifier.revision = \"../x\" is no branch, tag or commit",
            "cluster.toml:6: verifier.revision is for models on the hub, and verifier is a local path; drop one of them",
        ]
    );
}

//! Rules that span several keys or look at the file system. Rules of one key are in `keys`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::hub::HubModel;
use eaglet_runtime::ids::Role;
use eaglet_runtime::model_files::{self, ModelFiles};

use super::ClusterConfig;
use super::layers::Layers;
use super::sections::{Collective, LOCAL, RankConfig, Schedule, VerifierConfig};

/// Keys that have no default.
const REQUIRED: [(&str, &str); 2] = [
    ("run.name", "a run needs one, for example name = \"demo\""),
    (
        "verifier.path",
        "name the verifier's folder, .gguf file, or OWNER/NAME on the hub",
    ),
];

/// Reports required keys that no layer holds. A rank without a role takes all ranks out of the later checks, a host
/// without a name all hosts.
pub(crate) fn required(layers: &mut Layers) {
    for (path, remedy) in REQUIRED {
        if !layers.is_set(path) && !layers.is_rejected(path) {
            layers.problem(layers.place(path), format!("{path} is missing; {remedy}"));
            layers.reject(path);
        }
    }
    let elements = [
        (
            "hosts",
            "name",
            "give it one, and ranks on it host = \"that name\"",
        ),
        ("ranks", "role", "it is \"verifier\" or \"draft\""),
    ];
    for (list, key, remedy) in elements {
        let paths: Vec<_> = (0..layers.length(list))
            .map(|index| format!("{list}[{index}].{key}"))
            .collect();
        for path in &paths {
            if !layers.is_set(path) && !layers.is_rejected(path) {
                layers.problem(layers.place(path), format!("{path} is missing; {remedy}"));
                layers.reject(path);
            }
        }
        if paths.iter().any(|path| layers.is_rejected(path)) {
            layers.reject(list);
        }
    }
}

/// A checker that reports only what no earlier problem explains.
struct Checker<'a> {
    layers: &'a mut Layers,
}

impl Checker<'_> {
    /// Reports `message` at the first of `paths` unless `holds`, or unless the value of one of them was left out.
    fn rule(&mut self, holds: bool, paths: &[&str], message: impl FnOnce() -> String) {
        if holds || paths.iter().any(|path| self.layers.is_rejected(path)) {
            return;
        }
        // The key that somebody wrote is the one to mend, not the default it contradicts.
        let written = paths
            .iter()
            .find(|path| self.layers.is_set(path))
            .unwrap_or(&paths[0]);
        let place = self.layers.place(written);
        self.layers.problem(place, message());
    }
}

/// Checks a merged configuration with absolute paths.
pub(crate) fn all(config: &ClusterConfig, layers: &mut Layers) {
    let mut checker = Checker { layers };
    verifier(config, &mut checker);
    draft(config, &mut checker);
    training(config, &mut checker);
    samples(config, &mut checker);
    supervision(config, &mut checker);
    hosts(config, &mut checker);
    ranks(config, &mut checker);
    stored_states(config, &mut checker);
}

/// Hidden states that are read from files, or written to them.
fn stored_states(config: &ClusterConfig, checker: &mut Checker<'_>) {
    let (from, to) = (&config.samples.hidden_states, &config.run.extract_to);
    if let Some(folder) = from {
        checker.rule(folder.is_dir(), &["samples.hidden_states"], || {
            format!(
                "samples.hidden_states: there is no folder {}; write one with `eaglet extract`",
                folder.display()
            )
        });
        let holds_out = !config.samples.held_out.is_empty() || config.samples.held_out_every > 0;
        checker.rule(
            !holds_out,
            &["samples.held_out", "samples.held_out_every", "samples.hidden_states"],
            || {
                "samples.hidden_states leaves no verifier to answer held-out prompts; \
                 set samples.held_out = [] and samples.held_out_every = 0, and measure acceptance where the draft is served"
                    .to_owned()
            },
        );
    }
    let shards = config.verifier.shards();
    checker.rule(
        from.is_none() || shards == 1,
        &["verifier.pipeline", "verifier.tensor", "samples.hidden_states"],
        || {
            "samples.hidden_states are those of the whole verifier; set verifier.pipeline and verifier.tensor to 1"
                .to_owned()
        },
    );
    checker.rule(
        from.is_none() || to.is_none(),
        &["run.extract_to", "samples.hidden_states"],
        || "samples.hidden_states are there already; extract without that key".to_owned(),
    );
}

fn verifier(config: &ClusterConfig, checker: &mut Checker<'_>) {
    let path = &config.verifier.path;
    let shown = path.display();
    let is_on_hub = config.verifier.hub_model().is_some();
    checker.rule(
        is_on_hub || config.verifier.revision == VerifierConfig::default().revision,
        &["verifier.revision", "verifier.path"],
        || {
            format!(
                "verifier.revision is for models on the hub, and {shown} is a local path; drop one of them"
            )
        },
    );
    checker.rule(
        HubModel::is_revision(&config.verifier.revision),
        &["verifier.revision"],
        || {
            let revision = &config.verifier.revision;
            format!("verifier.revision = \"{revision}\" is no branch, tag or commit")
        },
    );
    if is_on_hub {
        // Whether it is there is found out when it is fetched.
    } else if ModelFiles::is_gguf(path) {
        checker.rule(path.is_file(), &["verifier.path"], || {
            format!("verifier.path: there is no file {shown}; paths are relative to the cluster file")
        });
    } else {
        checker.rule(path.is_dir(), &["verifier.path"], || {
            format!("verifier.path: there is no folder {shown}; paths are relative to the cluster file")
        });
        checker.rule(
            !path.is_dir() || path.join(model_files::CONFIG).is_file(),
            &["verifier.path"],
            || {
                format!(
                    "verifier.path: {shown} holds no config.json; \
                     it must be a model in the Hugging Face layout, or name a .gguf file"
                )
            },
        );
    }
    if let Some(layers) = &config.verifier.aux_layers {
        let ascending = !layers.is_empty() && layers.windows(2).all(|pair| pair[0] < pair[1]);
        checker.rule(ascending, &["verifier.aux_layers"], || {
            format!(
                "verifier.aux_layers = {layers:?} must name at least one layer, ascending and without repeats"
            )
        });
    }
}

fn draft(config: &ClusterConfig, checker: &mut Checker<'_>) {
    let draft = &config.draft;
    checker.rule(
        !(draft.fc_norm && draft.norm_before_fc),
        &["draft.fc_norm", "draft.norm_before_fc"],
        || "draft.fc_norm and draft.norm_before_fc exclude each other; set one of them to false".to_owned(),
    );
    if let (Some(heads), Some(kv_heads)) = (draft.heads, draft.kv_heads) {
        checker.rule(heads % kv_heads == 0, &["draft.kv_heads", "draft.heads"], || {
            format!("draft.kv_heads = {kv_heads} must divide draft.heads = {heads}")
        });
    }
    if let Some(head_dim) = draft.head_dim {
        checker.rule(head_dim % 2 == 0, &["draft.head_dim"], || {
            format!("draft.head_dim = {head_dim} must be even; rotary embeddings turn pairs of dimensions")
        });
    }
}

fn training(config: &ClusterConfig, checker: &mut Checker<'_>) {
    let training = &config.training;
    checker.rule(
        training.decay_ratio == 0.0 || training.schedule == Schedule::Constant,
        &["training.decay_ratio", "training.schedule"],
        || {
            "training.decay_ratio is only for training.schedule = \"constant\"; the others fall anyway"
                .to_owned()
        },
    );
    collectives(config, checker);
    let (warmup, decay) = (training.warmup_ratio, training.decay_ratio);
    checker.rule(warmup + decay <= 1.0, &["training.decay_ratio", "training.warmup_ratio"], || {
        format!("training.warmup_ratio = {warmup} and training.decay_ratio = {decay} must not exceed 1 together")
    });
    checker.rule(
        config.samples.min_trained_tokens < training.tokens_per_row,
        &["samples.min_trained_tokens", "training.tokens_per_row"],
        || {
            format!(
                "samples.min_trained_tokens = {} must be less than training.tokens_per_row = {}",
                config.samples.min_trained_tokens, training.tokens_per_row
            )
        },
    );
}

fn collectives(config: &ClusterConfig, checker: &mut Checker<'_>) {
    let (training, verifier) = (&config.training, &config.verifier);
    collective(config, checker, (Role::Draft, training.collective, training.sums));
    collective(
        config,
        checker,
        (Role::Verifier, verifier.collective, verifier.sums),
    );
    checker.rule(
        verifier.collective == Collective::Links || verifier.tensor > 1,
        &["verifier.collective", "verifier.tensor"],
        || {
            "verifier.collective = \"nccl\" is for the sums of slices, and verifier.tensor = 1 makes none; cut the layers, \
             or take \"links\""
                .to_owned()
        },
    );
}

/// The way of what the ranks of a role sum, and the order in which they do.
fn collective(
    config: &ClusterConfig,
    checker: &mut Checker<'_>,
    (role, way, sums): (Role, Collective, SumMode),
) {
    let section = match role {
        Role::Draft => "training",
        Role::Verifier => "verifier",
    };
    let is_nccl = way == Collective::Nccl;
    let on_host = config
        .ranks
        .iter()
        .find(|rank| rank.role == role && rank.gpu().is_none());
    let (collective_key, sums_key) = (format!("{section}.collective"), format!("{section}.sums"));
    checker.rule(!is_nccl || on_host.is_none(), &[&collective_key, "ranks"], || {
        let (seat, device) = on_host.map_or_else(Default::default, |rank| {
            (rank.seat().to_string(), rank.device.clone())
        });
        format!(
            "{collective_key} = \"nccl\" is for {role} ranks on GPUs, and {seat} is on \"{device}\"; give each {role} rank a \
             device = \"cuda:0\", \"cuda:1\", …, or take \"links\""
        )
    });
    checker.rule(
        is_nccl || sums == SumMode::Exact,
        &[&sums_key, &collective_key],
        || {
            format!(
                "{sums_key} = \"fast\" is for {collective_key} = \"nccl\": sums over links are exact, and nothing would make \
                 them faster; take \"exact\""
            )
        },
    );
}

fn samples(config: &ClusterConfig, checker: &mut Checker<'_>) {
    let samples = &config.samples;
    let some = !samples.files.is_empty() || !samples.watch.is_empty();
    let said = if checker.layers.is_set("samples.files") {
        "empty"
    } else {
        "missing"
    };
    checker.rule(some, &["samples.files", "samples.watch"], || {
        format!("samples.files is {said}; name at least one JSONL file, or a folder in samples.watch")
    });
    folders(&samples.watch, checker);
    let lists = [
        ("samples.files", &samples.files),
        ("samples.held_out", &samples.held_out),
    ];
    let mut seen: Vec<(&Path, String)> = Vec::new();
    for (list, files) in lists {
        for (index, file) in files.iter().enumerate() {
            let path = format!("{list}[{index}]");
            checker.rule(file.is_file() || !file.exists(), &[&path], || {
                format!(
                    "{list}: {} is no regular file; name the .jsonl or .json file itself",
                    file.display()
                )
            });
            checker.rule(file.exists(), &[&path], || {
                format!(
                    "{list}: there is no file {}; paths are relative to the cluster file",
                    file.display()
                )
            });
            let earlier = seen.iter().find(|(other, _)| other == file);
            checker.rule(earlier.is_none(), &[&path], || {
                let earlier = earlier.map(|(_, place)| place.as_str()).unwrap_or_default();
                format!(
                    "{list}: {} is {earlier} already; name each file once",
                    file.display()
                )
            });
            seen.push((file, path));
        }
    }
    checker.rule(
        samples.held_out.is_empty() || samples.held_out_every == 0,
        &["samples.held_out_every", "samples.held_out"],
        || "samples.held_out_every is for runs without samples.held_out; drop one of them".to_owned(),
    );
    checker.rule(samples.held_out_every != 1, &["samples.held_out_every"], || {
        "samples.held_out_every = 1 holds every sample out; take 2 or more, or 0 to hold none out".to_owned()
    });
}

fn folders(watch: &[PathBuf], checker: &mut Checker<'_>) {
    for (index, folder) in watch.iter().enumerate() {
        let path = format!("samples.watch[{index}]");
        checker.rule(folder.is_dir(), &[&path], || {
            format!(
                "samples.watch: there is no folder {}; make it first, paths are relative to the cluster file",
                folder.display()
            )
        });
        checker.rule(!watch[..index].contains(folder), &[&path], || {
            format!("samples.watch: {} is named twice", folder.display())
        });
    }
}

fn supervision(config: &ClusterConfig, checker: &mut Checker<'_>) {
    let supervision = &config.supervision;
    let (beat, suspect) = (supervision.beat_interval_ms, supervision.suspect_after_ms);
    let (dead, lease) = (supervision.dead_after_ms, supervision.coordinator_lease_ms);
    checker.rule(
        suspect >= 3 * beat,
        &["supervision.suspect_after_ms", "supervision.beat_interval_ms"],
        || {
            format!(
                "supervision.suspect_after_ms = {suspect} must be at least three beats of {beat} ms, \
                 else one late beat makes a rank suspect"
            )
        },
    );
    checker.rule(
        dead > suspect,
        &["supervision.dead_after_ms", "supervision.suspect_after_ms"],
        || {
            format!(
                "supervision.dead_after_ms = {dead} must be above supervision.suspect_after_ms = {suspect}"
            )
        },
    );
    checker.rule(
        lease >= dead,
        &["supervision.coordinator_lease_ms", "supervision.dead_after_ms"],
        || {
            format!(
                "supervision.coordinator_lease_ms = {lease} must be at least supervision.dead_after_ms = {dead}, \
                 else ranks leave before they are missed"
            )
        },
    );
    for (section, restarts) in [
        ("verifier_restarts", &config.verifier_restarts),
        ("draft_restarts", &config.draft_restarts),
    ] {
        let (initial, max) = (restarts.backoff_initial_ms, restarts.backoff_max_ms);
        let paths = ["backoff_initial_ms", "backoff_max_ms"].map(|name| format!("{section}.{name}"));
        checker.rule(initial <= max, &[paths[0].as_str(), paths[1].as_str()], || {
            format!("{} = {initial} must not exceed {} = {max}", paths[0], paths[1])
        });
    }
}

fn ranks(config: &ClusterConfig, checker: &mut Checker<'_>) {
    for (index, rank) in config.ranks.iter().enumerate() {
        let path = |name: &str| format!("ranks[{index}].{name}");
        place_of_work(config, rank, index, checker);
        let same = config.ranks[..index]
            .iter()
            .position(|other| other.seat() == rank.seat());
        checker.rule(same.is_none(), &[&path("seat")], || {
            format!(
                "{}: {} is the seat of ranks[{}] already",
                path("seat"),
                rank.seat(),
                same.unwrap_or_default()
            )
        });
        let peers = config
            .ranks
            .iter()
            .filter(|other| other.role == rank.role)
            .count();
        checker.rule(usize::from(rank.seat) < peers, &[&path("seat")], || {
            format!(
                "{} = {} leaves a gap; {} {} ranks have seats 0 to {}",
                path("seat"),
                rank.seat,
                peers,
                rank.role,
                peers - 1
            )
        });
    }
    let (stages, slices) = (config.verifier.pipeline, config.verifier.tensor);
    let shards = usize::from(stages) * usize::from(slices);
    let verifiers = config
        .ranks
        .iter()
        .filter(|rank| rank.role == Role::Verifier)
        .count();
    checker.rule(
        verifiers == 0 || shards > 0 && verifiers.is_multiple_of(shards),
        &["verifier.pipeline", "verifier.tensor", "ranks"],
        || {
            format!(
                "verifier.pipeline = {stages} and verifier.tensor = {slices} cut a verifier into {shards} shards, and \
                 there are {verifiers} verifier ranks; give each replica of the verifier {shards} of them"
            )
        },
    );
    for role in [Role::Verifier, Role::Draft] {
        one_kind_of_device(config, role, checker);
    }
    for (role, remedy) in [
        (Role::Verifier, "nothing would extract hidden states"),
        (Role::Draft, "nothing would be trained"),
    ] {
        checker.rule(
            config.ranks.iter().any(|rank| rank.role == role),
            &["ranks"],
            || format!("no rank has the role \"{role}\", so {remedy}; add [[ranks]] with role = \"{role}\""),
        );
    }
}

/// Rounding differs between CPUs and GPUs: replicas would drift apart, and weights would depend on who computed what.
fn one_kind_of_device(config: &ClusterConfig, role: Role, checker: &mut Checker<'_>) {
    let of_role = || (0..).zip(&config.ranks).filter(|(_, rank)| rank.role == role);
    let computes = |(_, rank): &(usize, &RankConfig)| rank.device == "cpu" || rank.gpu().is_some();
    let Some((_, first)) = of_role().find(computes) else {
        return;
    };
    let other = of_role()
        .filter(computes)
        .find(|(_, rank)| rank.gpu().is_some() != first.gpu().is_some());
    if let Some((index, other)) = other {
        let path = format!("ranks[{index}].device");
        checker.rule(false, &[&path], || {
            format!(
                "{path} = \"{}\" beside {} on \"{}\": CPUs and GPUs round differently, so all {role} ranks must be on \
                 one kind; use \"cpu\" for all of them, or \"cuda:N\"",
                other.device,
                first.seat(),
                first.device
            )
        });
    }
}

fn place_of_work(config: &ClusterConfig, rank: &RankConfig, index: usize, checker: &mut Checker<'_>) {
    let path = |name: &str| format!("ranks[{index}].{name}");
    let is_device = rank.device == "cpu" || rank.gpu().is_some();
    checker.rule(is_device, &[&path("device")], || {
        format!(
            "{} = \"{}\" is no device; use \"cpu\", or \"cuda:N\" for the N-th GPU that `eaglet devices` lists, from 0",
            path("device"),
            rank.device
        )
    });
    let known = rank.is_local() || config.hosts.iter().any(|host| host.name == rank.host);
    checker.rule(known, &[&path("host"), "hosts"], || {
        format!(
            "{} = \"{}\" is no host; use \"local\" for this machine, or add [[hosts]] with name = \"{}\"",
            path("host"),
            rank.host,
            rank.host
        )
    });
}

/// Machines beside the coordinator's, and whether they can reach it.
fn hosts(config: &ClusterConfig, checker: &mut Checker<'_>) {
    for (index, host) in config.hosts.iter().enumerate() {
        let path = |name: &str| format!("hosts[{index}].{name}");
        let is_first = config.hosts[..index].iter().all(|other| other.name != host.name);
        checker.rule(is_first && host.name != LOCAL, &[&path("name")], || {
            let why = if is_first {
                "means the coordinator's machine, which needs no [[hosts]]"
            } else {
                "is the name of an earlier host"
            };
            format!(
                "{} = \"{}\" {why}; give every host a name of its own",
                path("name"),
                host.name
            )
        });
        let is_used = config.ranks.iter().any(|rank| rank.host == host.name);
        checker.rule(is_used, &[&path("name"), "ranks"], || {
            format!(
                "{} = \"{}\" has no ranks; give one host = \"{}\", or remove the host",
                path("name"),
                host.name,
                host.name
            )
        });
        let is_address = host.address.is_none_or(|address| !address.is_unspecified());
        checker.rule(is_address, &[&path("address")], || {
            format!(
                "{} stands for all addresses; name the one that other hosts reach",
                path("address")
            )
        });
    }
    let listen = config.run.listen;
    checker.rule(
        config.hosts.is_empty() || !listen.ip().is_unspecified(),
        &["run.listen", "hosts"],
        || {
            format!(
                "run.listen = \"{listen}\" stands for all addresses; with [[hosts]], name the one at which they reach this \
                 machine"
            )
        },
    );
    let is_near = |address: IpAddr| address.is_loopback();
    checker.rule(
        !is_near(listen.ip()) || config.hosts.iter().all(|host| host.address.is_some_and(is_near)),
        &["run.listen", "hosts"],
        || {
            format!(
                "run.listen = \"{listen}\" can be reached from this machine only; with [[hosts]], set it to an address at \
                 which they reach this machine, like \"10.0.0.1:7400\""
            )
        },
    );
}

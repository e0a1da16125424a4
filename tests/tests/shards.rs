//! Verifiers that are cut into stages and slices, on real processes: the weights that they lead to, and what the death of any
//! of their ranks does to them.
//!
//! Stages give the bits of the whole verifier, so every cut into stages is compared with the run that is not cut. Sums over
//! slices have bits of their own: such a run repeats itself, whatever happens to its ranks.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

use eaglet_tests::drill::{Effect, Line, Quiet, is_stopped, metrics, print, token};
use eaglet_tests::traces::completed;
use eaglet_tests::{Cluster, PATIENT, QUICK_RESTARTS, ask, final_weights, processes_of, send};
use rustix::process::Signal;
use serde_json::Value;

/// Twelve small steps, a checkpoint after every fourth; replacements start at once, and only a fault is a loss.
const SETS: &[&str] = &[
    "training.steps=12",
    "training.passes=1",
    "training.tokens_per_row=128",
    "training.ttt_steps=2",
    "training.evaluate_every_steps=0",
    "training.max_new_tokens=8",
    "draft.intermediate_size=64",
    "checkpoints.every_steps=4",
    "samples.held_out=[]",
    "samples.held_out_every=60",
];

/// How a verifier is cut, and how many of it there are.
#[derive(Clone, Copy)]
struct Cut {
    name: &'static str,
    stages: usize,
    slices: usize,
    replicas: usize,
}

const STAGES: Cut = cut("stages", 2, 1, 1);
const SLICES: Cut = cut("slices", 1, 2, 1);
const BOTH: Cut = cut("both", 2, 2, 1);
const TWICE: Cut = cut("twice", 2, 1, 2);

const fn cut(name: &'static str, stages: usize, slices: usize, replicas: usize) -> Cut {
    Cut {
        name,
        stages,
        slices,
        replicas,
    }
}

impl Cut {
    fn sets(self, more: &[&str]) -> Vec<String> {
        let rank = |role: &str| format!("{{role=\"{role}\",threads=1}}");
        let verifiers = self.stages * self.slices * self.replicas;
        let ranks: Vec<String> = std::iter::repeat_n(rank("verifier"), verifiers)
            .chain([rank("draft"), rank("draft")])
            .collect();
        let own = [
            format!("verifier.pipeline={}", self.stages),
            format!("verifier.tensor={}", self.slices),
            format!("ranks=[{}]", ranks.join(",")),
        ];
        let common = [SETS, QUICK_RESTARTS, PATIENT, more]
            .concat()
            .into_iter()
            .map(|set| (*set).to_owned());
        common.chain(own).collect()
    }
}

fn texts(sets: &[String]) -> Vec<&str> {
    sets.iter().map(String::as_str).collect()
}

/// The run whose verifier is not cut.
fn whole() -> &'static Quiet {
    static QUIET: OnceLock<Quiet> = OnceLock::new();
    QUIET.get_or_init(|| Quiet::run(&texts(&cut("whole", 1, 1, 1).sets(&[]))))
}

/// The run whose verifier has two slices.
fn sliced() -> &'static Quiet {
    static QUIET: OnceLock<Quiet> = OnceLock::new();
    QUIET.get_or_init(|| Quiet::run(&texts(&SLICES.sets(&[]))))
}

/// The acceptance that a run has measured at its end: the answers of its verifier are in it.
fn acceptance(directory: &Path) -> Value {
    let lines = metrics(directory);
    let line = lines.iter().rfind(|line| line.get("acceptance").is_some());
    line.expect("held-out answers were evaluated")["acceptance"].clone()
}

/// Runs a cut verifier with faults, and compares weights and acceptance with another run.
fn drill(quiet: &Quiet, cut: Cut, more: &[&str], faults: &[&str]) -> Vec<Line> {
    let sets = cut.sets(more);
    let name = format!(
        "{}-{}",
        cut.name,
        faults.join("-").replace([':', '@', '=', '/', '#'], "_")
    );
    let name = &name[..name.len().min(80)];
    let lines = quiet.drill(name, &texts(&sets), &faults.join(";"));
    assert_eq!(
        acceptance(&quiet.beside(name)),
        acceptance(&quiet.directory),
        "{name}"
    );
    lines
}

/// A run without faults.
fn undisturbed(quiet: &Quiet, cut: Cut) -> std::path::PathBuf {
    let directory = quiet.beside(cut.name);
    let sets = cut.sets(&[]);
    let mut cluster = Cluster::launch(&directory, &texts(&sets));
    let tokens = BTreeSet::from([token(&mut cluster)]);
    completed(&cluster.finish());
    quiet.is_like(&directory, &tokens);
    assert_eq!(acceptance(&directory), acceptance(&quiet.directory));
    directory
}

#[test]
fn stages_and_replicas_of_them_lead_to_the_weights_of_the_whole_verifier() {
    let directory = undisturbed(whole(), STAGES);
    // How busy each stage was, and how long it waited, stands beside each step.
    let lines = metrics(&directory);
    let steps = lines.iter().filter(|line| line.get("loss").is_some());
    let mut busy_ms = [0, 0];
    for step in steps {
        let ranks = step["ranks"].as_array().expect("a list");
        let verifiers: Vec<_> = ranks.iter().filter(|rank| rank.get("stage").is_some()).collect();
        assert_eq!(verifiers.len(), 2, "{step}");
        for (stage, verifier) in verifiers.iter().enumerate() {
            assert_eq!(
                (&verifier["stage"], &verifier["slice"]),
                (&stage.into(), &0.into())
            );
            assert!(verifier["waiting_ms"].is_u64(), "{step}");
            busy_ms[stage] += verifier["busy_ms"].as_u64().expect("a number");
        }
    }
    assert!(busy_ms.iter().all(|&ms| ms > 0), "{busy_ms:?}");
    undisturbed(whole(), TWICE);
}

#[test]
fn slices_repeat_their_own_bits_and_stages_of_them_do_too() {
    undisturbed(sliced(), BOTH);
    // The same draft but for rounding: other bits, or nothing was cut.
    let bits = |quiet: &Quiet| final_weights(&quiet.directory)["model.safetensors"].clone();
    assert!(bits(whole()) != bits(sliced()));
}

/// One occupant after the other, in every phase of the work of each stage.
#[test]
fn any_stage_may_die_in_any_phase() {
    let lines = [
        drill(
            whole(),
            STAGES,
            &[],
            &[
                "verifier-0/0:load=kill",
                "verifier-0/1:form=kill",
                "verifier-0/2:formed=kill",
                "verifier-0/3:extract@1=kill",
                "verifier-0/4:pass@2=kill",
                "verifier-0/5:transfer@4=kill",
                "verifier-0/6:sent@6=kill",
            ],
        ),
        drill(
            whole(),
            STAGES,
            &[],
            &[
                "verifier-1/0:load=segv",
                "verifier-1/1:form=exit",
                "verifier-1/2:formed=error",
                "verifier-1/3:extract@2=kill",
                "verifier-1/4:transfer@4=error",
                "verifier-1/5:sent@7=kill",
            ],
        ),
        // Both stages at once, and a replica of both beside them.
        drill(
            whole(),
            TWICE,
            &[],
            &[
                // Which replica gets a step's rows is nobody's promise, so these count what a rank has done.
                "verifier-0:pass#1=kill",
                "verifier-1:extract#2=kill",
                "verifier-3/0:extract#3=kill",
                "verifier-2/0:transfer#4=kill",
            ],
        ),
    ];
    print("stages", &lines.concat());
}

#[test]
fn any_slice_may_die_in_any_phase() {
    let lines = [
        drill(
            sliced(),
            SLICES,
            &[],
            &[
                "verifier-1/0:form=kill",
                "verifier-1/1:share@1=kill",
                "verifier-1/2:share@2#5=error",
                "verifier-1/3:transfer@4=kill",
                "verifier-0/0:share@5=kill",
                "verifier-1/4:sent@7=kill",
            ],
        ),
        drill(
            sliced(),
            BOTH,
            &[],
            &[
                "verifier-0/0:share@1=kill",
                "verifier-3/0:extract@2=kill",
                "verifier-1/0:pass@3=kill",
                "verifier-2/0:share@5#3=kill",
                "verifier-3/1:transfer@7=kill",
            ],
        ),
    ];
    print("slices", &lines.concat());
}

/// Beats of all members go on while one of them hangs: it is that one which is killed, however the others wait for it.
#[test]
fn the_member_that_hangs_is_the_one_that_is_killed() {
    let hasty = ["supervision.step_timeout_s=1", "supervision.load_timeout_s=3"];
    let lines = [
        drill(
            whole(),
            STAGES,
            &hasty,
            &["verifier-0/0:pass@2=hang", "verifier-1/0:extract@4=hang"],
        ),
        drill(
            sliced(),
            BOTH,
            &hasty,
            &["verifier-2/0:share@2#3=hang", "verifier-1/0:transfer@5=hang"],
        ),
    ];
    print("a hung shard", &lines.concat());
}

/// A bit that flips in what one shard tells another: the checksum of the link catches it, and nobody is lost.
#[test]
fn a_corrupt_residual_is_caught() {
    let mut lines = drill(whole(), STAGES, &[], &["verifier-0:link=corrupt"]);
    lines.extend(drill(sliced(), SLICES, &[], &["verifier-1:link=corrupt"]));
    print("corrupt frames between shards", &lines);
}

/// A stage that is stopped for a while costs nothing but the time.
#[test]
fn a_stage_that_is_stopped_for_a_while_is_not_lost() {
    let faults = ["verifier-0:extract@3=stop", "verifier-1:transfer@6=stop"];
    let sets = STAGES.sets(&[]);
    let lines = whole().drill_with(
        "continued",
        &texts(&sets),
        &faults.join(";"),
        Effect::Delay,
        |cluster| {
            for _ in &faults {
                let pid = stopped(cluster);
                send(pid, Signal::CONT);
                cluster.wait("a rank that goes on", |_| (!is_stopped(pid)).then_some(()));
            }
        },
    );
    print("stopped and continued", &lines);
}

fn stopped(cluster: &mut Cluster) -> u32 {
    cluster.wait("a stopped rank", |cluster| {
        processes_of(cluster.directory())
            .into_iter()
            .find(|&pid| is_stopped(pid))
    })
}

/// What a command about a run says.
fn said(directory: &Path, arguments: &[&str]) -> (bool, String) {
    let output = ask(directory, arguments);
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[test]
fn replicas_are_added_and_removed_as_a_whole() {
    let sets = STAGES.sets(&[]);
    whole().drill_with(
        "membership",
        &texts(&sets),
        "draft-1:begin@4=stop",
        Effect::Delay,
        |cluster| {
            let pid = stopped(cluster);
            let directory = cluster.directory().to_owned();
            let (done, text) = said(&directory, &["ranks", "remove", "verifier-1"]);
            assert!(
                !done && text.contains("part of the only whole verifier replica"),
                "{text}"
            );
            let (done, text) = said(
                &directory,
                &["ranks", "add", "--role", "verifier", "--threads", "1"],
            );
            assert!(
                done && text.contains("verifier-2 and verifier-3 are starting"),
                "{text}"
            );
            cluster.wait("a second replica", |_| {
                let (_, table) = said(&directory, &["ranks", "list"]);
                let complete = |seat: &str| {
                    table.lines().any(|line| {
                        line.starts_with(seat) && line.contains("replica 1") && line.contains("busy")
                    })
                };
                (complete("verifier-2") && complete("verifier-3")).then_some(())
            });
            let (done, text) = said(&directory, &["ranks", "remove", "verifier-1"]);
            assert!(
                done && text.contains("verifier-0 and verifier-1 leave now"),
                "{text}"
            );
            send(pid, Signal::CONT);
        },
    );
}

/// A run directory belongs to one number of slices, and to any number of stages and replicas.
#[test]
fn a_run_goes_on_with_another_number_of_stages_but_not_of_slices() {
    let directory = whole().beside("cut-later");
    let launch = |cut: Cut| {
        let sets = cut.sets(&[]);
        Cluster::launch(&directory, &texts(&sets))
    };
    let mut cluster = launch(cut("whole", 1, 1, 1));
    let mut tokens = BTreeSet::from([token(&mut cluster)]);
    cluster.wait_for_step(3);
    cluster.signal(Signal::KILL);
    assert!(!cluster.finish().status.success());
    let finished = launch(SLICES).finish();
    assert!(!finished.status.success(), "{finished:#?}");
    assert!(
        finished
            .errors
            .contains("verifier.tensor differ from what its run was started with"),
        "{finished:#?}"
    );
    let mut cluster = launch(TWICE);
    tokens.insert(token(&mut cluster));
    completed(&cluster.finish());
    whole().is_like(&directory, &tokens);
}

#[test]
fn cuts_that_cannot_be_are_told_at_launch() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let refused = |name: &str, sets: &[String]| {
        let finished = Cluster::launch(&folder.path().join(name), &texts(sets)).finish();
        assert!(!finished.status.success(), "{finished:#?}");
        finished.errors
    };
    let many = refused("stages", &cut("many", 9, 1, 1).sets(&[]));
    assert!(
        many.contains("verifier.pipeline = 9 asks for more stages than the 8 layers that the verifier has"),
        "{many}"
    );
    let mut odd = STAGES.sets(&[]);
    odd.push("verifier.pipeline=3".to_owned());
    let odd = refused("ranks", &odd);
    assert!(
        odd.contains("cut a verifier into 3 shards, and there are 2 verifier ranks"),
        "{odd}"
    );
}

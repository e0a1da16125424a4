//! A verifier of two slices on stand-in GPUs that sum over the stand-in NCCL, and what becomes of a run when one of them dies.

use super::*;

/// A GPU for each slice; the draft has none.
const SLICES: &str = "ranks=[{role=\"verifier\",device=\"cuda:0\",threads=1},\
                      {role=\"verifier\",device=\"cuda:1\",threads=1},{role=\"draft\",threads=1}]";
const CUT: &str = "verifier.tensor=2";
const OVER_NCCL: &str = "verifier.collective=nccl";
const FAST: &str = "verifier.sums=fast";

fn run_with(directory: &Path, sets: &[&str], extra: &[(&str, &str)]) -> Option<Cluster> {
    launch(directory, &[&[SLICES, CUT], sets].concat(), extra)
}

/// The undisturbed run over links.
fn over_links() -> Option<&'static Path> {
    static LINKS: Once = Once::new();
    once(&LINKS, |directory| run_with(directory, &[], &[]))
}

#[test]
fn slices_over_nccl_have_the_bits_of_slices_over_links() {
    let Some(links) = over_links() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("nccl");
    let cluster = run_with(&directory, &[OVER_NCCL], &[]).expect("as before");
    completed(&cluster.finish());
    assert_eq!(losses(&directory).len(), 0);
    for seat in ["verifier-0", "verifier-1"] {
        assert!(log(&directory, seat).contains("slices are summed over NCCL"));
    }
    same_weights(links, &directory);
}

/// A slice dies in the middle of a row, while the device of the other one waits for it; and the first, whose id the stage
/// has, while its replacement meets it.
#[test]
fn slices_that_die_over_nccl_leave_the_weights_of_the_quiet_run() {
    let Some(links) = over_links() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("killed");
    let faults = "verifier-1:share@1=kill;verifier-0/0:share@3=kill;verifier-0/1:meet=kill";
    let mut cluster = run_with(&directory, &[OVER_NCCL], &[("EAGLET_FAULTS", faults)]).expect("as before");
    let tokens = BTreeSet::from([token(&mut cluster)]);
    completed(&cluster.finish());
    lost_only(&directory, &["verifier-1", "verifier-0", "verifier-0"]);
    nothing_is_left(&directory, &tokens);
    same_weights(links, &directory);
}

#[test]
fn fast_sums_of_slices_recover_from_a_death_and_are_not_gone_on_with_by_exact_ones() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("fast");
    let faults = [("EAGLET_FAULTS", "verifier-0:share@2=kill")];
    let Some(cluster) = run_with(&directory, &[OVER_NCCL, FAST], &faults) else {
        return;
    };
    completed(&cluster.finish());
    assert_eq!(losses(&directory).len(), 1);
    let finished = run_with(&directory, &[OVER_NCCL], &[])
        .expect("as before")
        .finish();
    assert_eq!(finished.status.code(), Some(2), "{finished:#?}");
    assert!(finished.errors.contains("verifier.sums"), "{finished:#?}");
}

#[test]
fn a_check_names_what_is_summed_over_nccl() {
    let Some(stack) = variables("2") else { return };
    let variables: Vec<(&str, &str)> = stack
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let check = |ranks: &str| {
        let sets = ["--set", ranks, "--set", CUT, "--set", OVER_NCCL];
        let output = run("check", &sets, &variables);
        (output.status.code(), text(&output.stdout))
    };
    let (_, said) = check(SLICES);
    assert!(said.contains("slices are summed over NCCL 2.27.0, "), "{said}");
    let together = SLICES.replace("cuda:1", "cuda:0");
    let (code, said) = check(&together);
    assert_eq!(code, Some(2));
    assert!(said.contains("verifier-0 and verifier-1 share cuda:0"), "{said}");
}

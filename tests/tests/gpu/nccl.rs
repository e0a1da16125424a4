//! Two draft ranks on stand-in GPUs that sum their gradients over the stand-in NCCL, and what becomes of a run when one of
//! them dies. As with NCCL, nobody is told of a death: the others spin until their epoch is called over.

use super::*;

/// A GPU for each draft rank; the verifier has none.
const DRAFTS: &str = "ranks=[{role=\"verifier\",threads=1},{role=\"draft\",device=\"cuda:0\",threads=1},\
                      {role=\"draft\",device=\"cuda:1\",threads=1}]";
/// Three rows a step for two ranks: one of them has two.
const ROWS: &str = "training.rows_per_step=3";
const OVER_NCCL: &str = "training.collective=nccl";
const FAST: &str = "training.sums=fast";

fn run_with(directory: &Path, sets: &[&str], extra: &[(&str, &str)]) -> Option<Cluster> {
    launch(directory, &[&[DRAFTS, ROWS], sets].concat(), extra)
}

/// The undisturbed run over links.
fn over_links() -> Option<&'static Path> {
    static LINKS: Once = Once::new();
    once(&LINKS, |directory| run_with(directory, &[], &[]))
}

#[test]
fn sums_over_nccl_have_the_bits_of_sums_over_links() {
    let Some(links) = over_links() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("nccl");
    completed(
        &run_with(&directory, &[OVER_NCCL], &[])
            .expect("as before")
            .finish(),
    );
    assert_eq!(losses(&directory).len(), 0);
    for seat in ["draft-0", "draft-1"] {
        assert!(log(&directory, seat).contains("gradients are summed over NCCL"));
    }
    same_weights(links, &directory);
}

/// A member dies with its lanes on their way while the other one waits for them, its replacement while the two meet, and
/// the first member, whose id the epoch has, between two lanes.
#[test]
fn members_that_die_over_nccl_leave_the_weights_of_the_quiet_run() {
    let Some(links) = over_links() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("killed");
    let faults = "draft-1:reducing@1=kill;draft-1/1:meet=kill;draft-0:computed@3=kill";
    let mut cluster = run_with(&directory, &[OVER_NCCL], &[("EAGLET_FAULTS", faults)]).expect("as before");
    let tokens = BTreeSet::from([token(&mut cluster)]);
    completed(&cluster.finish());
    lost_only(&directory, &["draft-1", "draft-1", "draft-0"]);
    nothing_is_left(&directory, &tokens);
    same_weights(links, &directory);
}

const CAME: &str = "the state came over NCCL";
const GIVEN: &str = "the state is given over NCCL";
const OVER_A_LINK: &str = "the state is sent over a link";

/// The state of a healthy member goes from GPU to GPU: the links carry none of it.
#[test]
fn a_killed_draft_takes_its_state_over_nccl_and_not_over_a_link() {
    let Some(links) = over_links() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("healed");
    let faults = [("EAGLET_FAULTS", "draft-1:reducing@2=kill")];
    let cluster = run_with(&directory, &[OVER_NCCL], &faults).expect("as before");
    completed(&cluster.finish());
    assert_eq!(losses(&directory).len(), 1);
    let [donor, healed] = ["draft-0", "draft-1"].map(|seat| log(&directory, seat));
    assert!(healed.contains(CAME) && !healed.contains(GIVEN), "{healed}");
    assert!(donor.contains(GIVEN) && !donor.contains(CAME), "{donor}");
    for said in [donor, healed] {
        assert!(!said.contains(OVER_A_LINK), "{said}");
    }
    same_weights(links, &directory);

    // Over links the same death is healed over a link.
    let directory = folder.path().join("healed-over-links");
    completed(&run_with(&directory, &[], &faults).expect("as before").finish());
    let donor = log(&directory, "draft-0");
    assert!(donor.contains(OVER_A_LINK) && !donor.contains(GIVEN), "{donor}");
    same_weights(links, &directory);
}

/// The donor dies with a part of its state given, so that nobody has one; and later a receiver with a part of it taken.
#[test]
fn deaths_in_a_handover_leave_the_weights_of_the_quiet_run() {
    let Some(links) = over_links() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("handover");
    let faults =
        "draft-1:reducing@1=kill;draft-0:donating=kill;draft-0/1:computed@3=kill;draft-0/2:adopting=kill";
    let cluster = run_with(&directory, &[OVER_NCCL], &[("EAGLET_FAULTS", faults)]).expect("as before");
    completed(&cluster.finish());
    lost_only(&directory, &["draft-1", "draft-0", "draft-0", "draft-0"]);
    same_weights(links, &directory);
}

/// An abort that never returns ends its process, which is replaced like any other.
#[test]
fn a_member_whose_abort_hangs_ends_itself_and_is_replaced() {
    let Some(links) = over_links() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("stuck");
    let variables = [
        ("EAGLET_FAULTS", "draft-1:reducing@2=kill"),
        ("EAGLET_STANDIN_NCCL", "stuck"),
    ];
    completed(
        &run_with(&directory, &[OVER_NCCL], &variables)
            .expect("as before")
            .finish(),
    );
    let losses = losses(&directory);
    let cause = |seat: &str| {
        let loss = losses.iter().find(|loss| loss.seat == seat);
        loss.unwrap_or_else(|| panic!("{losses:#?}")).cause.clone()
    };
    assert!(cause("draft-0").contains("the process has to end"), "{losses:#?}");
    same_weights(links, &directory);
}

#[test]
fn fast_sums_recover_from_a_death_and_are_not_gone_on_with_by_exact_ones() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("fast");
    let faults = [("EAGLET_FAULTS", "draft-0:reducing@2=kill")];
    let Some(cluster) = run_with(&directory, &[OVER_NCCL, FAST], &faults) else {
        return;
    };
    completed(&cluster.finish());
    assert_eq!(losses(&directory).len(), 1);
    let finished = run_with(&directory, &[OVER_NCCL], &[])
        .expect("as before")
        .finish();
    assert_eq!(finished.status.code(), Some(2), "{finished:#?}");
    assert!(finished.errors.contains("training.sums"), "{finished:#?}");
}

#[test]
fn a_check_names_nccl_and_refuses_ranks_that_it_would_refuse() {
    let Some(stack) = variables("2") else { return };
    let variables: Vec<(&str, &str)> = stack
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let output = run("check", &["--set", DRAFTS, "--set", OVER_NCCL], &variables);
    let said = text(&output.stdout);
    assert!(
        said.contains("gradients are summed over NCCL 2.27.0, ") && said.contains("libnccl.so.2"),
        "{said}"
    );
    let together =
        "ranks=[{role=\"verifier\"},{role=\"draft\",device=\"cuda:1\"},{role=\"draft\",device=\"cuda:1\"}]";
    let output = run("check", &["--set", together, "--set", OVER_NCCL], &variables);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stdout);
    assert!(said.contains("draft-0 and draft-1 share cuda:1"), "{said}");

    // A stack without it.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let stand_ins = stand_ins::stand_ins().expect("as before");
    for library in ["libcuda.so.1", "libnvrtc.so.12", "libcublasLt.so.12"] {
        std::os::unix::fs::symlink(stand_ins.join(library), folder.path().join(library)).expect("a link");
    }
    let mut without = variables;
    let path = folder.path().display().to_string();
    without[0].1 = &path;
    let output = run("check", &["--set", DRAFTS, "--set", OVER_NCCL], &without);
    let said = text(&output.stdout);
    if !said.contains("summed over NCCL") {
        assert_eq!(output.status.code(), Some(2));
        assert!(
            said.contains("NCCL was not found: looked for libnccl.so.2, libnccl.so in")
                && said.contains("or take \"links\""),
            "{said}"
        );
    }
}

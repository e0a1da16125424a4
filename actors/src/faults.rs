//! Faults on purpose, for drills and tests: named points in a rank's or the coordinator's work where it dies, stops,
//! hangs or computes nonsense, if `EAGLET_FAULTS` says so. `docs/operations.md` describes the variable.
//!
//! FAULTS-1: without the variable a point costs one relaxed load and changes nothing.
//! FAULTS-2: each fault of the list strikes at most once in a process, and only in the process that it names.

use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use eaglet_runtime::ids::{Generation, Seat, Step};
use rustix::process::{Signal, getpid, kill_process};

/// The environment variable.
pub const VARIABLE: &str = "EAGLET_FAULTS";

/// Exit code of the action `exit`.
const EXIT_CODE: i32 = 3;
/// How long words may take to leave the process before a point that comes after them strikes.
const WORDS_LEAVE: Duration = Duration::from_millis(50);

static ARMED: AtomicBool = AtomicBool::new(false);
static PLAN: OnceLock<Plan> = OnceLock::new();

/// Whom a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The coordinator.
    Coordinator,
    /// An occupant of a seat; `None` is every one.
    Rank(Seat, Option<Generation>),
}

/// Where in a process's work a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Told to load.
    Load,
    /// Told to link up with its peers, not linked yet.
    Form,
    /// Meets its peers over NCCL, and has not met them all.
    Meet,
    /// Linked up, and said so.
    Formed,
    /// A link to another rank is about to be made.
    Link,
    /// Draft: told to begin a step.
    Begin,
    /// Draft: its gradient is made, nothing of it is sent.
    Computed,
    /// Draft: a segment of a peer was taken into the sum; over NCCL, all of its own lanes were.
    Reducing,
    /// Draft: the sum is made, its vote is not sent.
    Staged,
    /// Draft: its vote is sent. Coordinator: the first vote of a step is in, the last is not.
    Voted,
    /// Draft: told to commit, nothing is applied.
    Commit,
    /// Draft: the step is applied, and said so.
    Applied,
    /// Draft: the first piece of its state has arrived at a peer.
    Donating,
    /// Draft: the first piece of a donor's state has arrived.
    Adopting,
    /// Draft: told to write a checkpoint, nothing is written.
    Save,
    /// Draft: half of a checkpoint is written.
    Saving,
    /// Verifier: told to extract a row.
    Extract,
    /// Verifier: the residual is about to be handed to the next stage.
    Pass,
    /// Verifier: its values are about to be sent to another slice.
    Share,
    /// Verifier: hidden states are computed, nothing is sent.
    Transfer,
    /// Verifier: hidden states are sent, and said so.
    Sent,
    /// Coordinator: the record of a committed step is on disk, no rank was told.
    Journaled,
}

/// What a fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// SIGKILL.
    Kill,
    /// SIGSEGV.
    Segv,
    /// SIGSTOP.
    Stop,
    /// Exit with code 3.
    Exit,
    /// The rank reports a passing fault.
    Error,
    /// The thread that reached the point sleeps for ever.
    Hang,
    /// A value of the gradient becomes NaN.
    Nan,
    /// A bit of the link's first tensor flips on the way.
    Corrupt,
}

/// What whoever reached a point is to spoil.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// A value of the gradient becomes NaN.
    Nan,
    /// A bit of the link's first tensor flips on the way.
    Corrupt,
}

/// A fault that a rank reports.
#[derive(Debug, thiserror::Error)]
#[error("{VARIABLE} asks for `{0}`")]
pub struct Injected(String);

/// A list of faults that cannot be understood.
#[derive(Debug, thiserror::Error)]
#[error(
    "{VARIABLE}: `{entry}`: {what}; write WHO[/GENERATION]:POINT[@STEP][#N]=ACTION, as in draft-1:staged@5=kill"
)]
pub struct FaultsError {
    entry: String,
    what: String,
}

#[derive(Debug)]
struct Fault {
    text: String,
    victim: Victim,
    point: Point,
    step: Option<Step>,
    /// Strikes when the point is reached for the n-th time.
    nth: u64,
    action: Action,
    reached: AtomicU64,
}

/// Faults of one process.
#[derive(Debug, Default)]
struct Plan(Vec<Fault>);

/// Reads the environment variable; from then on faults strike this process, which is `here`. The first call counts.
///
/// # Errors
/// If the list cannot be understood, whomever its entries name.
pub fn arm(here: Victim) -> Result<(), FaultsError> {
    let Some(text) = std::env::var_os(VARIABLE) else {
        return Ok(());
    };
    let mut plan = parse(&text.to_string_lossy())?;
    plan.0.retain(|fault| fault.strikes(here));
    if !plan.0.is_empty() && PLAN.set(plan).is_ok() {
        ARMED.store(true, Ordering::Release);
    }
    Ok(())
}

/// Whether faults strike this process.
pub(crate) fn are_armed() -> bool {
    ARMED.load(Ordering::Relaxed)
}

/// [`reach`] where no fault can be reported: [`Action::Error`] is refused for these points.
pub(crate) fn pass(point: Point, step: Option<Step>) -> Option<Damage> {
    reach(point, step).unwrap_or_default()
}

/// A point is reached, in work for a step if it has one: what is due here happens. Returns what the caller is to spoil.
///
/// # Errors
/// If the rank is to report a fault.
pub(crate) fn reach(point: Point, step: Option<Step>) -> Result<Option<Damage>, Injected> {
    if !are_armed() {
        return Ok(None);
    }
    match PLAN.get().and_then(|plan| plan.due(point, step)) {
        Some(fault) => fault.strike(),
        None => Ok(None),
    }
}

impl Plan {
    fn due(&self, point: Point, step: Option<Step>) -> Option<&Fault> {
        // All of them count, so that two faults at one point do not hold each other up.
        let due: Vec<&Fault> = self
            .0
            .iter()
            .filter(|fault| fault.point == point && (fault.step.is_none() || fault.step == step))
            .filter(|fault| fault.reached.fetch_add(1, Ordering::Relaxed) + 1 == fault.nth)
            .collect();
        due.first().copied()
    }
}

impl Fault {
    fn strikes(&self, here: Victim) -> bool {
        match (self.victim, here) {
            (Victim::Coordinator, Victim::Coordinator) => true,
            (Victim::Rank(seat, generation), Victim::Rank(here, now)) => {
                seat == here && (generation.is_none() || generation == now)
            }
            _ => false,
        }
    }

    fn strike(&self) -> Result<Option<Damage>, Injected> {
        if matches!(
            self.point,
            Point::Voted | Point::Applied | Point::Formed | Point::Sent
        ) {
            std::thread::sleep(WORDS_LEAVE);
        }
        let unix_ms = unix_ms();
        tracing::warn!(fault = self.text, unix_ms, "a fault on purpose");
        let me = |signal| {
            // A process may always signal itself.
            let _ = kill_process(getpid(), signal);
        };
        match self.action {
            Action::Kill => loop {
                me(Signal::KILL);
            },
            // The first one only removes the handler with which the standard library looks for stack overflows.
            Action::Segv => loop {
                me(Signal::SEGV);
            },
            Action::Stop => me(Signal::STOP),
            Action::Exit => std::process::exit(EXIT_CODE),
            Action::Error => return Err(Injected(self.text.clone())),
            Action::Hang => loop {
                std::thread::park();
            },
            Action::Nan => return Ok(Some(Damage::Nan)),
            Action::Corrupt => return Ok(Some(Damage::Corrupt)),
        }
        Ok(None)
    }
}

/// Now, in ms since 1970.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

fn parse(text: &str) -> Result<Plan, FaultsError> {
    text.split(';')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
        .map(|entry| {
            parse_entry(entry).map_err(|what| FaultsError {
                entry: entry.to_owned(),
                what,
            })
        })
        .collect::<Result<_, _>>()
        .map(Plan)
}

fn parse_entry(entry: &str) -> Result<Fault, String> {
    let (who, rest) = entry.split_once(':').ok_or("there is no `:`")?;
    let (place, action) = rest.split_once('=').ok_or("there is no `=`")?;
    let (place, nth) = match place.split_once('#') {
        None => (place, 1),
        Some((place, nth)) => match nth.parse() {
            Ok(nth) if nth > 0 => (place, nth),
            _ => return Err(format!("`#{nth}` is no number from 1")),
        },
    };
    let (point, step) = match place.split_once('@') {
        None => (place, None),
        Some((point, step)) => {
            let number = step.parse().map_err(|_| format!("`@{step}` is no step"))?;
            (point, Some(Step(number)))
        }
    };
    let victim = victim(who)?;
    let (point, action): (Point, Action) = (point.parse()?, action.parse()?);
    if !point.is_of(victim) {
        return Err(format!("{who} has no point `{}`", point.name()));
    }
    if step.is_some() && !point.has_step() {
        return Err(format!("the point `{}` has no step", point.name()));
    }
    if !point.takes(victim, action) {
        return Err(format!("`{}` cannot happen there", action.name()));
    }
    Ok(Fault {
        text: entry.to_owned(),
        victim,
        point,
        step,
        nth,
        action,
        reached: AtomicU64::new(0),
    })
}

fn victim(text: &str) -> Result<Victim, String> {
    let (who, generation) = match text.split_once('/') {
        None => (text, Some(Generation(0))),
        Some((who, "*")) => (who, None),
        Some((who, number)) => {
            let number = number
                .parse()
                .map_err(|_| format!("`/{number}` is no generation; it is a number, or * for all"))?;
            (who, Some(Generation(number)))
        }
    };
    if who == "coordinator" {
        return match text {
            "coordinator" => Ok(Victim::Coordinator),
            _ => Err("the coordinator has no generations".to_owned()),
        };
    }
    let seat = Seat::from_str(who).map_err(|error| format!("{error}, and there is the coordinator"))?;
    Ok(Victim::Rank(seat, generation))
}

/// An enum whose members are written in one way.
macro_rules! names {
    ($kind:ident, $what:literal, { $($member:ident: $name:literal),+ $(,)? }) => {
        impl $kind {
            fn name(self) -> &'static str {
                match self {
                    $(Self::$member => $name,)+
                }
            }
        }

        impl FromStr for $kind {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($name => Ok(Self::$member),)+
                    _ => Err(format!(
                        concat!("`{}` is no ", $what, "; there are {}"),
                        text,
                        [$($name),+].join(", ")
                    )),
                }
            }
        }
    };
}

names!(Point, "point", {
    Load: "load", Form: "form", Meet: "meet", Formed: "formed", Link: "link", Begin: "begin", Computed: "computed",
    Reducing: "reducing", Staged: "staged", Voted: "voted", Commit: "commit", Applied: "applied",
    Donating: "donating", Adopting: "adopting", Save: "save", Saving: "saving", Extract: "extract",
    Pass: "pass", Share: "share", Transfer: "transfer", Sent: "sent", Journaled: "journaled",
});

names!(Action, "action", {
    Kill: "kill", Segv: "segv", Stop: "stop", Exit: "exit", Error: "error", Hang: "hang", Nan: "nan",
    Corrupt: "corrupt",
});

impl Point {
    /// Whether a process ever reaches the point.
    fn is_of(self, victim: Victim) -> bool {
        use eaglet_runtime::ids::Role;
        let role = match victim {
            Victim::Coordinator => return matches!(self, Self::Voted | Self::Journaled),
            Victim::Rank(seat, _) => seat.role,
        };
        match self {
            Self::Load | Self::Link | Self::Form | Self::Meet | Self::Formed => true,
            Self::Extract | Self::Pass | Self::Share | Self::Transfer | Self::Sent => role == Role::Verifier,
            Self::Journaled => false,
            _ => role == Role::Draft,
        }
    }

    /// Whether what is done there belongs to a step.
    fn has_step(self) -> bool {
        !matches!(
            self,
            Self::Load
                | Self::Form
                | Self::Meet
                | Self::Formed
                | Self::Link
                | Self::Donating
                | Self::Adopting
        )
    }

    /// Whether an action makes sense there.
    fn takes(self, victim: Victim, action: Action) -> bool {
        match action {
            Action::Nan => self == Self::Computed,
            Action::Corrupt => self == Self::Link,
            // Deep inside a transfer or a file nobody passes on what is no error of either.
            Action::Error => {
                victim != Victim::Coordinator && !matches!(self, Self::Link | Self::Donating | Self::Saving)
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        parse(text).expect_err(text).to_string()
    }

    #[test]
    fn entries_name_their_victim_point_step_and_turn() {
        let plan = parse("draft-1:staged@5=kill; verifier-0/*:sent#3=stop;;coordinator:journaled=kill")
            .expect("right");
        let [first, second, third] = &plan.0[..] else {
            panic!("{plan:?}")
        };
        assert_eq!(
            (first.victim, first.point, first.step, first.nth, first.action),
            (
                Victim::Rank(Seat::draft(1), Some(Generation(0))),
                Point::Staged,
                Some(Step(5)),
                1,
                Action::Kill
            )
        );
        assert_eq!(
            (second.victim, second.step, second.nth),
            (Victim::Rank(Seat::verifier(0), None), None, 3)
        );
        assert_eq!(third.victim, Victim::Coordinator);
    }

    #[test]
    fn what_is_wrong_with_an_entry_is_told_with_the_entry_and_a_right_one() {
        for (text, words) in [
            ("draft-1=kill", "there is no `:`"),
            ("draft-1:staged", "there is no `=`"),
            ("draft1:staged=kill", "`draft1` is no seat"),
            ("draft-1/x:staged=kill", "`/x` is no generation"),
            ("draft-1:stagd=kill", "`stagd` is no point; there are load, form"),
            ("draft-1:staged=die", "`die` is no action; there are kill, segv"),
            ("draft-1:staged@x=kill", "`@x` is no step"),
            ("draft-1:staged#0=kill", "`#0` is no number from 1"),
            ("draft-1:form@3=kill", "the point `form` has no step"),
            ("draft-1:sent=kill", "draft-1 has no point `sent`"),
            ("coordinator:staged=kill", "coordinator has no point `staged`"),
            ("coordinator/1:voted=kill", "the coordinator has no generations"),
            ("draft-1:begin=nan", "`nan` cannot happen there"),
            ("verifier-0:sent=corrupt", "`corrupt` cannot happen there"),
            ("coordinator:voted=error", "`error` cannot happen there"),
        ] {
            let error = refused(&format!("draft-0:load=kill;{text}"));
            assert!(
                error.contains(words)
                    && error.contains(&format!("`{text}`"))
                    && error.contains("staged@5=kill"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn faults_2_a_fault_strikes_once_at_its_turn_and_only_its_victim() {
        let plan = parse("draft-1/2:computed@4#2=nan;draft-1:computed=error").expect("right");
        let [nan, error] = &plan.0[..] else {
            panic!("{plan:?}")
        };
        let second = Victim::Rank(Seat::draft(1), Some(Generation(2)));
        assert!(nan.strikes(second) && !error.strikes(second));
        assert!(!nan.strikes(Victim::Rank(Seat::draft(0), Some(Generation(2)))));
        assert!(!nan.strikes(Victim::Coordinator));
        let name = |fault: Option<&Fault>| fault.map(|fault| fault.action);
        let reach = |point, step| name(plan.due(point, Some(Step(step))));
        assert_eq!(reach(Point::Staged, 4), None);
        assert_eq!(reach(Point::Computed, 4), Some(Action::Error));
        assert_eq!(reach(Point::Computed, 5), None);
        assert_eq!(reach(Point::Computed, 4), Some(Action::Nan));
        assert_eq!(reach(Point::Computed, 4), None);
        assert!(matches!(nan.strike(), Ok(Some(Damage::Nan))));
        assert!(
            error
                .strike()
                .is_err_and(|error| error.to_string().contains("draft-1:computed=error"))
        );
    }
}

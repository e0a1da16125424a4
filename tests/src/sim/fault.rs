//! The kinds of things that go wrong, or are asked for, in a schedule.

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A kind of fault or request.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// What it is called in reports.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

faults! {
    /// A control message never arrives.
    MessageLost = "message lost",
    /// A control message, and those behind it, come late.
    MessageDelayed = "message delayed",
    /// A control message comes twice, sometimes much later.
    MessageDuplicated = "message duplicated",
    /// A control message is overtaken by those behind it.
    MessageReordered = "message reordered",
    /// Coordinator and rank cannot reach each other for a while, both ways.
    Partition = "partition, both ways",
    /// One of the two cannot reach the other for a while.
    PartitionOneWay = "partition, one way",
    /// A partition ends with the stream breaking.
    StreamBroken = "stream broken",
    /// Two ranks cannot reach each other for a while.
    PathBlocked = "path between ranks blocked",
    /// A link between two ranks breaks.
    LinkBroken = "link between ranks broken",
    /// NCCL fails at a member of a group whose members all live.
    CollectiveTorn = "collective torn",
    /// A rank cannot end its part in a collective, and ends itself.
    AbortStuck = "abort stuck",
    /// A rank is killed.
    RankKilled = "rank killed",
    /// A rank is killed in the middle of handling something, with part of its effects out.
    RankKilledInside = "rank killed inside a handler",
    /// The coordinator crashes between two commands.
    CoordinatorCrashed = "coordinator crashed",
    /// The journal's tail was torn at some byte, and read back from a real file.
    TailTorn = "journal torn in a real file",
    /// Ranks outlive their coordinator for a while.
    RankLingered = "rank outlived its coordinator",
    /// The coordinator is held up for a while.
    CoordinatorStalled = "coordinator stalled",
    /// A rank computes several times slower.
    RankSlow = "rank slow",
    /// A rank's process stops for a while.
    RankHung = "rank hung",
    /// A rank's compute thread stops for a while, and its beats go on.
    RankStuck = "rank stuck",
    /// A hung rank that cannot be killed: it is given up, and speaks again later.
    RankZombie = "zombie spoke again",
    /// A rank dies right after its start.
    StartFailed = "start failed",
    /// A contribution that is not a number.
    NotFinite = "gradient not finite",
    /// A replica holds another sum than the others.
    Disagreement = "replicas disagreed",
    /// A verifier refuses a sample.
    SampleRefused = "sample refused by a verifier",
    /// A verifier refuses held-out rows.
    HeldOutRefused = "held-out row refused",
    /// A checkpoint folder is gone at the next launch.
    CheckpointVanished = "checkpoint vanished",
    /// A checkpoint folder is gone under a live run.
    CheckpointVanishedLive = "checkpoint vanished under a live run",
    /// A sample came while the run went on.
    SampleArrived = "sample arrived late",
    /// A file was added.
    SourceAdded = "file added",
    /// A quarantined sample is tried again.
    SampleRetried = "quarantined sample retried",
    /// A rank is added.
    SeatAdded = "rank added",
    /// A rank is removed.
    SeatRemoved = "rank removed",
    /// A rank is restarted on request.
    SeatRestarted = "rank restarted on request",
    /// A host is lost with its ranks, and comes back.
    HostLost = "host lost",
    /// The run is drained, and launched again.
    Drained = "run drained",
    /// The run is stopped at once, and launched again.
    Stopped = "run stopped at once",
}

/// How often each kind happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultCounts([u64; Fault::ALL.len()]);

impl Default for FaultCounts {
    fn default() -> Self {
        Self([0; Fault::ALL.len()])
    }
}

impl FaultCounts {
    /// Counts one.
    pub fn note(&mut self, fault: Fault) {
        self.0[fault as usize] += 1;
    }

    /// How often a kind happened.
    pub fn of(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    /// Adds those of another schedule.
    pub fn add(&mut self, other: &Self) {
        for (ours, theirs) in self.0.iter_mut().zip(other.0) {
            *ours += theirs;
        }
    }

    /// All kinds with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Fault, u64)> {
        Fault::ALL.iter().map(|&fault| (fault, self.of(fault)))
    }
}

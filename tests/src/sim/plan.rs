//! What a seed decides before anything happens: the cluster, its samples, and which faults there will be at what rates.

use std::collections::BTreeMap;

use eaglet_actors::engine::{Fall, LearningRate, RestartPolicy, Settings, WhenExhausted};
use eaglet_runtime::collective::SumMode;
use eaglet_runtime::contract::{Contract, HiddenDtype};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::Seat;

use super::corpus::{Corpus, CorpusShape};
use super::dice::Dice;
use super::fault::Fault;
use super::machines::HOST;

/// Capacity of a row.
const TOKENS_PER_ROW: u32 = 12;
/// Longest sample.
const LONGEST: u32 = 9;

/// A schedule.
#[derive(Clone)]
pub struct Plan {
    /// What the engine knows of `cluster.toml`.
    pub settings: Settings,
    /// Checkpoints that are kept on disk.
    pub keep: usize,
    /// Silence of the coordinator after which a rank ends itself.
    pub lease_ms: u64,
    /// The samples.
    pub corpus: Corpus,
    /// Held-out prompts.
    pub held_out: u32,
    /// Longest way of a message.
    pub latency_ms: u64,
    /// Stages that capture nothing, as bits; the last one always does.
    pub silent_stages: u16,
    /// Draft ranks sum over NCCL, not over links.
    pub sums_over_nccl: bool,
    /// Whether the slices of a verifier are summed over NCCL.
    pub slices_over_nccl: bool,
    /// When all faults stop.
    pub calm_ms: u64,
    /// The faults.
    pub faults: Faults,
}

/// The rates of all faults. 0 is never.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// One in so many control messages.
    pub lose_one_in: u32,
    /// As above.
    pub delay_one_in: u32,
    /// As above.
    pub duplicate_one_in: u32,
    /// As above.
    pub reorder_one_in: u32,
    /// Faults that come by themselves, with the mean time between two of them.
    pub timed: Vec<(Fault, u64)>,
    /// One in so many ends of a part in a collective never comes to its end.
    pub stuck_abort_one_in: u32,
    /// One in so many crashes leaves ranks behind for a while.
    pub linger_one_in: u32,
    /// One in so many kills of a hung rank does not reach it.
    pub zombie_one_in: u32,
    /// One in so many launches finds a checkpoint missing.
    pub vanish_one_in: u32,
    /// One in so many contributions is not a number.
    pub not_finite_one_in: u32,
    /// One in so many rows has a gradient that is never a number, whoever computes it.
    pub never_finite_one_in: u32,
    /// One in so many sums is wrong at one replica.
    pub disagree_one_in: u32,
    /// One in so many units is refused by every verifier.
    pub bad_unit_one_in: u32,
    /// One in so many extractions is refused for no reason.
    pub refuse_one_in: u32,
    /// Held-out rows are refused.
    pub refuse_held_out: bool,
    /// Seats whose occupants die at their start, and how many of them do in each launch.
    pub crash_loops: Vec<(Seat, u32)>,
}

impl Faults {
    /// Whether nothing ever goes wrong.
    pub fn is_quiet(&self) -> bool {
        self.timed.is_empty()
            && self.lose_one_in == 0
            && self.delay_one_in == 0
            && self.duplicate_one_in == 0
            && self.reorder_one_in == 0
            && self.not_finite_one_in == 0
            && self.never_finite_one_in == 0
            && self.disagree_one_in == 0
            && self.bad_unit_one_in == 0
            && self.refuse_one_in == 0
            && !self.refuse_held_out
            && self.crash_loops.is_empty()
    }
}

/// Kinds that a schedule draws independently of each other.
const KINDS: u64 = 24;

impl Plan {
    /// The schedule of a seed.
    pub fn draw(seed: u64) -> Self {
        // Other dice than those that drive the schedule, so that a plan can change without all that follows.
        let mut dice = Dice::new(seed ^ 0x9_1a7);
        let calm_ms = dice.between(300, 2500);
        let mut plan = Self::cluster(&mut dice, calm_ms);
        let kind = dice.below(100);
        if kind < 5 {
            return plan; // nothing goes wrong
        }
        if kind < 35 {
            let only = dice.below(KINDS);
            plan.add(&mut dice, only);
            return plan;
        }
        // The more kinds, the rarer each.
        let share = dice.pick(&[3, 4, 6, 10]);
        for one in 0..KINDS {
            if dice.one_in(share) {
                plan.add(&mut dice, one);
            }
        }
        plan
    }

    /// A small cluster of fixed size in which nothing goes wrong: two lanes, three draft seats, one verifier, six steps.
    pub fn small() -> Self {
        let mut dice = Dice::new(1);
        let shape = CorpusShape {
            tokens: 100,
            longest: LONGEST,
            refused_one_in: 12,
            late_lines: 0,
            added_files: 0,
            until_ms: 400,
        };
        let mut settings = settings(2, 3, 1);
        settings.prefetch_steps = 2;
        settings.evaluate_every_steps = 2;
        settings.checkpoint_every_steps = 2;
        Self {
            settings,
            keep: 2,
            lease_ms: 1500,
            corpus: Corpus::draw(&mut dice, shape),
            held_out: 3,
            latency_ms: 1,
            silent_stages: 0,
            sums_over_nccl: false,
            slices_over_nccl: false,
            calm_ms: shape.until_ms,
            faults: Faults::default(),
        }
    }

    /// [`Self::small`], with a verifier of two stages of two slices.
    pub fn small_and_sharded() -> Self {
        let mut plan = Self::small();
        let mut sharded = settings(2, 3, 4);
        (sharded.pipeline, sharded.tensor) = (2, 2);
        plan.settings = Settings {
            prefetch_steps: plan.settings.prefetch_steps,
            evaluate_every_steps: plan.settings.evaluate_every_steps,
            checkpoint_every_steps: plan.settings.checkpoint_every_steps,
            ..sharded
        };
        plan
    }

    /// [`Self::small`], with sums over NCCL.
    pub fn small_over_nccl() -> Self {
        let mut plan = Self::small();
        plan.sums_over_nccl = true;
        plan.settings.broadcasts_state = true;
        plan
    }

    /// [`Self::small_and_sharded`], with slices that are summed over NCCL.
    pub fn small_and_sharded_over_nccl() -> Self {
        Self {
            slices_over_nccl: true,
            ..Self::small_and_sharded()
        }
    }

    /// Whether a stage of the verifier captures states.
    pub fn captures(&self, stage: u16) -> bool {
        stage + 1 == self.settings.pipeline || self.silent_stages >> stage & 1 == 0
    }

    /// [`Self::small`], with samples and a file that come while it runs.
    pub fn small_and_growing() -> Self {
        let mut plan = Self::small();
        plan.settings.open = true;
        plan.calm_ms = 200;
        let shape = CorpusShape {
            tokens: 50,
            longest: LONGEST,
            refused_one_in: 12,
            late_lines: 4,
            added_files: 1,
            until_ms: plan.calm_ms,
        };
        plan.corpus = Corpus::draw(&mut Dice::new(2), shape);
        plan.faults.timed.push((Fault::SourceAdded, plan.calm_ms / 3));
        plan
    }

    /// A cluster in which nothing goes wrong.
    fn cluster(dice: &mut Dice, calm_ms: u64) -> Self {
        // Most clusters are small, so that many of them fit a second.
        let large = dice.one_in(30);
        let lanes = dice.between(1, if large { 6 } else { 3 }) as u16;
        let drafts = dice.between(1, if large { 6 } else { 4 }) as u16;
        let replicas = dice.between(1, if large { 4 } else { 2 }) as u16;
        let (mut pipeline, mut tensor) = (1, 1);
        if dice.one_in(2) {
            pipeline = dice.between(1, if large { 4 } else { 3 }) as u16;
            tensor = dice.between(1, if large { 3 } else { 2 }) as u16;
        }
        let mut settings = settings(lanes, drafts, replicas * pipeline * tensor);
        (settings.pipeline, settings.tensor) = (pipeline, tensor);
        settings.passes = dice.between(1, 2) as u32;
        settings.open = dice.one_in(3);
        let steps = dice.between(3, if large { 25 } else { 10 });
        let shape = CorpusShape {
            // Rows are about three quarters full.
            tokens: steps * u64::from(lanes) * 9 / u64::from(settings.passes),
            longest: LONGEST,
            refused_one_in: dice.pick(&[0, 0, 12]),
            late_lines: if settings.open { dice.below(8) } else { 0 },
            added_files: if settings.open { dice.below(3) } else { 0 },
            until_ms: calm_ms,
        };
        settings.step_limit = dice.one_in(8).then(|| dice.between(2, steps));
        settings.prefetch_steps = dice.between(1, if large { 7 } else { 4 });
        settings.evaluate_every_steps = dice.pick(&[0, 0, 2, 3]);
        settings.checkpoint_every_steps = dice.pick(&[0, 1, 2, 3, 5]);
        let sums_over_nccl = dice.one_in(2);
        settings.broadcasts_state = sums_over_nccl;
        let mut faults = Faults::default();
        if shape.added_files > 0 {
            faults
                .timed
                .push((Fault::SourceAdded, calm_ms / (shape.added_files + 1)));
        }
        Self {
            settings,
            keep: dice.between(1, 3) as usize,
            lease_ms: dice.pick(&[700, 1500]),
            corpus: Corpus::draw(dice, shape),
            held_out: dice.pick(&[0, 0, 1, 2, 5]) as u32,
            latency_ms: dice.between(0, 3),
            silent_stages: dice.pick(&[0, 0, 0b1, 0b10, 0b111]),
            sums_over_nccl,
            slices_over_nccl: dice.one_in(2),
            calm_ms,
            faults,
        }
    }

    /// Adds one kind of fault at some rate.
    fn add(&mut self, dice: &mut Dice, kind: u64) {
        let message_rate = |dice: &mut Dice| dice.pick(&[20, 60, 200]);
        let every_ms = |dice: &mut Dice| dice.pick(&[60, 200, 600, 1500]);
        let rarely_ms = |dice: &mut Dice| dice.pick(&[300, 900, 2000]);
        let faults = &mut self.faults;
        match kind {
            0 => faults.lose_one_in = message_rate(dice),
            1 => faults.delay_one_in = message_rate(dice),
            2 => faults.duplicate_one_in = message_rate(dice),
            3 => faults.reorder_one_in = message_rate(dice),
            4 => faults.timed.push((Fault::Partition, rarely_ms(dice))),
            5 => faults.timed.push((Fault::PartitionOneWay, rarely_ms(dice))),
            6 => faults.timed.push((Fault::PathBlocked, rarely_ms(dice))),
            7 => faults.timed.push((Fault::LinkBroken, every_ms(dice))),
            8 => faults.timed.push((Fault::RankKilled, every_ms(dice))),
            9 => faults.timed.push((Fault::RankKilledInside, every_ms(dice))),
            10 => {
                faults.timed.push((Fault::CoordinatorCrashed, every_ms(dice)));
                faults.linger_one_in = dice.pick(&[0, 2]);
                faults.vanish_one_in = dice.pick(&[0, 0, 3]);
            }
            11 => faults.timed.push((Fault::CoordinatorStalled, rarely_ms(dice))),
            12 => faults.timed.push((Fault::RankSlow, rarely_ms(dice))),
            13 => {
                faults.timed.push((Fault::RankHung, rarely_ms(dice)));
                faults.zombie_one_in = dice.pick(&[0, 1, 2]);
            }
            14 => faults.timed.push((Fault::RankStuck, rarely_ms(dice))),
            15 => self.add_crash_loop(dice),
            16 => match dice.below(6) {
                0 => faults.never_finite_one_in = 30,
                _ => faults.not_finite_one_in = dice.pick(&[10, 40]),
            },
            17 => faults.disagree_one_in = dice.pick(&[10, 40]),
            18 => match dice.below(4) {
                0 => faults.refuse_held_out = true,
                1 => faults.refuse_one_in = dice.pick(&[10, 40]),
                _ => {
                    faults.bad_unit_one_in = dice.pick(&[4, 15]);
                    if dice.one_in(2) {
                        faults.timed.push((Fault::SampleRetried, every_ms(dice)));
                    }
                }
            },
            19 => {
                for change in [Fault::SeatAdded, Fault::SeatRemoved, Fault::SeatRestarted] {
                    if dice.one_in(2) {
                        faults.timed.push((change, rarely_ms(dice)));
                    }
                }
            }
            20 => {
                let end = dice.pick(&[Fault::Drained, Fault::Drained, Fault::Stopped]);
                faults.timed.push((end, rarely_ms(dice)));
            }
            21 => {
                faults.timed.push((Fault::CollectiveTorn, every_ms(dice)));
                faults.stuck_abort_one_in = dice.pick(&[0, 3, 10]);
            }
            22 => {
                for &seat in &self.settings.seats {
                    if dice.one_in(2) {
                        self.settings.hosts.insert(seat, HOST.to_owned());
                    }
                }
                faults.timed.push((Fault::HostLost, rarely_ms(dice)));
            }
            _ => {
                if dice.one_in(3) {
                    faults
                        .timed
                        .push((Fault::CheckpointVanishedLive, rarely_ms(dice)));
                }
                // Something else then has to make somebody read the folder.
                faults.timed.push((Fault::RankKilled, every_ms(dice)));
            }
        }
    }

    /// Some seats do not come up, and the policy may run out.
    fn add_crash_loop(&mut self, dice: &mut Dice) {
        for policy in [
            &mut self.settings.verifier_restarts,
            &mut self.settings.draft_restarts,
        ] {
            if dice.one_in(2) {
                policy.max_restarts = dice.between(1, 4) as u32;
                policy.window_ms = dice.pick(&[300, 2000, 20_000]);
                policy.then = dice.pick(&[WhenExhausted::Continue, WhenExhausted::Stop]);
            }
        }
        for _ in 0..dice.between(1, 2) {
            let seat = self.settings.seats[dice.place(self.settings.seats.len())];
            self.faults.crash_loops.push((seat, dice.between(1, 6) as u32));
        }
    }
}

/// Settings of a cluster of some size, with times that keep a schedule short.
fn settings(lanes: u16, drafts: u16, verifiers: u16) -> Settings {
    let restarts = RestartPolicy {
        max_restarts: u32::MAX,
        window_ms: 60_000,
        backoff_initial_ms: 20,
        backoff_max_ms: 150,
        then: WhenExhausted::Continue,
    };
    Settings {
        lanes,
        pipeline: 1,
        tensor: 1,
        seats: (0..drafts)
            .map(Seat::draft)
            .chain((0..verifiers).map(Seat::verifier))
            .collect(),
        open: false,
        contract: contract(),
        recipe: Digest::of(b"recipe"),
        sums: SumMode::Exact,
        slice_sums: SumMode::Exact,
        tokens_per_row: TOKENS_PER_ROW,
        passes: 1,
        step_limit: None,
        prefetch_steps: 1,
        evaluate_every_steps: 0,
        max_new_tokens: 2,
        held_out_rows: 1,
        checkpoint_every_steps: 0,
        learning_rate: LearningRate {
            peak: 1e-3,
            warmup_ratio: 0.1,
            fall: Fall::Linear,
        },
        suspect_after_ms: 250,
        dead_after_ms: 500,
        attach_timeout_ms: 800,
        hosts: BTreeMap::new(),
        host_timeout_ms: 1000,
        load_timeout_ms: 1200,
        step_timeout_ms: 1200,
        form_timeout_ms: 700,
        team_timeout_ms: 700,
        broadcasts_state: false,
        leave_timeout_ms: 500,
        verifier_restarts: restarts,
        draft_restarts: restarts,
    }
}

/// What all hidden states of the simulation promise.
pub fn contract() -> Contract {
    Contract {
        verifier: Digest::of(b"verifier"),
        aux_layers: vec![1],
        hidden_size: 8,
        dtype: HiddenDtype::Bf16,
        tokenizer: Digest::of(b"tokenizer"),
        template: Digest::of(b"template"),
    }
}

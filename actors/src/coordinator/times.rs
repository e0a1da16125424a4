//! How much of its time each rank computes, and how much of it it waits for its peers or for input. Of the shards of a
//! verifier, the wait for peers is the bubble.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use eaglet_runtime::ids::{Generation, Seat};
use eaglet_runtime::verifier::Shard;

use crate::engine::SeatView;

/// Rates are means over this long.
const RATE_WINDOW: Duration = Duration::from_secs(15);

/// A counter's growth per second over the last while.
#[derive(Default)]
pub(super) struct Rate(VecDeque<(Instant, u64)>);

impl Rate {
    /// Notes what the counter shows.
    pub(super) fn add(&mut self, now: Instant, total: u64) {
        if self.0.back().is_none_or(|&(_, last)| total != last) {
            self.0.push_back((now, total));
        }
        while self.0.len() > 2 && self.0.front().is_some_and(|&(at, _)| now - at > RATE_WINDOW) {
            self.0.pop_front();
        }
    }

    /// Its growth per second.
    pub(super) fn per_second(&self, now: Instant) -> f32 {
        let (Some(&(from, first)), Some(&(_, last))) = (self.0.front(), self.0.back()) else {
            return 0.0;
        };
        let seconds = (now - from).as_secs_f32();
        if seconds > 0.0 {
            last.saturating_sub(first) as f32 / seconds
        } else {
            0.0
        }
    }
}

/// Times of all ranks.
#[derive(Default)]
pub(super) struct WorkTimes(BTreeMap<Seat, Times>);

struct Times {
    generation: Generation,
    shard: Option<Shard>,
    /// Busy, waiting for peers, waiting for input.
    rates: [Rate; 3],
    /// Its counters, in ms, now and in the last line.
    latest_ms: [u64; 3],
    told_ms: [u64; 3],
}

/// Parts of a rank's time, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shares {
    /// It computes.
    pub(super) busy: f32,
    /// It waits for other ranks in the middle of work.
    pub(super) waiting: f32,
    /// It waits for input.
    pub(super) idle: f32,
}

impl WorkTimes {
    /// Notes the newest beats.
    pub(super) fn look(&mut self, now: Instant, seats: &[SeatView]) {
        for seat in seats {
            let Some(beat) = seat.beat else { continue };
            let fresh = || Times {
                generation: seat.generation,
                shard: seat.shard.map(|(_, shard)| shard),
                rates: Default::default(),
                latest_ms: [0; 3],
                told_ms: [0; 3],
            };
            let times = self.0.entry(seat.seat).or_insert_with(fresh);
            if times.generation != seat.generation {
                *times = fresh();
            }
            times.latest_ms = [beat.busy_ms, beat.waiting_ms, beat.idle_ms];
            for (rate, total_ms) in times.rates.iter_mut().zip(times.latest_ms) {
                rate.add(now, total_ms);
            }
        }
    }

    /// How the present occupant of a seat has spent its time lately.
    pub(super) fn shares(&self, now: Instant, seat: &SeatView) -> Option<Shares> {
        let times = self.0.get(&seat.seat)?;
        if times.generation != seat.generation || seat.pid == 0 {
            return None;
        }
        let [busy, waiting, idle] =
            [0, 1, 2].map(|which: usize| (times.rates[which].per_second(now) / 1000.0).min(1.0));
        Some(Shares { busy, waiting, idle })
    }

    /// What each of them has spent since the last line, for `metrics.jsonl`.
    pub(super) fn line(&mut self) -> Vec<serde_json::Value> {
        self.0
            .iter_mut()
            .map(|(seat, times)| {
                let [busy_ms, waiting_ms, idle_ms] =
                    [0, 1, 2].map(|which: usize| times.latest_ms[which].saturating_sub(times.told_ms[which]));
                times.told_ms = times.latest_ms;
                let mut line = serde_json::json!({
                    "seat": seat.to_string(),
                    "busy_ms": busy_ms,
                    "waiting_ms": waiting_ms,
                    "idle_ms": idle_ms,
                });
                if let Some(shard) = times.shard {
                    line["stage"] = shard.stage.into();
                    line["slice"] = shard.slice.into();
                }
                line
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use eaglet_runtime::control::{Activity, Beat};

    use super::*;

    fn view(generation: u32, busy_ms: u64, waiting_ms: u64) -> SeatView {
        SeatView {
            host: None,
            seat: Seat::verifier(1),
            generation: Generation(generation),
            status: "ready",
            pid: 7,
            restarts: 0,
            lanes: Vec::new(),
            shard: Some((0, Shard::nth(1, 2, 1))),
            silent_ms: 0,
            beat: Some(Beat {
                sequence: 0,
                activity: Activity::Extracting,
                activity_age_ms: 0,
                rss_bytes: 0,
                busy_ms,
                waiting_ms,
                idle_ms: 10,
            }),
        }
    }

    #[test]
    fn shares_are_of_the_last_while_and_lines_of_the_time_between_them() {
        let mut times = WorkTimes::default();
        let begun = Instant::now();
        let later = |seconds: u64| begun + Duration::from_secs(seconds);
        times.look(begun, &[view(0, 1000, 500)]);
        times.look(later(10), &[view(0, 8000, 3000)]);
        let shares = times.shares(later(10), &view(0, 0, 0)).expect("it is known");
        assert!(
            (shares.busy - 0.7).abs() < 1e-6 && (shares.waiting - 0.25).abs() < 1e-6 && shares.idle == 0.0,
            "{shares:?}"
        );
        let spent = |times: &mut WorkTimes| {
            let line = times.line();
            assert_eq!(
                (line.len(), &line[0]["seat"], &line[0]["stage"]),
                (1, &"verifier-1".into(), &1.into())
            );
            [&line[0]["busy_ms"], &line[0]["waiting_ms"]].map(|ms| ms.as_u64())
        };
        assert_eq!(spent(&mut times), [Some(8000), Some(3000)]);
        times.look(later(11), &[view(0, 8400, 3000)]);
        assert_eq!(spent(&mut times), [Some(400), Some(0)]);
        // The next occupant counts from the start.
        times.look(later(12), &[view(1, 20, 10)]);
        assert_eq!(spent(&mut times), [Some(20), Some(10)]);
        assert_eq!(times.shares(later(12), &view(0, 0, 0)), None);
    }
}

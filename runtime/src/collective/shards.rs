//! What the shards of one verifier say to each other while they compute a row.
//!
//! [`ShardPeers`] answers the calls of [`Peers`] over anything that carries bytes from shard to shard ([`Exchange`]). It
//! decides who sends what to whom, and does the additions; it neither knows links nor rows.
//!
//! Invariants, cited by the tests:
//! - **X-1 order**: values are added in the order of the slices, `((v0 + v1) + v2) + …`, whichever way they travel, so all
//!   slices of a stage end with the same bits.
//! - **X-2 pairs**: every message has exactly one receiving call, which knows its kind and its length before it comes.
//! - **X-3 no deadlock**: nothing is waited for before everything that others need for it is on its way.

use std::ops::{Deref, Range};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::segments::Segments;
use crate::link::bytes_of_f32;
use crate::verifier::{Interrupted, Peers, Shard};

/// Most bytes of one message: a longer tensor is sent in pieces, cut the same way on both sides. Far below what a link
/// carries at once, so that a tensor of any size fits and receiving overlaps with sending.
const PIECE_BYTES: usize = 32 << 20;

/// Up to so many bytes every slice sends all of its values to all others: one way instead of two is faster than less of
/// everything.
const DIRECT_BYTES: usize = 64 << 10;

/// What a message between shards is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ShardMessage {
    /// The residual stream, f32, for the next stage.
    Residual,
    /// A slice's own values of a sum, f32.
    Addend,
    /// The finished sum of a segment, f32.
    Sum,
    /// A slice's part of a longer tensor, f32.
    Part,
    /// Chosen tokens, u32, from the last stage.
    Tokens,
}

/// Carries bytes between the shards of one verifier, in order from each one to each other one.
pub trait Exchange: Send {
    /// Bytes that have arrived.
    type Received: Deref<Target = [u8]>;

    /// Puts a message on its way; does not wait until there is room.
    ///
    /// # Errors
    /// If the shards are not together any more.
    fn send(&mut self, to: Shard, what: ShardMessage, bytes: Bytes) -> Result<(), Interrupted>;

    /// Waits for the next message of a shard, which must be of this kind and length.
    ///
    /// # Errors
    /// If the shards are not together any more, or it is another message.
    fn receive(
        &mut self,
        from: Shard,
        what: ShardMessage,
        bytes: usize,
    ) -> Result<Self::Received, Interrupted>;
}

/// A shard's view of the others.
pub struct ShardPeers<E> {
    own: Shard,
    exchange: E,
    /// Sums of the slices before this one.
    before: Vec<f32>,
}

impl<E: Exchange> ShardPeers<E> {
    /// The peers of the shard `own`.
    pub fn new(own: Shard, exchange: E) -> Self {
        Self {
            own,
            exchange,
            before: Vec::new(),
        }
    }

    /// What carries the bytes.
    pub fn exchange(&mut self) -> &mut E {
        &mut self.exchange
    }

    /// A slice of this shard's stage.
    fn slice(&self, slice: u16) -> Shard {
        Shard { slice, ..self.own }
    }

    /// The same slice of another stage.
    fn stage(&self, stage: u16) -> Shard {
        Shard { stage, ..self.own }
    }

    fn others(&self) -> impl Iterator<Item = u16> + use<E> {
        let Shard { slice, slices, .. } = self.own;
        (0..slices).filter(move |&other| other != slice)
    }

    fn send(&mut self, to: Shard, what: ShardMessage, values: &[f32]) -> Result<(), Interrupted> {
        pieces(values.len())
            .try_for_each(|piece| self.exchange.send(to, what, bytes_of_f32(values[piece].to_vec())))
    }

    fn receive(&mut self, from: Shard, what: ShardMessage, values: &mut [f32]) -> Result<(), Interrupted> {
        for piece in pieces(values.len()) {
            let bytes = self.exchange.receive(from, what, 4 * piece.len())?;
            for (value, received) in values[piece].iter_mut().zip(floats(&bytes)) {
                *value = received;
            }
        }
        Ok(())
    }

    /// Replaces this slice's values by the sum of all slices', which are sent here.
    fn add(&mut self, values: &mut [f32]) -> Result<(), Interrupted> {
        let Shard { slice, slices, .. } = self.own;
        for piece in pieces(values.len()) {
            let values = &mut values[piece];
            let mut before = std::mem::take(&mut self.before);
            before.clear();
            for other in 0..slices {
                if other == slice {
                    for (value, before) in values.iter_mut().zip(&before) {
                        *value += before;
                    }
                    continue;
                }
                let bytes =
                    self.exchange
                        .receive(self.slice(other), ShardMessage::Addend, 4 * values.len())?;
                if other == 0 {
                    before.extend(floats(&bytes));
                } else {
                    let sum = if other < slice {
                        &mut before[..]
                    } else {
                        &mut *values
                    };
                    for (sum, value) in sum.iter_mut().zip(floats(&bytes)) {
                        *sum += value;
                    }
                }
            }
            self.before = before;
        }
        Ok(())
    }

    /// Every slice sums one segment and sends it to all.
    fn sum_by_segments(&mut self, values: &mut [f32]) -> Result<(), Interrupted> {
        let segments = Segments::new(values.len(), self.own.slices);
        let own = segments.range(self.own.slice);
        for other in self.others() {
            let to = self.slice(other);
            self.send(to, ShardMessage::Addend, &values[segments.range(other)])?;
        }
        self.add(&mut values[own.clone()])?;
        for other in self.others() {
            let to = self.slice(other);
            self.send(to, ShardMessage::Sum, &values[own.clone()])?;
        }
        for other in self.others() {
            let from = self.slice(other);
            self.receive(from, ShardMessage::Sum, &mut values[segments.range(other)])?;
        }
        Ok(())
    }
}

impl<E: Exchange> Peers for ShardPeers<E> {
    fn sum(&mut self, values: &mut [f32]) -> Result<(), Interrupted> {
        if self.own.slices > 2 && size_of_val(values) > DIRECT_BYTES {
            return self.sum_by_segments(values);
        }
        for other in self.others() {
            let to = self.slice(other);
            self.send(to, ShardMessage::Addend, values)?;
        }
        self.add(values)
    }

    fn gather(&mut self, part: &[f32], whole: &mut Vec<f32>) -> Result<(), Interrupted> {
        for other in self.others() {
            let to = self.slice(other);
            self.send(to, ShardMessage::Part, part)?;
        }
        let Shard { slice, slices, .. } = self.own;
        whole.clear();
        whole.resize(part.len() * usize::from(slices), 0.0);
        for other in 0..slices {
            let start = usize::from(other) * part.len();
            let place = &mut whole[start..start + part.len()];
            if other == slice {
                place.copy_from_slice(part);
            } else {
                let from = self.slice(other);
                self.receive(from, ShardMessage::Part, place)?;
            }
        }
        Ok(())
    }

    fn pass_on(&mut self, residual: &[f32]) -> Result<(), Interrupted> {
        if self.own.is_last() {
            return Ok(());
        }
        let next = self.stage(self.own.stage + 1);
        self.send(next, ShardMessage::Residual, residual)
    }

    fn take_over(&mut self, residual: &mut [f32]) -> Result<(), Interrupted> {
        match self.own.stage.checked_sub(1) {
            Some(before) => self.receive(self.stage(before), ShardMessage::Residual, residual),
            None => Ok(()),
        }
    }

    fn announce(&mut self, chosen: &mut [u32]) -> Result<(), Interrupted> {
        let last = self.own.stages - 1;
        if !self.own.is_last() {
            let from = self.stage(last);
            let bytes = self
                .exchange
                .receive(from, ShardMessage::Tokens, size_of_val(chosen))?;
            for (token, bytes) in chosen.iter_mut().zip(bytes.chunks_exact(4)) {
                *token = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
            return Ok(());
        }
        let bytes: Bytes = chosen.iter().flat_map(|token| token.to_le_bytes()).collect();
        (0..last).try_for_each(|stage| {
            let to = self.stage(stage);
            self.exchange.send(to, ShardMessage::Tokens, bytes.clone())
        })
    }
}

/// The pieces in which so many f32 travel.
fn pieces(elements: usize) -> impl Iterator<Item = Range<usize>> {
    const PIECE: usize = PIECE_BYTES / 4;
    (0..elements)
        .step_by(PIECE)
        .map(move |start| start..(start + PIECE).min(elements))
}

/// Buffers come from anywhere, so their alignment is not known.
fn floats(bytes: &[u8]) -> impl ExactSizeIterator<Item = f32> + '_ {
    bytes
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    type Message = (ShardMessage, Bytes);

    /// Shards in threads of one process.
    struct Channels {
        to: HashMap<Shard, Sender<Message>>,
        from: HashMap<Shard, Receiver<Message>>,
    }

    impl Exchange for Channels {
        type Received = Bytes;

        fn send(&mut self, to: Shard, what: ShardMessage, bytes: Bytes) -> Result<(), Interrupted> {
            assert!(bytes.len() <= PIECE_BYTES);
            let gone = |_| Interrupted {
                reason: format!("{to} is gone"),
            };
            self.to[&to].send((what, bytes)).map_err(gone)
        }

        fn receive(&mut self, from: Shard, what: ShardMessage, bytes: usize) -> Result<Bytes, Interrupted> {
            let message = self.from[&from].recv().map_err(|_| Interrupted {
                reason: format!("{from} is gone"),
            })?;
            //
            assert_eq!((message.0, message.1.len()), (what, bytes));
            Ok(message.1)
        }
    }

    /// Runs a program on all shards of a verifier, each in a thread, and checks that every message was taken.
    fn all<T: Send>(
        stages: u16,
        slices: u16,
        program: impl Fn(Shard, &mut ShardPeers<Channels>) -> T + Sync,
    ) -> Vec<T> {
        let shards: Vec<Shard> = (0..stages * slices)
            .map(|index| Shard::nth(index, stages, slices))
            .collect();
        let mut ends: Vec<Channels> = shards
            .iter()
            .map(|_| Channels {
                to: HashMap::new(),
                from: HashMap::new(),
            })
            .collect();
        for (a, &from) in shards.iter().enumerate() {
            for (b, &to) in shards.iter().enumerate().filter(|&(b, _)| a != b) {
                let (sender, receiver) = channel();
                ends[a].to.insert(to, sender);
                ends[b].from.insert(from, receiver);
            }
        }
        let program = &program;
        let results: Vec<(T, Channels)> = std::thread::scope(|scope| {
            let threads: Vec<_> = shards
                .iter()
                .zip(ends)
                .map(|(&shard, channels)| {
                    scope.spawn(move || {
                        let mut peers = ShardPeers::new(shard, channels);
                        (program(shard, &mut peers), peers.exchange)
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no shard panics"))
                .collect()
        });
        for (_, channels) in &results {
            assert!(channels.from.values().all(|from| from.try_recv().is_err()), "X-2");
        }
        results.into_iter().map(|(result, _)| result).collect()
    }

    /// Values of very different size, so that another order of addition gives other bits.
    fn values(shard: Shard, elements: usize) -> Vec<f32> {
        let mut state = 0x9e37_79b9_u32 ^ (u32::from(shard.slice) << 8) ^ u32::from(shard.stage);
        (0..elements)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 8) as f32 - (1 << 23) as f32) * 2_f32.powi((state % 40) as i32 - 20)
            })
            .collect()
    }

    /// X-1, for few and for many slices, short and long tensors, and lengths that no segment divides.
    #[test]
    fn slices_add_in_their_order_and_hold_the_same_bits() {
        for slices in 1..=5 {
            for elements in [0, 1, 7, 1000, 50_021] {
                let sums = all(2, slices, |shard, peers| {
                    let mut sum = values(shard, elements);
                    peers.sum(&mut sum).expect("nobody is interrupted");
                    sum
                });
                for (index, sum) in (0..).zip(sums) {
                    let stage = Shard::nth(index, 2, slices).stage;
                    let mut wanted = vec![0.0; elements];
                    for slice in 0..slices {
                        let addend = values(
                            Shard {
                                slice,
                                ..Shard::nth(stage * slices, 2, slices)
                            },
                            elements,
                        );
                        for (sum, value) in wanted.iter_mut().zip(addend) {
                            *sum = if slice == 0 { value } else { *sum + value };
                        }
                    }
                    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert!(
                        bits(&sum) == bits(&wanted),
                        "{elements} elements, {slices} slices"
                    );
                }
            }
        }
    }

    /// Longer than a piece: what travels is cut, and put together again.
    #[test]
    fn tensors_longer_than_a_message_arrive_whole() {
        let elements = PIECE_BYTES / 4 + 5;
        all(2, 2, |shard, peers| {
            let own = values(shard, elements);
            let mut whole = Vec::new();
            peers.gather(&own, &mut whole).expect("nobody is interrupted");
            for slice in 0..2 {
                let part = &whole[usize::from(slice) * elements..][..elements];
                assert!(part == values(Shard { slice, ..shard }, elements));
            }
            let mut residual = vec![0.0; elements];
            if shard.is_first() {
                peers.pass_on(&own).expect("nobody is interrupted");
            } else {
                peers.take_over(&mut residual).expect("nobody is interrupted");
                assert!(residual == values(Shard { stage: 0, ..shard }, elements));
            }
        });
    }

    /// A whole forward and a choice, twice: residuals go down the stages, tokens come back to all.
    #[test]
    fn residuals_go_from_stage_to_stage_and_tokens_to_everybody() {
        for (stages, slices) in [(1, 1), (1, 3), (3, 1), (4, 2)] {
            let heard = all(stages, slices, |shard, peers| {
                let mut heard = Vec::new();
                for round in 0..2 {
                    let mut residual = vec![f32::from(shard.slice) + 10.0 * round as f32; 3];
                    peers.take_over(&mut residual).expect("nobody is interrupted");
                    residual.iter_mut().for_each(|value| *value += 100.0);
                    peers.pass_on(&residual).expect("nobody is interrupted");
                    let mut chosen = [0; 2];
                    if shard.is_last() {
                        chosen = [residual[0] as u32 - u32::from(shard.slice), round];
                    }
                    peers.announce(&mut chosen).expect("nobody is interrupted");
                    heard.push(chosen);
                }
                heard
            });
            let wanted = [[100 * u32::from(stages), 0], [100 * u32::from(stages) + 10, 1]];
            assert!(heard.iter().all(|heard| heard[..] == wanted), "{heard:?}");
        }
    }

    #[test]
    fn who_waits_for_a_shard_that_is_gone_is_interrupted() {
        let results = all(2, 2, |shard, peers| {
            if shard == Shard::nth(0, 2, 2) {
                *peers.exchange() = Channels {
                    to: HashMap::new(),
                    from: HashMap::new(),
                };
                return None;
            }
            let mut sum = vec![1.0; 4];
            match shard.stage {
                0 => peers.sum(&mut sum).err(),
                _ if shard.slice == 0 => peers.take_over(&mut sum).err(),
                _ => None,
            }
        });
        let told = |index: usize| results[index].as_ref().map(|error| error.reason.as_str());
        let gone = Some("stage 0 of 2, slice 0 of 2 is gone");
        assert_eq!([told(0), told(1), told(2), told(3)], [None, gone, gone, None]);
    }
}

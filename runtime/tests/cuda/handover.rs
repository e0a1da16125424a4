//! A state that goes from one member of an epoch to others before its first step.

use eaglet_runtime::cuda::Buffer;

use super::*;

/// Parameters and moments of the donor.
fn state() -> Vec<Vec<f32>> {
    [10, 11, 12].map(lane).to_vec()
}

fn handover(donor: u16, receivers: &[u16]) -> Handover {
    Handover {
        donor,
        receivers: receivers.to_vec(),
        vectors: 3,
        patience: LONG,
    }
}

/// A member with the vectors of its state, and what orders its work with them.
struct Replica {
    part: Part,
    vectors: Vec<Buffer<f32>>,
    stack: Stack,
}

impl Replica {
    fn new(part: Part, values: &[Vec<f32>]) -> Self {
        let stack = Stack::open().expect("as before");
        let vectors = values.iter().map(|values| stack.upload(values)).collect();
        Self { part, vectors, stack }
    }

    fn give(&mut self) -> Result<(), SumError> {
        let views: Vec<_> = self.vectors.iter().map(Buffer::view).collect();
        self.part.sums.give_state(&views, &self.stack.stream)
    }

    fn take(&mut self) -> Result<(), SumError> {
        let mut views: Vec<_> = self.vectors.iter_mut().map(Buffer::view_mut).collect();
        self.part.sums.take_state(&mut views, &self.stack.stream)
    }

    /// Goes on until the state has gone round; what was told.
    fn pass(&mut self, is_donor: bool) -> Vec<SumWord> {
        let mut told = Vec::new();
        if is_donor {
            self.give().expect("given");
        }
        loop {
            let word = self.part.hear();
            match &word {
                SumWord::Room => self.give().expect("given"),
                SumWord::Arrived => self.take().expect("taken"),
                SumWord::HandedOver => return told,
                other => panic!("{other:?}"),
            }
            told.push(word);
        }
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        let vectors = self.vectors.iter();
        vectors.map(|vector| bits(&self.stack.download(vector))).collect()
    }
}

/// Members that have met, the donor with the state and the others with something else.
fn replicas(device: &SumDevice, members: &[u16], handover: &Handover) -> Vec<Replica> {
    let (state, other) = (state(), vec![vec![f32::NAN; ELEMENTS]; 3]);
    group_with(device, members, SumMode::Exact, Some(handover))
        .into_iter()
        .map(|part| {
            let is_donor = part.own == handover.donor;
            Replica::new(part, if is_donor { &state } else { &other })
        })
        .collect()
}

/// STATE-1, STATE-2: with one receiver and several, with and without members that need nothing; and steps go on behind it.
#[test]
fn a_state_goes_round_bit_for_bit_before_the_first_step() {
    let Some(device) = device() else { return };
    let wanted: Vec<Vec<u32>> = state().iter().map(|values| bits(values)).collect();
    let buckets = 3 * plan().buckets();
    for (members, donor, receivers) in [
        (&[0, 1][..], 0, &[1][..]),
        (&[2, 5], 5, &[2]),
        (&[0, 3, 4, 9], 3, &[0, 9]),
        (&[0, 1, 2], 1, &[0, 2]),
    ] {
        let mut replicas = replicas(&device, members, &handover(donor, receivers));
        std::thread::scope(|scope| {
            for replica in &mut replicas {
                scope.spawn(|| {
                    let own = replica.part.own;
                    let told = replica.pass(own == donor);
                    let word = if own == donor {
                        SumWord::Room
                    } else {
                        SumWord::Arrived
                    };
                    let expected = if own == donor || receivers.contains(&own) {
                        buckets
                    } else {
                        0
                    };
                    assert_eq!(told, vec![word; expected], "{own} of {members:?}");
                });
            }
        });
        for replica in &replicas {
            let own = replica.part.own;
            let holds = replica.bits() == wanted;
            assert_eq!(
                holds,
                own == donor || receivers.contains(&own),
                "{own} of {members:?}"
            );
        }
        let mut parts: Vec<Part> = replicas.into_iter().map(|replica| replica.part).collect();
        let lanes = [(0, members[0]), (1, members[1]), (2, members[0])];
        for sum in steps(&mut parts, &lanes) {
            assert_eq!(bits(&sum), bits(&reference(&[0, 1, 2])), "{members:?}");
        }
        end(parts);
    }
}

/// SUMS-2
#[test]
fn a_donor_gives_no_more_than_a_receiver_takes() {
    let Some(device) = device() else { return };
    let mut replicas = replicas(&device, &[0, 1], &handover(0, &[1]));
    let (donor, receiver) = replicas.split_at_mut(1);
    let (donor, receiver) = (&mut donor[0], &mut receiver[0]);
    donor.give().expect("given");
    let mut rooms = 0;
    while let Ok(word) = donor.part.words.recv_timeout(SHORT) {
        assert_eq!(word, SumWord::Room);
        rooms += 1;
        donor.give().expect("given");
    }
    assert!(
        (1..8).contains(&rooms),
        "{rooms} buckets left, and nobody took one"
    );
    std::thread::scope(|scope| {
        scope.spawn(|| receiver.pass(false));
        let told = donor.pass(true).len();
        assert_eq!(rooms + told, 3 * plan().buckets());
    });
    assert_eq!(replicas[0].bits(), replicas[1].bits());
    end(replicas.into_iter().map(|replica| replica.part).collect());
}

/// SUMS-3
#[test]
fn a_state_that_does_not_come_is_told_and_the_next_epoch_passes_it() {
    let Some(device) = device() else { return };
    let mut late = handover(0, &[1]);
    late.patience = SHORT;
    let parts = group_with(&device, &[0, 1], SumMode::Exact, Some(&late));
    // The donor computes something else for ever.
    let SumWord::Broken(reason) = parts[1].hear() else {
        panic!("nothing was given")
    };
    assert!(reason.contains("the state"), "{reason}");
    end(parts);

    let mut replicas = replicas(&device, &[0, 1], &handover(1, &[0]));
    std::thread::scope(|scope| {
        for replica in &mut replicas {
            scope.spawn(|| replica.pass(replica.part.own == 1));
        }
    });
    assert_eq!(replicas[0].bits(), replicas[1].bits());
    end(replicas.into_iter().map(|replica| replica.part).collect());
}

#[test]
fn a_handover_that_contradicts_itself_is_refused() {
    let Some(device) = device() else { return };
    for wrong in [
        handover(7, &[1]),
        handover(0, &[]),
        handover(0, &[0, 1]),
        handover(0, &[1, 7]),
    ] {
        let mut shape = shape(&[0, 1], 0, SumMode::Exact);
        shape.handover = Some(wrong);
        let refused = GradientSums::begin_epoch(&device, shape, |_| {});
        assert!(matches!(refused.map(|_| ()), Err(SumError::Handover { .. })));
    }
    let mut replicas = replicas(&device, &[0, 1], &handover(0, &[1]));
    let is_refused = |result| matches!(result, Err(SumError::State { .. }));
    assert!(is_refused(replicas[0].take()));
    assert!(is_refused(replicas[1].give()));
    replicas[0].vectors.pop();
    assert!(is_refused(replicas[0].give()));
    end(replicas.into_iter().map(|replica| replica.part).collect());
}

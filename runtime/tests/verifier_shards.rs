//! Verifiers that are cut into stages and slices against the same verifiers whole, each shard on a thread of its own.
//!
//! Over every model folder of `tests/golden/verifiers` and of `verifiers/` in `EAGLET_GOLDEN_DIR`. Stages must give the same
//! bits (SHARD-1), slices the same numbers to 1e-5 of the largest one and the same bits as each other (SHARD-2).
#![allow(clippy::print_stdout, reason = "says what was skipped")]

mod common;

use std::error::Error;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use common::{difference, model_folders};
use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::row::{HiddenStates, PackedRow, Sample};
use eaglet_runtime::verifier::{
    Alone, Interrupted, Peers, Shard, Verifier, VerifierConfig, VerifierError, VerifierOptions,
};

type Outcome = Result<(), Box<dyn Error>>;

/// Largest difference of a sliced verifier, over a tensor's largest value.
const TOLERANCE: f32 = 1e-5;

/// The other shards of a verifier, on other threads of this process.
struct Threads {
    shard: Shard,
    /// To and from every shard, by its index.
    outgoing: Vec<Sender<Vec<f32>>>,
    incoming: Vec<Receiver<Vec<f32>>>,
}

impl Threads {
    fn mesh(stages: u16, slices: u16) -> Vec<Self> {
        let count = usize::from(stages * slices);
        let mut mesh: Vec<Self> = (0..stages * slices)
            .map(|index| Self {
                shard: Shard::nth(index, stages, slices),
                outgoing: Vec::new(),
                incoming: Vec::new(),
            })
            .collect();
        for from in 0..count {
            for to in 0..count {
                let (sender, receiver) = channel();
                mesh[from].outgoing.push(sender);
                mesh[to].incoming.push(receiver);
            }
        }
        mesh
    }

    fn index(&self, stage: u16, slice: u16) -> usize {
        usize::from(stage * self.shard.slices + slice)
    }

    fn send(&self, to: usize, values: &[f32]) -> Result<(), Interrupted> {
        self.outgoing[to].send(values.to_vec()).map_err(|_| gone())
    }

    fn receive(&self, from: usize) -> Result<Vec<f32>, Interrupted> {
        self.incoming[from].recv().map_err(|_| gone())
    }
}

fn gone() -> Interrupted {
    Interrupted {
        reason: "another shard is gone".to_owned(),
    }
}

impl Peers for Threads {
    fn sum(&mut self, values: &mut [f32]) -> Result<(), Interrupted> {
        let mut whole = Vec::new();
        self.gather(values, &mut whole)?;
        values.fill(0.0);
        for part in whole.chunks_exact(values.len().max(1)) {
            values.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        Ok(())
    }

    fn gather(&mut self, part: &[f32], whole: &mut Vec<f32>) -> Result<(), Interrupted> {
        whole.clear();
        for slice in 0..self.shard.slices {
            self.send(self.index(self.shard.stage, slice), part)?;
        }
        for slice in 0..self.shard.slices {
            whole.extend(self.receive(self.index(self.shard.stage, slice))?);
        }
        Ok(())
    }

    fn pass_on(&mut self, residual: &[f32]) -> Result<(), Interrupted> {
        self.send(self.index(self.shard.stage + 1, self.shard.slice), residual)
    }

    fn take_over(&mut self, residual: &mut [f32]) -> Result<(), Interrupted> {
        let values = self.receive(self.index(self.shard.stage - 1, self.shard.slice))?;
        assert_eq!(
            values.len(),
            residual.len(),
            "shards take the same rows in the same order"
        );
        residual.copy_from_slice(&values);
        Ok(())
    }

    fn announce(&mut self, chosen: &mut [u32]) -> Result<(), Interrupted> {
        let last = self.shard.stages - 1;
        if self.shard.is_last() && self.shard.slice == 0 {
            let values: Vec<f32> = chosen.iter().map(|&token| f32::from_bits(token)).collect();
            for index in 0..self.outgoing.len() {
                self.send(index, &values)?;
            }
        }
        for (chosen, value) in chosen.iter_mut().zip(self.receive(self.index(last, 0))?) {
            *chosen = value.to_bits();
        }
        Ok(())
    }
}

/// Runs `work` on every shard of a verifier at once; what each returned.
fn on_all_shards<R: Send>(
    folder: &Path,
    (stages, slices): (u16, u16),
    aux_layers: &[u32],
    work: impl Fn(&mut Verifier, &mut Threads) -> Result<R, VerifierError> + Sync,
) -> Result<Vec<R>, VerifierError> {
    let mesh = Threads::mesh(stages, slices);
    std::thread::scope(|scope| {
        let started: Vec<_> = mesh
            .into_iter()
            .map(|mut peers| {
                let options = VerifierOptions {
                    aux_layers: Some(aux_layers.to_vec()),
                    shard: peers.shard,
                    ..VerifierOptions::default()
                };
                let work = &work;
                scope.spawn(move || work(&mut Verifier::load(folder, options)?, &mut peers))
            })
            .collect();
        started
            .into_iter()
            .map(|thread| thread.join().expect("a shard's thread does not panic"))
            .collect()
    })
}

fn row(vocab: usize) -> PackedRow {
    let mut row = PackedRow::default();
    for (document, length) in [7usize, 1, 13].into_iter().enumerate() {
        let tokens = (0..length).map(|i| ((i * i * 31 + i * 7 + document * 77) % vocab) as u32);
        let tokens: Vec<u32> = tokens.collect();
        row.push(&Sample {
            loss_mask: vec![1; length],
            tokens,
        });
    }
    row
}

fn values(states: &HiddenStates, state: usize) -> Vec<f32> {
    let mut all = Vec::new();
    let mut one = vec![0.0; states.hidden];
    for token in 0..states.tokens() {
        states.read(token, state, &mut one);
        all.extend_from_slice(&one);
    }
    all
}

/// Everything a cut verifier hands out against the whole one; the largest difference.
fn check_cut(folder: &Path, config: &VerifierConfig, cut: (u16, u16)) -> Result<f32, Box<dyn Error>> {
    let aux: Vec<u32> = (1..=config.layers as u32).collect();
    let row = row(config.vocab_size);
    let prompts = [row.tokens[..7].to_vec(), row.tokens[8..].to_vec()];
    let whole = VerifierOptions {
        aux_layers: Some(aux.clone()),
        ..VerifierOptions::default()
    };
    let mut whole = Verifier::load(folder, whole)?;
    let states = whole.extract(&row, HiddenDtype::F32, &mut Alone)?;
    let (_, logits) = whole.logits(&row, &mut Alone)?;
    let answers = whole.generate(&prompts, 6, &[], &mut Alone)?;

    let parts = on_all_shards(folder, cut, &aux, |shard, peers| {
        let states = shard.extract(&row, HiddenDtype::F32, peers)?;
        let (_, logits) = shard.logits(&row, peers)?;
        let answers = shard.generate(&prompts, 6, &[], peers)?;
        match shard.self_check(HiddenDtype::Bf16, peers) {
            Err(VerifierError::SelfCheck { .. }) if config.logit_softcap.is_some() => {}
            checked => assert!(checked?.difference < 0.02),
        }
        Ok((shard.shard(), shard.captured(), states, logits, answers))
    })?;
    let mut worst = 0f32;
    let mut covered = 0;
    for (shard, captured, part, part_logits, part_answers) in &parts {
        if shard.slice == 0 {
            assert_eq!(
                captured.start, covered,
                "stages capture one state after the other"
            );
            covered = captured.end;
        }
        for (index, state) in captured.clone().enumerate() {
            let (ours, theirs) = (values(part, index), values(&states, state));
            if cut.1 == 1 {
                assert!(ours == theirs, "state {state} of {shard} has the same bits");
            }
            worst = worst.max(difference(&ours, &theirs));
        }
        let twin = parts
            .iter()
            .find(|(other, ..)| other.stage == shard.stage)
            .expect("slice 0");
        assert!(
            part == &twin.2 && part_logits == &twin.3,
            "slices of a stage hold the same bits"
        );
        assert_eq!(part_answers, &parts[0].4, "all shards say the same");
        if shard.is_last() {
            if cut.1 == 1 {
                assert!(part_logits == &logits, "logits have the same bits");
                assert_eq!(part_answers, &answers);
            }
            worst = worst.max(difference(part_logits, &logits));
        }
    }
    assert_eq!(covered, states.states);
    Ok(worst)
}

#[test]
fn every_cut_of_every_family_equals_the_whole() -> Outcome {
    let (mut checked, mut wrong) = (0, Vec::new());
    for folder in model_folders() {
        let config = VerifierConfig::read(&folder)?;
        let name = folder.file_name().unwrap_or_default().display();
        let cuts = [(2, 1), (config.layers as u16, 1), (1, 2), (2, 2), (1, 4)];
        for cut in cuts
            .into_iter()
            .filter(|cut| config.heads.is_multiple_of(usize::from(cut.1)))
        {
            match check_cut(&folder, &config, cut) {
                Ok(worst) if worst > TOLERANCE => {
                    wrong.push(format!("{name} as {cut:?} differs by {worst:e}"))
                }
                Ok(worst) => {
                    println!(
                        "{name} as {} stages of {} slices: within {worst:.1e}",
                        cut.0, cut.1
                    );
                    checked += 1;
                }
                Err(error) => wrong.push(format!("{name} as {cut:?}: {error}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked >= 20, "{checked} cuts were checked");
    Ok(())
}

#[test]
fn states_that_are_not_finite_reach_every_shard() -> Outcome {
    let folder = tempfile::tempdir()?;
    let source = model_folders().into_iter().next().ok_or("a model")?;
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(source.join(file), folder.path().join(file))?;
    }
    // Every weight of the first file's first layers stays; the last bytes of the embedding of token 3 become NaN.
    let weights = eaglet_runtime::weights::Weights::open(folder.path())?;
    let embedding = weights.tensor("model.embed_tokens.weight")?;
    let file = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file)?;
    let row_bytes = embedding.bytes().len() / embedding.rows();
    let at = find(&bytes, &embedding.bytes()[3 * row_bytes..4 * row_bytes]).ok_or("the row")?;
    bytes[at..at + row_bytes].fill(0xff);
    drop((embedding, weights));
    std::fs::write(&file, bytes)?;
    let outcomes = on_all_shards(folder.path(), (2, 1), &[1], |shard, peers| {
        let wrong = shard.generate(&[vec![1, 2], vec![4, 3]], 4, &[], peers);
        // Nobody is left waiting: the next request works.
        let right = shard.generate(&[vec![1, 2]], 4, &[], peers)?;
        Ok((
            matches!(wrong, Err(VerifierError::NonFinite { document: 1, .. })),
            right,
        ))
    })?;
    assert!(
        outcomes
            .iter()
            .all(|(named, right)| *named && right[0].len() == 4)
    );
    Ok(())
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[test]
fn heads_that_cannot_be_shared_out_are_named() -> Outcome {
    let folder = model_folders().into_iter().next().ok_or("a model")?;
    let options = VerifierOptions {
        aux_layers: Some(vec![1]),
        shard: Shard::nth(0, 1, 3),
        ..VerifierOptions::default()
    };
    let Err(error) = Verifier::load(&folder, options) else {
        return Err("three slices of four heads".into());
    };
    let text = error.to_string();
    assert!(
        text.contains("cannot be cut into 3 slices: 4 query heads") && text.contains("verifier.tensor"),
        "{text}"
    );
    Ok(())
}

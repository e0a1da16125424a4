//! Which experts of a mixture a token goes to.

/// How the scores of experts come from the router's logits, and the weights of the chosen ones from the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts; the chosen ones keep their share (Qwen, Mixtral).
    Softmax,
    /// Softmax over the chosen experts only (gpt-oss).
    SoftmaxOfChosen,
    /// A sigmoid each; the bias decides who is chosen but not how much it counts (DeepSeek-V3).
    Sigmoid,
}

/// Experts come in groups, and a token goes to some groups only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of equal size.
    pub count: usize,
    /// Groups of a token: those whose two best experts have the largest scores together.
    pub chosen: usize,
}

/// Everything that decides a token's experts and their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing<'a> {
    /// Experts of a token.
    pub top: usize,
    /// From logits to scores.
    pub scoring: Scoring,
    /// Added to the scores for the choice only, `[experts]`; empty if there is none.
    pub choice_bias: &'a [f32],
    /// Groups, if there are any.
    pub groups: Option<ExpertGroups>,
    /// The weights of a token are divided by their sum.
    pub normalised: bool,
    /// Factor of all weights.
    pub factor: f32,
}

impl Routing<'_> {
    /// The experts and weights of one token; `logits` `[experts]`, `chosen` and `weights` `[top]`.
    pub(super) fn choose(
        &self,
        logits: &[f32],
        scratch: &mut [f32],
        chosen: &mut [u32],
        weights: &mut [f32],
    ) {
        let (scores, choice) = scratch.split_at_mut(logits.len());
        match self.scoring {
            Scoring::Softmax => {
                let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let mut sum = 0.0;
                for (score, &logit) in scores.iter_mut().zip(logits) {
                    *score = (logit - top).exp();
                    sum += *score;
                }
                scores.iter_mut().for_each(|score| *score /= sum);
            }
            Scoring::SoftmaxOfChosen => scores.copy_from_slice(logits),
            Scoring::Sigmoid => {
                for (score, &logit) in scores.iter_mut().zip(logits) {
                    *score = 1.0 / (1.0 + (-logit).exp());
                }
            }
        }
        choice.copy_from_slice(scores);
        for (choice, bias) in choice.iter_mut().zip(self.choice_bias) {
            *choice += bias;
        }
        if let Some(groups) = self.groups {
            keep_best_groups(groups, choice);
        }
        for (chosen, weight) in chosen.iter_mut().zip(weights.iter_mut()) {
            let best = first_largest(choice);
            *chosen = best as u32;
            *weight = scores[best];
            choice[best] = f32::NEG_INFINITY;
        }
        if self.scoring == Scoring::SoftmaxOfChosen {
            let top = weights.first().copied().unwrap_or_default();
            weights
                .iter_mut()
                .for_each(|weight| *weight = (*weight - top).exp());
        }
        if self.normalised || self.scoring == Scoring::SoftmaxOfChosen {
            // The small number is DeepSeek's: all sigmoids can be 0.
            let sum = weights.iter().sum::<f32>() + 1e-20;
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        weights.iter_mut().for_each(|weight| *weight *= self.factor);
    }
}

/// Experts outside the best groups count nothing, as in DeepSeek's reference.
fn keep_best_groups(groups: ExpertGroups, choice: &mut [f32]) {
    let size = choice.len() / groups.count;
    let mut sums: Vec<f32> = choice
        .chunks_exact(size)
        .map(|group| {
            let best = first_largest(group);
            let second = group
                .iter()
                .enumerate()
                .filter(|&(index, _)| index != best)
                .map(|(_, &score)| score)
                .fold(f32::NEG_INFINITY, f32::max);
            group[best] + if size > 1 { second } else { 0.0 }
        })
        .collect();
    let mut kept = vec![false; groups.count];
    for _ in 0..groups.chosen {
        let best = first_largest(&sums);
        kept[best] = true;
        sums[best] = f32::NEG_INFINITY;
    }
    for (group, _) in choice
        .chunks_exact_mut(size)
        .zip(&kept)
        .filter(|(_, kept)| !**kept)
    {
        group.fill(0.0);
    }
}

fn first_largest(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, &value) in values.iter().enumerate() {
        if value > values[best] {
            best = index;
        }
    }
    best
}

//! What a run writes, against the room where it writes.

use eaglet_runtime::checkpoint::tensor_table;
use eaglet_runtime::draft::DraftSpec;
use serde::Serialize;

use super::links::state_bytes;
use super::units::size;

/// Bytes of the journal per step: a planned and a committed record.
const JOURNAL_STEP_BYTES: u64 = 500;
/// Bytes of the journal per sample: its place and its length.
const JOURNAL_SAMPLE_BYTES: u64 = 120;
/// Bytes of metrics and logs of all processes per step.
const LOG_STEP_BYTES: u64 = 1500;

/// Bytes that a run writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DiskPlan {
    /// One checkpoint: the draft as it is served, and the training state.
    pub checkpoint_bytes: u64,
    /// Checkpoints on disk at most, the one that is being written included.
    pub checkpoints: u64,
    /// Hidden states that an extraction writes, in all.
    pub hidden_state_bytes: u64,
    /// Samples as they are stored, in all.
    pub sample_bytes: u64,
    /// Journal, metrics and logs, in all.
    pub journal_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
    /// What of it is there already, from an earlier launch.
    pub present_bytes: u64,
    /// Room on the disk now; absent if the system does not say.
    pub free_bytes: Option<u64>,
}

/// How long a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Length {
    /// Optimizer steps.
    pub(crate) steps: u64,
    /// Samples.
    pub(crate) samples: u64,
    /// Tokens of all samples.
    pub(crate) tokens: u64,
}

impl DiskPlan {
    /// Bytes of one checkpoint of a draft with `parameters` trained parameters.
    pub fn checkpoint_bytes(spec: &DraftSpec, parameters: u64) -> u64 {
        let table = tensor_table(spec);
        let served: u64 = table
            .iter()
            .map(|(_, shape)| 2 * shape.iter().map(|&side| side as u64).product::<u64>())
            .sum();
        let maps = if spec.draft_vocab_size == spec.vocab_size {
            0
        } else {
            // d2t in i64, t2d in bytes.
            8 * spec.draft_vocab_size as u64 + spec.vocab_size as u64
        };
        served + maps + state_bytes(parameters)
    }

    /// What a run writes that keeps `keep` checkpoints, and hidden states of so many bytes a token.
    pub(crate) fn new(
        checkpoint_bytes: u64,
        keep: usize,
        hidden_bytes_per_token: u64,
        length: Length,
    ) -> Self {
        // The one before stays until the journal knows the new one.
        let checkpoints = keep.max(2) as u64 + 1;
        // As the sample store writes them: a head, four bytes a token and a bit of mask.
        let sample_bytes = length.samples * 12 + length.tokens * 4 + length.tokens.div_ceil(8);
        let journal_bytes =
            length.steps * (JOURNAL_STEP_BYTES + LOG_STEP_BYTES) + length.samples * JOURNAL_SAMPLE_BYTES;
        let hidden_state_bytes = length.tokens * hidden_bytes_per_token;
        Self {
            checkpoint_bytes,
            checkpoints,
            hidden_state_bytes,
            sample_bytes,
            journal_bytes,
            total_bytes: checkpoint_bytes * checkpoints + hidden_state_bytes + sample_bytes + journal_bytes,
            present_bytes: 0,
            free_bytes: None,
        }
    }

    /// Bytes that are still to be written. While a checkpoint is written no old one is gone, so one is always needed.
    pub fn missing_bytes(&self) -> u64 {
        self.total_bytes
            .saturating_sub(self.present_bytes)
            .max(self.checkpoint_bytes)
    }

    /// What is wrong, if there is too little room.
    pub(crate) fn shortage(&self) -> Option<String> {
        let free = self.free_bytes.filter(|&free| free < self.missing_bytes())?;
        if self.hidden_state_bytes > self.checkpoint_bytes * self.checkpoints {
            return Some(format!(
                "the extraction writes {} more, of which {} are hidden states, and {} are free; extract fewer samples, or to \
                 a larger disk",
                size(self.missing_bytes()),
                size(self.hidden_state_bytes),
                size(free)
            ));
        }
        let remedy = if self.checkpoints > 3 {
            "lower checkpoints.keep, or give run.directory a larger disk"
        } else {
            "give run.directory a larger disk"
        };
        Some(format!(
            "the run writes {} more ({} checkpoints of {}, samples and journal {}), and {} are free; {remedy}",
            size(self.missing_bytes()),
            self.checkpoints,
            size(self.checkpoint_bytes),
            size(self.sample_bytes + self.journal_bytes),
            size(free),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(free: u64, present: u64, keep: usize) -> DiskPlan {
        DiskPlan {
            free_bytes: Some(free),
            present_bytes: present,
            ..DiskPlan::new(1000, keep, 0, Length::default())
        }
    }

    #[test]
    fn one_checkpoint_more_than_are_kept_lies_there_while_it_is_written() {
        assert_eq!((plan(0, 0, 2).checkpoints, plan(0, 0, 5).checkpoints), (3, 6));
        assert_eq!(plan(0, 0, 1).checkpoints, 3, "two are always kept");
        let length = Length {
            steps: 10,
            samples: 3,
            tokens: 80,
        };
        let whole = DiskPlan::new(1000, 2, 0, length);
        assert_eq!(whole.sample_bytes, 3 * 12 + 320 + 10);
        assert_eq!(whole.total_bytes, 3000 + whole.sample_bytes + whole.journal_bytes);
    }

    #[test]
    fn what_is_there_already_is_not_needed_again() {
        assert_eq!(plan(0, 0, 2).missing_bytes(), 3000);
        assert_eq!(plan(0, 1500, 2).missing_bytes(), 1500);
        assert_eq!(plan(0, 3000, 2).missing_bytes(), 1000, "the next checkpoint");
    }

    #[test]
    fn a_shortage_names_the_remedy() {
        assert_eq!(plan(3000, 0, 2).shortage(), None);
        let text = plan(2999, 0, 2).shortage().expect("a byte is missing");
        assert!(
            text.ends_with("give run.directory a larger disk") && !text.contains("keep"),
            "{text}"
        );
        let text = plan(10, 0, 4).shortage().expect("most is missing");
        assert!(text.contains("lower checkpoints.keep"), "{text}");
    }

    #[test]
    fn an_extraction_is_as_large_as_its_hidden_states() {
        let length = Length {
            steps: 1,
            samples: 2,
            tokens: 1000,
        };
        let plan = DiskPlan {
            free_bytes: Some(50_000_000),
            ..DiskPlan::new(0, 2, 57_344, length)
        };
        assert_eq!(plan.hidden_state_bytes, 57_344_000);
        let text = plan.shortage().expect("7 MB are missing");
        assert!(
            text.contains("57.3 MB are hidden states") && text.contains("fewer samples"),
            "{text}"
        );
    }
}

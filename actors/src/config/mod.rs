//! `cluster.toml`: read, layered, checked.
//!
//! Three layers, later ones win: the file, environment variables `EAGLET__SECTION__KEY`, and `--set section.key=value`.
//! Relative paths mean the folder of the cluster file, whichever layer they come from. [`ClusterConfig::load`] either
//! returns a configuration that satisfies every rule of `check`, with absolute paths and numbered seats, or all of its
//! problems at once, each with its line, variable or flag.

mod check;
mod keys;
mod layers;
mod problem;
mod sections;
mod survey;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use config::Config;
use eaglet_runtime::ids::{Role, Seat};
use eaglet_runtime::samples::SampleLimits;
use eaglet_runtime::verifier::Shard;
use serde::{Deserialize, Serialize};

use layers::{Layers, VARIABLE_PREFIX};
pub use problem::{ConfigError, Place, Problem};
pub use sections::{
    CheckpointsConfig, Collective, DraftConfig, HostConfig, LOCAL, RankConfig, RestartsConfig, RunConfig,
    SamplesConfig, Schedule, SupervisionConfig, TooLong, TrainingConfig, VerifierConfig,
};
pub use survey::Survey;

/// A whole cluster, as `cluster.toml` describes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// What the run is called and where it lives.
    pub run: RunConfig,
    /// The model whose hidden states are learnt from.
    pub verifier: VerifierConfig,
    /// The shape of the draft.
    pub draft: DraftConfig,
    /// The objective and the optimizer.
    pub training: TrainingConfig,
    /// What is trained on and what is held out.
    pub samples: SamplesConfig,
    /// When training state is written.
    pub checkpoints: CheckpointsConfig,
    /// When a rank is given up and how it comes back.
    pub supervision: SupervisionConfig,
    /// When a lost verifier rank comes back, and when it is given up.
    pub verifier_restarts: RestartsConfig,
    /// When a lost draft rank comes back, and when it is given up.
    pub draft_restarts: RestartsConfig,
    /// Machines beside the coordinator's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostConfig>,
    /// The processes of the cluster.
    pub ranks: Vec<RankConfig>,
}

impl ClusterConfig {
    /// Reads the cluster file and lays environment variables and `--set` texts (`section.key=value`) over it.
    ///
    /// Variables that do not start with `EAGLET__` are passed over; see [`environment`].
    ///
    /// # Errors
    /// If the file cannot be read or anything in any layer is wrong; the error lists all of it.
    pub fn load<S: AsRef<str>>(
        path: &Path,
        environment: impl IntoIterator<Item = (String, String)>,
        sets: &[S],
    ) -> Result<Self, ConfigError> {
        let survey = Self::survey(path, environment, sets);
        ConfigError::from_problems(survey.problems).map_or(Ok(survey.config), Err)
    }

    /// As [`Self::load`], for whoever goes on with what can be used although something is wrong.
    pub fn survey<S: AsRef<str>>(
        path: &Path,
        environment: impl IntoIterator<Item = (String, String)>,
        sets: &[S],
    ) -> Survey {
        let mut layers = Layers::new(&path.display().to_string());
        match std::fs::read_to_string(path) {
            Ok(text) => layers.read_file(&text),
            Err(error) => {
                layers.reject_all();
                layers.problem(layers.place(""), format!("cannot be read: {error}"));
                return Survey::new(Self::default(), layers);
            }
        }
        let mut variables: Vec<_> = environment.into_iter().collect();
        variables.sort(); // a fixed order: of two spellings of one key the same one wins every time
        for (name, value) in &variables {
            layers.read_variable(name, value);
        }
        for set in sets {
            layers.read_flag(set.as_ref());
        }
        check::required(&mut layers);
        let config = match Self::merge(&layers) {
            Ok(mut config) => {
                let folder = path.parent().unwrap_or(Path::new(""));
                // An empty path stands for the working directory, which `absolute` refuses.
                let folder = if folder.as_os_str().is_empty() {
                    Path::new(".")
                } else {
                    folder
                };
                match std::path::absolute(folder) {
                    Ok(folder) => config.resolve(&folder, &layers),
                    Err(error) => layers.problem(layers.place(""), format!("its folder is unknown: {error}")),
                }
                check::all(&config, &mut layers);
                config
            }
            Err(error) => {
                layers.reject_all();
                layers.problem(layers.place(""), error.to_string());
                Self::default()
            }
        };
        Survey::new(config, layers)
    }

    fn merge(layers: &Layers) -> Result<Self, config::ConfigError> {
        let mut builder = Config::builder();
        for layer in &layers.layers {
            builder = builder.add_source(layer.clone());
        }
        for list in keys::LISTS.into_iter().filter(|list| layers.is_rejected(list)) {
            // A rank without a role is no rank, a host without a name no host; what is wrong has been said.
            builder = builder.set_override(list, Vec::<config::Value>::new())?;
        }
        builder.build()?.try_deserialize()
    }

    /// Makes paths absolute, numbers the seats that have no number and fixes the rows of a step.
    fn resolve(&mut self, folder: &Path, layers: &Layers) {
        if self.run.directory.as_os_str().is_empty() {
            self.run.directory = Path::new("runs").join(&self.run.name);
        }
        let samples = &mut self.samples;
        let files = samples
            .files
            .iter_mut()
            .chain(&mut samples.watch)
            .chain(&mut samples.held_out)
            .chain(&mut samples.hidden_states)
            .chain(&mut self.run.extract_to);
        // Joining component by component drops `.`, so that one file has one spelling.
        let local = |path: &Path| folder.join(path).components().collect::<PathBuf>();
        for path in files.chain([&mut self.run.directory]) {
            if !path.as_os_str().is_empty() {
                *path = local(path);
            }
        }
        let verifier = &mut self.verifier;
        let path = local(&verifier.path);
        // What may be a name on the Hub is a path if something is there.
        if !verifier.path.as_os_str().is_empty() && (verifier.hub_model().is_none() || path.exists()) {
            verifier.path = path;
        }
        let is_numbered = |index: usize| layers.is_set(&format!("ranks[{index}].seat"));
        let mut taken: Vec<Seat> = Vec::new();
        taken.extend(
            self.ranks
                .iter()
                .enumerate()
                .filter(|(i, _)| is_numbered(*i))
                .map(|(_, rank)| rank.seat()),
        );
        for index in (0..self.ranks.len()).filter(|&index| !is_numbered(index)) {
            let rank = &mut self.ranks[index];
            let free = |seat: &u16| {
                !taken.contains(&Seat {
                    role: rank.role,
                    index: *seat,
                })
            };
            rank.seat = (0..u16::MAX).find(free).unwrap_or(u16::MAX);
            taken.push(rank.seat());
        }
        let drafts = self.draft_seats().len() as u16;
        self.training.rows_per_step.get_or_insert(drafts.max(1));
    }

    /// The configuration as a cluster file with absolute paths and numbered seats; it loads to an equal value.
    ///
    /// # Errors
    /// If a path is not UTF-8.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }

    /// Reads what [`Self::to_toml`] has written, to the last bit and without looking at files. (JSON is the same but
    /// for floats with more than 15 digits, which `serde_json` may read one unit in the last place off.)
    ///
    /// # Errors
    /// If the text is no resolved configuration.
    pub fn from_resolved(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }

    /// Adds a rank that came to the live run. One that is there already, because `cluster.toml` names it or because it
    /// came back, is left as it is.
    pub fn add_rank(&mut self, seat: Seat, threads: usize) {
        if self.rank(seat).is_none() {
            self.ranks.push(RankConfig {
                seat: seat.index,
                threads,
                ..RankConfig::new(seat.role)
            });
        }
    }

    /// How long samples may be and how much of them must be trained. One that is still longer than a row afterwards is
    /// put aside.
    pub fn sample_limits(&self) -> SampleLimits {
        SampleLimits {
            max_tokens: match self.samples.too_long {
                TooLong::Truncate => self.training.tokens_per_row,
                TooLong::Quarantine => usize::MAX,
            },
            min_trained_tokens: self.samples.min_trained_tokens,
        }
    }

    /// The same for a held-out conversation: its prompt must leave room for an answer.
    pub fn prompt_limits(&self) -> SampleLimits {
        let room = self.training.tokens_per_row;
        SampleLimits {
            max_tokens: room.saturating_sub(self.training.max_new_tokens).max(2),
            min_trained_tokens: 1,
        }
    }

    /// Every so many conversations one is held out; 0 holds none out.
    pub fn held_out_every(&self) -> u64 {
        if self.samples.held_out.is_empty() {
            self.samples.held_out_every
        } else {
            0
        }
    }

    /// Rows of each step.
    pub fn rows_per_step(&self) -> u16 {
        self.training.rows_per_step.unwrap_or(1)
    }

    /// Seats of the drafts, ascending.
    pub fn draft_seats(&self) -> Vec<Seat> {
        self.seats(Role::Draft)
    }

    /// Seats of the verifier, ascending.
    pub fn verifier_seats(&self) -> Vec<Seat> {
        self.seats(Role::Verifier)
    }

    /// The part of a verifier that the rank on a verifier seat holds.
    pub fn shard_of(&self, seat: Seat) -> Shard {
        let (stages, slices) = (self.verifier.pipeline.max(1), self.verifier.tensor.max(1));
        Shard::nth(seat.index % stages.saturating_mul(slices), stages, slices)
    }

    fn seats(&self, role: Role) -> Vec<Seat> {
        let mut seats: Vec<_> = self
            .ranks
            .iter()
            .map(RankConfig::seat)
            .filter(|seat| seat.role == role)
            .collect();
        seats.sort();
        seats
    }

    /// The rank that occupies a seat.
    pub fn rank(&self, seat: Seat) -> Option<&RankConfig> {
        self.ranks.iter().find(|rank| rank.seat() == seat)
    }

    /// The GPU that a rank computes on. One that only reads or writes hidden states computes nowhere.
    pub fn gpu_of(&self, rank: &RankConfig) -> Option<u16> {
        let computes = match rank.role {
            Role::Verifier => self.samples.hidden_states.is_none(),
            Role::Draft => self.run.extract_to.is_none(),
        };
        rank.gpu().filter(|_| computes)
    }

    /// Whether the ranks of a role compute on GPUs: all of them do, or none.
    pub fn is_on_gpus(&self, role: Role) -> bool {
        let mut of_role = self.ranks.iter().filter(|rank| rank.role == role);
        of_role.any(|rank| self.gpu_of(rank).is_some())
    }

    /// CPU threads of a rank on a machine with `cores` cores, at least 1.
    pub fn threads(&self, rank: &RankConfig, cores: usize) -> usize {
        if rank.threads > 0 {
            return rank.threads;
        }
        let sharing = self.ranks.iter().filter(|other| other.host == rank.host).count();
        (cores / sharing.max(1)).max(1)
    }
}

/// The variables of this process that configure a cluster. A value that is not UTF-8 gets replacement characters,
/// which the checks then refuse or show.
pub fn environment() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| name.starts_with(VARIABLE_PREFIX))
        .collect()
}

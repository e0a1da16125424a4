//! Starts and reaps the rank processes of this machine.
//!
//! HOST-1: a rank dies with the process that started it. The kernel sends its parent-death signal when the *thread* that started it
//! ends, so each rank has a thread of its own that starts it, waits for it and ends after it.
//! HOST-2: a process is signalled through its pidfd, so a recycled process number is never hit.
//! HOST-3: a rank on a GPU sees that GPU only, and runs on the CPUs of its NUMA node, so that what it touches first lies
//! there. The thread that starts it is bound, and a process begins as bound as the thread that starts it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc;

use eaglet_runtime::ids::{Generation, Seat};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::gpus::{Place, VISIBLE_VARIABLE};

/// Environment variable that carries the launch's token to a rank; arguments can be read by every user.
pub const TOKEN_VARIABLE: &str = "EAGLET_RANK_TOKEN";

/// Where glibc's allocator is told what to do.
const TUNABLES_VARIABLE: &str = "GLIBC_TUNABLES";

/// Large allocations lie in huge pages where the system lets a process ask for them. A process ends when its memory is
/// given back, page by page, so the exit of a killed rank is noticed three times sooner (300 MB: 43 ms down to 16).
const HUGE_PAGES: &str = "glibc.malloc.hugetlb=1";

/// How much of a log is shown when its rank is lost.
const LOG_TAIL_BYTES: u64 = 1200;

/// Starts ranks on this machine: what every rank of this launch gets.
#[derive(Clone, Debug)]
pub(crate) struct Starter {
    /// The `eaglet` executable.
    pub(crate) executable: PathBuf,
    /// Where the coordinator listens.
    pub(crate) coordinator: String,
    /// Secret of this launch.
    pub(crate) token: String,
    /// This machine, as `cluster.toml` calls it.
    pub(crate) host: String,
    /// Address at which ranks of other machines reach those of this one; none in a cluster of one machine.
    pub(crate) network: Option<IpAddr>,
    /// The run directory.
    pub(crate) run_directory: PathBuf,
    /// Format of the ranks' log files.
    pub(crate) log_format: String,
    /// How ranks on GPUs are started.
    pub(crate) places: Arc<BTreeMap<Seat, Place>>,
}

/// A started process.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its number.
    pub(crate) pid: u32,
    descriptor: Arc<OwnedFd>,
}

impl Process {
    /// Kills it; nothing happens if it is gone.
    pub(crate) fn kill(&self) {
        // The only failure is that the process is gone, which is what was wanted.
        let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
    }
}

impl Starter {
    /// Starts a rank and calls `exited` once, from another thread, when its process is gone.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub(crate) fn start(
        &self,
        seat: Seat,
        generation: Generation,
        exited: impl FnOnce(String) + Send + 'static,
    ) -> io::Result<Process> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.output_path(seat))?;
        let mut command = Command::new(&self.executable);
        command
            .arg("rank")
            .args(["--coordinator", &self.coordinator])
            .args(["--seat", &seat.to_string()])
            .args(["--generation", &generation.to_string()])
            .args(["--host", &self.host])
            .arg("--run-directory")
            .arg(&self.run_directory)
            .args(["--log-format", &self.log_format])
            .args(["--parent", &std::process::id().to_string()])
            .env(TOKEN_VARIABLE, &self.token)
            .env(TUNABLES_VARIABLE, tunables(std::env::var(TUNABLES_VARIABLE).ok()))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C is for the coordinator, which then drains.
            .process_group(0);
        if let Some(address) = self.network {
            command.args(["--network", &address.to_string()]);
        }
        let place = self.places.get(&seat).cloned();
        if let Some(place) = &place {
            command.env(VISIBLE_VARIABLE, &place.visible);
        }
        let (started, answer) = mpsc::channel();
        std::thread::Builder::new()
            .name(format!("wait {seat}"))
            .spawn(move || {
                if let Some(place) = place {
                    bind(seat, &place);
                }
                let mut child = match command.spawn() {
                    Ok(child) => child,
                    Err(error) => {
                        // The asker waits for exactly one answer.
                        let _ = started.send(Err(error));
                        return;
                    }
                };
                let process = open_process(child.id());
                let failed = process.is_err();
                let _ = started.send(process);
                if failed {
                    // Without a pidfd it could not be killed later.
                    let _ = child.kill();
                }
                let status = child.wait();
                if !failed {
                    exited(status.map_or_else(|error| error.to_string(), describe));
                }
            })?;
        answer
            .recv()
            .unwrap_or_else(|_| Err(io::Error::other("the thread that starts the rank ended")))
    }

    /// Where a rank's standard output and error go.
    fn output_path(&self, seat: Seat) -> PathBuf {
        self.run_directory.join("logs").join(format!("{seat}.out"))
    }

    /// The last lines that a rank wrote to standard error.
    pub(crate) fn last_words(&self, seat: Seat) -> String {
        tail(&self.output_path(seat)).unwrap_or_default()
    }
}

/// Binds the calling thread, and what it starts, to the CPUs near a GPU. Those that it may not use stay out; a rank runs
/// without, so that a failure is no reason to stop.
fn bind(seat: Seat, place: &Place) {
    let bound = sched_getaffinity(None).and_then(|allowed| {
        let Some((near, cpus)) = near(&allowed, &place.cpus) else {
            return Ok(None);
        };
        sched_setaffinity(None, &near).map(|()| Some(cpus))
    });
    match bound {
        Ok(Some(cpus)) => {
            tracing::info!(%seat, gpu = place.visible, cpus, "bound to the CPUs of the GPU's NUMA node");
        }
        Ok(None) => tracing::debug!(%seat, gpu = place.visible, "not bound: no CPUs are nearer than others"),
        Err(error) => tracing::debug!(%seat, %error, "not bound to CPUs"),
    }
}

/// Those of some CPUs that are allowed, and how many; none if they are all or none of the allowed ones.
fn near(allowed: &CpuSet, cpus: &[usize]) -> Option<(CpuSet, usize)> {
    let mut near = CpuSet::new();
    for &cpu in cpus
        .iter()
        .filter(|&&cpu| cpu < CpuSet::MAX_CPU && allowed.is_set(cpu))
    {
        near.set(cpu);
    }
    let count = near.count() as usize;
    (count > 0 && near != *allowed).then_some((near, count))
}

/// The allocator's settings of a rank: those of the user first, ours unless the user has decided the matter.
fn tunables(given: Option<String>) -> String {
    match given.filter(|given| !given.is_empty()) {
        Some(given) if given.contains("glibc.malloc.hugetlb") => given,
        Some(given) => format!("{given}:{HUGE_PAGES}"),
        None => HUGE_PAGES.to_owned(),
    }
}

fn open_process(pid: u32) -> io::Result<Process> {
    let number = Pid::from_raw(pid as i32).ok_or_else(|| io::Error::other("a process without a number"))?;
    let descriptor = Arc::new(pidfd_open(number, PidfdFlags::empty())?);
    Ok(Process { pid, descriptor })
}

fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

fn tail(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let from = if length > LOG_TAIL_BYTES {
        text.find('\n').map_or(0, |at| at + 1)
    } else {
        0
    };
    Ok(text[from..].trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use rustix::thread::CpuSet;

    use super::{near, tunables};

    /// HOST-3
    #[test]
    fn a_rank_is_bound_to_those_near_cpus_that_it_may_use() {
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|&cpu| set.set(cpu));
            set
        };
        let allowed = set(&[0, 1, 4, 5]);
        assert_eq!(near(&allowed, &[4, 5, 6, 7]), Some((set(&[4, 5]), 2)));
        // As it is already, none that it may use, and numbers that no set holds.
        assert_eq!(near(&allowed, &[0, 1, 2, 3, 4, 5]), None);
        assert_eq!(near(&allowed, &[2, 3]), None);
        assert_eq!(near(&allowed, &[1 << 20]), None);
        assert_eq!(near(&allowed, &[]), None);
    }

    #[test]
    fn huge_pages_join_what_the_user_has_set_and_never_override_it() {
        assert_eq!(tunables(None), "glibc.malloc.hugetlb=1");
        assert_eq!(tunables(Some(String::new())), "glibc.malloc.hugetlb=1");
        let given = "glibc.malloc.check=3".to_owned();
        assert_eq!(
            tunables(Some(given)),
            "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
        );
        let decided = "glibc.malloc.hugetlb=0".to_owned();
        assert_eq!(tunables(Some(decided.clone())), decided);
    }
}

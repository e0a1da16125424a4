//! Starts and reaps the rank processes of this machine.
//!
//! HOST-1: a rank dies with its coordinator. The kernel sends its parent-death signal when the *thread* that started it
//! ends, so each rank has a thread of its own that starts it, waits for it and ends after it.
//! HOST-2: a process is signalled through its pidfd, so a recycled process number is never hit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc;

use eaglet_runtime::ids::{Generation, Seat};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Environment variable that carries the launch's token to a rank; arguments can be read by every user.
pub const TOKEN_VARIABLE: &str = "EAGLET_RANK_TOKEN";

/// Where glibc's allocator is told what to do.
const TUNABLES_VARIABLE: &str = "GLIBC_TUNABLES";

/// Large allocations lie in huge pages where the system lets a process ask for them. A process ends when its memory is
/// given back, page by page, so the exit of a killed rank is noticed three times sooner (300 MB: 43 ms down to 16).
const HUGE_PAGES: &str = "glibc.malloc.hugetlb=1";

/// How much of a log is shown when its rank is lost.
const LOG_TAIL_BYTES: u64 = 1200;

/// What every rank of this launch is started with.
#[derive(Clone, Debug)]
pub(super) struct Host {
    /// The `eaglet` executable.
    pub executable: PathBuf,
    /// Where the coordinator listens.
    pub coordinator: String,
    /// Secret of this launch.
    pub token: String,
    /// The run directory.
    pub run_directory: PathBuf,
    /// Format of the ranks' log files.
    pub log_format: String,
}

/// A started process.
#[derive(Debug)]
pub(super) struct Process {
    /// Its number.
    pub pid: u32,
    descriptor: Arc<OwnedFd>,
}

impl Process {
    /// Kills it; nothing happens if it is gone.
    pub(super) fn kill(&self) {
        // The only failure is that the process is gone, which is what was wanted.
        let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
    }
}

impl Host {
    /// Starts a rank and calls `exited` once, from another thread, when its process is gone.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub(super) fn start(
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
        let (started, answer) = mpsc::channel();
        std::thread::Builder::new()
            .name(format!("wait {seat}"))
            .spawn(move || {
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
    pub(super) fn output_path(&self, seat: Seat) -> PathBuf {
        self.run_directory.join("logs").join(format!("{seat}.out"))
    }

    /// The last lines that a rank wrote to standard error.
    pub(super) fn last_words(&self, seat: Seat) -> String {
        tail(&self.output_path(seat)).unwrap_or_default()
    }
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
    use super::tunables;

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

//! Where a live coordinator can be asked, and joined: `coordinator.json` of its run directory, and the call that uses it.
//!
//! The file can be read by its owner only, because its token is the right to command the run. It is replaced as a whole by
//! each launch and removed at the end; what a killed coordinator leaves behind leads nowhere and is told as such.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use eaglet_runtime::control::transport::{self, TransportError};
use eaglet_runtime::control::{OperatorCall, OperatorReply, OperatorRequest};
use serde::{Deserialize, Serialize};

/// Name of the file within a run directory.
const FILE: &str = "coordinator.json";

/// Where a coordinator listens, and what it takes to be heard.
#[derive(Serialize, Deserialize)]
pub(crate) struct Endpoint {
    pub(crate) address: String,
    pub(super) pid: u32,
    pub(super) token: String,
    /// Secret of the hosts.
    pub(crate) host_token: String,
}

impl Endpoint {
    /// Written beside and renamed in, so that a reader never sees half of it.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        let path = directory.join(FILE);
        let beside = path.with_extension("json.partial");
        match std::fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&beside)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        std::fs::rename(&beside, &path)
    }

    pub(crate) fn read(directory: &Path) -> io::Result<Self> {
        let bytes = std::fs::read(directory.join(FILE))?;
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// Removes the file of this process.
    pub(super) fn remove(directory: &Path) {
        if Self::read(directory).is_ok_and(|endpoint| endpoint.pid == std::process::id())
            && let Err(error) = std::fs::remove_file(directory.join(FILE))
        {
            tracing::warn!(%error, "{FILE} cannot be removed");
        }
    }

    fn is_alive(&self) -> bool {
        Path::new("/proc").join(self.pid.to_string()).exists()
    }
}

/// Why a run cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum OperateError {
    /// Nobody runs it.
    #[error("no coordinator is running on {directory}; start it with `eaglet launch`")]
    NotRunning {
        /// The run directory.
        directory: PathBuf,
    },
    /// The file that names the coordinator cannot be read.
    #[error("cannot read {path}: {source}; it belongs to whoever launched the run")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The coordinator is there and does not answer.
    #[error(transparent)]
    Transport(TransportError),
}

/// Asks something of the live run in a directory.
///
/// # Errors
/// If no coordinator runs there, or it does not answer.
pub async fn operate(directory: &Path, request: OperatorRequest) -> Result<OperatorReply, OperateError> {
    let not_running = || OperateError::NotRunning {
        directory: directory.to_owned(),
    };
    let endpoint = Endpoint::read(directory).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => not_running(),
        _ => OperateError::Unreadable {
            path: directory.join(FILE),
            source,
        },
    })?;
    let call = OperatorCall {
        token: endpoint.token.clone(),
        request,
    };
    transport::operate(&endpoint.address, call)
        .await
        .map_err(|error| match error {
            TransportError::Connect { .. } | TransportError::Stranger { .. } => not_running(),
            _ if !endpoint.is_alive() => not_running(),
            error => OperateError::Transport(error),
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn endpoint(address: &str, pid: u32) -> Endpoint {
        Endpoint {
            address: address.to_owned(),
            pid,
            token: "secret".to_owned(),
            host_token: "another".to_owned(),
        }
    }

    #[tokio::test]
    async fn a_directory_that_nobody_runs_is_told_with_the_remedy() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let expected = format!(
            "no coordinator is running on {}; start it with `eaglet launch`",
            folder.path().display()
        );
        let said = async || {
            let error = operate(folder.path(), OperatorRequest::Ranks).await;
            error.expect_err("nobody runs it").to_string()
        };
        assert_eq!(said().await, expected);
        // What a killed coordinator leaves behind: nobody listens at its address.
        let (listener, address) = transport::bind("127.0.0.1:0").await.expect("a free port");
        drop(listener);
        let stale = endpoint(&address.to_string(), std::process::id());
        stale.write(folder.path()).expect("writable");
        assert_eq!(said().await, expected);
        std::fs::write(folder.path().join(FILE), "{").expect("writable");
        assert!(said().await.starts_with("cannot read "));
    }

    #[test]
    fn only_its_owner_can_read_the_file_and_only_its_process_removes_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join(FILE);
        endpoint("127.0.0.1:1", 0).write(folder.path()).expect("writable");
        endpoint("127.0.0.1:2", 1)
            .write(folder.path())
            .expect("replaceable");
        let mode = path.metadata().expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        Endpoint::remove(folder.path());
        assert!(path.exists(), "another process wrote it");
        let own = endpoint("127.0.0.1:3", std::process::id());
        own.write(folder.path()).expect("replaceable");
        Endpoint::remove(folder.path());
        assert!(!path.exists());
    }
}

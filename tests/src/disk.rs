//! A small disk for tests that fill it.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A disk of its own, in memory. A process in another mount namespace holds it, and takes it along when it ends.
pub struct Disk(Child);

impl Disk {
    /// `None` where mounts in a namespace of one's own are forbidden.
    pub fn mount(size: &str) -> Option<Self> {
        let script = format!("mount -t tmpfs -o size={size} tmpfs /mnt && echo mounted && exec cat");
        let mut child = Command::new("unshare")
            .args(["-Urm", "sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut said = [0; 8];
        let mut out = child.stdout.take()?;
        let mounted = out.read_exact(&mut said);
        let disk = Self(child);
        mounted.ok().map(|()| disk)
    }

    /// Where it is mounted, for any process.
    pub fn folder(&self) -> PathBuf {
        format!("/proc/{}/root/mnt", self.0.id()).into()
    }

    /// Fills it to the last byte.
    ///
    /// # Panics
    /// If it fails otherwise than by being full.
    pub fn fill(&self) {
        let filler = File::create(self.folder().join("filler")).expect("a new file");
        let block = vec![1; 4096];
        loop {
            match (&filler).write(&block) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Removes what [`Self::fill`] has written.
    ///
    /// # Panics
    /// If it cannot.
    pub fn make_room(&self) {
        std::fs::remove_file(self.folder().join("filler")).expect("it was written");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Killed, it takes its disk along.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

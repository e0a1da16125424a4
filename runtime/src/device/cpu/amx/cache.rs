//! Packed weights on disk: the ranks of a host map one copy of them, and a rank that starts again packs nothing.
//!
//! There is a file for each shard of a verifier. It is named after a digest of everything that decides its bytes: the way
//! of packing, and of each matrix the file that it was stored in (name, number, size and times), the bytes there, and the
//! part. It says so inside once more, with a digest of each matrix.
//!
//! - PACKED-1: a file that is torn, or was made from something else, is refused when it is opened, and made again. A matrix
//!   whose digest is not that of its bytes is found at its first use: it is packed in this process's memory then, and the
//!   file is dropped. So wrong bytes are never multiplied.
//! - PACKED-2: files are written beside and renamed in, whole and synced; they are mapped read-only and never changed.
//! - PACKED-3: of ranks that miss the same file at the same time one packs and the others wait for it, by a lock that ends
//!   with its process. Nobody waits for ever: after [`WAIT_LIMIT`] a rank packs for itself.
//! - PACKED-4: whoever maps a file holds a shared lock on it. Files that nobody opened for [`UNUSED_LIMIT`] and nobody maps
//!   are deleted by whoever opens another one, and so is what killed ranks left of theirs.
//! - PACKED-5: a cache that cannot be written is no error: weights are packed in each process's memory, and the log says so.

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytemuck::{Pod, Zeroable};
use rayon::prelude::*;
use rustix::fs::FallocateFlags;

use super::packed::{PackedMatrix, Source, lines_of};
use super::tiles::Line;
use crate::cache_files::{self, PARTIAL, refused};
use crate::device::{EachMatrix, Kept, StoredMatrix, WeightUse};
use crate::digest::{Digest, Digester};
use crate::weights::MappedFile;

/// The variable that names the folder of packed weights.
const CACHE_VARIABLE: &str = "EAGLET_PACKED_CACHE";

/// First bytes of a file: name and version of its layout and of the way of packing.
const MAGIC: &[u8; 16] = b"eaglet packed  1";
/// Magic, digest of the key, number of matrices, digest of their table.
const HEADER: usize = 16 + 32 + 8 + 32;
/// Where the lines begin is a multiple of this.
const PAGE: usize = 4096;
/// Lines that are digested together: 1 MiB.
const DIGESTED_LINES: usize = (1 << 20) / size_of::<Line>();

/// A rank waits at most this long for another one that packs the same weights.
const WAIT_LIMIT: Duration = Duration::from_secs(600);
/// From one look at a lock to the next.
const LOCK_POLL: Duration = Duration::from_millis(50);
/// Files that nobody opened for so long are deleted.
const UNUSED_LIMIT: Duration = Duration::from_secs(30 * 24 * 3600);
/// A file that is being written is locked well before it is this old.
const PARTIAL_LIMIT: Duration = Duration::from_secs(3600);

/// A folder of packed weights.
#[derive(Clone, Debug)]
pub(in crate::device::cpu) struct PackedCache {
    folder: PathBuf,
}

/// What the table of a file says of a matrix.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Record {
    rows: u64,
    cols: u64,
    first_line: u64,
    /// [`digest_of`] its lines, as text.
    digest: [u8; 32],
}

/// A matrix `[rows, cols]` of a file.
#[derive(Clone, Debug)]
struct Entry {
    rows: usize,
    cols: usize,
    lines: Range<usize>,
}

/// What a file is to hold, and under which key.
#[derive(Debug)]
struct Plan {
    key: Digest,
    entries: Vec<Entry>,
}

/// The weights that are kept packed, to be packed.
fn packable(weights: &dyn StoredMatrix, purpose: WeightUse) -> Option<Source<'_>> {
    weights.kept().filter(|_| purpose == WeightUse::Products)?;
    Source::in_place(weights)
}

impl Plan {
    /// `None` if nothing is kept packed, or of something it is not known what it was made from.
    fn of(each: &mut EachMatrix<'_>) -> Option<Self> {
        let mut key = Digester::new();
        key.part(MAGIC);
        let (mut entries, mut next, mut is_known) = (Vec::new(), 0, true);
        each(&mut |weights, purpose| {
            let Some(source) = packable(weights, purpose) else {
                return;
            };
            match weights.identity() {
                Some(identity) => key.part(identity.to_string().as_bytes()),
                None => return is_known = false,
            };
            let (rows, cols) = (source.depth(), source.lanes());
            let lines = next..next + lines_of(rows, cols);
            next = lines.end;
            entries.push(Entry { rows, cols, lines });
        });
        (is_known && !entries.is_empty()).then(|| Self {
            key: key.finish(),
            entries,
        })
    }

    /// Where the lines begin.
    fn data_start(&self) -> usize {
        (HEADER + self.entries.len() * size_of::<Record>()).next_multiple_of(PAGE)
    }

    fn file_bytes(&self) -> usize {
        let lines = self.entries.last().map_or(0, |entry| entry.lines.end);
        self.data_start() + lines * size_of::<Line>()
    }

    /// Header and table.
    fn head(&self, digests: &[Digest]) -> Vec<u8> {
        let mut table = Vec::with_capacity(self.entries.len() * size_of::<Record>());
        for (entry, digest) in self.entries.iter().zip(digests) {
            let mut text = [0; 32];
            text.copy_from_slice(digest.to_string().as_bytes());
            table.extend_from_slice(bytemuck::bytes_of(&Record {
                rows: entry.rows as u64,
                cols: entry.cols as u64,
                first_line: entry.lines.start as u64,
                digest: text,
            }));
        }
        let mut head = Vec::with_capacity(HEADER + table.len());
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(self.key.to_string().as_bytes());
        head.extend_from_slice(&(self.entries.len() as u64).to_le_bytes());
        head.extend_from_slice(Digest::of(&table).to_string().as_bytes());
        head.extend_from_slice(&table);
        head
    }

    /// The digests that a file has for its matrices, if its header and table are those of this plan.
    fn digests(&self, bytes: &[u8]) -> Option<Vec<Digest>> {
        let table = bytes.get(HEADER..HEADER + self.entries.len() * size_of::<Record>())?;
        let digest = |record: &[u8]| {
            std::str::from_utf8(&record[size_of::<Record>() - 32..])
                .ok()?
                .parse()
                .ok()
        };
        let digests: Option<Vec<Digest>> = table.chunks_exact(size_of::<Record>()).map(digest).collect();
        digests.filter(|digests| bytes.starts_with(&self.head(digests)))
    }
}

/// Digest of packed lines, over the threads of the current pool.
fn digest_of(lines: &[Line]) -> Digest {
    let chunks = lines.par_chunks(DIGESTED_LINES);
    let digests: Vec<String> = chunks
        .map(|lines| Digest::of(bytemuck::cast_slice(lines)).to_string())
        .collect();
    Digest::of(digests.concat().as_bytes())
}

/// A mapped file of packed weights. Its lock is shared by all who map it, and ends with the map.
pub(super) struct PackedFile {
    map: MappedFile,
    data_start: usize,
    digests: Vec<Digest>,
    _lock: File,
}

impl fmt::Debug for PackedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedFile {}", self.map.path().display())
    }
}

impl PackedFile {
    /// Takes an open file that is locked.
    fn map(file: File, path: &Path, plan: &Plan) -> io::Result<Self> {
        if file.metadata()?.len() != plan.file_bytes() as u64 {
            return Err(refused("the file has another length than these weights"));
        }
        let map = MappedFile::of(&file, path)?;
        let digests = plan
            .digests(map.bytes())
            .ok_or_else(|| refused("the file is torn, or was made from other weights"))?;
        Ok(Self {
            map,
            data_start: plan.data_start(),
            digests,
            _lock: file,
        })
    }

    /// Some packed lines.
    pub(super) fn lines(&self, range: &Range<usize>) -> &[Line] {
        // The length of the file is that of the plan, and maps begin with a page.
        let lines: &[Line] = bytemuck::cast_slice(&self.map.bytes()[self.data_start..]);
        &lines[range.clone()]
    }

    /// Whether a matrix is what was packed.
    pub(super) fn is_whole(&self, entry: usize, range: &Range<usize>) -> bool {
        digest_of(self.lines(range)) == self.digests[entry]
    }

    /// Says that a matrix is not, and drops the file, so that it is made again.
    pub(super) fn drop_damaged(&self) {
        let path = self.map.path();
        tracing::warn!(file = %path.display(), "packed weights are damaged; they are packed again in this process's memory");
        // Those who map it keep it.
        let _ = std::fs::remove_file(path);
    }
}

impl PackedCache {
    /// The folder in [`CACHE_VARIABLE`], or `eaglet/packed` in the user's cache folder; none if the user has none.
    pub(in crate::device::cpu) fn here() -> Option<Self> {
        cache_files::folder(CACHE_VARIABLE, "packed").map(Self::at)
    }

    /// This folder; it is made when something is written.
    pub(in crate::device::cpu) fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Maps the weights that are kept packed; packs them first if nobody has. They stay where they are if that cannot be:
    /// then each is packed in this process's memory when it is first needed.
    pub(in crate::device::cpu) fn keep(&self, pool: &rayon::ThreadPool, each: &mut EachMatrix<'_>) {
        let Some(plan) = Plan::of(each) else { return };
        let begun = Instant::now();
        let file = match self.open_or_make(&plan, pool, each) {
            Ok(file) => Arc::new(file),
            Err(error) => {
                tracing::warn!(
                    folder = %self.folder.display(),
                    %error,
                    "packed weights cannot be shared, and take this process's own memory; {CACHE_VARIABLE} names another \
                     folder"
                );
                return;
            }
        };
        tracing::info!(
            file = %file.map.path().display(),
            bytes = plan.file_bytes(),
            ms = begun.elapsed().as_millis() as u64,
            "packed weights are mapped"
        );
        let mut entries = plan.entries.iter().enumerate();
        each(&mut |weights, purpose| {
            if packable(weights, purpose).is_some()
                && let (Some(place), Some((index, entry))) = (weights.kept(), entries.next())
            {
                let lines = entry.lines.clone();
                let packed = PackedMatrix::mapped(Arc::clone(&file), index, lines, (entry.rows, entry.cols));
                let _ = place.set(Kept::Amx(packed));
            }
        });
    }

    fn open_or_make(
        &self,
        plan: &Plan,
        pool: &rayon::ThreadPool,
        each: &mut EachMatrix<'_>,
    ) -> io::Result<PackedFile> {
        let file = self.folder.join(format!("{}.packed", plan.key));
        let found = self.open(&file, plan);
        self.sweep();
        match found {
            Ok(found) => return Ok(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(file = %file.display(), %error, "packed weights are made again"),
        }
        std::fs::create_dir_all(&self.folder)?;
        let path = file.with_extension("lock");
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)?;
        wait_for(|| lock.try_lock(), "another rank packs these weights")?;
        // It may have been made meanwhile.
        let made = self.open(&file, plan).or_else(|_| make(&file, plan, pool, each));
        // Whoever waits for it finds the file, or makes it; a second maker at the same time does no harm.
        let _ = std::fs::remove_file(&path);
        made
    }

    fn open(&self, path: &Path, plan: &Plan) -> io::Result<PackedFile> {
        let file = File::open(path)?;
        wait_for(|| file.try_lock_shared(), "another rank writes these weights")?;
        if file.metadata()?.nlink() == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        // When it was last used. Somebody else's file tells of its owner's use only.
        let _ = file.set_modified(SystemTime::now());
        PackedFile::map(file, path, plan)
    }

    /// PACKED-4
    fn sweep(&self) {
        let Ok(entries) = std::fs::read_dir(&self.folder) else {
            return;
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            let is_ours = path
                .file_name()
                .and_then(|name| name.to_str()?.split_once('.'))
                .is_some_and(|(key, _)| key.parse::<Digest>().is_ok());
            let limit = match path.extension().and_then(|extension| extension.to_str()) {
                Some("packed") if is_ours => UNUSED_LIMIT,
                Some(PARTIAL) if is_ours => PARTIAL_LIMIT,
                _ => continue,
            };
            let Ok(file) = File::open(&path) else { continue };
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            let is_old = modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > limit));
            if is_old && file.try_lock().is_ok() {
                tracing::info!(file = %path.display(), "packed weights that nobody used for long are deleted");
                let _ = std::fs::remove_file(&path);
            }
        }
    }
}

/// Packs all matrices of a plan, one after the other, into a new file.
fn make(
    path: &Path,
    plan: &Plan,
    pool: &rayon::ThreadPool,
    each: &mut EachMatrix<'_>,
) -> io::Result<PackedFile> {
    let made = cache_files::write_beside(path, |out| {
        out.try_lock()?;
        reserve(out, plan.file_bytes())?;
        let (mut entries, mut digests) = (plan.entries.iter(), Vec::with_capacity(plan.entries.len()));
        let (mut lines, mut written) = (Vec::new(), Ok(()));
        each(&mut |weights, purpose| {
            let Some(source) = packable(weights, purpose).filter(|_| written.is_ok()) else {
                return;
            };
            let Some(entry) = entries.next() else { return };
            lines.resize(entry.lines.len(), Line::ZERO);
            digests.push(pool.install(|| {
                source.pack_right(&mut lines);
                digest_of(&lines)
            }));
            let offset = plan.data_start() + entry.lines.start * size_of::<Line>();
            written = out.write_all_at(bytemuck::cast_slice(&lines), offset as u64);
        });
        written?;
        out.write_all_at(&plan.head(&digests), 0)
    })?;
    // It was locked against [`PackedCache::sweep`] until it had its name.
    made.lock_shared()?;
    PackedFile::map(made, path, plan)
}

/// Takes the room on disk at once: who runs out of it halfway has worked in vain.
fn reserve(file: &File, bytes: usize) -> io::Result<()> {
    use rustix::io::Errno;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes as u64) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes as u64),
        other => Ok(other?),
    }
}

/// PACKED-3
fn wait_for(take: impl Fn() -> Result<(), TryLockError>, what: &str) -> io::Result<()> {
    let begun = Instant::now();
    let mut is_told = false;
    loop {
        match take() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) if begun.elapsed() > WAIT_LIMIT => {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{what}, for more than {} s", WAIT_LIMIT.as_secs()),
                ));
            }
            Err(TryLockError::WouldBlock) => {
                if !is_told {
                    tracing::info!("{what}, and this one waits for it");
                    is_told = true;
                }
                std::thread::sleep(LOCK_POLL);
            }
        }
    }
}

//! A pool that this process cannot map: local memory stands for it, into which the copy service of
//! the node's directory copies messages.
//!
//! A message has the same offset in both. A block is not reused while a message of it is held or
//! fetched, so that this part of the mirror has the same bytes for all readers of the process.

use std::fmt;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use gpu::{DEFAULT_TIMEOUT, Device, Importer, Memory, Slice, Uuid};
use threads::lock;
use transfer::path::Operation;
use transfer::{Admission, CopyPair, ServiceCopies};

use super::pieces::Piece;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;

/// How long the service may take to map a piece of a pool.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// The copy service of a node, connected when a pool first needs it.
pub(crate) struct NodeCopies {
    directory: PathBuf,
    label: String,
    copies: OnceLock<ServiceCopies>,
}

impl fmt::Debug for NodeCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeCopies({})", self.directory.display())
    }
}

impl NodeCopies {
    /// The copies of a process, under its label, by the service of a directory.
    pub(crate) fn new(directory: &Path, label: &str) -> Self {
        let (directory, label) = (directory.to_owned(), label.to_owned());
        Self { directory, label, copies: OnceLock::new() }
    }

    fn get(&self) -> transfer::Result<&ServiceCopies> {
        if let Some(copies) = self.copies.get() {
            return Ok(copies);
        }
        let copies = ServiceCopies::new(&self.directory, &self.label, Admission::own_user())?;
        Ok(self.copies.get_or_init(|| copies))
    }
}

/// Local memory in place of a pool.
#[derive(Debug)]
pub(super) struct Mirror {
    copies: Arc<NodeCopies>,
    /// The device of the pool.
    of: Uuid,
    memory: Importer,
    /// Where each piece begins, and its pair of memories.
    pairs: Mutex<Vec<(u64, Arc<CopyPair>)>>,
}

impl Mirror {
    /// A mirror on this device of a pool with this limit on another one.
    pub(super) fn new(
        copies: &Arc<NodeCopies>,
        device: &Device,
        of: Uuid,
        limit: u64,
    ) -> Result<Self> {
        let memory = device.importer(limit).during("reserve addresses of pool")?;
        Ok(Self { copies: Arc::clone(copies), of, memory, pairs: Mutex::default() })
    }

    pub(super) fn memory(&self) -> &Memory {
        self.memory.memory()
    }

    /// Adds the next piece.
    pub(super) fn add(&self, piece: &Piece) -> Result<()> {
        const OPERATION: &str = "map piece of pool by the copy service";
        let device = self.memory().mapped_for();
        let local = device.allocate_shared(piece.length, &[]).during(OPERATION)?;
        let file = piece.memory.try_clone().during(OPERATION)?;
        let copies = self.copies.get().during(OPERATION)?;
        let opened = copies.open_pair(&local, self.of, file, piece.length, OPEN_TIMEOUT);
        let pair = opened.during(OPERATION)?;
        let start = self.memory().length();
        let (same, _) = local.export_piece(0).during(OPERATION)?;
        // First: a thread that finds the memory finds its pair.
        lock(&self.pairs).push((start, Arc::new(pair)));
        let added = self.memory.add(same.as_fd(), piece.length);
        added.during(OPERATION).inspect_err(|_| _ = lock(&self.pairs).pop())
    }

    /// Copies a part of the pool, and waits.
    #[cold]
    pub(super) fn fetch(&self, part: &Slice) -> Result<()> {
        const NAME: &str = "copy message by the copy service";
        let offset = part.offset();
        let end = offset + part.length();
        let pairs: Vec<_> = {
            let pairs = lock(&self.pairs);
            let after = pairs.partition_point(|(start, _)| *start < end);
            let first = pairs.partition_point(|(start, _)| *start <= offset).max(1) - 1;
            pairs.get(first..after).unwrap_or_default().to_vec()
        };
        let copies = self.copies.get().during(NAME)?;
        let ends = pairs.iter().skip(1).map(|(start, _)| *start).chain([end]);
        for ((start, pair), next) in pairs.iter().zip(ends) {
            let from = offset.max(*start);
            let at = from - start;
            let block = gpu::Block { to: at, from: at, length: next.min(end) - from };
            copies.copy(pair, Operation::Get, block, DEFAULT_TIMEOUT).during(NAME)?;
        }
        Ok(())
    }
}

impl During for transfer::Error {
    type Named = Error;

    fn during(self, operation: &'static str) -> Error {
        let kind = match self.kind() {
            transfer::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
            transfer::ErrorKind::Denied => ErrorKind::Denied,
            _ => ErrorKind::Failed,
        };
        Error::because(operation, kind, self)
    }
}

//! What carries out and measures the operations of a communicator.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Flag, Result};
use crate::request::{Request, StreamHandle};

/// A point of a stream.
#[derive(Debug)]
pub(crate) enum Mark {
    /// An event of a device.
    Event(gpu::Event),
    /// A moment, of streams whose operations are done when their calls return.
    Moment(Instant),
    /// The next synchronization of its stream.
    Synchronization(Arc<OnceLock<Instant>>),
}

impl Mark {
    /// When it was reached; None if it is an event, or not reached yet.
    fn moment(&self) -> Option<Instant> {
        match self {
            Self::Event(_) => None,
            Self::Moment(moment) => Some(*moment),
            Self::Synchronization(moment) => moment.get().copied(),
        }
    }
}

/// Gives up the operations of an engine, from any thread.
#[derive(Debug, Clone)]
pub(crate) enum AbortHandle {
    Device(collective::DeviceAbort),
    /// Operations of the host ask for it while they wait.
    Flag(Flag),
}

impl AbortHandle {
    pub(crate) fn abort(&self) {
        match self {
            Self::Device(abort) => abort.abort(),
            Self::Flag(flag) => flag.set(),
        }
    }
}

/// Carries out operations, and measures those of this project and of the other library.
pub(crate) trait Engine: Debug + Send {
    /// Returns whether operations on the stream are left to the other library: because it is captured into a
    /// graph, or is the default stream of each thread. All ranks do the same.
    fn is_left(&mut self, stream: StreamHandle) -> bool;

    /// Carries out an operation: starts it on the stream.
    ///
    /// # Safety
    /// The addresses are valid for it until it is done, as the other library requires.
    #[allow(unsafe_code)]
    unsafe fn run(&mut self, request: &Request, stream: StreamHandle) -> Result<()>;

    /// Marks this point of a stream.
    fn mark(&mut self, stream: StreamHandle) -> Result<Mark>;

    /// Lets later operations of the stream wait for a mark of another one.
    fn order(&mut self, stream: StreamHandle, after: &Mark) -> Result<()>;

    /// The time from one mark to a later one; None if it is not known yet. Does not wait.
    fn elapsed(&self, begin: &Mark, end: &Mark) -> Result<Option<Duration>> {
        match (begin, end) {
            (Mark::Event(begin), Mark::Event(end)) => Ok(end.time_since(begin)?),
            _ => Ok(begin.moment().zip(end.moment()).map(|(begin, end)| end - begin)),
        }
    }

    /// Takes back a mark that is not used any more.
    fn forget(&mut self, mark: Mark) {
        drop(mark);
    }

    /// Checks whether operations of this rank failed, or cannot be started any more.
    fn check(&self) -> Result<()>;

    /// Checks whether operations that this rank has started failed. The end of another rank, or its abort, after
    /// its part of them is no failure.
    fn check_started(&self) -> Result<()>;

    fn abort_handle(&self) -> AbortHandle;

    /// Waits until all operations that it carries out are done.
    fn drain(&mut self, timeout: Duration) -> Result<()>;

    /// The program has waited for all operations of a stream.
    fn synchronized(&mut self, _stream: StreamHandle) {}
}

/// An engine that is ready to join the other ranks.
pub(crate) type Join =
    Box<dyn FnOnce(&collective::CommDomainKey, u32, &collective::DomainOptions) -> Joined + Send>;
pub(crate) type Joined = std::result::Result<Box<dyn Engine>, Error>;

//! What takes long, beside a rail's thread, which has peers to answer meanwhile.
//!
//! The system needs half a second to pin a gibibyte, and a while to let go of it. Who registers
//! memory does it on its own thread; what is let go of is let go of here.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{RailShared, START};
use crate::error::{Error, ErrorKind, Result};
use crate::lock;

/// How often it is looked whether memory that is kept registered is anybody's yet.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);

type Work = Box<dyn FnOnce() + Send>;

/// The thread that lets go of things.
#[derive(Debug)]
pub(super) struct ReleaseWorker {
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl ReleaseWorker {
    pub(super) fn start(shared: &Arc<RailShared>) -> Result<Self> {
        let (work, works) = channel();
        let has_cache = lock(&shared.registration_cache).options.is_some();
        let shared = Arc::downgrade(shared);
        let thread = std::thread::Builder::new().name("fabricast-release".to_owned());
        let thread = thread
            .spawn(move || serve(&works, &shared, has_cache))
            .map_err(|error| Error::new(START, ErrorKind::Failed, error.to_string()))?;
        Ok(Self { work: Some(work), thread: Some(thread) })
    }

    /// Has it done there.
    pub(super) fn run(&self, work: impl FnOnce() + Send + 'static) {
        if let Some(sender) = &self.work
            && let Err(refused) = sender.send(Box::new(work))
        {
            (refused.0)();
        }
    }

    /// Lets go of something.
    pub(super) fn release(&self, what: impl Send + 'static) {
        self.run(move || drop(what));
    }
}

fn serve(works: &Receiver<Work>, shared: &Weak<RailShared>, has_cache: bool) {
    loop {
        let work = match has_cache {
            true => works.recv_timeout(SWEEP_INTERVAL),
            false => works.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match work {
            Ok(work) => work(),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if let (true, Some(shared)) = (has_cache, shared.upgrade()) {
            lock(&shared.registration_cache).release();
        }
    }
}

impl Drop for ReleaseWorker {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

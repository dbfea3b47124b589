//! A thread for slow releases, because the rail's thread has to answer peers.
//!
//! Pinning takes half a second per gibibyte, and unpinning takes time too. Registering runs on the
//! caller's thread, releasing here.
//!
//! No [`DeferredDrop`](threads::DeferredDrop): a rail starts only with this thread, releases begin
//! at once and in their order, and the end of the rail waits for all of them, because the domain
//! is closed after them.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use threads::lock;

use super::{RailShared, START};
use crate::error::{Result, failed};

/// How often cached registrations of dropped memory are swept.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);

type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub(super) struct ReleaseWorker {
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl ReleaseWorker {
    pub(super) fn start(shared: &Arc<RailShared>) -> Result<Self> {
        let (work, works) = channel();
        let has_cache = lock(&shared.registration_cache).is_used();
        let shared = Arc::downgrade(shared);
        let serve = move || serve(&works, &shared, has_cache);
        let thread = threads::spawn("fabricast-unpin", serve).map_err(failed(START))?;
        Ok(Self { work: Some(work), thread: Some(thread) })
    }

    pub(super) fn run(&self, work: impl FnOnce() + Send + 'static) {
        if let Some(sender) = &self.work
            && let Err(refused) = sender.send(Box::new(work))
        {
            (refused.0)();
        }
    }

    /// Drops a value on the thread.
    pub(super) fn release(&self, value: impl Send + 'static) {
        self.run(move || drop(value));
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

//! The host-staged sessions of a target, and its thread, which starts with the first one.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use threads::lock;

use super::region_uses::RegionUses;
use super::staging_link::STAGING_DESCRIPTORS;
use super::staging_session::{StagingOwner, StagingSession};
use super::staging_thread::{ThreadState, serve};
use crate::error::{Error, ErrorKind, Result, failed};
use crate::region::RegisteredRegion;
use crate::remaining;

const OPEN: &str = "open staging session";
/// Maximum of sessions of an agent: each pins 34 MiB.
const MAX_SESSIONS: usize = 128;
/// How often the end of the thread is checked.
const END_CHECK_INTERVAL: Duration = Duration::from_micros(200);

/// What an initiator gets to map: requests, slots, doorbell.
pub(in crate::agent) type StagingFiles = [OwnedFd; STAGING_DESCRIPTORS];

#[derive(Debug, Default)]
pub(in crate::agent) struct StagingTarget {
    uses: Arc<RegionUses>,
    thread: Mutex<ThreadSlot>,
}

#[derive(Debug, Default)]
enum ThreadSlot {
    #[default]
    NotStarted,
    Running(Arc<ThreadState>, JoinHandle<()>),
    Ended,
}

impl StagingTarget {
    /// Creates the session of an initiator, with its first region: there is none if that is refused.
    pub(in crate::agent) fn open_session(
        &self,
        owner: Arc<dyn StagingOwner>,
        label: &str,
        first: &RegisteredRegion,
    ) -> Result<(Arc<StagingSession>, StagingFiles)> {
        let mut thread = lock(&self.thread);
        if matches!(*thread, ThreadSlot::NotStarted) {
            let state = Arc::new(ThreadState::new(Arc::clone(&self.uses))?);
            let (of_thread, owner) = (Arc::clone(&state), Arc::clone(&owner));
            let handle = threads::spawn("fabricast-staging", move || serve(&*owner, &of_thread));
            *thread = ThreadSlot::Running(state, handle.map_err(failed(OPEN))?);
        }
        let ThreadSlot::Running(state, _) = &*thread else {
            return Err(Error::new(OPEN, ErrorKind::Closed, "the agent has ended"));
        };
        if state.sessions() >= MAX_SESSIONS {
            let detail = format!(
                "{MAX_SESSIONS} initiators stage through this agent, the maximum. Disconnect one, \
                 or use memory that can be exported"
            );
            return Err(failed(OPEN)(detail));
        }
        let session = Arc::new(StagingSession::new(label)?);
        session.open_region(first, &*owner)?;
        let [control, slots] = session.segment().export()?;
        let files = [control, slots, state.doorbell().export()?];
        state.add(Arc::clone(&session));
        Ok((session, files))
    }

    /// Wakes the thread.
    pub(in crate::agent) fn wake(&self) {
        if let ThreadSlot::Running(state, _) = &*lock(&self.thread) {
            state.wake();
        }
    }

    /// A peer for which the thread copies to or from this region, or any.
    pub(in crate::agent) fn user_of(&self, region: Option<u64>) -> Option<String> {
        region.map_or_else(|| self.uses.any_user(), |region| self.uses.user_of(region))
    }

    /// Ends the thread: no copy begins from now on.
    pub(in crate::agent) fn end(&self) {
        if let ThreadSlot::Running(state, _) = &*lock(&self.thread) {
            state.end();
        }
    }

    /// Waits until the thread has ended, at most until `end`; later it ends by itself.
    pub(in crate::agent) fn join(&self, end: Instant) {
        let thread = std::mem::replace(&mut *lock(&self.thread), ThreadSlot::Ended);
        let ThreadSlot::Running(_, handle) = thread else { return };
        while !handle.is_finished() {
            if remaining(end).is_zero() {
                return;
            }
            std::thread::sleep(END_CHECK_INTERVAL);
        }
        let _ = handle.join();
    }
}

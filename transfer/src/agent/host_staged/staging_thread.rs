//! The thread of a target that copies between its regions and the slots of its initiators.
//!
//! It serves the sessions in turn, a chunk of each, and sleeps while nothing is requested. All that
//! a session says is checked; garbage harms only the session that wrote it.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::{DeviceName, Pause};
use ipc::WaitStrategy;
use threads::{ExactTimer, lock};

use super::chunk_request::CheckedRequest;
use super::region_uses::{RegionUse, RegionUses};
use super::slot_layout::{SLOTS, SlotSize};
use super::staged_end::{Direction, StagedEnd};
use super::staged_pauses::{ChunkTimes, Look, coarse_pause};
use super::staging_segment::{StagingDoorbell, UncheckedRequest};
use super::staging_session::{StagingOwner, StagingSession};
use crate::error::{ErrorKind, Result};
use crate::host_copy::CacheUse;
use crate::path::Operation;
use crate::refusal::Refusal;
use crate::stream_copies::StreamCopies;

/// Bytes of one session and size of slots that a device has at a time: the next chunk follows the
/// current one at once, and those of other sessions come between.
const MAX_BEGUN: u64 = 12 << 20;
/// The longest sleep; a request ends it.
const IDLE_WAIT: Duration = Duration::from_secs(1);
/// How long the thread looks for the next request before it sleeps.
const IDLE_SPIN: Duration = Duration::from_micros(10);
/// How long copies of a session that has left, or of a closed agent, are waited for.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// A chunk of this length belongs to a transfer that does not fit into the caches.
const MIN_BYPASS: u64 = 512 << 10;

/// What the thread shares with the agent.
#[derive(Debug)]
pub(super) struct ThreadState {
    doorbell: StagingDoorbell,
    /// Sessions that the thread has not taken yet.
    incoming: Mutex<Vec<Arc<StagingSession>>>,
    has_incoming: AtomicBool,
    /// Number of sessions.
    sessions: AtomicUsize,
    is_ending: AtomicBool,
    uses: Arc<RegionUses>,
}

impl ThreadState {
    pub(super) fn new(uses: Arc<RegionUses>) -> Result<Self> {
        Ok(Self {
            doorbell: StagingDoorbell::create()?,
            incoming: Mutex::default(),
            has_incoming: AtomicBool::new(false),
            sessions: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
            uses,
        })
    }

    pub(super) fn doorbell(&self) -> &StagingDoorbell {
        &self.doorbell
    }

    pub(super) fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, session: Arc<StagingSession>) {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        lock(&self.incoming).push(session);
        self.has_incoming.store(true, Ordering::Release);
        self.wake();
    }

    /// Ends the thread.
    pub(super) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn wake(&self) {
        self.doorbell.doorbell().ring();
    }
}

/// A copy of a device for a request.
#[derive(Debug)]
struct StagingJob {
    slot: usize,
    sequence: u64,
    bytes: u64,
    // Last: withdrawing the region waits for it.
    _region_use: RegionUse,
}

/// A session and its requests.
#[derive(Debug)]
struct ServedSession {
    session: Arc<StagingSession>,
    state: Arc<ThreadState>,
    seen_posted: u64,
    /// Sequence numbers of the last requests.
    last: [u64; SLOTS],
    is_busy: [bool; SLOTS],
    /// Requests that were not begun, by size and sequence number.
    waiting: BTreeMap<(SlotSize, u64), (usize, UncheckedRequest)>,
    streams: HashMap<(DeviceName, Direction, SlotSize), StreamCopies<StagingJob>>,
    times: ChunkTimes,
    left_at: Option<Instant>,
}

impl Drop for ServedSession {
    fn drop(&mut self) {
        self.state.sessions.fetch_sub(1, Ordering::Relaxed);
        self.session.end();
    }
}

/// Serves sessions until the agent ends.
pub(super) fn serve(owner: &dyn StagingOwner, state: &Arc<ThreadState>) {
    // Sleeps until the end of a copy are exact.
    let _exact = ExactTimer::set();
    let mut idle_strategy = WaitStrategy::Adaptive { now: IDLE_SPIN, max: IDLE_SPIN };
    let mut sessions: Vec<ServedSession> = Vec::new();
    while !state.is_ending.load(Ordering::Acquire) {
        if state.has_incoming.swap(false, Ordering::AcqRel) {
            let incoming = std::mem::take(&mut *lock(&state.incoming));
            sessions.extend(incoming.into_iter().map(|it| ServedSession::new(it, state)));
        }
        let mut has_moved = false;
        for session in &mut sessions {
            // The owner of adopted memory may panic when the last copy drops it.
            let moved = catch_unwind(AssertUnwindSafe(|| session.progress(owner)));
            has_moved |= moved.unwrap_or_else(|_| {
                tracing::error!(peer = &**session.session.label(), "a staging copy panicked");
                true
            });
        }
        for over in sessions.extract_if(.., |session| session.is_over()) {
            drop(over);
            owner.staging_session_over();
        }
        if !has_moved {
            wait(&sessions, state, &mut idle_strategy);
        }
    }
    let end = ipc::deadline(CLOSE_TIMEOUT);
    sessions.iter_mut().for_each(|session| session.close(end));
}

/// Waits for a request, or for the end of a copy.
fn wait(sessions: &[ServedSession], state: &ThreadState, idle_strategy: &mut WaitStrategy) {
    let now = Instant::now();
    let pause = sessions.iter().filter_map(|session| session.pause(now)).min();
    let mut block = WaitStrategy::Block;
    let (until, strategy) = match pause {
        Some(Pause::Spin) => return std::hint::spin_loop(),
        Some(Pause::Until(look)) => (look, &mut block),
        None => (now + IDLE_WAIT, idle_strategy),
    };
    state.doorbell.doorbell().wait(strategy, until, || {
        let has_news = state.is_ending.load(Ordering::Acquire)
            || state.has_incoming.load(Ordering::Acquire)
            || sessions.iter().any(ServedSession::has_news);
        has_news.then_some(())
    });
}

impl ServedSession {
    fn new(session: Arc<StagingSession>, state: &Arc<ThreadState>) -> Self {
        Self {
            session,
            state: Arc::clone(state),
            seen_posted: 0,
            last: [0; SLOTS],
            is_busy: [false; SLOTS],
            waiting: BTreeMap::new(),
            streams: HashMap::new(),
            times: ChunkTimes::new(),
            left_at: None,
        }
    }

    /// Was something requested that was not seen yet, or did the initiator leave?
    fn has_news(&self) -> bool {
        let has_left = self.session.has_left() && self.left_at.is_none();
        has_left || self.session.segment().posted() != self.seen_posted
    }

    /// Has the initiator left, and are its copies over?
    fn is_over(&self) -> bool {
        self.left_at.is_some() && !self.has_copies()
    }

    fn has_copies(&self) -> bool {
        self.streams.values().any(|copies| copies.count() > 0)
    }

    /// Bytes of the copies in flight of this size.
    fn bytes_in_flight(&self, size: SlotSize) -> u64 {
        let streams = self.streams.iter().filter(|((.., of), _)| *of == size);
        streams.flat_map(|(_, copies)| copies.in_flight()).map(|(job, _)| job.bytes).sum()
    }

    /// Answers completed requests, and begins one of each size. False if nothing changed.
    fn progress(&mut self, owner: &dyn StagingOwner) -> bool {
        let mut has_moved = self.answer_completed();
        self.take_requests();
        if self.session.has_left() {
            return self.leave() || has_moved;
        }
        for size in SlotSize::ALL {
            if self.bytes_in_flight(size) >= MAX_BEGUN {
                continue;
            }
            let next = self.waiting.range((size, 0)..=(size, u64::MAX)).next();
            if let Some(key) = next.map(|(key, _)| *key)
                && let Some((slot, request)) = self.waiting.remove(&key)
            {
                has_moved = true;
                if let Err(refusal) = self.begin(slot, &request, owner) {
                    self.answer(slot, request.sequence(), Some(&refusal));
                }
            }
        }
        has_moved
    }

    /// Forgets the requests of an initiator that left. True if its copies are given up.
    fn leave(&mut self) -> bool {
        self.waiting.clear();
        let left_at = *self.left_at.get_or_insert_with(Instant::now);
        let gives_up = left_at.elapsed() >= CLOSE_TIMEOUT && self.has_copies();
        if gives_up {
            self.close(Instant::now());
        }
        gives_up
    }

    fn take_requests(&mut self) {
        let segment = self.session.segment();
        let posted = segment.posted();
        if posted == self.seen_posted {
            return;
        }
        self.seen_posted = posted;
        for slot in 0..SLOTS {
            // A request in place of one that was not answered is garbage.
            if self.is_busy[slot] {
                continue;
            }
            if let Some(request) = segment.request(slot, self.last[slot]) {
                self.last[slot] = request.sequence();
                self.is_busy[slot] = true;
                // Garbage may repeat a sequence number: then the earlier one is lost.
                let key = (SlotSize::of_slot(slot), request.sequence());
                if let Some((lost, _)) = self.waiting.insert(key, (slot, request)) {
                    self.is_busy[lost] = false;
                }
            }
        }
    }

    fn answer(&mut self, slot: usize, sequence: u64, refusal: Option<&Refusal>) {
        self.is_busy[slot] = false;
        self.session.segment().answer(slot, sequence, refusal);
    }

    /// Begins the copy of a request; the CPU completes it.
    fn begin(
        &mut self,
        slot: usize,
        request: &UncheckedRequest,
        owner: &dyn StagingOwner,
    ) -> std::result::Result<(), Refusal> {
        let number = request.region();
        let region_use = RegionUse::begin(&self.state.uses, number, self.session.label());
        let region = self.session.ticket_of(number).and_then(|it| owner.staged_region(number, it));
        let Some(region) = region else {
            let cause = "the region was withdrawn or never opened. Join a region that exists";
            return Err(Refusal::new(ErrorKind::Stale, cause));
        };
        let checked = CheckedRequest::new(request, slot, &region.descriptor)?;
        let (length, slots) = (region.descriptor.length, self.session.segment().slots());
        let end = StagedEnd::new(&region.buffer, length, slots);
        let end = end.map_err(|error| Refusal::of(&error))?;
        // Not kept: the region ends when its owner drops it, and its memory when the copy is over.
        drop(region);
        let (sequence, bytes) = (request.sequence(), checked.bytes());
        let direction = match checked.operation() {
            Operation::Put => Direction::OutOfSlots,
            Operation::Get => Direction::IntoSlots,
        };
        let Some(device) = end.device() else {
            let large = if bytes >= MIN_BYPASS { CacheUse::Bypass } else { CacheUse::Normal };
            let copied = end.copy_by_cpu(direction, checked.blocks(), large);
            copied.map_err(|error| Refusal::of(&error))?;
            self.answer(slot, sequence, None);
            return Ok(());
        };
        let copies = match self.streams.entry((device.name(), direction, SlotSize::of_slot(slot))) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(entry) => {
                let made = StreamCopies::new(device).map_err(|error| Refusal::of(&error))?;
                entry.insert(made)
            }
        };
        let job = StagingJob { slot, sequence, bytes, _region_use: region_use };
        copies.begin(job, |stream| end.start_on(stream, direction, checked.blocks()));
        Ok(())
    }

    /// Answers the requests whose copies the devices have completed.
    fn answer_completed(&mut self) -> bool {
        let mut done = Vec::new();
        for copies in self.streams.values_mut() {
            let (was_coarse, before) = (copies.count() > 1, done.len());
            let mut first = None;
            while let Some((job, since, outcome)) = copies.next_done() {
                first.get_or_insert_with(|| (job.bytes, since, copies.take_in_progress()));
                done.push((job, outcome));
            }
            if let Some((bytes, since, in_progress)) = first {
                let count = done.len() - before;
                let look = Look::new(Instant::now(), in_progress, count, was_coarse);
                self.times.note(bytes, since, look);
            }
        }
        let has_moved = !done.is_empty();
        for (job, outcome) in done {
            let refusal = outcome.err().map(|error| Refusal::of(&error));
            self.answer(job.slot, job.sequence, refusal.as_ref());
        }
        has_moved
    }

    fn pause(&self, now: Instant) -> Option<Pause> {
        let pauses = self.streams.values().filter_map(|copies| {
            let (job, since) = copies.in_flight().next()?;
            let pause = self.times.pause(now, since, std::iter::once(job.bytes));
            // With another copy behind it the device stays busy.
            Some(if copies.count() > 1 { coarse_pause(pause, now) } else { pause })
        });
        pauses.min()
    }

    /// Waits for the copies of devices, at most until `end`. Those that continue keep their memory,
    /// and use their regions, for ever.
    fn close(&mut self, end: Instant) {
        for ((device, ..), mut copies) in self.streams.drain() {
            let jobs: Vec<_> = copies.abandon().collect();
            if !copies.close(end) {
                let peer = &**self.session.label();
                tracing::warn!(%device, peer, "staging copies did not finish: memory is leaked");
                std::mem::forget(jobs);
            }
        }
    }
}

//! A lane: an endpoint with its queue, and the thread that drives them.
//!
//! The thread takes jobs from one bounded channel and reports events in another. When idle for a
//! while it sleeps in the queue, and a new job wakes it. Its events wake the port if that sleeps in
//! its own queue.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::super::SenderInstance;
use super::super::chunk_poster::{ChunkPoster, parse_write_token};
use super::super::memory::RingMemory;
use super::super::posted_receives::PostedReceives;
use super::LaneResources;
use super::lane_event::LaneEvent;
use super::send_queue::{LaneSendQueue, QueuedChunk};
use crate::{Error, ErrorKind, Failure, Outcome, Result, Waker};

const JOB_QUEUE_LEN: usize = 64;
/// Polls without an event before a lane sleeps: every job wakes it, and other threads need the
/// core.
const SPIN_POLLS: u32 = 200;
/// Longest sleep of an idle lane, and of one that waits for room in the provider.
const MAX_SLEEP: Duration = Duration::from_millis(50);
const SHORT_SLEEP: Duration = Duration::from_micros(100);
/// Pause before a full event channel is tried again.
const RETRY_PAUSE: Duration = Duration::from_micros(100);

/// Polls after the port has stopped the lane: the maximum, and the minimum that injected writes
/// need to leave.
const MAX_DRAIN_POLLS: u32 = 5000;
const MIN_DRAIN_POLLS: u32 = 64;

#[derive(Debug)]
pub(super) enum LaneJob {
    /// Open a ring.
    Open(Box<ChunkPoster>),
    /// Write a chunk of a ring.
    Write { instance: SenderInstance, queued: QueuedChunk },
    /// No more chunks of the ring follow. Earlier ones are still written, if that takes less than a
    /// second. If the ring is closed, no event of it is wanted any more.
    Stop { instance: SenderInstance, is_closed: bool },
}

/// Memory that peers write through lanes: it stays as long as a thread does, even one that hangs.
pub(super) type RetainedMemory = Arc<Mutex<Vec<Arc<RingMemory>>>>;

/// Wakes the thread of the port, if it sleeps in its queue.
#[derive(Debug)]
pub(super) struct PortWaker {
    is_asleep: AtomicBool,
    waker: Waker,
}

impl PortWaker {
    pub(super) fn new(waker: Waker) -> Self {
        Self { is_asleep: AtomicBool::new(false), waker }
    }

    /// Set before the thread reads events a last time and sleeps; cleared afterwards.
    pub(super) fn set_sleeping(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// To be called after an event was sent.
    fn wake(&self) {
        // Either this sees the thread asleep, or the thread sees the event before it sleeps.
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.waker.wake_best_effort();
        }
    }
}

/// The port's handle of a lane.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: Option<SyncSender<LaneJob>>,
    waker: Waker,
    shared: Arc<LaneShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct LaneShared {
    is_asleep: AtomicBool,
    /// The port stops the lane.
    is_stopped: AtomicBool,
}

impl Lane {
    pub(super) fn start(
        number: usize,
        resources: LaneResources,
        (events, port_waker): (SyncSender<LaneEvent>, Arc<PortWaker>),
    ) -> Result<Self> {
        let (sender, jobs) = sync_channel(JOB_QUEUE_LEN);
        let shared = Arc::new(LaneShared::default());
        let waker = resources.io.queue.waker();
        let worker = LaneThread {
            number,
            resources,
            send_queues: HashMap::new(),
            writing: Vec::new(),
            jobs,
            reporter: LaneReporter { events, port_waker, shared: Arc::clone(&shared) },
            next: None,
        };
        let thread = threads::spawn(&format!("ring lane {number}"), move || worker.run()).map_err(
            |error| {
                let detail = format!("cannot start the thread of a lane: {error}");
                Error::new(ErrorKind::ResourceExhausted, "open ring", detail)
            },
        )?;
        Ok(Self { jobs: Some(sender), waker, shared, thread: Some(thread) })
    }

    /// Sends a job to the lane; returns it if the job queue is full.
    pub(super) fn send_job(&self, job: LaneJob) -> std::result::Result<(), Box<LaneJob>> {
        let Some(jobs) = &self.jobs else { return Err(Box::new(job)) };
        match jobs.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => {
                return Err(Box::new(job));
            }
        }
        // Either the lane sees the job before it sleeps, or it is seen here to sleep.
        fence(Ordering::SeqCst);
        if self.shared.is_asleep.load(Ordering::Relaxed) {
            self.waker.wake_best_effort();
        }
        Ok(())
    }

    /// Asks the thread to end without waiting, so that several can end at the same time.
    pub(super) fn request_stop(&self) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.waker.wake_best_effort();
    }

    /// Has the thread ended?
    pub(super) fn is_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the thread within a sleep. False if it hangs in the provider, which can happen if a
    /// peer dies: then the thread and its resources are leaked.
    pub(super) fn shut_down(&mut self) -> bool {
        self.jobs = None;
        self.request_stop();
        let Some(thread) = self.thread.take() else { return true };
        for _ in 0..1000 {
            if thread.is_finished() {
                let _ = thread.join();
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.waker.is_inherited() {
            // A forked child does not have the thread.
            std::mem::forget((self.jobs.take(), self.thread.take()));
            return;
        }
        self.shut_down();
    }
}

struct LaneThread {
    number: usize,
    resources: LaneResources,
    send_queues: HashMap<SenderInstance, LaneSendQueue>,
    /// Rings with chunks to post.
    writing: Vec<SenderInstance>,
    jobs: Receiver<LaneJob>,
    reporter: LaneReporter,
    /// A job that was taken just before sleeping.
    next: Option<LaneJob>,
}

struct LaneReporter {
    events: SyncSender<LaneEvent>,
    port_waker: Arc<PortWaker>,
    shared: Arc<LaneShared>,
}

impl LaneReporter {
    /// Waits for room, unless the port has stopped the lane.
    fn report(&self, event: LaneEvent) {
        let mut event = event;
        loop {
            let sent = self.events.try_send(event);
            self.port_waker.wake();
            match sent {
                Ok(()) | Err(TrySendError::Disconnected(_)) => return,
                Err(TrySendError::Full(back)) => event = back,
            }
            if self.shared.is_stopped.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(RETRY_PAUSE);
        }
    }
}

impl LaneThread {
    fn run(mut self) {
        if let Err(error) = self.work() {
            self.reporter.report(LaneEvent::LaneFailed(error));
        }
    }

    fn work(&mut self) -> Result<()> {
        let mut idle = 0;
        loop {
            let LaneResources { io, posted_receives, .. } = &mut self.resources;
            posted_receives.refill(io)?;
            let has_worked = self.step()?;
            if self.reporter.shared.is_stopped.load(Ordering::Acquire) {
                return self.drain();
            }
            if has_worked {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle < SPIN_POLLS {
                self.resources.io.queue.pause();
            } else {
                self.sleep()?;
            }
        }
    }

    /// The port has stopped the lane: earlier jobs are still done, for a limited time.
    fn drain(&mut self) -> Result<()> {
        let mut idle = 0;
        for _ in 0..MAX_DRAIN_POLLS {
            idle = if self.step()? { 0 } else { idle + 1 };
            if idle > MIN_DRAIN_POLLS {
                if self.send_queues.values().all(LaneSendQueue::is_idle) {
                    return Ok(());
                }
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        Ok(())
    }

    /// Does all jobs, and handles one completion. True if anything was done.
    fn step(&mut self) -> Result<bool> {
        let has_worked = self.do_jobs();
        match self.resources.io.queue.poll() {
            Some(outcome) => self.dispatch(outcome).map(|()| true),
            None => Ok(has_worked),
        }
    }

    /// Does all jobs, and posts as far as there is room. True if anything was done.
    fn do_jobs(&mut self) -> bool {
        let mut has_worked = false;
        while let Some(job) = self.next.take().or_else(|| self.jobs.try_recv().ok()) {
            self.begin(job);
            has_worked = true;
        }
        has_worked | self.write()
    }

    fn begin(&mut self, job: LaneJob) {
        match job {
            LaneJob::Open(chunk_poster) => {
                let instance = chunk_poster.instance();
                let send_queue = LaneSendQueue::new(self.number, *chunk_poster);
                self.send_queues.insert(instance, send_queue);
            }
            LaneJob::Write { instance, queued } => {
                if let Some(send_queue) = self.send_queues.get_mut(&instance)
                    && send_queue.push(queued)
                {
                    self.writing.push(instance);
                }
            }
            LaneJob::Stop { instance, is_closed } => {
                if let Some(send_queue) = self.send_queues.get_mut(&instance) {
                    send_queue.stop(is_closed);
                    self.forget(instance);
                }
            }
        }
    }

    /// Posts as far as there is room; a ring without room does not block the others.
    fn write(&mut self) -> bool {
        let (mut has_written, mut at) = (false, 0);
        while let Some(instance) = self.writing.get(at).copied() {
            let Some(send_queue) = self.send_queues.get_mut(&instance) else {
                self.writing.swap_remove(at);
                continue;
            };
            let report = |event| self.reporter.report(event);
            has_written |= send_queue.write(&mut self.resources.io, report);
            if send_queue.has_waiting() {
                at += 1;
            } else {
                self.writing.swap_remove(at);
                self.forget(instance);
            }
        }
        has_written
    }

    /// Removes a ring that is closed, once none of its chunks is in flight.
    fn forget(&mut self, instance: SenderInstance) {
        if self.send_queues.get(&instance).is_some_and(LaneSendQueue::is_stopped) {
            self.send_queues.remove(&instance);
        }
    }

    fn dispatch(&mut self, outcome: Outcome) -> Result<()> {
        let completion = match outcome {
            Ok(completion) => completion,
            Err(failure) => return self.dispatch_failure(failure),
        };
        if let Some(notice) = self.resources.posted_receives.handle_notice(&completion)? {
            self.reporter.report(LaneEvent::ReceivedNotice(notice));
        } else if let Some((instance, slot)) = parse_write_token(completion.token)
            && let Some(send_queue) = self.send_queues.get_mut(&instance)
        {
            if let Some(event) = send_queue.completed(slot) {
                self.reporter.report(event);
            }
            self.forget(instance);
        }
        Ok(())
    }

    #[cold]
    fn dispatch_failure(&mut self, failure: Failure) -> Result<()> {
        let kind = failure.error.kind();
        if let Some((instance, slot)) =
            parse_write_token(failure.token).filter(|_| failure.operation.is_some())
        {
            if let Some(send_queue) = self.send_queues.get_mut(&instance) {
                let event = send_queue.failed(slot, failure.error);
                self.reporter.report(event);
                self.forget(instance);
            }
        } else if PostedReceives::owns_token(failure.token) && kind == ErrorKind::Truncated {
            // A peer sent a message that is too long for a notice.
            self.resources.posted_receives.receive_failed(failure.token);
        } else if failure.operation.is_some()
            || !matches!(
                kind,
                ErrorKind::ConnectionLost | ErrorKind::ConnectionRefused | ErrorKind::Cancelled
            )
        {
            return Err(failure.error);
        }
        // Otherwise a lost injected write, which the provider does not identify: lanes inject
        // nothing that matters.
        Ok(())
    }

    fn sleep(&mut self) -> Result<()> {
        let shared = &self.reporter.shared;
        shared.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // The sender of an earlier job may not have seen this thread asleep, and did not wake it.
        self.next = self.jobs.try_recv().ok();
        let is_stopped = shared.is_stopped.load(Ordering::Acquire);
        let is_idle = self.next.is_none() && self.writing.is_empty() && !is_stopped;
        // No wake-up arrives when the provider has room again.
        let longest = if is_idle { MAX_SLEEP } else { SHORT_SLEEP };
        let outcome = self.resources.io.queue.wait_or_wake(longest);
        self.reporter.shared.is_asleep.store(false, Ordering::Relaxed);
        outcome.map_or(Ok(()), |outcome| self.dispatch(outcome))
    }
}

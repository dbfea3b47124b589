//! A lane: an endpoint with its queue, and the thread that drives them.
//!
//! The thread takes jobs from one bounded channel and tells what happened in another. When
//! there is nothing to do for a while it sleeps in the queue, and who gives it a job wakes it; it
//! wakes its owner, too, if that sleeps in a queue of its own.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::super::chunk_poster::{ChunkPoster, SenderInstance, parse_write_token};
use super::super::memory::RingMemory;
use super::super::posted_receives::{PostedReceives, ReceivedNotice};
use super::super::writer_state::Chunk;
use super::send_queue::LaneSendQueue;
use crate::{
    CompletionQueue, Endpoint, Error, ErrorKind, Failure, MemoryRegion, Outcome, Result, Waker,
};

/// Jobs that may wait for a lane.
const JOB_QUEUE_LEN: usize = 64;
/// Looks that find nothing before a lane goes to sleep: it is woken for whatever there is to do,
/// and others want the core.
const SPIN_POLLS: u32 = 200;
/// Longest sleep of a lane that has nothing to do, and of one that waits for room.
const MAX_SLEEP: Duration = Duration::from_millis(50);
const SHORT_SLEEP: Duration = Duration::from_micros(100);
/// How long a lane waits before it looks again whether its owner listens.
const RETRY_PAUSE: Duration = Duration::from_micros(100);

/// Turns that a lane makes at most once its owner is gone, and how many it makes in any case:
/// what was injected leaves with them.
const MAX_DRAIN_POLLS: u32 = 5000;
const MIN_DRAIN_POLLS: u32 = 64;

/// What a lane is told to do.
#[derive(Debug)]
pub(super) enum LaneJob {
    /// Chunks of a ring will come.
    Open(Box<ChunkPoster>),
    /// Write a chunk of a ring, with payload from an offset of a region.
    Write { instance: SenderInstance, chunk: Chunk, payload: Option<(MemoryRegion, usize)> },
    /// No more chunks of a ring will come: those that came are still written, if that does not take
    /// long.
    Stop(SenderInstance),
    /// The same, and nobody wants to hear of them.
    Close(SenderInstance),
}

/// What a lane tells.
#[derive(Debug)]
pub(in super::super) enum LaneEvent {
    /// A notice came.
    ReceivedNotice(ReceivedNotice),
    /// A chunk with so many bytes of payload is done, and with it all that the lane was given of
    /// its ring up to a position.
    Completed { lane: usize, instance: SenderInstance, bytes: u64, completed_to: u64 },
    /// A chunk was not written, and no later one of its ring will be. What the lane was given up to
    /// that position is not read any more.
    WriteFailed { lane: usize, instance: SenderInstance, completed_to: u64, error: Error },
    /// The lane is of no use any more.
    LaneFailed(Error),
}

/// Memory that peers write through lanes: it stays for as long as the thread of one of them does,
/// even if that has to be left behind.
pub(super) type RetainedMemory = Arc<Mutex<Vec<Arc<RingMemory>>>>;

/// What a lane's thread owns. In this order: memory that peers write goes after the endpoint.
pub(super) struct LaneResources {
    pub(super) endpoint: Endpoint,
    pub(super) queue: CompletionQueue,
    pub(super) posted_receives: PostedReceives,
    #[allow(dead_code)] // held, never read
    pub(super) credit_memory: MemoryRegion,
    #[allow(dead_code)] // held, never read
    pub(super) retained: RetainedMemory,
}

/// Who a lane tells: wakes it, if it sleeps in a queue.
#[derive(Debug)]
pub(super) struct PortWaker {
    is_asleep: AtomicBool,
    waker: Waker,
}

impl PortWaker {
    pub(super) fn new(waker: Waker) -> Self {
        Self { is_asleep: AtomicBool::new(false), waker }
    }

    /// Says that it is about to sleep, and looks once more at what it was told after this; or that
    /// it does not any more.
    pub(super) fn set_sleeping(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// After it was told something.
    fn wake(&self) {
        // Either this sees that it sleeps, or it sees what it was told before it does.
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.waker.wake_best_effort();
        }
    }
}

/// How a lane tells what happened.
#[derive(Debug, Clone)]
pub(super) struct EventSender {
    pub(super) events: SyncSender<LaneEvent>,
    pub(super) port_waker: Arc<PortWaker>,
}

/// What a lane's owner has of it.
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
    /// The owner is gone, or going.
    is_stopped: AtomicBool,
}

impl Lane {
    /// Starts a lane's thread.
    pub(super) fn start(
        number: usize,
        resources: LaneResources,
        event_sender: EventSender,
    ) -> Result<Self> {
        let (sender, jobs) = sync_channel(JOB_QUEUE_LEN);
        let shared = Arc::new(LaneShared::default());
        let waker = resources.queue.waker();
        let worker = LaneThread {
            number,
            resources,
            send_queues: HashMap::new(),
            writing: Vec::new(),
            jobs,
            reporter: LaneReporter { event_sender, shared: Arc::clone(&shared) },
            next: None,
        };
        let thread = std::thread::Builder::new()
            .name(format!("ring lane {number}"))
            .spawn(move || worker.run())
            .map_err(|error| {
                let detail = format!("no thread for a lane: {error}");
                Error::new(ErrorKind::ResourceExhausted, "opening a ring", detail)
            })?;
        Ok(Self { jobs: Some(sender), waker, shared, thread: Some(thread) })
    }

    /// Gives the lane a job; gives it back if it has too many.
    pub(super) fn send_job(&self, job: LaneJob) -> std::result::Result<(), LaneJob> {
        let Some(jobs) = &self.jobs else { return Err(job) };
        match jobs.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => return Err(job),
        }
        // Either the lane sees the job before it sleeps, or it is seen here to sleep.
        fence(Ordering::SeqCst);
        if self.shared.is_asleep.load(Ordering::Relaxed) {
            self.waker.wake_best_effort();
        }
        Ok(())
    }

    /// Lets the thread end soon, without waiting for it: so that several end at the same time.
    pub(super) fn request_stop(&self) {
        self.shared.is_stopped.store(true, Ordering::Release);
        self.waker.wake_best_effort();
    }

    /// Did the thread end?
    pub(super) fn is_stopped(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the thread, which may hang in the provider, if the peer died at the wrong moment: then
    /// it stays behind, with what it owns, and this is false. Else it ends within a sleep.
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
            // A forked child: it does not have the thread.
            std::mem::forget((self.jobs.take(), self.thread.take()));
            return;
        }
        self.shut_down();
    }
}

struct LaneThread {
    number: usize,
    resources: LaneResources,
    /// What is written, by the numbers of titles.
    send_queues: HashMap<u32, LaneSendQueue>,
    /// Those that have something to be written.
    writing: Vec<u32>,
    jobs: Receiver<LaneJob>,
    reporter: LaneReporter,
    /// A job that was taken just before it would have slept.
    next: Option<LaneJob>,
}

/// The thread's way to its owner.
struct LaneReporter {
    event_sender: EventSender,
    shared: Arc<LaneShared>,
}

impl LaneReporter {
    /// To an owner that listens, or is gone.
    fn report(&self, event: LaneEvent) {
        let mut event = event;
        loop {
            let sent = self.event_sender.events.try_send(event);
            self.event_sender.port_waker.wake();
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
            let LaneResources { endpoint, queue, posted_receives, .. } = &mut self.resources;
            posted_receives.refill(endpoint, queue)?;
            let has_worked = self.do_jobs();
            let outcome = self.resources.queue.poll();
            let has_outcome = outcome.is_some();
            if let Some(outcome) = outcome {
                self.dispatch(outcome)?;
            }
            if self.reporter.shared.is_stopped.load(Ordering::Acquire) {
                return self.drain();
            }
            if has_worked || has_outcome {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle < SPIN_POLLS {
                self.resources.queue.pause();
            } else {
                self.sleep()?;
            }
        }
    }

    /// The owner has gone: what it gave before is still done, if that does not take long.
    fn drain(&mut self) -> Result<()> {
        let mut idle = 0;
        for _ in 0..MAX_DRAIN_POLLS {
            let has_worked = self.do_jobs();
            let outcome = self.resources.queue.poll();
            let is_done = self.send_queues.values().all(LaneSendQueue::is_idle);
            idle = if has_worked || outcome.is_some() { 0 } else { idle + 1 };
            if let Some(outcome) = outcome {
                self.dispatch(outcome)?;
            } else if is_done && idle > MIN_DRAIN_POLLS {
                return Ok(());
            } else if idle > MIN_DRAIN_POLLS {
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        Ok(())
    }

    /// Does all jobs that there are, and writes what there is room for. True if anything was done.
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
                self.send_queues
                    .insert(chunk_poster.instance().number(), LaneSendQueue::new(*chunk_poster));
            }
            LaneJob::Write { instance, chunk, payload } => {
                let number = instance.number();
                if let Some(send_queue) = self.send_queues.get_mut(&number)
                    && send_queue.push(chunk, payload)
                {
                    self.writing.push(number);
                }
            }
            LaneJob::Stop(instance) => {
                if let Some(send_queue) = self.send_queues.get_mut(&instance.number()) {
                    send_queue.stop();
                }
            }
            LaneJob::Close(instance) => {
                if let Some(send_queue) = self.send_queues.get_mut(&instance.number()) {
                    send_queue.close();
                    self.forget(instance.number());
                }
            }
        }
    }

    /// Writes what there is room for. No ring holds up another one.
    fn write(&mut self) -> bool {
        let (mut has_written, mut at) = (false, 0);
        while let Some(number) = self.writing.get(at).copied() {
            let Some(send_queue) = self.send_queues.get_mut(&number) else {
                self.writing.swap_remove(at);
                continue;
            };
            let LaneResources { endpoint, queue, .. } = &mut self.resources;
            let (lane, reporter) = (self.number, &self.reporter);
            has_written |= send_queue.write(endpoint, queue, lane, |event| reporter.report(event));
            if send_queue.has_waiting() {
                at += 1;
            } else {
                self.writing.swap_remove(at);
                self.forget(number);
            }
        }
        has_written
    }

    /// Forgets a ring that is closed, once nothing of it is on its way.
    fn forget(&mut self, number: u32) {
        if self.send_queues.get(&number).is_some_and(LaneSendQueue::is_stopped) {
            self.send_queues.remove(&number);
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
            && let Some(send_queue) = self.send_queues.get_mut(&instance.number())
        {
            if let Some(event) = send_queue.completed(self.number, slot) {
                self.reporter.report(event);
            }
            self.forget(instance.number());
        }
        Ok(())
    }

    #[cold]
    fn dispatch_failure(&mut self, failure: Failure) -> Result<()> {
        let kind = failure.error.kind();
        if let Some((instance, slot)) =
            parse_write_token(failure.token).filter(|_| failure.operation.is_some())
        {
            if let Some(send_queue) = self.send_queues.get_mut(&instance.number()) {
                let event = send_queue.failed(self.number, slot, failure.error);
                self.reporter.report(event);
                self.forget(instance.number());
            }
        } else if PostedReceives::owns_token(failure.token) && kind == ErrorKind::Truncated {
            // Somebody sent a message that is too long for a notice.
            self.resources.posted_receives.receive_failed(failure.token);
        } else if failure.operation.is_some()
            || !matches!(
                kind,
                ErrorKind::ConnectionLost | ErrorKind::ConnectionRefused | ErrorKind::Cancelled
            )
        {
            return Err(failure.error);
        }
        // Else something was lost that nobody can name: nothing that matters is injected here.
        Ok(())
    }

    fn sleep(&mut self) -> Result<()> {
        let shared = &self.reporter.shared;
        shared.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Who gave a job before that did not see it, and woke nobody.
        self.next = self.jobs.try_recv().ok();
        let is_stopped = shared.is_stopped.load(Ordering::Acquire);
        let is_idle = self.next.is_none() && self.writing.is_empty() && !is_stopped;
        // Something that there is no room for: nothing tells when there is.
        let longest = if is_idle { MAX_SLEEP } else { SHORT_SLEEP };
        let outcome = self.resources.queue.wait_or_wake(longest);
        self.reporter.shared.is_asleep.store(false, Ordering::Relaxed);
        outcome.map_or(Ok(()), |outcome| self.dispatch(outcome))
    }
}

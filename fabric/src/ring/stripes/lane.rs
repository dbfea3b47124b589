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

use super::super::board::{Board, Heard};
use super::super::memory::RingMemory;
use super::super::outlet::{Outlet, Title, named};
use super::super::writer::Chunk;
use super::share::Share;
use crate::{
    CompletionQueue, Endpoint, Error, ErrorKind, Failure, MemoryRegion, Outcome, Result, Waker,
};

/// Jobs that may wait for a lane.
const JOBS: usize = 64;
/// Looks that find nothing before a lane goes to sleep: it is woken for whatever there is to do,
/// and others want the core.
const LOOKS: u32 = 200;
/// Longest sleep of a lane that has nothing to do, and of one that waits for room.
const SLEEP: Duration = Duration::from_millis(50);
const NAP: Duration = Duration::from_micros(100);
/// How long a lane waits before it looks again whether its owner listens.
const PATIENCE: Duration = Duration::from_micros(100);

/// Turns that a lane makes at most once its owner is gone, and how many it makes in any case:
/// what was injected leaves with them.
const LINGER: u32 = 5000;
const LAST_LOOKS: u32 = 64;

/// What a lane is told to do.
#[derive(Debug)]
pub(super) enum Job {
    /// Chunks of a ring will come.
    Open(Box<Outlet>),
    /// Write a chunk of a ring, with payload from an offset of a region.
    Write { title: Title, chunk: Chunk, payload: Option<(MemoryRegion, usize)> },
    /// No more chunks of a ring will come: those that came are still written, if that does not take
    /// long.
    Stop(Title),
    /// The same, and nobody wants to hear of them.
    Close(Title),
}

/// What a lane tells.
#[derive(Debug)]
pub(in super::super) enum Event {
    /// A notice came.
    Heard(Heard),
    /// A chunk with so many bytes of payload is done, and with it all that the lane was given of
    /// its ring up to a position.
    Done { lane: usize, title: Title, bytes: u64, left_to: u64 },
    /// A chunk was not written, and no later one of its ring will be. What the lane was given up to
    /// that position is not read any more.
    Undone { lane: usize, title: Title, left_to: u64, error: Error },
    /// The lane is of no use any more.
    Failed(Error),
}

/// Memory that peers write through lanes: it stays for as long as the thread of one of them does,
/// even if that has to be left behind.
pub(super) type Kept = Arc<Mutex<Vec<Arc<RingMemory>>>>;

/// What a lane's thread owns. In this order: memory that peers write goes after the endpoint.
pub(super) struct Parts {
    pub(super) endpoint: Endpoint,
    pub(super) queue: CompletionQueue,
    pub(super) board: Board,
    #[allow(dead_code)] // held, never read
    pub(super) credit_memory: MemoryRegion,
    #[allow(dead_code)] // held, never read
    pub(super) kept: Kept,
}

/// Who a lane tells: wakes it, if it sleeps in a queue.
#[derive(Debug)]
pub(super) struct Owner {
    is_asleep: AtomicBool,
    waker: Waker,
}

impl Owner {
    pub(super) fn new(waker: Waker) -> Self {
        Self { is_asleep: AtomicBool::new(false), waker }
    }

    /// Says that it is about to sleep, and looks once more at what it was told after this; or that
    /// it does not any more.
    pub(super) fn sleeps(&self, is_asleep: bool) {
        self.is_asleep.store(is_asleep, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// After it was told something.
    fn wake(&self) {
        // Either this sees that it sleeps, or it sees what it was told before it does.
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.waker.nudge();
        }
    }
}

/// How a lane tells what happened.
#[derive(Debug, Clone)]
pub(super) struct Ear {
    pub(super) events: SyncSender<Event>,
    pub(super) owner: Arc<Owner>,
}

/// What a lane's owner has of it.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: Option<SyncSender<Job>>,
    waker: Waker,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    is_asleep: AtomicBool,
    /// The owner is gone, or going.
    is_over: AtomicBool,
}

impl Lane {
    /// Starts a lane's thread.
    pub(super) fn start(number: usize, parts: Parts, ear: Ear) -> Result<Self> {
        let (sender, jobs) = sync_channel(JOBS);
        let shared = Arc::new(Shared::default());
        let waker = parts.queue.waker();
        let worker = Worker {
            number,
            parts,
            shares: HashMap::new(),
            writing: Vec::new(),
            jobs,
            teller: Teller { ear, shared: Arc::clone(&shared) },
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
    pub(super) fn give(&self, job: Job) -> std::result::Result<(), Job> {
        let Some(jobs) = &self.jobs else { return Err(job) };
        match jobs.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => return Err(job),
        }
        // Either the lane sees the job before it sleeps, or it is seen here to sleep.
        fence(Ordering::SeqCst);
        if self.shared.is_asleep.load(Ordering::Relaxed) {
            self.waker.nudge();
        }
        Ok(())
    }

    /// Lets the thread end soon, without waiting for it: so that several end at the same time.
    pub(super) fn end(&self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.waker.nudge();
    }

    /// Did the thread end?
    pub(super) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the thread, which may hang in the provider, if the peer died at the wrong moment: then
    /// it stays behind, with what it owns, and this is false. Else it ends within a sleep.
    pub(super) fn finish(&mut self) -> bool {
        self.jobs = None;
        self.end();
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
        if self.waker.is_parents() {
            // A forked child: it does not have the thread.
            std::mem::forget((self.jobs.take(), self.thread.take()));
            return;
        }
        self.finish();
    }
}

struct Worker {
    number: usize,
    parts: Parts,
    /// What is written, by the numbers of titles.
    shares: HashMap<u32, Share>,
    /// Those that have something to be written.
    writing: Vec<u32>,
    jobs: Receiver<Job>,
    teller: Teller,
    /// A job that was taken just before it would have slept.
    next: Option<Job>,
}

/// The thread's way to its owner.
struct Teller {
    ear: Ear,
    shared: Arc<Shared>,
}

impl Teller {
    /// To an owner that listens, or is gone.
    fn tell(&self, event: Event) {
        let mut event = event;
        loop {
            let told = self.ear.events.try_send(event);
            self.ear.owner.wake();
            match told {
                Ok(()) | Err(TrySendError::Disconnected(_)) => return,
                Err(TrySendError::Full(back)) => event = back,
            }
            if self.shared.is_over.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(PATIENCE);
        }
    }
}

impl Worker {
    fn run(mut self) {
        if let Err(error) = self.work() {
            self.teller.tell(Event::Failed(error));
        }
    }

    fn work(&mut self) -> Result<()> {
        let mut idle = 0;
        loop {
            let Parts { endpoint, queue, board, .. } = &mut self.parts;
            board.refill(endpoint, queue)?;
            let has_worked = self.do_jobs();
            let outcome = self.parts.queue.poll();
            let has_heard = outcome.is_some();
            if let Some(outcome) = outcome {
                self.sort(outcome)?;
            }
            if self.teller.shared.is_over.load(Ordering::Acquire) {
                return self.linger();
            }
            if has_worked || has_heard {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle < LOOKS {
                self.parts.queue.pause();
            } else {
                self.sleep()?;
            }
        }
    }

    /// The owner has gone: what it gave before is still done, if that does not take long.
    fn linger(&mut self) -> Result<()> {
        let mut idle = 0;
        for _ in 0..LINGER {
            let has_worked = self.do_jobs();
            let outcome = self.parts.queue.poll();
            let is_done = self.shares.values().all(Share::is_silent);
            idle = if has_worked || outcome.is_some() { 0 } else { idle + 1 };
            if let Some(outcome) = outcome {
                self.sort(outcome)?;
            } else if is_done && idle > LAST_LOOKS {
                return Ok(());
            } else if idle > LAST_LOOKS {
                std::thread::sleep(PATIENCE);
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

    fn begin(&mut self, job: Job) {
        match job {
            Job::Open(outlet) => {
                self.shares.insert(outlet.title().number(), Share::new(*outlet));
            }
            Job::Write { title, chunk, payload } => {
                let number = title.number();
                if let Some(share) = self.shares.get_mut(&number)
                    && share.put(chunk, payload)
                {
                    self.writing.push(number);
                }
            }
            Job::Stop(title) => {
                if let Some(share) = self.shares.get_mut(&title.number()) {
                    share.stop();
                }
            }
            Job::Close(title) => {
                if let Some(share) = self.shares.get_mut(&title.number()) {
                    share.close();
                    self.forget(title.number());
                }
            }
        }
    }

    /// Writes what there is room for. No ring holds up another one.
    fn write(&mut self) -> bool {
        let (mut has_written, mut at) = (false, 0);
        while let Some(number) = self.writing.get(at).copied() {
            let Some(share) = self.shares.get_mut(&number) else {
                self.writing.swap_remove(at);
                continue;
            };
            let Parts { endpoint, queue, .. } = &mut self.parts;
            let (lane, teller) = (self.number, &self.teller);
            has_written |= share.write(endpoint, queue, lane, |event| teller.tell(event));
            if share.has_waiting() {
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
        if self.shares.get(&number).is_some_and(Share::is_over) {
            self.shares.remove(&number);
        }
    }

    fn sort(&mut self, outcome: Outcome) -> Result<()> {
        let completion = match outcome {
            Ok(completion) => completion,
            Err(failure) => return self.sort_failure(failure),
        };
        if let Some(heard) = self.parts.board.hear(&completion)? {
            self.teller.tell(Event::Heard(heard));
        } else if let Some((title, slot)) = named(completion.token)
            && let Some(share) = self.shares.get_mut(&title.number())
        {
            if let Some(event) = share.completed(self.number, slot) {
                self.teller.tell(event);
            }
            self.forget(title.number());
        }
        Ok(())
    }

    #[cold]
    fn sort_failure(&mut self, failure: Failure) -> Result<()> {
        let kind = failure.error.kind();
        if let Some((title, slot)) = named(failure.token).filter(|_| failure.operation.is_some()) {
            if let Some(share) = self.shares.get_mut(&title.number()) {
                let event = share.failed(self.number, slot, failure.error);
                self.teller.tell(event);
                self.forget(title.number());
            }
        } else if Board::is_ours(failure.token) && kind == ErrorKind::Truncated {
            // Somebody sent a message that is too long for a notice.
            self.parts.board.missed(failure.token);
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
        let shared = &self.teller.shared;
        shared.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Who gave a job before that did not see it, and woke nobody.
        self.next = self.jobs.try_recv().ok();
        let is_over = shared.is_over.load(Ordering::Acquire);
        let is_idle = self.next.is_none() && self.writing.is_empty() && !is_over;
        // Something that there is no room for: nothing tells when there is.
        let longest = if is_idle { SLEEP } else { NAP };
        let outcome = self.parts.queue.wait_or_wake(longest);
        self.teller.shared.is_asleep.store(false, Ordering::Relaxed);
        outcome.map_or(Ok(()), |outcome| self.sort(outcome))
    }
}

//! A lane: an endpoint with its queue, and the thread that drives them.
//!
//! The thread takes jobs from one bounded channel and tells what happened in another. When
//! there is nothing to do for a while it sleeps in the queue, and who gives it a job wakes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::super::board::{Board, Heard};
use super::super::memory::RingMemory;
use super::super::outlet::{Outlet, Posted, Title, named};
use super::super::speaker::Speaker;
use super::super::writer::Chunk;
use crate::{CompletionQueue, Endpoint, Error, ErrorKind, MemoryRegion, Outcome, Result, Waker};

/// Jobs that may wait for a lane.
pub(super) const JOBS: usize = 64;
/// Looks that find nothing before a lane goes to sleep.
const LOOKS: u32 = 2000;
/// Longest sleep of a lane that can be woken, and of one that cannot.
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
    /// Write a chunk, with payload from an offset of a region.
    Write { chunk: Chunk, payload: Option<(MemoryRegion, usize)> },
    /// Give a notice to the peer.
    Say(u32),
    /// Give the last notice to the peer, and tell when it came.
    SayLast(u32),
}

/// What a lane tells.
#[derive(Debug)]
pub(super) enum Event {
    /// A notice came.
    Heard(Heard),
    /// A chunk with so many bytes of payload is done.
    Done { lane: usize, bytes: u64 },
    /// The last notice came, or nobody will know.
    Said,
    /// The lane is of no use any more.
    Failed(Error),
}

/// What a lane's thread owns. In this order: memory that peers write goes after the endpoint.
pub(super) struct Parts {
    pub(super) endpoint: Endpoint,
    pub(super) queue: CompletionQueue,
    pub(super) board: Board,
    /// For chunks, at a writer.
    pub(super) outlet: Option<Outlet>,
    /// For notices, at a reader.
    pub(super) speaker: Option<Speaker>,
    /// What peers write to through this endpoint: it stays, even if the thread has to be left
    /// behind.
    #[allow(dead_code)] // held, never read
    pub(super) kept: (MemoryRegion, Option<Arc<RingMemory>>),
}

/// What a lane's owner has of it.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: Option<SyncSender<Job>>,
    waker: Waker,
    can_wake: bool,
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
    pub(super) fn start(number: usize, parts: Parts, events: SyncSender<Event>) -> Result<Self> {
        let (sender, jobs) = sync_channel(JOBS);
        let shared = Arc::new(Shared::default());
        let waker = parts.queue.waker();
        // Asked once: not all queues can be woken.
        let can_wake = waker.wake().is_ok();
        let worker = Worker {
            number,
            parts,
            jobs,
            events,
            shared: Arc::clone(&shared),
            longest: if can_wake { SLEEP } else { NAP },
            waiting: None,
        };
        let thread = std::thread::Builder::new()
            .name(format!("ring lane {number}"))
            .spawn(move || worker.run())
            .map_err(|error| {
                let detail = format!("no thread for a lane: {error}");
                Error::new(ErrorKind::ResourceExhausted, "opening a ring", detail)
            })?;
        Ok(Self { jobs: Some(sender), waker, can_wake, shared, thread: Some(thread) })
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
        // One that cannot be woken looks soon.
        if self.can_wake && self.shared.is_asleep.load(Ordering::Relaxed) {
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
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.jobs = None;
        self.end();
        // It may hang in the provider, if the peer died at the wrong moment: then it stays behind,
        // with what it owns. Else it ends within a sleep.
        let Some(thread) = self.thread.take() else { return };
        for _ in 0..1000 {
            if thread.is_finished() {
                let _ = thread.join();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Worker {
    number: usize,
    parts: Parts,
    jobs: Receiver<Job>,
    events: SyncSender<Event>,
    shared: Arc<Shared>,
    longest: Duration,
    /// A job that there was no room for.
    waiting: Option<Job>,
}

impl Worker {
    fn run(mut self) {
        if let Err(error) = self.work() {
            self.tell(Event::Failed(error));
        }
    }

    fn work(&mut self) -> Result<()> {
        let mut idle = 0;
        loop {
            let Parts { endpoint, queue, board, .. } = &mut self.parts;
            board.refill(endpoint, queue)?;
            let has_worked = self.do_jobs()?;
            let outcome = self.parts.queue.poll();
            let has_heard = outcome.is_some();
            if let Some(outcome) = outcome {
                self.sort(outcome)?;
            }
            if self.shared.is_over.load(Ordering::Acquire) {
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
            let has_worked = self.do_jobs()?;
            let outcome = self.parts.queue.poll();
            let is_done = self.waiting.is_none()
                && self.parts.outlet.as_ref().is_none_or(|outlet| outlet.unfinished() == 0);
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

    /// Does jobs until there are none, or there is no room.
    fn do_jobs(&mut self) -> Result<bool> {
        let mut has_worked = false;
        loop {
            let job = match self.waiting.take() {
                Some(job) => job,
                None => match self.jobs.try_recv() {
                    Ok(job) => job,
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                },
            };
            if !self.attempt(&job)? {
                self.waiting = Some(job);
                break;
            }
            has_worked = true;
        }
        if let Parts { endpoint, queue, outlet: Some(outlet), .. } = &mut self.parts {
            outlet.settle(endpoint, queue)?;
        }
        Ok(has_worked)
    }

    /// False if there is no room now.
    fn attempt(&mut self, job: &Job) -> Result<bool> {
        let Parts { endpoint, queue, outlet, speaker, .. } = &mut self.parts;
        match (job, outlet, speaker) {
            (Job::Write { chunk, payload }, Some(outlet), _) => {
                let payload = payload.as_ref().map(|(region, from)| (region, *from));
                let posted = outlet.post(endpoint, queue, chunk, payload)?;
                if posted == Posted::Copied {
                    let bytes = chunk.header.payload.into();
                    self.tell(Event::Done { lane: self.number, bytes });
                }
                Ok(posted != Posted::No)
            }
            (Job::Say(bits), Some(outlet), _) => outlet.speaker().say(endpoint, queue, *bits),
            (Job::SayLast(bits), Some(outlet), _) => {
                let number = outlet.title().number();
                let said = outlet.speaker().say_last(endpoint, queue, *bits, number)?;
                if said.is_none() {
                    self.tell(Event::Said);
                }
                Ok(said != Some(false))
            }
            (Job::Say(bits), None, Some(speaker)) => speaker.say(endpoint, queue, *bits),
            // Not given to such a lane.
            _ => Ok(true),
        }
    }

    fn sort(&mut self, outcome: Outcome) -> Result<()> {
        let Parts { board, outlet, .. } = &mut self.parts;
        let completion = match outcome {
            Ok(completion) => completion,
            // Somebody sent a message that is too long for a notice.
            Err(failure)
                if Board::is_ours(failure.token)
                    && failure.error.kind() == ErrorKind::Truncated =>
            {
                board.missed(failure.token);
                return Ok(());
            }
            Err(failure) => return Err(failure.error),
        };
        if let Some(heard) = board.hear(&completion)? {
            self.tell(Event::Heard(heard));
        } else if Title::of_last(completion.token).is_some() {
            self.tell(Event::Said);
        } else if let Some((_, slot)) = named(completion.token)
            && let Some(bytes) = outlet.as_mut().and_then(|outlet| outlet.completed(slot))
        {
            self.tell(Event::Done { lane: self.number, bytes: bytes.into() });
        }
        Ok(())
    }

    /// To an owner that listens, or is gone.
    fn tell(&self, event: Event) {
        let mut event = event;
        loop {
            match self.events.try_send(event) {
                Ok(()) | Err(TrySendError::Disconnected(_)) => return,
                Err(TrySendError::Full(back)) => event = back,
            }
            if self.shared.is_over.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(PATIENCE);
        }
    }

    fn sleep(&mut self) -> Result<()> {
        self.shared.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Who gave a job before that did not see it, and woke nobody.
        if self.waiting.is_none() {
            self.waiting = self.jobs.try_recv().ok();
        }
        let is_over = self.shared.is_over.load(Ordering::Acquire);
        let outcome = match self.waiting {
            None if !is_over => self.parts.queue.wait_or_wake(self.longest),
            // A job that there is no room for: nothing tells when there is.
            _ => self.parts.queue.wait_or_wake(NAP),
        };
        self.shared.is_asleep.store(false, Ordering::Relaxed);
        outcome.map_or(Ok(()), |outcome| self.sort(outcome))
    }
}

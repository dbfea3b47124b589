//! The reading side of a ring over several lanes.

use std::sync::PoisonError;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use super::super::immediate::{Immediate, Notice};
use super::super::memory::{RingMemory, Site, View};
use super::super::notify::Notify;
use super::super::receiver::{ReceiverStatistics, RingOptions, RingReceiver, shape_of};
use super::super::shape::MOST_CHUNKS;
use super::super::speaker::Speaker;
use super::super::terms::{RingAnswer, RingOffer};
use super::lane::{Ear, Event, Job, Kept, Lane, Parts};
use super::sender::late;
use super::{LOOKS, MOST_AT_ONCE, Opened, Stripes};
use crate::waiting::Deadline;
use crate::{Address, Error, ErrorKind, HostMemory, Memory, MemoryRegion, Peer, Result};

/// How long to look for an event before sleeping until there is one.
const SPIN: Duration = Duration::from_micros(20);
const NAP: Duration = Duration::from_micros(200);
const LOOK: Duration = Duration::from_millis(20);

/// A ring in this process's memory, which one peer writes by several lanes. Made by
/// [`Stripes::receiver`].
#[derive(Debug)]
pub struct StripedReceiver {
    // Before the memory that peers write.
    state: State,
    receiver: RingReceiver,
    slates: Vec<MemoryRegion>,
    /// Credit that no lane has taken.
    unsent: Option<u32>,
    broken: Option<Error>,
}

#[derive(Debug)]
enum State {
    /// The writer has not answered yet.
    Offered {
        lanes: Vec<Opened>,
        peers: Vec<Peer>,
    },
    Running {
        lanes: Vec<Lane>,
        events: Receiver<Event>,
    },
    /// Could not be started.
    Gone,
}

impl Stripes {
    /// Makes these lanes the reading side of a ring, in fresh memory; the writer's addresses
    /// are in the order of its lanes. The writer is to get its [`terms`](StripedReceiver::terms).
    ///
    /// # Errors
    /// `InvalidArgument` for another number of lanes, or a capacity that no ring has;
    /// `NotSupported` for what the provider cannot do.
    pub fn receiver(self, peers: &[Address], options: &RingOptions) -> Result<StripedReceiver> {
        let capacity = usize::try_from(options.capacity).unwrap_or(usize::MAX);
        self.receiver_over(peers, options, HostMemory::zeroed(capacity)?)
    }

    /// The same in memory that the caller made: of a device, or shared with other processes.
    ///
    /// # Errors
    /// As [`receiver`](Self::receiver); `OutOfBounds` if the memory is too small.
    pub fn receiver_over(
        self,
        peers: &[Address],
        options: &RingOptions,
        memory: impl Memory,
    ) -> Result<StripedReceiver> {
        let peers = self.insert(peers)?;
        if options.notify == Notify::Polling {
            let detail = "a ring over several lanes is told of by immediates or messages";
            return Err(Error::new(ErrorKind::NotSupported, "opening a ring", detail));
        }
        let sites: Vec<_> = self.lanes.iter().map(|lane| Site::of(&lane.endpoint)).collect();
        let shape = shape_of(&self.lanes[0].endpoint, 0, options, memory.kind())?;
        let memory = RingMemory::over(&sites, shape, memory)?;
        Ok(StripedReceiver {
            receiver: RingReceiver::with(memory, 1, options),
            slates: self.lanes.iter().map(|lane| lane.slate.clone()).collect(),
            state: State::Offered { lanes: self.lanes, peers },
            unsent: None,
            broken: None,
        })
    }
}

impl StripedReceiver {
    /// What the writer has to know.
    ///
    /// # Errors
    /// If the memory's keys cannot be had.
    pub fn terms(&self) -> Result<RingOffer> {
        self.receiver.offer(&self.slates)
    }

    /// Takes the writer's answer, and starts the lanes.
    ///
    /// # Errors
    /// What is wrong with the answer; `InvalidArgument` if there was one already.
    pub fn connect(&mut self, answer: &RingAnswer) -> Result<()> {
        let State::Offered { lanes, peers } = std::mem::replace(&mut self.state, State::Gone)
        else {
            let detail = "it is connected already";
            return Err(Error::new(ErrorKind::InvalidArgument, "connecting a ring", detail));
        };
        let form = self.receiver.notify();
        self.receiver.answered(answer)?;
        let most = MOST_CHUNKS as usize + 1024;
        let (sender, events) = sync_channel(most);
        let kept = Kept::default();
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(self.receiver.memory());
        let mut running = Vec::with_capacity(lanes.len());
        for (number, (lane, peer)) in lanes.into_iter().zip(peers).enumerate() {
            let mut board = lane.board();
            let Opened { mut endpoint, mut queue, slate, .. } = lane;
            // The answer is for the first lane: by that one credit is told.
            let speaker = match number {
                0 => Some(Speaker::new(
                    Site::of(&endpoint),
                    (form, answer.tagged),
                    peer,
                    &answer.credit,
                )?),
                _ => None,
            };
            board.expect(&endpoint, form)?;
            board.refill(&mut endpoint, &mut queue)?;
            let kept = Kept::clone(&kept);
            let parts = Parts { endpoint, queue, board, outlet: None, speaker, slate, kept };
            let ear = Ear { events: sender.clone(), owner: None };
            running.push(Lane::start(number, parts, ear, LOOKS)?);
        }
        self.state = State::Running { lanes: running, events };
        Ok(())
    }

    /// The next chunk, if it is there.
    ///
    /// # Errors
    /// Why nothing more can be read; `Closed` once the writer is done and everything is taken.
    pub fn take(&mut self) -> Result<Option<View>> {
        self.listen()?;
        if let Some(view) = self.receiver.take()? {
            return Ok(Some(view));
        }
        if self.receiver.is_over() {
            let detail = "the writer is done, and all of it was read";
            return Err(Error::new(ErrorKind::Closed, "reading a ring", detail));
        }
        match &self.broken {
            Some(broken) => Err(broken.clone()),
            None => Ok(None),
        }
    }

    /// Waits for the next chunk.
    ///
    /// # Errors
    /// As [`take`](Self::take); `DeadlineExceeded`, with how much there is of the message.
    pub fn receive(&mut self, timeout: Duration) -> Result<View> {
        let deadline = Deadline::after(timeout);
        let spin_end = Instant::now() + SPIN;
        loop {
            if let Some(view) = self.take()? {
                self.tell(false);
                return Ok(view);
            }
            if Instant::now() < spin_end {
                self.tell(false);
                std::hint::spin_loop();
                continue;
            }
            self.tell(true);
            self.rest(deadline.left());
            if deadline.has_passed() {
                let reader = self.receiver.reader();
                let (whole, bytes) = (reader.whole(), reader.received());
                let detail = format!("{whole} messages came whole, and {bytes} bytes of the next");
                return Err(late("reading a ring", timeout, &detail));
            }
        }
    }

    /// Waits until something may have changed, or so long.
    pub fn rest(&mut self, longest: Duration) {
        let State::Running { lanes, events } = &self.state else { return };
        // Nobody tells of a view that is dropped by another thread.
        let has_views = !self.receiver.reader().unreleased().is_empty();
        match events.recv_timeout(longest.min(if has_views { NAP } else { LOOK })) {
            Ok(event) => self.hear(event),
            Err(RecvTimeoutError::Timeout) if !lanes.iter().any(Lane::is_over) => {}
            Err(_) => {
                let detail = "a lane's thread has ended";
                let error = Error::new(ErrorKind::Closed, "reading a ring", detail);
                self.broken.get_or_insert(error);
            }
        }
    }

    /// Tells the writer what was released, if it is time: see [`Port::tell`](super::super::Port::tell).
    /// True if something was told.
    pub fn tell(&mut self, is_quiet: bool) -> bool {
        if let Some(bits) = self.receiver.due(is_quiet) {
            // A later one tells all that an earlier one would have.
            self.unsent = Some(bits);
        }
        let Some(bits) = self.unsent else { return false };
        let State::Running { lanes, .. } = &self.state else { return false };
        let is_told = lanes[0].give(Job::Say(bits)).is_ok();
        if is_told {
            self.unsent = None;
            self.receiver.count_credit();
        }
        is_told
    }

    /// Takes note of what the lanes told.
    fn listen(&mut self) -> Result<()> {
        // No more at a time: peers may have something to say without end.
        for _ in 0..MOST_AT_ONCE {
            let State::Running { events, .. } = &self.state else {
                let detail = "the writer has not answered yet";
                return Err(Error::new(ErrorKind::InvalidArgument, "reading a ring", detail));
            };
            let Ok(event) = events.try_recv() else { break };
            self.hear(event);
        }
        Ok(())
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Heard(heard) => {
                let immediate = Immediate::decode(heard.bits);
                if matches!(immediate.notice, Notice::Chunk { .. } | Notice::Done { .. })
                    && let Err(error) = self.receiver.hear(&immediate, heard.length)
                {
                    self.receiver.fail(error);
                }
            }
            Event::Lost(error) | Event::Failed(error) => {
                self.broken.get_or_insert(error);
            }
            Event::Done { .. } | Event::Undone { .. } | Event::Said => {}
        }
    }

    /// Tells the writer that nobody reads any more, and waits for it to have nothing on its way.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn close(mut self, timeout: Duration) -> Result<ReceiverStatistics> {
        let deadline = Deadline::after(timeout);
        let mut bits = Some(self.receiver.reader().gone());
        loop {
            match self.take() {
                Ok(Some(view)) => drop(view),
                Ok(None) => {}
                Err(_) => return Ok(self.receiver.statistics()),
            }
            if let (Some(said), State::Running { lanes, .. }) = (bits, &self.state) {
                bits = lanes[0].give(Job::Say(said)).err().map(|_| said);
            }
            if deadline.has_passed() {
                let detail = "the writer has not said that nothing more comes";
                return Err(late("closing a ring", timeout, detail));
            }
            self.rest(deadline.left());
        }
    }

    /// The reading side behind it.
    #[must_use]
    pub fn receiver(&self) -> &RingReceiver {
        &self.receiver
    }

    /// What it did so far.
    #[must_use]
    pub fn statistics(&self) -> ReceiverStatistics {
        self.receiver.statistics()
    }
}

impl Drop for StripedReceiver {
    fn drop(&mut self) {
        if let State::Running { lanes, .. } = &self.state {
            lanes.iter().for_each(Lane::end);
        }
    }
}

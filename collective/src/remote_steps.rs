//! Steps of an operation between machines: each rank of a set gives bytes to the others.
//!
//! In a step each rank that gives sends one message to each peer that gets, which takes it. A rank may publish
//! some steps before it reads the first of them, so that bytes of one step travel while those of another one
//! are read.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ipc::Announcement;

use crate::block_lengths::WordExchange;
use crate::members::{Failure, Members, Outcome, REMOTE_TIME};
use crate::remote_ranks::{HEADER, OutboxSlot, RemoteRanks, StepHeader};

/// Steps that a rank publishes before it has read the first of them.
const MAX_UNREAD: u32 = 3;
/// The longest wait without a look whether another rank has failed, which nothing may tell this one.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How long a rank polls before it lets its thread sleep: about what a message takes over a network.
const POLL_TIME: Duration = Duration::from_micros(50);
/// Attempts to make progress between two looks at the time.
const POLLS: u32 = 16;

/// The bytes that a rank gives to the others in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// Number of bytes that are the same for all.
    All(usize),
    /// Number of bytes for each, which differ.
    Each(usize),
}

impl Given {
    fn bytes(self) -> usize {
        match self {
            Self::All(bytes) | Self::Each(bytes) => bytes,
        }
    }

    /// Where the message for the rank at a place begins.
    fn offset(self, place: usize) -> usize {
        match self {
            Self::All(_) => 0,
            Self::Each(bytes) => place * (HEADER + bytes.next_multiple_of(HEADER)),
        }
    }
}

/// Ranks that exchange steps.
#[derive(Debug)]
pub(crate) struct RemoteSet {
    /// The ranks, ascending.
    ranks: Vec<u32>,
    /// This rank's place among them.
    own: usize,
    /// The places of those with which it exchanges messages.
    peers: Vec<usize>,
}

impl RemoteSet {
    /// Of these ranks. Messages go to and from those that are peers.
    pub(crate) fn new(ranks: Vec<u32>, own_rank: u32, is_peer: impl Fn(u32) -> bool) -> Self {
        let own = ranks.iter().position(|rank| *rank == own_rank).unwrap_or(0);
        let others = (own + 1..ranks.len()).chain(0..own);
        let peers = others.filter(|place| is_peer(ranks[*place])).collect();
        Self { ranks, own, peers }
    }
}

/// What a rank calls between machines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteCall {
    /// The number of the operation.
    number: u64,
    announcement: Announcement,
    /// A digest of all calls so far: ranks that differ called different operations.
    signature: u64,
    /// A word of which all ranks get the greatest.
    carried: u64,
    /// The number of the part of the operation.
    part: u32,
}

impl RemoteCall {
    pub(crate) fn new(
        number: u64,
        announcement: Announcement,
        signature: u64,
        carried: u64,
    ) -> Self {
        Self { number, announcement, signature, carried, part: 0 }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The greatest carried word so far.
    pub(crate) fn carried(&self) -> u64 {
        self.carried
    }

    pub(crate) fn carry(&mut self, greatest: u64) {
        self.carried = greatest;
    }

    /// Ends a part between machines.
    pub(crate) fn end_part(&mut self) {
        self.part += 1;
    }
}

/// An operation of a rank between machines: its steps.
#[derive(Debug)]
pub(crate) struct RemoteOperation<'a> {
    set: &'a RemoteSet,
    remote: &'a mut RemoteRanks,
    members: &'a Members,
    call: RemoteCall,
    /// The greatest carried word so far.
    carried: u64,
    /// Steps that this rank has published, but not read.
    unread: VecDeque<(OutboxSlot, Given)>,
    /// The step that this rank fills.
    filled: Option<(OutboxSlot, Given)>,
    /// How many steps this rank has published, and read.
    published: u32,
    read: u32,
    begun: Option<Instant>,
    deadline: Instant,
}

impl<'a> RemoteOperation<'a> {
    pub(crate) fn new(
        set: &'a RemoteSet,
        remote: &'a mut RemoteRanks,
        members: &'a Members,
        call: RemoteCall,
        deadline: Instant,
    ) -> Self {
        Self {
            set,
            remote,
            members,
            call,
            carried: call.carried,
            unread: VecDeque::new(),
            filled: None,
            published: 0,
            read: 0,
            begun: None,
            deadline,
        }
    }

    /// This rank's place among the ranks.
    pub(crate) fn own(&self) -> usize {
        self.set.own
    }

    pub(crate) fn count(&self) -> usize {
        self.set.ranks.len()
    }

    /// The places of the peers, from the next one on: not all send to the same one at the same time.
    pub(crate) fn peers(&self) -> &'a [usize] {
        &self.set.peers
    }

    /// The most bytes that a rank gives to another one in a step.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.remote.payload_bytes()
    }

    /// When the first step of all ranks had come.
    pub(crate) fn begun(&self) -> Option<Instant> {
        self.begun
    }

    /// The greatest carried word of the ranks whose first step this one has read.
    pub(crate) fn carried(&self) -> u64 {
        self.carried
    }

    /// Returns whether this rank may publish a step before it has read more.
    pub(crate) fn may_publish(&self) -> bool {
        self.published - self.read < MAX_UNREAD
    }

    /// Begins a step in which this rank gives so many bytes.
    pub(crate) fn begin(&mut self, given: Given) -> Outcome<()> {
        assert!(given.bytes() <= self.payload_bytes(), "a step has at most the bytes of a message");
        let bytes = given.bytes();
        let mut free = self.remote.free_slot(bytes);
        while let Err(rank) = free {
            self.wait_for(rank, |on| {
                free = on.remote.free_slot(bytes);
                free.is_ok()
            })?;
        }
        let Ok(slot) = free else { return Ok(()) };
        self.filled = Some((slot, given));
        Ok(())
    }

    /// Where this rank writes what it gives to the rank at a place.
    pub(crate) fn target(&self, place: usize) -> *mut u8 {
        let at = |(slot, given): (OutboxSlot, Given)| slot.payload(given.offset(place));
        self.filled.map_or(std::ptr::null_mut(), at)
    }

    fn step(&self, number: u32) -> u64 {
        u64::from(self.call.part) << 32 | u64::from(number)
    }

    /// Publishes the step that this rank has filled, for the ranks at these places: none if it gives nothing.
    pub(crate) fn publish(&mut self, to: &[usize]) -> Outcome<()> {
        let step = self.step(self.published);
        self.published += 1;
        let Some((slot, given)) = self.filled.take() else { return Ok(()) };
        let RemoteCall { number, announcement, signature, carried, .. } = &self.call;
        let header = StepHeader::new(*signature, announcement, *carried, given.bytes());
        let header = header.at(*number, step);
        for place in to {
            let rank = self.set.ranks[*place];
            let begun = self.remote.begin(rank, slot, given.offset(*place), &header);
            let mut sending = match begun {
                Ok(Some(sending)) => sending,
                Ok(None) => continue,
                Err(error) => return Err(self.ring_failed(rank, &error)),
            };
            let mut failed = None;
            let push = |on: &mut Self| match on.remote.push(&mut sending) {
                Ok(is_written) => is_written,
                Err(error) => {
                    failed = Some(error);
                    true
                }
            };
            self.wait_for(rank, push)?;
            if let Some(error) = failed {
                return Err(self.ring_failed(rank, &error));
            }
        }
        self.unread.push_back((slot, given));
        Ok(())
    }

    fn ring_failed(&mut self, rank: u32, error: &dyn std::fmt::Display) -> Failure {
        self.remote.set_unreachable(rank, error);
        match self.wait_for(rank, |_| false) {
            Err(failure) => failure,
            Ok(()) => Failure::Unreachable { rank, waiting: self.remote.own() },
        }
    }

    /// The bytes of the rank at a place in the step that is read, when so many have come. Valid until the
    /// step ends.
    pub(crate) fn source(&mut self, place: usize, bytes: usize) -> Outcome<*const u8> {
        let header = self.header(place)?;
        let rank = self.set.ranks[place];
        if header.bytes() < bytes as u64 {
            let detail = format!("{} bytes where {bytes} are expected", header.bytes());
            return Err(self.ring_failed(rank, &detail));
        }
        Ok(self.remote.payload(rank))
    }

    fn header(&mut self, place: usize) -> Outcome<StepHeader> {
        let rank = self.set.ranks[place];
        let mut found = None;
        let mut failed = None;
        self.wait_for(rank, |on| {
            match on.remote.arrived(rank) {
                Ok(header) => found = header,
                Err(error) => failed = Some(error),
            }
            found.is_some() || failed.is_some()
        })?;
        if let Some(error) = failed {
            return Err(self.ring_failed(rank, &error));
        }
        let Some(header) = found else { return Err(Failure::Ended { rank }) };
        if !header.is_of(self.call.signature, self.call.number, self.step(self.read)) {
            let calls = [self.call.announcement, header.announcement()];
            return Err(self.members.fail_with(self.mismatch_with(rank), &calls));
        }
        if self.read == 0 {
            self.carried = self.carried.max(header.carried());
        }
        Ok(header)
    }

    fn mismatch_with(&self, rank: u32) -> Failure {
        let (one, collective) = (self.remote.own(), self.call.number);
        Failure::Mismatch { one, other: rank, collective }
    }

    /// What this rank has written for itself, or for all, in the step that is read.
    pub(crate) fn own_source(&self) -> *const u8 {
        let at = |(slot, given): &(OutboxSlot, Given)| slot.payload(given.offset(self.own()));
        self.unread.front().map_or(std::ptr::null(), |step| at(step).cast_const())
    }

    /// Waits until the step of all peers has come.
    pub(crate) fn wait_for_all(&mut self) -> Outcome<()> {
        for place in self.peers() {
            self.header(*place)?;
        }
        self.begun.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Ends a step, whose bytes came from the ranks at these places.
    pub(crate) fn end(&mut self, from: &[usize]) {
        for place in from {
            self.remote.release(self.set.ranks[*place]);
        }
        self.unread.pop_front();
        self.read += 1;
    }

    /// Waits until the fabric has taken all that this rank has published: it makes no progress later, while
    /// the rank is in no call.
    pub(crate) fn finish(&mut self) -> Outcome<()> {
        for place in self.peers() {
            let rank = self.set.ranks[*place];
            self.wait_for(rank, |on| on.remote.is_sent(rank))?;
        }
        // Others may wait for that while this rank waits for one of its machine.
        self.remote.return_credit();
        Ok(())
    }

    /// A step in which all ranks wait for all.
    pub(crate) fn barrier(&mut self) -> Outcome<()> {
        self.begin(Given::All(0))?;
        self.publish(self.peers())?;
        self.wait_for_all()?;
        self.end(self.peers());
        self.finish()
    }

    /// Waits until something is ready that depends on a rank.
    fn wait_for(&mut self, rank: u32, mut is_ready: impl FnMut(&mut Self) -> bool) -> Outcome<()> {
        let mut end = None;
        loop {
            for _ in 0..POLLS {
                if is_ready(self) {
                    return Ok(());
                }
                self.progress(rank, None);
            }
            let now = Instant::now();
            if now >= *end.get_or_insert(now + POLL_TIME) {
                break;
            }
            // The other rank may have no other core.
            std::thread::yield_now();
        }
        self.members.set_waits_for_remote(true);
        let waited = self.wait_until(rank, is_ready);
        self.members.set_waits_for_remote(false);
        waited
    }

    /// Makes progress; waits for it for this time at most.
    fn progress(&mut self, rank: u32, time: Option<Duration>) {
        let progress = match time {
            None => self.remote.poll().map(|_| ()),
            Some(time) => self.remote.wait(time),
        };
        if let Err(error) = progress {
            self.remote.set_unreachable(rank, &error);
        }
    }

    fn wait_until(
        &mut self,
        rank: u32,
        mut is_ready: impl FnMut(&mut Self) -> bool,
    ) -> Outcome<()> {
        let mut check_at = Instant::now();
        loop {
            if is_ready(self) {
                return Ok(());
            }
            if Instant::now() >= check_at {
                self.check(rank)?;
                check_at = Instant::now() + LOOK_INTERVAL;
            }
            self.progress(rank, Some(LOOK_INTERVAL));
        }
    }

    /// Fails if a rank has failed, or the deadline has passed.
    fn check(&mut self, rank: u32) -> Outcome<()> {
        if let Some(failure) = self.members.failure() {
            return Err(failure);
        }
        self.members.check_processes()?;
        let failure = self.remote.failure(rank).or_else(|| self.remote.any_failure());
        if let Some((failure, calls)) = failure {
            return Err(self.members.fail_with(failure, &calls));
        }
        self.members.check_interruption()?;
        let now = Instant::now();
        if now < self.deadline {
            return Ok(());
        }
        let waiting = self.remote.own();
        if let Some(stopped) = self.members.stopped() {
            let rank = self.members.name(stopped);
            return Err(self.members.fail(Failure::Late { rank, waiting }));
        }
        if now >= self.deadline + REMOTE_TIME {
            return Err(self.members.fail(Failure::Late { rank, waiting }));
        }
        Ok(())
    }
}

impl WordExchange for RemoteOperation<'_> {
    fn ranks(&self) -> [u32; 2] {
        [self.own() as u32, self.count() as u32]
    }

    fn includes(&self, rank: u32) -> bool {
        let place = rank as usize;
        place == self.own() || self.peers().contains(&place)
    }

    fn exchange(&mut self, own: &[u64]) -> Outcome<Vec<Vec<u64>>> {
        let bytes = size_of_val(own);
        self.begin(Given::All(bytes))?;
        // SAFETY: a message has space for a word of each rank.
        unsafe { self.target(0).copy_from_nonoverlapping(own.as_ptr().cast(), bytes) };
        self.publish(self.peers())?;
        self.wait_for_all()?;
        let mut all = Vec::with_capacity(self.count());
        for place in 0..self.count() {
            let mut words = vec![0_u64; own.len()];
            if place == self.own() {
                words.copy_from_slice(own);
            } else if self.peers().contains(&place) {
                let from = self.source(place, bytes)?;
                // SAFETY: the rank has given so many bytes.
                unsafe { from.copy_to_nonoverlapping(words.as_mut_ptr().cast(), bytes) };
            }
            all.push(words);
        }
        self.end(self.peers());
        self.finish()?;
        Ok(all)
    }

    fn mismatch(&self, rank: u32) -> Failure {
        self.mismatch_with(self.set.ranks[rank as usize])
    }
}

//! Steps of an operation between machines: each rank of a set gives bytes to the others.
//!
//! All ranks of a set number the steps of all their operations alike. A rank puts its bytes of a step into
//! memory of each other rank, with a message that says how many steps it has read: so the others know when
//! they may write there again. It may publish some steps before it reads the first of them, so that
//! bytes of one step travel while those of another one are read.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gpu::Block;
use ipc::Announcement;
use transfer::{Agent, HostBuffer, Region, Rights, Route, Token};

use crate::block_lengths::WordExchange;
use crate::domain_options::JOIN;
use crate::error::{Error, ErrorKind, Result};
use crate::members::{BEYOND_TIME, CHECK_INTERVAL, Failure, Members, Outcome};
use crate::remote_ranks::{INLINE_BYTES, RemoteRanks, StepMessage};

/// Steps that a rank publishes before it has read the first of them.
const MAX_UNREAD: u64 = 3;
/// Slots for steps of a rank. A message that is `MAX_UNREAD` steps old says that its rank has read those
/// that are twice as old.
const DEPTH: u64 = 2 * MAX_UNREAD;
/// Memory for the steps that other ranks write, at most.
const MAX_MEMORY: u64 = 64 << 20;
/// Bytes of a step of a rank, at least and at most.
const SLOT_BYTES: [u64; 2] = [16 << 10, 1 << 20];

/// The bytes that a rank gives to the others in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// The same to all: so many.
    All(usize),
    /// To each other ones: so many, one after the other.
    Each(usize),
}

/// The memory for the steps of a set.
#[derive(Debug)]
pub(crate) struct StepMemory {
    /// For each rank of the set, what it writes here.
    inbox: HostBuffer,
    region: Region,
    /// What this rank gives.
    outbox: HostBuffer,
    source: Region,
    slot_bytes: u64,
}

impl StepMemory {
    /// Of a set of so many ranks.
    pub(crate) fn new(agent: &Agent, ranks: usize) -> transfer::Result<Self> {
        let ranks = ranks as u64;
        let slot_bytes = (MAX_MEMORY / DEPTH / ranks).clamp(SLOT_BYTES[0], SLOT_BYTES[1]);
        let slot_bytes = slot_bytes / 4096 * 4096;
        let inbox = HostBuffer::new(ranks * DEPTH * slot_bytes)?;
        let region = agent.register(&inbox, Rights::WRITE)?;
        let outbox = HostBuffer::new(ranks * DEPTH * slot_bytes)?;
        let source = agent.register_local(&outbox)?;
        Ok(Self { inbox, region, outbox, source, slot_bytes })
    }

    /// The inbox, for the other ranks.
    pub(crate) fn descriptor(&self) -> transfer::Result<Vec<u8>> {
        self.region.descriptor().encode()
    }

    fn at(buffer: &HostBuffer, offset: u64) -> *mut u8 {
        let address = usize::try_from(buffer.address() + offset).unwrap_or(0);
        std::ptr::with_exposed_provenance_mut(address)
    }
}

/// The steps of this rank in a set.
#[derive(Debug)]
pub(crate) struct RemoteSteps {
    set: usize,
    /// The ranks of the set, ascending.
    ranks: Vec<u32>,
    /// This rank's place among them.
    own: usize,
    memory: StepMemory,
    routes: Vec<Option<Route>>,
    /// How many steps this rank has published, and read.
    published: u64,
    read: u64,
    /// Transfers that are not known to be complete, with their steps.
    transfers: VecDeque<(u64, Token)>,
}

impl RemoteSteps {
    pub(crate) fn new(set: usize, ranks: Vec<u32>, own_rank: u32, memory: StepMemory) -> Self {
        let own = ranks.iter().position(|rank| *rank == own_rank).unwrap_or(0);
        let routes = ranks.iter().map(|_| None).collect();
        Self { set, ranks, own, memory, routes, published: 0, read: 0, transfers: VecDeque::new() }
    }

    /// Connects to the other ranks, which happens at the first operation otherwise.
    pub(crate) fn connect(&mut self, remote: &mut RemoteRanks, deadline: Instant) -> Result<()> {
        for (route, rank) in self.routes.iter_mut().zip(&self.ranks) {
            if *rank != remote.own() && route.is_none() {
                let found = remote.route(*rank, self.set, &self.memory.source, deadline);
                *route = Some(found.map_err(|error| {
                    let kind = match error.kind() {
                        transfer::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
                        transfer::ErrorKind::Closed => ErrorKind::RankFailed,
                        _ => ErrorKind::Failed,
                    };
                    Error::caused_by(JOIN, kind, error).of_ranks([*rank])
                })?);
            }
        }
        Ok(())
    }

    /// Waits until the other ranks have all that this one gave. Returns whether they have.
    pub(crate) fn flush(&mut self, remote: &mut RemoteRanks, deadline: Instant) -> bool {
        let transfers = self.transfers.drain(..).map(|(_, token)| {
            let left = deadline.saturating_duration_since(Instant::now());
            remote.agent().wait(token, left).is_ok()
        });
        transfers.fold(true, |all, complete| all & complete)
    }

    /// The steps of one operation. Ranks whose signatures differ call different operations; `call` is what
    /// this rank calls, in the operation of this number.
    pub(crate) fn operation<'a>(
        &'a mut self,
        remote: &'a mut RemoteRanks,
        members: &'a Members,
        call: RemoteCall,
        deadline: Instant,
    ) -> RemoteOperation<'a> {
        let carried = [call.carried; 2];
        let first = self.published;
        RemoteOperation {
            steps: self,
            remote,
            members,
            call,
            carried,
            first,
            begun: None,
            deadline,
        }
    }
}

/// What a rank calls between machines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteCall {
    pub(crate) number: u64,
    pub(crate) announcement: Announcement,
    /// A digest of all calls so far.
    pub(crate) signature: u64,
    /// A word of which all ranks get the greatest.
    pub(crate) carried: u64,
}

/// An operation of a rank between machines: its steps.
#[derive(Debug)]
pub(crate) struct RemoteOperation<'a> {
    steps: &'a mut RemoteSteps,
    remote: &'a mut RemoteRanks,
    members: &'a Members,
    call: RemoteCall,
    /// The word of this rank, and the greatest one so far.
    carried: [u64; 2],
    /// The first step.
    first: u64,
    begun: Option<Instant>,
    deadline: Instant,
}

impl RemoteOperation<'_> {
    /// This rank's place among the ranks.
    pub(crate) fn own(&self) -> usize {
        self.steps.own
    }

    pub(crate) fn count(&self) -> usize {
        self.steps.ranks.len()
    }

    /// The places of the other ranks, from the next one on.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, count) = (self.own(), self.count());
        (own + 1..count).chain(0..own)
    }

    /// The most bytes that a rank gives to another one in a step.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.steps.memory.slot_bytes as usize
    }

    /// When the first step of all ranks had come.
    pub(crate) fn begun(&self) -> Option<Instant> {
        self.begun
    }

    /// The greatest carried word of the ranks whose first step this one has read.
    pub(crate) fn carried(&self) -> u64 {
        self.carried[1]
    }

    /// Returns whether this rank may publish a step before it has read more.
    pub(crate) fn may_publish(&self) -> bool {
        self.steps.published - self.steps.read < MAX_UNREAD
    }

    /// Begins a step. Returns where this rank writes what it gives.
    pub(crate) fn begin(&mut self) -> Outcome<*mut u8> {
        let step = self.steps.published;
        let free = (step + 1).saturating_sub(DEPTH);
        for other in self.others() {
            let rank = self.steps.ranks[other];
            let set = self.steps.set;
            self.wait_for(rank, |remote| remote.read(rank, set) >= free)?;
        }
        while self.steps.transfers.front().is_some_and(|(of, _)| of + DEPTH <= step) {
            self.complete_transfer()?;
        }
        let memory = &self.steps.memory;
        let slot = step % DEPTH * self.count() as u64;
        Ok(StepMemory::at(&memory.outbox, slot * memory.slot_bytes))
    }

    fn complete_transfer(&mut self) -> Outcome<()> {
        let Some((_, token)) = self.steps.transfers.pop_front() else { return Ok(()) };
        let left = self.deadline.saturating_duration_since(Instant::now()) + BEYOND_TIME;
        match self.remote.agent().wait(token, left) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.transfer_failed(self.steps.ranks[self.own()], &error)),
        }
    }

    fn transfer_failed(&mut self, rank: u32, error: &transfer::Error) -> Failure {
        // The departure of the rank is the better cause.
        let end = Instant::now() + CHECK_INTERVAL;
        while self.remote.failure(rank).is_none() && Instant::now() < end {
            self.remote.wait(Duration::from_millis(1));
        }
        tracing::warn!(rank, %error, "transfer of a collective operation failed");
        let waiting = self.remote.own();
        let unreachable = (Failure::Unreachable { rank, waiting }, [[0; 4]; 2]);
        let (failure, calls) = self.remote.failure(rank).unwrap_or(unreachable);
        self.members.fail_with(failure, &calls)
    }

    /// Publishes the bytes that this rank has written.
    pub(crate) fn publish(&mut self, given: Given) -> Outcome<()> {
        let step = self.steps.published;
        let (Given::All(bytes) | Given::Each(bytes)) = given;
        assert!(bytes <= self.slot_bytes(), "a step has at most the bytes of a slot");
        let memory = &self.steps.memory;
        let (depth_slot, slot_bytes) = (step % DEPTH, memory.slot_bytes);
        let own_slot = self.own() as u64 * DEPTH + depth_slot;
        let first_from = depth_slot * self.count() as u64 * slot_bytes;
        let outbox = StepMemory::at(&memory.outbox, first_from);
        let is_inline = bytes <= INLINE_BYTES;
        for other in self.others() {
            let offset = if given == Given::All(bytes) { 0 } else { other * bytes };
            let mut inline = [0; INLINE_BYTES];
            if is_inline {
                // SAFETY: the memory has so many bytes; only this rank writes them.
                unsafe {
                    outbox.add(offset).copy_to_nonoverlapping(inline.as_mut_ptr(), bytes);
                }
            }
            let message = StepMessage {
                step,
                unread: (step - self.steps.read) as u8,
                signature: self.call.signature,
                carried: self.carried[0],
                call: [self.call.announcement[0], self.call.announcement[1]],
                is_inline,
                inline,
            };
            let block = Block {
                to: own_slot * slot_bytes,
                from: first_from + offset as u64,
                length: bytes as u64,
            };
            let blocks = if is_inline { &[][..] } else { std::slice::from_ref(&block) };
            let Some(route) = self.steps.routes[other].clone() else { continue };
            match self.remote.send(&route, blocks, self.steps.set, &message) {
                Ok(token) => self.steps.transfers.push_back((step, token)),
                Err(error) => return Err(self.transfer_failed(self.steps.ranks[other], &error)),
            }
        }
        self.steps.published += 1;
        Ok(())
    }

    /// The bytes of the rank at a place, in the step that is read, when they have come.
    pub(crate) fn source(&mut self, place: usize) -> Outcome<*const u8> {
        let (step, set) = (self.steps.read, self.steps.set);
        let rank = self.steps.ranks[place];
        self.wait_for(rank, |remote| remote.message(rank, set, step).is_some())?;
        let Some(message) = self.remote.message(rank, set, step) else {
            return Err(self.members.fail(Failure::Ended { rank }));
        };
        if step == self.first {
            if message.signature != self.call.signature {
                let calls = [self.call.announcement, message.announcement()];
                return Err(self.members.fail_with(self.mismatch_with(rank), &calls));
            }
            self.carried[1] = self.carried[1].max(message.carried);
        }
        if message.is_inline {
            return Ok(message.inline.as_ptr());
        }
        let slot = place as u64 * DEPTH + step % DEPTH;
        Ok(StepMemory::at(&self.steps.memory.inbox, slot * self.steps.memory.slot_bytes))
    }

    fn mismatch_with(&self, rank: u32) -> Failure {
        let (one, collective) = (self.remote.own(), self.call.number);
        Failure::Mismatch { one, other: rank, collective }
    }

    /// What this rank has written for itself in the step that is read.
    pub(crate) fn own_source(&self) -> *const u8 {
        let memory = &self.steps.memory;
        let slot = self.steps.read % DEPTH * self.count() as u64;
        StepMemory::at(&memory.outbox, slot * memory.slot_bytes)
    }

    /// Waits until the steps of all other ranks have come.
    pub(crate) fn wait_for_all(&mut self) -> Outcome<()> {
        for other in self.others() {
            self.source(other)?;
        }
        self.begun.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Ends the reading of a step.
    pub(crate) fn end(&mut self) {
        self.steps.read += 1;
        let (set, read) = (self.steps.set, self.steps.read);
        self.remote.drop_before(set, read);
    }

    /// A step in which all ranks wait for all.
    pub(crate) fn barrier(&mut self) -> Outcome<()> {
        self.begin()?;
        self.publish(Given::All(0))?;
        self.wait_for_all()?;
        self.end();
        Ok(())
    }

    /// Waits until a rank is ready.
    fn wait_for(&mut self, rank: u32, is_ready: impl Fn(&RemoteRanks) -> bool) -> Outcome<()> {
        if is_ready(self.remote) {
            return Ok(());
        }
        self.remote.poll();
        if is_ready(self.remote) {
            return Ok(());
        }
        self.members.set_waits_beyond(true);
        let waited = self.wait_until(rank, is_ready);
        self.members.set_waits_beyond(false);
        waited
    }

    fn wait_until(&mut self, rank: u32, is_ready: impl Fn(&RemoteRanks) -> bool) -> Outcome<()> {
        loop {
            self.remote.wait(CHECK_INTERVAL);
            self.remote.poll();
            if is_ready(self.remote) {
                return Ok(());
            }
            if let Some(failure) = self.members.failure() {
                return Err(failure);
            }
            self.members.check_processes()?;
            if let Some((failure, calls)) = self.remote.failure(rank) {
                return Err(self.members.fail_with(failure, &calls));
            }
            self.members.check_interruption()?;
            let now = Instant::now();
            if now < self.deadline {
                continue;
            }
            let waiting = self.remote.own();
            if let Some(stopped) = self.members.stopped() {
                let rank = self.members.name(stopped);
                return Err(self.members.fail(Failure::Late { rank, waiting }));
            }
            if now >= self.deadline + BEYOND_TIME {
                return Err(self.members.fail(Failure::Late { rank, waiting }));
            }
        }
    }
}

impl WordExchange for RemoteOperation<'_> {
    fn ranks(&self) -> [u32; 2] {
        [self.own() as u32, self.count() as u32]
    }

    fn exchange(&mut self, own: &[u64]) -> Outcome<Vec<Vec<u64>>> {
        let bytes = size_of_val(own);
        let to = self.begin()?;
        // SAFETY: this rank writes its bytes of the step; a slot has space for a word of each rank.
        unsafe { to.copy_from_nonoverlapping(own.as_ptr().cast(), bytes) };
        self.publish(Given::All(bytes))?;
        self.wait_for_all()?;
        let mut all = Vec::with_capacity(self.count());
        for place in 0..self.count() {
            let from = if place == self.own() { self.own_source() } else { self.source(place)? };
            let mut words = vec![0_u64; own.len()];
            // SAFETY: the rank has given so many bytes.
            unsafe { from.copy_to_nonoverlapping(words.as_mut_ptr().cast(), bytes) };
            all.push(words);
        }
        self.end();
        Ok(all)
    }

    fn mismatch(&self, rank: u32) -> Failure {
        self.mismatch_with(self.steps.ranks[rank as usize])
    }
}

//! Steps of an operation in host memory: each rank publishes bytes, and reads those of others.
//!
//! All ranks of a domain number the steps of all their operations alike. Bytes of even and odd steps
//! have memory of their own. A rank writes those of step `s` when all ranks have published step
//! `s - 1`: then they have read those of step `s - 2`.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::WaitStrategy;
use nix::sys::time::TimeValLike;
use nix::time::ClockId;

use crate::members::{CARRIED_WORDS, Failure, INLINE_BYTES, Members, Outcome, Wait};
use crate::peer_memory;

/// The memory of a process that is killed is gone a moment before the process is.
const ENDING_TIME: Duration = Duration::from_millis(100);

/// The steps of a rank.
#[derive(Debug)]
pub(crate) struct HostSteps {
    members: Arc<Members>,
    /// The word at which the memory for steps begins.
    first_word: usize,
    /// Bytes of a step of a rank.
    slot_bytes: usize,
    next: u64,
    strategy: WaitStrategy,
}

impl HostSteps {
    /// Words that so many ranks need for steps of so many bytes.
    pub(crate) fn required_words(ranks: u32, slot_bytes: usize) -> usize {
        2 * ranks as usize * (slot_bytes / size_of::<u64>())
    }

    /// In the memory from a word on, which is large enough. `slot_bytes` is a multiple of a page.
    pub(crate) fn new(
        members: Arc<Members>,
        first_word: usize,
        slot_bytes: usize,
        strategy: WaitStrategy,
    ) -> Option<Self> {
        let words = Self::required_words(members.count(), slot_bytes);
        members.memory(first_word, words * size_of::<u64>())?;
        Some(Self { members, first_word, slot_bytes, next: 0, strategy })
    }

    /// The steps of one operation. Ranks whose signatures differ call different operations. The greatest
    /// of the words that they carry is for all. All measure it, or none.
    pub(crate) fn operation(
        &mut self,
        signature: u64,
        carried: u64,
        is_measured: bool,
        deadline: Instant,
    ) -> HostOperation<'_> {
        let Self { members, first_word, slot_bytes, next, strategy } = self;
        let wait = Wait::new(strategy, deadline);
        let own = [carried, if is_measured { nanoseconds() } else { 0 }];
        HostOperation {
            members,
            first_word: *first_word,
            slot_bytes: *slot_bytes,
            next,
            wait,
            signature,
            own,
            greatest: own,
            is_first: true,
            bytes: 0,
        }
    }
}

/// An operation of a rank: its steps, one after the other.
#[derive(Debug)]
pub(crate) struct HostOperation<'a> {
    members: &'a Members,
    first_word: usize,
    slot_bytes: usize,
    next: &'a mut u64,
    wait: Wait<'a>,
    signature: u64,
    /// The words of this rank, and the greatest ones so far: one for the caller, and when a rank entered the
    /// operation.
    own: [u64; CARRIED_WORDS],
    greatest: [u64; CARRIED_WORDS],
    is_first: bool,
    /// Bytes of the current step, at most: the same for all ranks.
    bytes: usize,
}

/// The time of a clock that all processes of the machine share.
fn nanoseconds() -> u64 {
    let now = ClockId::CLOCK_MONOTONIC.now().map_or(0, |now| now.num_nanoseconds());
    u64::try_from(now).unwrap_or(0)
}

impl HostOperation<'_> {
    pub(crate) fn rank(&self) -> u32 {
        self.members.rank()
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.members.count()
    }

    /// The other ranks, from the next one on: not all read from the same one at the same time.
    pub(crate) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (own, count) = (self.rank(), self.ranks());
        (own + 1..count).chain(0..own)
    }

    /// The time since the entrance of the last rank of those that this one has waited for, and of itself.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(nanoseconds().saturating_sub(self.greatest[1]))
    }

    /// The greatest carried word of the ranks that this one has waited for.
    pub(crate) fn carried(&self) -> u64 {
        self.greatest[0]
    }

    /// The most bytes of a step.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    fn memory(&self, rank: u32) -> *mut u8 {
        if self.bytes <= INLINE_BYTES {
            return self.members.inline_bytes(rank, *self.next);
        }
        let slot = rank as usize * 2 + (*self.next & 1) as usize;
        let words = self.slot_bytes / size_of::<u64>();
        let memory = self.members.memory(self.first_word + slot * words, self.slot_bytes);
        memory.expect("the memory was checked")
    }

    /// Begins a step in which each rank publishes at most so many bytes. Returns where this rank writes
    /// its bytes.
    pub(crate) fn begin(&mut self, bytes: usize) -> Outcome<*mut u8> {
        assert!(bytes <= self.slot_bytes, "a step has at most the bytes of a slot");
        self.bytes = bytes;
        let step = *self.next;
        if step >= 2 {
            for rank in self.others() {
                self.members.wait_for_step(&mut self.wait, rank, step - 1)?;
                if !self.is_first {
                    self.take_carried(rank, step - 1);
                }
            }
        }
        Ok(self.memory(self.rank()))
    }

    /// Publishes the bytes of this rank.
    pub(crate) fn publish(&mut self) {
        self.members.publish(*self.next, self.signature, self.own);
    }

    /// Begins a step in which each rank publishes where its bytes are in its memory.
    pub(crate) fn publish_address<T>(&mut self, of: *const T) -> Outcome<()> {
        let address = of.expose_provenance() as u64;
        let to = self.begin(size_of::<u64>())?;
        // SAFETY: this rank writes its bytes of the step, of which there are enough.
        unsafe { to.cast::<[u8; 8]>().write(address.to_le_bytes()) };
        self.publish();
        Ok(())
    }

    /// The address that a rank publishes in this step.
    pub(crate) fn address(&mut self, rank: u32) -> Outcome<u64> {
        let from = self.source(rank)?;
        // SAFETY: the rank has published so many bytes.
        Ok(u64::from_le_bytes(unsafe { from.cast::<[u8; 8]>().read() }))
    }

    /// The bytes of a rank in this step, when it has published them.
    pub(crate) fn source(&mut self, rank: u32) -> Outcome<*const u8> {
        let step = *self.next;
        if rank != self.rank() {
            self.members.wait_for_step(&mut self.wait, rank, step)?;
            if self.is_first && self.members.signature(rank, step) != self.signature {
                return Err(self.mismatch(rank));
            }
            self.take_carried(rank, step);
        }
        Ok(self.memory(rank))
    }

    /// Takes the words that a rank carries with a step of this operation.
    fn take_carried(&mut self, rank: u32, step: u64) {
        let carried = self.members.carried(rank, step);
        self.greatest = [0, 1].map(|at| self.greatest[at].max(carried[at]));
    }

    /// The failure that a rank calls another operation.
    pub(crate) fn mismatch(&self, rank: u32) -> Failure {
        let [one, other] = [self.rank(), rank].map(|rank| self.members.name(rank));
        Failure::Mismatch { one, other, collective: 0 }
    }

    /// Waits until all other ranks have published this step.
    pub(crate) fn wait_for_all(&mut self) -> Outcome<()> {
        for rank in self.others() {
            self.source(rank)?;
        }
        Ok(())
    }

    /// Ends the step: this rank does not read its bytes any more.
    pub(crate) fn end(&mut self) {
        *self.next += 1;
        self.is_first = false;
    }

    /// A step in which all ranks wait for all.
    pub(crate) fn barrier(&mut self) -> Outcome<()> {
        self.begin(0)?;
        self.publish();
        self.wait_for_all()?;
        self.end();
        Ok(())
    }

    /// A step in which each rank publishes words, which all read.
    pub(crate) fn exchange(&mut self, own: &[u64]) -> Outcome<Vec<Vec<u64>>> {
        let bytes = size_of_val(own);
        let to = self.begin(bytes)?;
        // SAFETY: this rank writes its bytes of the step, of which there are enough.
        unsafe { to.copy_from_nonoverlapping(own.as_ptr().cast(), bytes) };
        self.publish();
        self.wait_for_all()?;
        let mut all = Vec::with_capacity(self.ranks() as usize);
        for rank in 0..self.ranks() {
            let from = self.source(rank)?;
            let mut words = vec![0_u64; own.len()];
            // SAFETY: the rank has published so many bytes.
            unsafe { from.copy_to_nonoverlapping(words.as_mut_ptr().cast(), bytes) };
            all.push(words);
        }
        self.end();
        Ok(all)
    }

    /// Copies bytes of the memory of another rank.
    ///
    /// # Safety
    /// `to` is valid for writes of `bytes`, and only the caller accesses them.
    pub(crate) unsafe fn read_memory(
        &self,
        rank: u32,
        from: u64,
        to: *mut u8,
        bytes: usize,
    ) -> Outcome<()> {
        // SAFETY: the caller's promise.
        unsafe { peer_memory::read(self.members.process_id(rank), from, to, bytes) }.map_err(|_| {
            let [name, reader] = [rank, self.rank()].map(|rank| self.members.name(rank));
            self.members.fail(match self.members.ends_within(rank, ENDING_TIME) {
                true => Failure::Ended { rank: name },
                false => Failure::Unreadable { rank: name, reader },
            })
        })
    }
}

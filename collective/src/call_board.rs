//! What each rank of a device domain calls, by number: ranks that call different operations find it, and those
//! that wait for a rank that does not call theirs give up at their deadline.
//!
//! Devices carry out operations without their hosts, so nothing else compares the calls. A rank writes its call
//! before it looks at those of the others: of two ranks at least the later one sees both calls.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ipc::{Announcement, MappedWords, WordRange, Words};
use threads::lock;

use crate::call::Call;
use crate::members::{Failure, Members, Outcome};

const LINE: usize = 8;
/// Calls of a rank that are kept. Those of a rank that is further ahead are not compared.
const SLOTS: u64 = 64;
/// Words of a slot: the number, then the call.
const CALL: usize = 1;

/// The calls of all ranks, and the deadlines of this one's.
#[derive(Debug)]
pub(crate) struct CallBoard {
    members: Arc<Members>,
    words: WordRange<MappedWords>,
    /// The numbers of operations that not all ranks may have started, and their deadlines.
    deadlines: Mutex<VecDeque<(u64, Instant)>>,
}

impl CallBoard {
    /// The words that so many ranks need.
    pub(crate) fn required_words(ranks: u32) -> usize {
        ranks as usize * LINE * (1 + SLOTS as usize)
    }

    pub(crate) fn new(members: Arc<Members>, first: usize) -> Option<Self> {
        let words = members.part(first, Self::required_words(members.count()))?;
        Some(Self { members, words, deadlines: Mutex::default() })
    }

    fn at_rank(rank: u32) -> usize {
        rank as usize * LINE * (1 + SLOTS as usize)
    }

    fn at_slot(rank: u32, number: u64) -> usize {
        Self::at_rank(rank) + LINE * (1 + (number % SLOTS) as usize)
    }

    /// The number of operations that a rank has started.
    fn started(&self, rank: u32) -> u64 {
        self.words.load(Self::at_rank(rank), Acquire)
    }

    fn others(&self) -> impl Iterator<Item = u32> {
        let own = self.members.rank();
        (0..self.members.count()).filter(move |rank| *rank != own)
    }

    /// What a rank calls as this number; None if it has not yet, or long ago.
    fn call(&self, rank: u32, number: u64) -> Option<Announcement> {
        let at = Self::at_slot(rank, number);
        if self.words.load(at, Acquire) != number {
            return None;
        }
        let call = std::array::from_fn(|word| self.words.load(at + CALL + word, Acquire));
        (self.words.load(at, Relaxed) == number).then_some(call)
    }

    /// Starts the next operation, which all ranks are to start within this time. Fails if another rank has
    /// started another one.
    pub(crate) fn start(&self, call: &Call, timeout: Duration) -> Outcome<()> {
        let rank = self.members.rank();
        let number = self.started(rank) + 1;
        let (at, own) = (Self::at_slot(rank, number), call.encode());
        self.words.store(at, 0, Relaxed);
        for (word, at) in own.into_iter().zip(at + CALL..) {
            // Not before the number is cleared.
            self.words.store(at, word, Release);
        }
        self.words.store(at, number, Release);
        self.words.store(Self::at_rank(rank), number, Release);
        fence(SeqCst);
        for other in self.others() {
            if let Some(call) = self.call(other, number).filter(|call| *call != own) {
                let failure = Failure::Mismatch { one: rank, other, collective: number };
                return Err(self.members.fail_with(failure, &[own, call]));
            }
        }
        if let Some(deadline) = Instant::now().checked_add(timeout) {
            lock(&self.deadlines).push_back((number, deadline));
        }
        Ok(())
    }

    /// Why this rank's devices are to give up what they wait for, if they are.
    pub(crate) fn look(&self) -> Option<Failure> {
        let own = self.started(self.members.rank());
        let is_behind = |rank: &u32| self.started(*rank) < own;
        match self.members.failure() {
            // It may have started all that this one waits for.
            Some(Failure::Left { rank }) if !is_behind(&rank) => {}
            Some(failure) => return Some(failure),
            None => {}
        }
        if let Some(rank) =
            self.others().find(|rank| self.members.has_left(*rank) && is_behind(rank))
        {
            return Some(Failure::Left { rank });
        }
        let last = self.others().map(|rank| (self.started(rank), rank)).min();
        let (started_by_all, last) = last.unwrap_or((own, 0));
        let mut deadlines = lock(&self.deadlines);
        while deadlines.front().is_some_and(|(number, _)| *number <= started_by_all) {
            deadlines.pop_front();
        }
        // A later one may have a shorter timeout.
        let is_late = deadlines.iter().any(|(_, deadline)| Instant::now() >= *deadline);
        is_late.then_some(Failure::Late { rank: last, waiting: self.members.rank() })
    }
}

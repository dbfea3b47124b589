//! The calls of the ranks of a device domain, by number: ranks that call different operations find that, and those
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
/// Calls of a rank that are kept: more than a device's driver lets a host be ahead. A rank waits before it is
/// further ahead of another one.
const SLOTS: u64 = 4096;
/// Words of a slot: the number, then those of the call but the last one, which is always 0.
const SLOT_WORDS: usize = 4;
const CALL: usize = 1;
const PAUSE: Duration = Duration::from_micros(100);
/// Time for the operations of this rank to end after another one has given up: they may have all that they need
/// from it.
const GRACE: Duration = Duration::from_secs(1);

/// The calls of all ranks, and the deadlines of this one's.
#[derive(Debug)]
pub(crate) struct CallBoard {
    members: Arc<Members>,
    words: WordRange<MappedWords>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The numbers of operations that not all ranks may have started, and their deadlines.
    deadlines: VecDeque<(u64, Instant)>,
    /// The moment at which this rank found that another one has given up.
    given_up: Option<Instant>,
}

impl CallBoard {
    /// The words that so many ranks need.
    pub(crate) fn required_words(ranks: u32) -> usize {
        Self::at_rank(ranks)
    }

    pub(crate) fn new(members: Arc<Members>, first: usize) -> Option<Self> {
        let words = members.part(first, Self::required_words(members.count()))?;
        Some(Self { members, words, state: Mutex::default() })
    }

    fn at_rank(rank: u32) -> usize {
        rank as usize * (LINE + SLOTS as usize * SLOT_WORDS)
    }

    fn at_slot(rank: u32, number: u64) -> usize {
        Self::at_rank(rank) + LINE + (number % SLOTS) as usize * SLOT_WORDS
    }

    /// The number of operations that a rank has started.
    fn started(&self, rank: u32) -> u64 {
        self.words.load(Self::at_rank(rank), Acquire)
    }

    fn others(&self) -> impl Iterator<Item = u32> {
        let own = self.members.rank();
        (0..self.members.count()).filter(move |rank| *rank != own)
    }

    /// The rank that has started the fewest operations, and their number; None without other ranks.
    fn last(&self) -> Option<(u64, u32)> {
        self.others().map(|rank| (self.started(rank), rank)).min()
    }

    /// The call of a rank with this number; None if the slot has another one.
    fn call(&self, rank: u32, number: u64) -> Option<Announcement> {
        let at = Self::at_slot(rank, number);
        if self.words.load(at, Acquire) != number {
            return None;
        }
        let word = |word| self.words.load(at + CALL + word, Acquire);
        let call = [word(0), word(1), word(2), 0];
        (self.words.load(at, Relaxed) == number).then_some(call)
    }

    /// Starts the next operation, which all ranks are to start within this time. Fails if another rank has
    /// started another one.
    pub(crate) fn start(&self, call: &Call, timeout: Duration) -> Outcome<()> {
        let rank = self.members.rank();
        let number = self.started(rank) + 1;
        self.wait_for_slot(number, timeout)?;
        let (at, own) = (Self::at_slot(rank, number), call.encode());
        self.words.store(at, 0, Relaxed);
        for (word, at) in own.into_iter().take(SLOT_WORDS - CALL).zip(at + CALL..) {
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
            lock(&self.state).deadlines.push_back((number, deadline));
        }
        Ok(())
    }

    /// Waits until all ranks have compared the call that this operation overwrites: they have started a later one.
    fn wait_for_slot(&self, number: u64, timeout: Duration) -> Outcome<()> {
        if number < SLOTS {
            return Ok(());
        }
        let deadline = ipc::deadline(timeout);
        while let Some((started, rank)) =
            self.last().filter(|(started, _)| started + SLOTS <= number)
        {
            if let Some(failure) = self.failure() {
                return Err(self.members.fail(failure));
            }
            if Instant::now() >= deadline {
                let waiting = self.members.rank();
                tracing::debug!(rank, started, "a rank is too far behind");
                return Err(self.members.fail(Failure::Late { rank, waiting }));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// The failure for which the devices of this rank are to stop, if there is one.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let own = self.started(self.members.rank());
        let is_behind = |rank: &u32| self.started(*rank) < own;
        let mut state = lock(&self.state);
        match self.members.failure() {
            Some(Failure::Left { rank }) if !is_behind(&rank) => {
                let given_up = *state.given_up.get_or_insert_with(Instant::now);
                if given_up.elapsed() >= GRACE {
                    return Some(Failure::Left { rank });
                }
            }
            Some(failure) => return Some(failure),
            None => {}
        }
        let has_left = |rank: &u32| self.members.has_left(*rank) && is_behind(rank);
        if let Some(rank) = self.others().find(has_left) {
            return Some(Failure::Left { rank });
        }
        let (started_by_all, last) = self.last().unwrap_or((own, 0));
        let deadlines = &mut state.deadlines;
        while deadlines.front().is_some_and(|(number, _)| *number <= started_by_all) {
            deadlines.pop_front();
        }
        // A later one may have a shorter timeout.
        let is_late = deadlines.iter().any(|(_, deadline)| Instant::now() >= *deadline);
        is_late.then_some(Failure::Late { rank: last, waiting: self.members.rank() })
    }
}

//! The ranks of a machine: their common memory, waiting for each other, and the failure of one.
//!
//! Words of the segment: the key and the size of the domain, the failure, lines of each rank, then the
//! parts that others lay out. A rank publishes numbered steps in its lines, and the others wait for
//! them at its doorbell. The lines have space for a few bytes, which need no memory beyond then.
//!
//! Ranks of the machine are counted from 0. A domain may have further ranks on other machines: failures
//! have the ranks of the domain, for which [`Members::name`] is.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use ipc::{
    Announcement, Doorbell, ForkGeneration, MappedWords, PidFd, Segment, WaitStrategy, WordRange,
    Words,
};

use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::rendezvous::{JoinedRanks, Offer};

const LINE: usize = 8;
const KEY: usize = 0;
const RANKS: usize = 1;
const FAILURE: usize = LINE;
const FIRST_RANK: usize = 2 * LINE;
/// Lines for the doorbell, for even and for odd steps, and for the state.
const RANK_WORDS: usize = 4 * LINE;
const STEP_LINE: usize = LINE;
const STATE_LINE: usize = 3 * LINE;
/// The states of a rank: it has left, or waits for a rank of another machine.
const LEFT: u64 = 1;
const WAITS_FOR_REMOTE: u64 = 2;
/// Words of a step's line: how many steps the rank has published, the signature of the call, the carried
/// words, and bytes.
const SIGNATURE: usize = 1;
const CARRIED: usize = 2;
const INLINE: usize = CARRIED + CARRIED_WORDS;
/// Words of the failure's line: the failure, the calls of two ranks, and the rank that writes them.
const CALLS: usize = 1;
const CALL_WORDS: usize = 3;
const WRITER: usize = 7;

/// Words that a rank carries with a step.
pub(crate) const CARRIED_WORDS: usize = 2;
/// Bytes that a step's line has space for.
pub(crate) const INLINE_BYTES: usize = (LINE - INLINE) * size_of::<u64>();
/// The longest time without a look whether the awaited rank lives.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// How much longer a rank waits for one of another machine: ranks of that machine know better which one
/// is late.
pub(crate) const REMOTE_TIME: Duration = Duration::from_millis(200);
/// How long a rank that finds a failure waits for another one that has found one, and writes the calls.
const WRITING_TIME: Duration = Duration::from_millis(10);

/// Why the operations of a domain are over. Its ranks are those of the domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The process of a rank has ended.
    Ended { rank: u32 },
    /// A rank has left the domain.
    Left { rank: u32 },
    /// A rank did not take part in time.
    Late { rank: u32, waiting: u32 },
    /// The memory of a rank could not be read by another one.
    Unreadable { rank: u32, reader: u32 },
    /// Two ranks announced different calls for the same collective operation.
    Mismatch { one: u32, other: u32, collective: u64 },
    /// A transfer to a rank of another machine failed.
    Unreachable { rank: u32, waiting: u32 },
}

/// What two ranks call.
pub(crate) type Calls = [Announcement; 2];

/// The result of a part of an operation.
pub(crate) type Outcome<T> = std::result::Result<T, Failure>;

impl Failure {
    const NUMBER_BITS: u32 = 28;

    pub(crate) fn encode(self) -> u64 {
        let (kind, one, other, number) = match self {
            Self::Ended { rank } => (1, rank, 0, 0),
            Self::Left { rank } => (2, rank, 0, 0),
            Self::Late { rank, waiting } => (3, rank, waiting, 0),
            Self::Unreadable { rank, reader } => (4, rank, reader, 0),
            Self::Mismatch { one, other, collective } => (5, one, other, collective),
            Self::Unreachable { rank, waiting } => (6, rank, waiting, 0),
        };
        kind << 60
            | (u64::from(one) & 0xffff) << 44
            | (u64::from(other) & 0xffff) << Self::NUMBER_BITS
            | number & ((1 << Self::NUMBER_BITS) - 1)
    }

    pub(crate) fn decode(word: u64) -> Self {
        let rank_at = |bit: u32| ((word >> bit) as u32 & 0xffff).min(MAX_RANKS - 1);
        let (one, other) = (rank_at(44), rank_at(Self::NUMBER_BITS));
        match word >> 60 {
            1 => Self::Ended { rank: one },
            2 => Self::Left { rank: one },
            3 => Self::Late { rank: one, waiting: other },
            4 => Self::Unreadable { rank: one, reader: other },
            6 => Self::Unreachable { rank: one, waiting: other },
            _ => Self::Mismatch { one, other, collective: word & ((1 << Self::NUMBER_BITS) - 1) },
        }
    }
}

/// The ranks of a machine, as one of them sees them.
#[derive(Debug)]
pub(crate) struct Members {
    segment: Segment,
    words: MappedWords,
    pidfds: Vec<PidFd>,
    process_ids: Vec<u32>,
    /// The rank in the domain of each.
    names: Vec<u32>,
    rank: u32,
    fork_generation: ForkGeneration,
    interruption: Option<fn() -> bool>,
}

/// The largest number of ranks: failures name them in 16 bits.
pub(crate) const MAX_RANKS: u32 = 4096;

impl Members {
    /// The words before the parts that others lay out.
    pub(crate) fn required_words(ranks: u32) -> usize {
        FIRST_RANK + ranks as usize * RANK_WORDS
    }

    /// The view of a rank that has joined.
    pub(crate) fn new(
        joined: JoinedRanks,
        rank: u32,
        names: Vec<u32>,
        key: u64,
        interruption: Option<fn() -> bool>,
    ) -> Result<(Self, Vec<Offer>)> {
        let (segment, pidfds, process_ids, offers) = joined.into_parts();
        let words = segment.words();
        let ranks = pidfds.len();
        // The first rank writes them, and the others find the same.
        for (at, value) in [(KEY, key), (RANKS, ranks as u64)] {
            if let Err(found) = words.compare_exchange(at, 0, value)
                && found != value
            {
                let detail = format!("word {at} of the segment is {found:#x}, not {value:#x}");
                return Err(Error::new("join communication domain", ErrorKind::Malformed, detail));
            }
        }
        let fork_generation = ForkGeneration::current();
        let members = Self {
            segment,
            words,
            pidfds,
            process_ids,
            names,
            rank,
            fork_generation,
            interruption,
        };
        Ok((members, offers))
    }

    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    pub(crate) fn count(&self) -> u32 {
        self.pidfds.len() as u32
    }

    /// The rank in the domain of a rank of this machine.
    pub(crate) fn name(&self, rank: u32) -> u32 {
        self.names[rank as usize]
    }

    /// The id of a rank's process, as the listening rank saw it; 0 if that did not see it.
    pub(crate) fn process_id(&self, rank: u32) -> u32 {
        self.process_ids[rank as usize]
    }

    /// Words for another part of the segment.
    pub(crate) fn part(&self, first: usize, count: usize) -> Option<WordRange<MappedWords>> {
        WordRange::new(self.words.clone(), first, count)
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Memory of the segment from a word on, valid as long as this. None if it does not have so many
    /// bytes.
    pub(crate) fn memory(&self, first: usize, bytes: usize) -> Option<*mut u8> {
        let offset = first * size_of::<u64>();
        let fits = offset.checked_add(bytes)? <= self.segment.body_length();
        // SAFETY: inside of the mapping.
        fits.then(|| unsafe { self.segment.body().add(offset) })
    }

    fn at_rank(&self, rank: u32) -> usize {
        FIRST_RANK + rank as usize * RANK_WORDS
    }

    fn at_step(&self, rank: u32, step: u64) -> usize {
        self.at_rank(rank) + STEP_LINE + (step & 1) as usize * LINE
    }

    fn doorbell(&self, rank: u32) -> Doorbell<WordRange<&MappedWords>> {
        let range = WordRange::new(&self.words, self.at_rank(rank), LINE);
        range.and_then(Doorbell::new).expect("the segment has lines of all ranks")
    }

    /// Bytes of a step's line, for bytes of this or another rank.
    pub(crate) fn inline_bytes(&self, rank: u32, step: u64) -> *mut u8 {
        let at = self.at_step(rank, step) + INLINE;
        self.memory(at, INLINE_BYTES).expect("the segment has lines of all ranks")
    }

    /// Publishes a step of this rank, whose bytes are written.
    pub(crate) fn publish(&self, step: u64, signature: u64, carried: [u64; CARRIED_WORDS]) {
        let at = self.at_step(self.rank, step);
        self.words.store(at + SIGNATURE, signature, Relaxed);
        for (number, word) in carried.into_iter().enumerate() {
            self.words.store(at + CARRIED + number, word, Relaxed);
        }
        self.words.store(at, step + 1, Release);
        self.doorbell(self.rank).ring();
    }

    /// Returns whether a rank has published a step.
    pub(crate) fn has_published(&self, rank: u32, step: u64) -> bool {
        self.words.load(self.at_step(rank, step), Acquire) > step
    }

    /// The signature of a rank's step that it has published.
    pub(crate) fn signature(&self, rank: u32, step: u64) -> u64 {
        self.words.load(self.at_step(rank, step) + SIGNATURE, Relaxed)
    }

    /// The words that a rank carries with a step that it has published.
    pub(crate) fn carried(&self, rank: u32, step: u64) -> [u64; CARRIED_WORDS] {
        let at = self.at_step(rank, step) + CARRIED;
        std::array::from_fn(|number| self.words.load(at + number, Relaxed))
    }

    /// The number of steps that a rank has published.
    fn published(&self, rank: u32) -> u64 {
        let of = |step| self.words.load(self.at_step(rank, step), Acquire);
        of(0).max(of(1))
    }

    /// Tells the other ranks that this one has left.
    pub(crate) fn leave(&self) {
        self.set_state(LEFT);
        self.ring();
    }

    /// Tells the other ranks whether this one waits for a rank of another machine.
    pub(crate) fn set_waits_for_remote(&self, waits: bool) {
        self.set_state(if waits { WAITS_FOR_REMOTE } else { 0 });
    }

    fn set_state(&self, state: u64) {
        self.words.store(self.at_rank(self.rank) + STATE_LINE, state, Release);
    }

    fn state(&self, rank: u32) -> u64 {
        self.words.load(self.at_rank(rank) + STATE_LINE, Acquire)
    }

    pub(crate) fn has_left(&self, rank: u32) -> bool {
        self.state(rank) == LEFT
    }

    /// A rank whose process is stopped.
    pub(crate) fn stopped(&self) -> Option<u32> {
        let is_stopped = |rank: &u32| {
            let descriptor = self.pidfds[*rank as usize].as_fd().as_raw_fd();
            let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
            let found = read(format!("/proc/self/fdinfo/{descriptor}"));
            let id = found.lines().find_map(|line| line.strip_prefix("Pid:")).map(str::trim);
            let stat = id.map_or_else(String::new, |id| read(format!("/proc/{id}/stat")));
            // The state is behind the name, which may contain anything.
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            *rank != self.rank && matches!(state, Some('T' | 't'))
        };
        (0..self.count()).find(is_stopped)
    }

    /// The rank that keeps this one waiting, if the deadline has passed. None if a rank of another
    /// machine does, and that is not over yet.
    fn late(&self, awaited: u32, deadline: Instant) -> Option<u32> {
        if let Some(stopped) = self.stopped() {
            return Some(stopped);
        }
        let late = (0..self.count()).min_by_key(|rank| self.published(*rank));
        // The awaited rank may be only waiting itself.
        let late = late.filter(|late| *late != self.rank).unwrap_or(awaited);
        let is_over = Instant::now() >= deadline + 2 * REMOTE_TIME;
        let waits_for_remote = (0..self.count()).any(|rank| self.state(rank) == WAITS_FOR_REMOTE);
        (is_over || !waits_for_remote).then_some(late)
    }

    /// Wakes the ranks that wait for this one.
    pub(crate) fn ring(&self) {
        self.doorbell(self.rank).ring();
    }

    /// The processes of all ranks.
    pub(crate) fn pidfds(&self) -> &[PidFd] {
        &self.pidfds
    }

    /// Returns whether the process of a rank has ended.
    pub(crate) fn has_ended(&self, rank: u32) -> bool {
        rank != self.rank && self.pidfds[rank as usize].has_exited()
    }

    /// Returns whether the process of a rank ends within this time.
    pub(crate) fn ends_within(&self, rank: u32, time: Duration) -> bool {
        rank != self.rank && self.pidfds[rank as usize].exits_within(time)
    }

    pub(crate) fn check_fork(&self, operation: &'static str) -> Result<()> {
        if self.fork_generation.is_current() {
            return Ok(());
        }
        let detail = "the domain belongs to the parent of this process. Join one in the child";
        Err(Error::new(operation, ErrorKind::Forked, detail))
    }

    /// Waits until a rank is ready, or has ended: returns whether it is ready.
    pub(crate) fn wait(
        &self,
        wait: &mut Wait<'_>,
        rank: u32,
        ready: impl Fn() -> bool,
    ) -> Outcome<bool> {
        if ready() {
            return Ok(true);
        }
        loop {
            let now = Instant::now();
            let slice = if now < wait.deadline { wait.deadline } else { now + CHECK_INTERVAL };
            let slice = slice.min(now + CHECK_INTERVAL);
            let found = self.doorbell(rank).wait(wait.strategy, slice, || {
                if ready() {
                    return Some(true);
                }
                (self.words.load(FAILURE, Relaxed) != 0).then_some(false)
            });
            match found {
                Some(true) => return Ok(true),
                Some(false) => {
                    let ended = Failure::Ended { rank: self.name(rank) };
                    return Err(self.failure().unwrap_or(ended));
                }
                None if self.has_ended(rank) => return Ok(ready()),
                // It may have been ready before.
                None if self.has_left(rank) => match ready() {
                    true => return Ok(true),
                    false => return Err(self.fail(Failure::Left { rank: self.name(rank) })),
                },
                None => {}
            }
            self.check_interruption()?;
            if Instant::now() >= wait.deadline
                && let Some(late) = self.late(rank, wait.deadline)
            {
                let (rank, waiting) = (self.name(late), self.name(self.rank));
                return Err(self.fail(Failure::Late { rank, waiting }));
            }
        }
    }

    /// Fails if the process of a rank of this machine has ended without leaving.
    pub(crate) fn check_processes(&self) -> Outcome<()> {
        let is_lost = |rank: &u32| self.has_ended(*rank) && !self.has_left(*rank);
        match (0..self.count()).find(is_lost) {
            Some(rank) => Err(self.fail(Failure::Ended { rank: self.name(rank) })),
            None => Ok(()),
        }
    }

    /// Fails if the program asks this rank to give up.
    pub(crate) fn check_interruption(&self) -> Outcome<()> {
        if self.interruption.is_some_and(|is_interrupted| is_interrupted()) {
            return Err(self.fail(Failure::Left { rank: self.name(self.rank) }));
        }
        Ok(())
    }

    /// Waits until a rank is ready, whatever has failed; False at the deadline, or if it has ended.
    pub(crate) fn poll(&self, wait: &mut Wait<'_>, rank: u32, ready: impl Fn() -> bool) -> bool {
        loop {
            let slice = wait.deadline.min(Instant::now() + CHECK_INTERVAL);
            let look = || ready().then_some(());
            if self.doorbell(rank).wait(wait.strategy, slice, look).is_some() {
                return true;
            }
            if self.has_ended(rank) || Instant::now() >= wait.deadline {
                return ready();
            }
        }
    }

    /// Waits until a rank has published a step.
    pub(crate) fn wait_for_step(&self, wait: &mut Wait<'_>, rank: u32, step: u64) -> Outcome<()> {
        if self.has_published(rank, step) {
            return Ok(());
        }
        match self.wait(wait, rank, || self.has_published(rank, step))? {
            true => Ok(()),
            false => Err(self.fail(Failure::Ended { rank: self.name(rank) })),
        }
    }

    /// The failure of the domain, if there is one.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let word = self.words.load(FAILURE, Acquire);
        (word != 0).then(|| Failure::decode(word))
    }

    /// Checks whether the domain goes on.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.check_fork(operation)?;
        match self.failure() {
            Some(failure) => Err(self.error(operation, failure)),
            None => Ok(()),
        }
    }

    /// Ends the operations of the domain for all ranks. Returns the failure that came first.
    pub(crate) fn fail(&self, failure: Failure) -> Failure {
        let first = match self.words.compare_exchange(FAILURE, 0, failure.encode()) {
            Ok(_) => failure,
            Err(first) => Failure::decode(first),
        };
        (0..self.count()).for_each(|rank| self.doorbell(rank).ring_unconditionally());
        first
    }

    /// Ends the operations, with what the two ranks of the failure call.
    pub(crate) fn fail_with(&self, failure: Failure, calls: &Calls) -> Failure {
        if self.words.compare_exchange(FAILURE + WRITER, 0, u64::from(self.rank) + 1).is_ok() {
            for (at, word) in calls.iter().flat_map(|call| &call[..CALL_WORDS]).enumerate() {
                self.words.store(FAILURE + CALLS + at, *word, Relaxed);
            }
        } else {
            // Another rank writes what it found, and fails next, unless it ends at that moment.
            let end = Instant::now() + WRITING_TIME;
            while self.words.load(FAILURE, Acquire) == 0 && Instant::now() < end {
                std::thread::yield_now();
            }
        }
        self.fail(failure)
    }

    /// What the two ranks of the failure call; words that are no call if that is not known.
    pub(crate) fn calls_of_failure(&self) -> Calls {
        let word =
            |rank: usize, at| self.words.load(FAILURE + CALLS + rank * CALL_WORDS + at, Relaxed);
        [0, 1].map(|rank| [word(rank, 0), word(rank, 1), word(rank, 2), 0])
    }

    /// The error of a failure.
    pub(crate) fn error(&self, operation: &'static str, failure: Failure) -> Error {
        let process = |name: u32| {
            let local = self.names.iter().position(|local| *local == name);
            match local.map_or(0, |local| self.process_ids[local]) {
                0 => format!("rank {name}"),
                id => format!("rank {name} (process {id})"),
            }
        };
        let call = |words| {
            let call = Call::decode(&words).filter(|_| words != [0; 4]);
            call.map_or_else(|| "an unknown operation".to_owned(), |call| call.to_string())
        };
        match failure {
            Failure::Ended { rank } => {
                let detail = format!("{} has ended", process(rank));
                Error::new(operation, ErrorKind::RankFailed, detail).of_ranks([rank])
            }
            Failure::Left { rank } => {
                let detail = format!("{} has left the domain", process(rank));
                Error::new(operation, ErrorKind::Closed, detail).of_ranks([rank])
            }
            Failure::Late { rank, waiting } => {
                let detail = format!(
                    "{} did not take part in time, as rank {waiting} found. It may be stopped, busy, \
                     or may not call the operation",
                    process(rank)
                );
                Error::new(operation, ErrorKind::DeadlineExceeded, detail).of_ranks([rank])
            }
            Failure::Unreadable { rank, reader } => {
                let detail = format!(
                    "rank {reader} could not read the memory of {}. Do not unmap buffers of an \
                     operation that runs",
                    process(rank)
                );
                Error::new(operation, ErrorKind::Failed, detail).of_ranks([rank])
            }
            Failure::Mismatch { one, other, collective } => {
                let calls = self.calls_of_failure().map(call);
                let detail = format!(
                    "operation {collective} of the domain: rank {one} calls {}, rank {other} calls {}",
                    calls[0], calls[1]
                );
                Error::new(operation, ErrorKind::Mismatch, detail).of_ranks([one, other])
            }
            Failure::Unreachable { rank, waiting } => {
                let detail = format!(
                    "rank {waiting} could not transfer to {}: its log has the cause",
                    process(rank)
                );
                Error::new(operation, ErrorKind::Failed, detail).of_ranks([rank])
            }
        }
    }
}

/// How and until when a rank waits for others.
#[derive(Debug)]
pub(crate) struct Wait<'a> {
    strategy: &'a mut WaitStrategy,
    deadline: Instant,
}

impl<'a> Wait<'a> {
    pub(crate) fn new(strategy: &'a mut WaitStrategy, deadline: Instant) -> Self {
        Self { strategy, deadline }
    }
}

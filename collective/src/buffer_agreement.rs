//! The buffers of the ranks of an operation, for ranks that access each other's directly.
//!
//! The host must know the buffers of the other ranks when it starts an operation, and these may start it
//! much later. So each rank publishes its buffers, opens those of the others, and votes. If all have voted,
//! the operation is direct. A rank that waits too long decides that it is not: whichever decision comes
//! first holds for all. No rank waits longer than it wants, and all do the same.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use gpu::{Device, LegacyHandle, Slice};
use ipc::{MappedWords, WordRange, Words};

use crate::members::Members;

/// Operations whose records are kept.
const SLOTS: u64 = 8;
/// Words of a handle: its bytes, offset and length.
const HANDLE_WORDS: usize = 10;
/// Words of the record of a rank: its number, its vote, the handles of two buffers, and its report.
const RECORD_WORDS: usize = 32;
const VOTE: usize = 1;
const FIRST_HANDLE: usize = 2;
const REPORTS: usize = FIRST_HANDLE + 2 * HANDLE_WORDS;
/// Words of the report of a rank to all others in an operation.
pub(crate) const REPORT_WORDS: usize = 5;
/// Words of the decision, on a line of their own.
const DECISION_WORDS: usize = 8;

const STAGED: u64 = 1;
const DIRECT: u64 = 2;
const STATE_BITS: u32 = 2;

/// The longest wait for other ranks, and the shortest one after ranks came late. A program runs ahead of its
/// device, so that the device does not wait meanwhile.
const LONGEST_WAIT: Duration = Duration::from_millis(5);
const SHORTEST_WAIT: Duration = Duration::from_micros(200);
/// Buffers of other ranks that stay open, in the order of their last use.
const MAX_OPEN: usize = 32;
/// Own buffers whose handles are kept.
const MAX_KNOWN: usize = 256;

/// The buffers of a rank in an operation.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankBuffers {
    input: Option<Slice>,
    output: Option<Slice>,
}

impl RankBuffers {
    pub(crate) fn new(input: Option<Slice>, output: Option<Slice>) -> Self {
        Self { input, output }
    }

    pub(crate) fn input(&self) -> Option<&Slice> {
        self.input.as_ref()
    }

    pub(crate) fn output(&self) -> Option<&Slice> {
        self.output.as_ref()
    }
}

/// Report of a rank to all others in an operation.
pub(crate) type ReportWords = [u64; REPORT_WORDS];

/// The buffers and the reports of all ranks.
#[derive(Debug)]
pub(crate) struct Agreed {
    buffers: Vec<RankBuffers>,
    reports: Vec<ReportWords>,
}

impl Agreed {
    pub(crate) fn buffers(&self) -> &[RankBuffers] {
        &self.buffers
    }

    pub(crate) fn reports(&self) -> &[ReportWords] {
        &self.reports
    }
}

/// A buffer of another rank that is open here, and the operation that used it last.
#[derive(Debug)]
struct Opened {
    slice: Slice,
    last_use: u64,
}

/// How the operations of a rank were decided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DirectOutcomes {
    /// Ranks accessed the buffers of each other.
    pub direct: u64,
    /// Another rank came too late.
    pub late: u64,
    /// A buffer of this rank or of another one cannot be opened.
    pub not_shareable: u64,
    /// Another rank decided against it.
    pub refused: u64,
}

/// A buffer of this rank, by address and length, the id of its allocation, and its handle.
type Known = HashMap<(u64, u64), (u64, [u64; HANDLE_WORDS])>;

/// The agreement, as one rank sees it.
#[derive(Debug)]
pub(crate) struct BufferAgreement {
    members: Arc<Members>,
    words: WordRange<MappedWords>,
    device: Device,
    /// The number of the last operation.
    number: u64,
    wait: Duration,
    opened: HashMap<(u32, [u64; HANDLE_WORDS]), Opened>,
    known: Known,
    outcomes: DirectOutcomes,
}

impl BufferAgreement {
    /// The words that so many ranks need.
    pub(crate) fn required_words(ranks: u32) -> usize {
        SLOTS as usize * (DECISION_WORDS + ranks as usize * RECORD_WORDS)
    }

    pub(crate) fn new(members: Arc<Members>, first: usize, device: &Device) -> Option<Self> {
        let words = members.part(first, Self::required_words(members.count()))?;
        let (device, opened, known) = (device.clone(), HashMap::new(), Known::new());
        Some(Self {
            members,
            words,
            device,
            number: 0,
            wait: LONGEST_WAIT,
            opened,
            known,
            outcomes: DirectOutcomes::default(),
        })
    }

    fn at_slot(&self) -> usize {
        let slot = (self.number % SLOTS) as usize;
        slot * (DECISION_WORDS + self.members.count() as usize * RECORD_WORDS)
    }

    fn at_record(&self, rank: u32) -> usize {
        self.at_slot() + DECISION_WORDS + rank as usize * RECORD_WORDS
    }

    /// How operations were decided so far.
    pub(crate) fn outcomes(&self) -> DirectOutcomes {
        self.outcomes
    }

    /// Agrees on the next operation: the buffers of all ranks if it is direct, None if it is not. All
    /// ranks call it for the same operations. None for `own`: this rank's buffers may not be accessed.
    pub(crate) fn agree(
        &mut self,
        own: Option<&RankBuffers>,
        report: &ReportWords,
    ) -> Option<Agreed> {
        self.number += 1;
        let agreed = own.and_then(|own| self.collect(own, report));
        let is_direct = match &agreed {
            Some(_) => self.vote(),
            None => self.decide(STAGED),
        };
        if is_direct {
            self.wait = LONGEST_WAIT;
            self.outcomes.direct += 1;
        }
        self.close_unused();
        agreed.filter(|_| is_direct)
    }

    /// Publishes the buffers of this rank, and opens those of the others. None if that is not possible,
    /// or another rank does not come in time.
    fn collect(&mut self, own: &RankBuffers, report: &ReportWords) -> Option<Agreed> {
        let handles =
            (self.handle_words(own.input.as_ref()), self.handle_words(own.output.as_ref()));
        let (Some(input), Some(output)) = handles else {
            self.outcomes.not_shareable += 1;
            return None;
        };
        let handles = [input, output];
        let at = self.at_record(self.members.rank());
        self.words.store(at, 0, Relaxed);
        for (number, word) in handles.into_iter().flatten().enumerate() {
            // Not before the number is cleared.
            self.words.store(at + FIRST_HANDLE + number, word, Release);
        }
        for (number, word) in report.iter().enumerate() {
            self.words.store(at + REPORTS + number, *word, Release);
        }
        self.words.store(at, self.number, Release);
        let deadline = Instant::now() + self.wait;
        let mut all = Vec::with_capacity(self.members.count() as usize);
        let mut reports = Vec::with_capacity(self.members.count() as usize);
        for rank in 0..self.members.count() {
            if rank == self.members.rank() {
                all.push(own.clone());
                reports.push(*report);
                continue;
            }
            let at = self.at_record(rank);
            let has_come = || self.words.load(at, Acquire) == self.number;
            if !self.spin(deadline, has_come) {
                self.outcomes.late += 1;
                self.wait = (self.wait / 2).max(SHORTEST_WAIT);
                return None;
            }
            let mut words = [0; 2 * HANDLE_WORDS];
            for (number, word) in words.iter_mut().enumerate() {
                *word = self.words.load(at + FIRST_HANDLE + number, Acquire);
            }
            let of_rank = [0, 1, 2, 3, 4].map(|it| self.words.load(at + REPORTS + it, Acquire));
            // A rank that went on without this one may have overwritten it.
            if self.words.load(at, Relaxed) != self.number {
                self.outcomes.refused += 1;
                return None;
            }
            let (input, output) = words.split_at(HANDLE_WORDS);
            let opened = (self.open(rank, input), self.open(rank, output));
            let (Some(input), Some(output)) = opened else {
                self.outcomes.not_shareable += 1;
                return None;
            };
            all.push(RankBuffers { input, output });
            reports.push(of_rank);
        }
        Some(Agreed { buffers: all, reports })
    }

    /// Votes for a direct operation, and returns whether it is one.
    fn vote(&mut self) -> bool {
        let own = self.at_record(self.members.rank()) + VOTE;
        self.words.store(own, self.number, Release);
        let deadline = Instant::now() + self.wait;
        let at = self.at_slot();
        let have_all_voted = || {
            let has_voted =
                |rank| self.words.load(self.at_record(rank) + VOTE, Acquire) == self.number;
            (0..self.members.count()).all(has_voted)
        };
        let is_decided = || self.words.load(at, Acquire) >> STATE_BITS >= self.number;
        let is_in_time = self.spin(deadline, || have_all_voted() || is_decided());
        let is_direct = self.decide(if have_all_voted() { DIRECT } else { STAGED });
        if !is_direct && is_in_time {
            self.outcomes.refused += 1;
        }
        if !is_in_time {
            self.outcomes.late += 1;
            self.wait = (self.wait / 2).max(SHORTEST_WAIT);
        }
        is_direct
    }

    /// Decides on the operation, unless another rank has. Returns whether it is direct.
    fn decide(&self, state: u64) -> bool {
        let at = self.at_slot();
        loop {
            let found = self.words.load(at, Acquire);
            match (found >> STATE_BITS).cmp(&self.number) {
                std::cmp::Ordering::Equal => return found & ((1 << STATE_BITS) - 1) == DIRECT,
                // Others went on without this rank.
                std::cmp::Ordering::Greater => return false,
                std::cmp::Ordering::Less => {}
            }
            let _ = self.words.compare_exchange(at, found, self.number << STATE_BITS | state);
        }
    }

    fn spin(&self, deadline: Instant, is_over: impl Fn() -> bool) -> bool {
        let mut looks = 0_u32;
        while !is_over() {
            looks += 1;
            if looks.is_multiple_of(64) {
                if Instant::now() >= deadline {
                    return is_over();
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Opens a buffer of another rank. None if it cannot be opened; Some(None) if the rank has none.
    #[allow(clippy::option_option)]
    fn open(&mut self, rank: u32, words: &[u64]) -> Option<Option<Slice>> {
        let key: [u64; HANDLE_WORDS] = words.try_into().ok()?;
        let [.., offset, length] = key;
        if length == 0 {
            return Some(None);
        }
        let last_use = self.number;
        if let Some(opened) = self.opened.get_mut(&(rank, key)) {
            opened.last_use = last_use;
            return Some(Some(opened.slice.clone()));
        }
        let mut bytes = [0; 64];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(key) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let handle = LegacyHandle { bytes, offset, length };
        let slice = self.device.open_legacy_handle(&handle).ok()?.whole();
        self.opened.insert((rank, key), Opened { slice: slice.clone(), last_use });
        Some(Some(slice))
    }

    /// The words of a buffer's handle; zeros if there is none. None if it has no handle.
    fn handle_words(&mut self, buffer: Option<&Slice>) -> Option<[u64; HANDLE_WORDS]> {
        let Some(buffer) = buffer else { return Some([0; HANDLE_WORDS]) };
        let (address, length) = (buffer.address(), buffer.length());
        // Memory that was freed and allocated again has another id.
        let id = self.device.attributes(address).ok()?.id;
        if let Some((known, words)) = self.known.get(&(address, length))
            && *known == id
            && id != 0
        {
            return Some(*words);
        }
        // SAFETY: valid as long as `buffer`, and only its handle is asked for.
        let memory = unsafe { self.device.adopt(address, length, ()) }.ok()?;
        let handle = memory.export_legacy().ok()?;
        let mut words = [0; HANDLE_WORDS];
        for (word, bytes) in words.iter_mut().zip(handle.bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        words[HANDLE_WORDS - 2..].copy_from_slice(&[handle.offset, length]);
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        self.known.insert((address, length), (id, words));
        Some(words)
    }

    /// Closes the buffer that was not used for longest, if too many are open.
    fn close_unused(&mut self) {
        if self.opened.len() > MAX_OPEN {
            let oldest = self.opened.iter().min_by_key(|(_, opened)| opened.last_use);
            if let Some(key) = oldest.map(|(key, _)| *key) {
                self.opened.remove(&key);
            }
        }
    }
}

const _: () = assert!(REPORTS + REPORT_WORDS <= RECORD_WORDS);

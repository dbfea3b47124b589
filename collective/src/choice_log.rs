//! Operations whose parameters the first rank that comes to them chooses, for all.
//!
//! A [`ShmParamStore`](crate::ShmParamStore) lets a rank wait for others that are far behind, and changes
//! parameters only after as many operations as a rank may be ahead. Both do not suit operations that a host
//! starts long before its device carries them out, and that it may start alone. Here each operation has a word:
//! the first rank writes the choice of rank 0 that it knows, and the others read it. So a rank waits for another
//! one only when that is [`SLOTS`] operations behind, and a change takes effect at the next operation.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

use ipc::{MappedWords, WordRange, Words};

use crate::controller::{Choices, Controller};
use crate::domain_key::{CommDomainKey, digest};
use crate::domain_options::{DomainOptions, JOIN, Kind, segment_too_small};
use crate::error::{Error, ErrorKind, Result};
use crate::members::Members;
use crate::operation::OpKey;
use crate::parameters::Parameters;
use crate::rendezvous::Offer;
use crate::statistics::ExecStat;
use crate::status_file::{DomainKind, StatusFile};

/// Operations whose choices are kept: more than a device's driver lets a host be ahead.
const SLOTS: u64 = 4096;
/// Operations whose times are kept. The fastest rank is [`SLOTS`] ahead of the slowest at most, and that one may
/// have as many whose times it has not recorded yet.
const TIME_SLOTS: u64 = 2 * SLOTS;
/// Agreements of [`ChoiceLog::agree`] in the life of a log.
const AGREEMENTS: usize = 4;
const LINE: usize = 8;
const PAUSE: Duration = Duration::from_micros(100);
/// Of settled operations one of so many is measured, to notice changes.
const SAMPLED: u64 = 64;

const YES: u64 = 1;
const NO: u64 = 2;
/// Of the word of a choice: the index of the candidate, and whether rank 0 has settled on it.
const INDEX: u64 = 0x7f;
const SETTLED: u64 = 0x80;
/// A check of the key is above them.
const CHECK_BIT: u32 = 8;
const CHOICE_BITS: u32 = 16;
/// Of the word of a time: nanoseconds, below the last bits of the number of the operation.
const TIME_BITS: u32 = 36;

/// An operation that a rank has entered, and what all ranks do in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The number of the operation, from 1: the same on all ranks.
    pub number: u64,
    /// The key.
    pub key: OpKey,
    /// The parameters: the same on all ranks.
    pub parameters: Parameters,
    /// Set if the ranks should measure it: the same on all ranks.
    pub is_measured: bool,
}

/// An operation of which rank 0 awaits the times.
#[derive(Debug)]
struct Awaited {
    choice: Choice,
    bytes: u64,
}

/// Numbered operations in shared memory, as one rank of a machine sees them.
///
/// Rank 0 learns from the times that all ranks record. In the operation of one number all ranks use the same
/// parameters; none waits for that. Ranks enter operations in the same order. After the death of rank 0 the
/// parameters stay as they are.
///
/// ```
/// use std::time::Duration;
/// use collective::{Algorithm, ChoiceLog, Choices, CommDomainKey, DataType, DomainOptions, OpKey};
/// use collective::{Operation, Parameters, SizeClass};
/// # let directory = std::env::temp_dir().join(format!("fabricast-log-{}", std::process::id()));
/// let options = DomainOptions::new().job("example");
/// # let options = options.directory(&directory);
/// let library = Parameters { algorithm: Algorithm::Library, ..Parameters::default() };
/// let candidates = vec![library, Parameters::default()];
/// let choices = move |_| Choices { candidates: candidates.clone(), first_alpha: None };
/// let mut log = ChoiceLog::join(&CommDomainKey::of_first_ranks(1), 0, &options, 0, choices)?;
/// let size_class = SizeClass::of(1 << 20);
/// let key = OpKey { operation: Operation::AllReduce, size_class, data_type: DataType::F32 };
/// for _ in 0..8 {
///     let choice = log.enter(key, 1 << 20, Duration::from_secs(10))?;
///     // The operation is carried out here, and measured.
///     let micros = if choice.parameters.algorithm == Algorithm::Library { 9 } else { 5 };
///     log.record(&choice, Some(Duration::from_micros(micros)));
/// }
/// let choice = log.enter(key, 1 << 20, Duration::from_secs(10))?;
/// assert_eq!(choice.parameters, Parameters::default());
/// # drop(log);
/// # std::fs::remove_dir(&directory).unwrap();
/// # Ok::<(), collective::Error>(())
/// ```
pub struct ChoiceLog {
    members: Arc<Members>,
    words: WordRange<MappedWords>,
    choices: Box<dyn Fn(OpKey) -> Choices + Send>,
    candidates: HashMap<OpKey, Vec<Parameters>>,
    /// The number of the last operation of this rank.
    number: u64,
    /// All ranks have entered this one, and so read the choices of those before it.
    entered_by_all: u64,
    agreements: usize,
    /// Only of rank 0.
    controller: Option<Controller>,
    awaited: VecDeque<Awaited>,
    status: Option<StatusFile>,
}

impl fmt::Debug for ChoiceLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChoiceLog")
            .field("rank", &self.members.rank())
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// Parts of the words: agreements, what rank 0 chose for each key, the last operation of each rank, choices
/// of operations, times of each rank.
fn at_agreement(number: usize, ranks: u32) -> usize {
    number * (1 + ranks as usize)
}

fn at_row(row: u32, ranks: u32) -> usize {
    at_agreement(AGREEMENTS, ranks).next_multiple_of(LINE) + row as usize
}

fn at_entered(rank: u32, ranks: u32) -> usize {
    at_row(OpKey::COUNT, ranks).next_multiple_of(LINE) + rank as usize * LINE
}

fn at_choice(number: u64, ranks: u32) -> usize {
    at_entered(ranks, ranks) + (number % SLOTS) as usize
}

fn at_time(rank: u32, number: u64, ranks: u32) -> usize {
    let first = at_entered(ranks, ranks) + SLOTS as usize;
    first + rank as usize * TIME_SLOTS as usize + (number % TIME_SLOTS) as usize
}

fn required_words(ranks: u32) -> usize {
    at_time(ranks, 0, ranks)
}

/// A check by which most ranks that enter different operations find that.
fn check_of(key: OpKey) -> u8 {
    digest([key.row().into()]) as u8
}

/// The word of a time; 0 nanoseconds if there is none.
fn encode_time(number: u64, time: Option<Duration>) -> u64 {
    let most = (1_u64 << TIME_BITS) - 1;
    let time = time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(most).clamp(1, most));
    number << TIME_BITS | time
}

impl ChoiceLog {
    /// Joins the log of a domain, as its rank of this number. Waits until all ranks have come. `choices` are
    /// the candidates of which rank 0 chooses, at most 128 of a key: the same on all ranks. `setup` is a digest of
    /// what else is equal on all ranks.
    ///
    /// # Errors
    /// As for [`CommDomain::join`](crate::CommDomain::join).
    pub fn join(
        key: &CommDomainKey,
        rank: u32,
        options: &DomainOptions,
        setup: u64,
        choices: impl Fn(OpKey) -> Choices + Clone + Send + 'static,
    ) -> Result<Self> {
        let build = digest([SLOTS, TIME_SLOTS, u64::from(OpKey::COUNT), setup]);
        let kind = Kind::new("log", DomainKind::LibraryOperations, build);
        let mut joined = options.join(kind, key, rank, None, required_words, Offer::default())?;
        let (first, status) = (joined.first_extra(), joined.take_status());
        let members = joined.into_members().0;
        let words = members.part(first, required_words(members.count()));
        let words = words.ok_or_else(segment_too_small)?;
        let controller = (rank == 0).then(|| Controller::new(choices.clone()));
        Ok(Self {
            members,
            words,
            choices: Box::new(choices),
            candidates: HashMap::new(),
            number: 0,
            entered_by_all: 0,
            agreements: 0,
            controller,
            awaited: VecDeque::new(),
            status,
        })
    }

    /// This process' rank, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.members.rank()
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.members.count()
    }

    /// Agrees on a yes or no: yes if all ranks say so before the timeout of the first one that waits. All
    /// ranks call it at the same place, a few times in the life of a log.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if it was called too often;
    /// [`Forked`](ErrorKind::Forked).
    pub fn agree(&mut self, own: bool, timeout: Duration) -> Result<bool> {
        const OPERATION: &str = "agree";
        self.members.check_fork(OPERATION)?;
        let ranks = self.size();
        if self.agreements == AGREEMENTS {
            let detail = format!("a log has {AGREEMENTS} agreements");
            return Err(Error::new(OPERATION, ErrorKind::InvalidArgument, detail));
        }
        let verdict = at_agreement(self.agreements, ranks);
        self.agreements += 1;
        let vote_of = |rank: u32| verdict + 1 + rank as usize;
        self.words.store(vote_of(self.rank()), if own { YES } else { NO }, Release);
        let deadline = ipc::deadline(timeout);
        loop {
            let votes = (0..ranks).map(|rank| self.words.load(vote_of(rank), Acquire));
            let (mut is_complete, mut is_refused) = (true, false);
            for (rank, vote) in (0..).zip(votes) {
                is_complete &= vote == YES;
                is_refused |= vote == NO || vote == 0 && self.members.has_ended(rank);
            }
            if is_complete || is_refused || Instant::now() >= deadline {
                let own = if is_complete { YES } else { NO };
                // The first verdict holds for all.
                let first = self.words.compare_exchange(verdict, 0, own).err();
                return Ok(first.unwrap_or(own) == YES);
            }
            match self.words.load(verdict, Acquire) {
                0 => std::thread::sleep(PAUSE),
                first => return Ok(first == YES),
            }
        }
    }

    /// Enters the next operation, of so many bytes. Waits only while another rank is thousands of operations
    /// behind.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) with that rank: the log is of no use any more.
    /// [`Mismatch`](ErrorKind::Mismatch) if another rank has entered one of another key, as far as that is noticed;
    /// [`Malformed`](ErrorKind::Malformed) if the others went on without this rank.
    pub fn enter(&mut self, key: OpKey, bytes: u64, timeout: Duration) -> Result<Choice> {
        const OPERATION: &str = "enter operation";
        self.members.check_fork(OPERATION)?;
        self.aggregate();
        self.wait_for_slot(OPERATION, self.number + 1, timeout)?;
        self.number += 1;
        let (number, ranks) = (self.number, self.size());
        self.words.store(at_entered(self.rank(), ranks), number, Release);
        // Others that see that this rank has entered it see its reads of earlier choices as done.
        fence(SeqCst);
        let at = at_choice(number, ranks);
        let chosen = loop {
            let found = self.words.load(at, Acquire);
            if found >> CHOICE_BITS == number {
                if (found >> CHECK_BIT) as u8 == check_of(key) {
                    break found;
                }
                let detail = format!("operation {number} of another rank is not {key}");
                return Err(Error::new(OPERATION, ErrorKind::Mismatch, detail));
            }
            if found >> CHOICE_BITS > number {
                let detail = "other ranks went on without this one";
                return Err(Error::new(OPERATION, ErrorKind::Malformed, detail));
            }
            let proposal = self.words.load(at_row(key.row(), ranks), Acquire);
            let check = u64::from(check_of(key)) << CHECK_BIT;
            let word = number << CHOICE_BITS | check | proposal & (INDEX | SETTLED);
            let _ = self.words.compare_exchange(at, found, word);
        };
        // Programs call the same operations in turn: not always those of the same keys are measured.
        let is_sampled = digest([number]).is_multiple_of(SAMPLED);
        let is_measured = chosen & SETTLED == 0 || is_sampled;
        let index = (chosen & INDEX) as usize;
        let parameters = self.candidates(key).get(index).copied().unwrap_or_default();
        let choice = Choice { number, key, parameters, is_measured };
        if is_measured && self.controller.is_some() {
            self.awaited.push_back(Awaited { choice, bytes });
        }
        Ok(choice)
    }

    /// Records how long an operation took on this rank; None if it was not measured.
    pub fn record(&mut self, choice: &Choice, time: Option<Duration>) {
        let at = at_time(self.rank(), choice.number, self.size());
        self.words.store(at, encode_time(choice.number, time), Release);
    }

    /// The parameters that rank 0 has chosen for operations of a key to come.
    #[must_use]
    pub fn parameters(&mut self, key: OpKey) -> Parameters {
        let word = self.words.load(at_row(key.row(), self.size()), Acquire);
        self.candidates(key).get((word & INDEX) as usize).copied().unwrap_or_default()
    }

    fn candidates(&mut self, key: OpKey) -> &[Parameters] {
        let Self { candidates, choices, .. } = self;
        candidates.entry(key).or_insert_with(|| choices(key).candidates)
    }

    /// Waits until all ranks have read the choice that this operation overwrites.
    fn wait_for_slot(
        &mut self,
        operation: &'static str,
        number: u64,
        timeout: Duration,
    ) -> Result<()> {
        let mut deadline = None;
        while self.entered_by_all + SLOTS <= number {
            let ranks = self.size();
            let entered = |rank| match self.members.has_ended(rank) {
                true => u64::MAX,
                false => self.words.load(at_entered(rank, ranks), Acquire),
            };
            let others = (0..ranks).filter(|rank| *rank != self.rank());
            let last = others.map(|rank| (entered(rank), rank)).min();
            let (entered, rank) = last.unwrap_or((u64::MAX, 0));
            self.entered_by_all = entered.min(self.number);
            if self.entered_by_all + SLOTS > number {
                break;
            }
            let deadline = *deadline.get_or_insert_with(|| ipc::deadline(timeout));
            if Instant::now() >= deadline {
                let detail = format!("rank {rank} is {SLOTS} operations behind: it may be stopped");
                let error = Error::new(operation, ErrorKind::DeadlineExceeded, detail);
                return Err(error.of_ranks([rank]));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Learns from the operations whose times are complete.
    fn aggregate(&mut self) {
        let (ranks, last) = (self.size(), self.number);
        let Self { members, words, candidates, choices, controller, awaited, status, .. } = self;
        let Some(controller) = controller else { return };
        while let Some(Awaited { choice: Choice { number, key, parameters, .. }, bytes }) =
            awaited.front()
        {
            let time_of = |rank| {
                let word = words.load(at_time(rank, *number, ranks), Acquire);
                (word >> TIME_BITS == *number << TIME_BITS >> TIME_BITS)
                    .then_some(word & ((1 << TIME_BITS) - 1))
            };
            let times: Option<Vec<u64>> = (0..ranks).map(time_of).collect();
            // To ask whether processes have ended takes longer than all else.
            let has_ended = || (0..ranks).any(|rank| members.has_ended(rank));
            let is_lost =
                || last - number >= TIME_SLOTS || last.is_multiple_of(SAMPLED) && has_ended();
            match times {
                Some(times) if times.iter().all(|time| *time > 0) => {
                    let longest = times.into_iter().max().unwrap_or(0);
                    let stat = ExecStat {
                        fast_time: Duration::from_nanos(longest),
                        fast_bytes: *bytes,
                        success: true,
                        ..ExecStat::default()
                    };
                    controller.update(*key, *parameters, &stat);
                    let next = controller.parameters(*key);
                    let all = candidates.entry(*key).or_insert_with(|| choices(*key).candidates);
                    let index = all.iter().position(|it| *it == next).unwrap_or(0) as u64 & INDEX;
                    let settled = if controller.is_settled(*key) { SETTLED } else { 0 };
                    words.store(at_row(key.row(), ranks), index | settled, Release);
                    if let Some(status) = status {
                        status.update(controller);
                    }
                }
                Some(_) => {}
                None if is_lost() => {}
                None => break,
            }
            awaited.pop_front();
        }
    }
}

impl Drop for ChoiceLog {
    fn drop(&mut self) {
        if self.members.check_fork(JOIN).is_ok() {
            // Ranks that are behind do not wait for this one.
            self.words.store(at_entered(self.rank(), self.size()), u64::MAX >> 1, Release);
            self.members.leave();
        }
    }
}

//! A communicator of the program: decides which library carries out its operations, and measures them.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use collective::{Algorithm, Choice, ChoiceLog, Choices, CommDomainKey, DomainOptions, Parameters};
use threads::lock;

use crate::engine::{AbortHandle, Engine, Join, Mark};
use crate::error::{Error, Flag, Result};
use crate::report::{self, Statistics};
use crate::request::{Request, StreamHandle};
use crate::settings::{Forced, settings};

/// How long a rank waits for one that is thousands of operations behind.
const ENTER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the end of a communicator waits for its operations.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Percent by which an operation of this project must be faster: ties go to NCCL.
const HANDICAP: u32 = 2;
const FAST_ONLY: u16 = Parameters::FAST_ONLY;
const LIBRARY: Parameters =
    Parameters { alpha: FAST_ONLY, chunk_bits: 0, stripes: 0, algorithm: Algorithm::Library };

/// Who carries out an operation.
#[derive(Debug)]
pub(crate) enum Decision {
    /// The library, without a number.
    Left,
    Library(Choice),
    Ours(Choice, Request),
    /// No one: the communicator has failed.
    Failed(Error),
}

/// An operation whose time is not known yet.
#[derive(Debug)]
struct Pending {
    choice: Choice,
    is_ours: bool,
    begin: Begin,
    end: Arc<Mark>,
}

/// The begin of an operation that is measured.
#[derive(Debug)]
pub(crate) struct Begin {
    mark: Mark,
    at: Instant,
    /// How long the host took to start it.
    host_time: Duration,
}

/// What the ranks of a machine share.
#[derive(Debug)]
struct Domain {
    engine: Box<dyn Engine>,
    log: ChoiceLog,
    pending: VecDeque<Pending>,
    /// The stream of the last operation, and a mark behind it.
    last: Option<(StreamHandle, Arc<Mark>)>,
    failure: Option<Error>,
}

#[derive(Debug, Default)]
struct State {
    statistics: Statistics,
    domain: Option<Domain>,
}

#[derive(Debug)]
pub(crate) struct Communicator {
    title: String,
    library: &'static str,
    ranks: u32,
    /// Why all its operations are left to the library.
    reason: Option<String>,
    /// A number that all its ranks know, and no other communicator has.
    seed: u64,
    /// How many communicators were split off.
    splits: AtomicU64,
    process: u32,
    abort: Option<AbortHandle>,
    is_aborted: Flag,
    state: Mutex<State>,
}

/// What identifies a communicator of this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    library: &'static str,
    ranks: u32,
    rank: u32,
    seed: u64,
}

impl Identity {
    pub(crate) fn new(library: &'static str, ranks: u32, rank: u32, seed: u64) -> Self {
        Self { library, ranks, rank, seed }
    }
}

impl Communicator {
    /// The communicator, all of whose operations are left to the library.
    pub(crate) fn left(identity: &Identity, reason: impl Into<String>) -> Self {
        let Identity { library, ranks, rank, seed } = *identity;
        let process = std::process::id();
        Self {
            title: format!(
                "{library} communicator {:08x}, rank {rank} of {ranks}, process {process}",
                seed as u32
            ),
            library,
            ranks,
            reason: Some(reason.into()),
            seed,
            splits: AtomicU64::new(0),
            process,
            abort: None,
            is_aborted: Flag::default(),
            state: Mutex::default(),
        }
    }

    /// Joins the other ranks, if all are on this machine and can.
    pub(crate) fn join(
        identity: &Identity,
        has_operations: bool,
        prepare: impl FnOnce() -> Result<Join>,
    ) -> Self {
        let mut communicator = Self::left(identity, "");
        match join(identity, has_operations, prepare) {
            Ok(domain) => {
                communicator.abort = Some(domain.engine.abort_handle());
                communicator.reason = None;
                communicator.state = State { domain: Some(domain), ..State::default() }.into();
            }
            Err(error) => communicator.reason = Some(error.to_string()),
        }
        communicator
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.ranks
    }

    pub(crate) fn has_domain(&self) -> bool {
        self.reason.is_none()
    }

    pub(crate) fn is_left_because(&self, reason: &str) -> bool {
        self.reason.as_deref() == Some(reason)
    }

    /// The seed of the next communicator that is split off with this color: the same on its ranks. None if
    /// this one has no seed.
    pub(crate) fn split_seed(&self, color: i32) -> Option<u64> {
        let number = self.splits.fetch_add(1, Ordering::Relaxed);
        let words = [self.seed, number + 1, u64::from(color.cast_unsigned())];
        (self.seed != 0).then(|| digest(words.into_iter().flat_map(u64::to_le_bytes)))
    }

    /// Decides about an operation; `request` may be the reason why it is left. All ranks decide alike.
    pub(crate) fn decide(
        &self,
        request: std::result::Result<Request, &'static str>,
        stream: StreamHandle,
    ) -> Decision {
        let mut state = lock(&self.state);
        let State { statistics, domain } = &mut *state;
        let request = request.and_then(|request| match settings().allows(request.operation()) {
            _ if request.is_empty() => Err("no elements"),
            true => Ok(request),
            false => Err("not in FABRICAST_NCCL_OPERATIONS"),
        });
        let Some(domain) = domain else {
            match request {
                Ok(request) => statistics.add_call(request.key(), false),
                Err(reason) => statistics.add_left(reason),
            }
            return Decision::Left;
        };
        if let Err(error) = self.check(domain) {
            return Decision::Failed(error);
        }
        domain.poll(statistics);
        let is_left = domain.engine.is_left(stream);
        let request = match request {
            Ok(request) if !is_left => request,
            _ => {
                statistics
                    .add_left(request.err().unwrap_or("stream is captured or of each thread"));
                let ordered = if is_left { Ok(()) } else { domain.order(stream) };
                return ordered.map_or_else(|error| domain.fail(error), |()| Decision::Left);
            }
        };
        let key = request.key();
        let choice = match domain.log.enter(key, request.bytes(), ENTER_TIMEOUT) {
            Ok(choice) => choice,
            Err(error) => return domain.fail(error.into()),
        };
        let is_ours = choice.parameters.algorithm != Algorithm::Library;
        statistics.add_call(key, is_ours);
        if is_ours {
            return Decision::Ours(choice, request);
        }
        match domain.order(stream) {
            Ok(()) => Decision::Library(choice),
            Err(error) => domain.fail(error),
        }
    }

    /// The begin of an operation of the library, if it is to be measured.
    pub(crate) fn begin(&self, choice: &Choice, stream: StreamHandle) -> Option<Begin> {
        if !choice.is_measured {
            return None;
        }
        lock(&self.state).domain.as_mut()?.begin(stream).ok()
    }

    /// The end of an operation of the library.
    pub(crate) fn end(&self, choice: &Choice, stream: StreamHandle, begin: Option<Begin>) {
        if let Some(domain) = &mut lock(&self.state).domain {
            domain.end(choice, stream, begin, false);
        }
    }

    /// Carries out an operation.
    pub(crate) fn run(
        &self,
        choice: &Choice,
        request: &Request,
        stream: StreamHandle,
    ) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(domain) = &mut state.domain else { return Err(Error::Aborted) };
        self.check(domain)?;
        let run = |domain: &mut Domain| {
            domain.order(stream)?;
            let begin = choice.is_measured.then(|| domain.begin(stream)).transpose()?;
            // SAFETY: the program's addresses, which are valid as NCCL requires.
            unsafe { domain.engine.run(request, stream) }?;
            domain.end(choice, stream, begin, true);
            Ok(())
        };
        run(domain).inspect_err(|error: &Error| {
            domain.failure.get_or_insert_with(|| error.clone());
            // The devices of the others wait for this operation.
            if let Some(abort) = &self.abort {
                abort.abort();
            }
        })
    }

    /// The operation was not carried out.
    pub(crate) fn discard(&self, choice: &Choice) {
        if let Some(domain) = &mut lock(&self.state).domain {
            domain.log.record(choice, None);
        }
    }

    /// Operations of this rank are missing: the others are told.
    pub(crate) fn give_up(&self, error: Error) {
        if let Some(domain) = &mut lock(&self.state).domain {
            domain.failure.get_or_insert(error);
        }
        if let Some(abort) = &self.abort {
            abort.abort();
        }
    }

    fn check(&self, domain: &Domain) -> Result<()> {
        match &domain.failure {
            _ if self.is_aborted.is_set() => Err(Error::Aborted),
            Some(failure) => Err(failure.clone()),
            None => domain.engine.check(),
        }
    }

    /// The failure of operations that were started. Does not wait for a thread that starts one.
    pub(crate) fn failure(&self) -> Option<Error> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let domain = state.domain.as_ref()?;
        domain.failure.clone().or_else(|| domain.engine.check_started().err())
    }

    /// Gives up all operations that run, also of a thread that is starting one.
    pub(crate) fn abort(&self) {
        self.is_aborted.set();
        if let Some(abort) = &self.abort {
            abort.abort();
        }
    }

    /// Waits until operations of this project are done.
    pub(crate) fn drain(&self) {
        if let Some(domain) = &mut lock(&self.state).domain {
            let _ = domain.engine.drain(DRAIN_TIMEOUT);
        }
    }

    /// The program has waited for all operations of a stream.
    pub(crate) fn synchronized(&self, stream: StreamHandle) {
        let mut state = lock(&self.state);
        let State { statistics, domain: Some(domain) } = &mut *state else { return };
        domain.engine.synchronized(stream);
        domain.poll(statistics);
    }

    /// Writes the report.
    pub(crate) fn report(&self) {
        if settings().report().is_none() || self.process != std::process::id() {
            return;
        }
        let Ok(mut state) = self.state.try_lock() else { return };
        let State { statistics, domain } = &mut *state;
        if let Some(domain) = domain {
            domain.poll(statistics);
        }
        report::write(&statistics.table(&self.title, self.library, self.reason.as_deref()));
    }
}

impl Domain {
    fn fail(&mut self, error: Error) -> Decision {
        self.failure.get_or_insert_with(|| error.clone());
        Decision::Failed(error)
    }

    fn begin(&mut self, stream: StreamHandle) -> Result<Begin> {
        let mark = self.engine.mark(stream)?;
        Ok(Begin { mark, at: Instant::now(), host_time: Duration::ZERO })
    }

    /// Lets an operation follow the last one, if that was on another stream: two that wait for other ranks at
    /// the same time could occupy a device in different orders.
    fn order(&mut self, stream: StreamHandle) -> Result<()> {
        match &self.last {
            Some((last, mark)) if *last != stream => self.engine.order(stream, mark),
            _ => Ok(()),
        }
    }

    fn end(&mut self, choice: &Choice, stream: StreamHandle, begin: Option<Begin>, is_ours: bool) {
        let host_time = begin.as_ref().map_or(Duration::ZERO, |begin| begin.at.elapsed());
        let end = self.engine.mark(stream).ok().map(Arc::new);
        match (begin, &end) {
            (Some(begin), Some(end)) => {
                let (begin, end) = (Begin { host_time, ..begin }, Arc::clone(end));
                self.pending.push_back(Pending { choice: *choice, is_ours, begin, end });
            }
            _ => self.log.record(choice, None),
        }
        if let Some((_, mark)) = std::mem::replace(&mut self.last, end.map(|end| (stream, end))) {
            self.forget(mark);
        }
    }

    fn forget(&mut self, mark: Arc<Mark>) {
        if let Some(mark) = Arc::into_inner(mark) {
            self.engine.forget(mark);
        }
    }

    /// Records the times that have become known.
    fn poll(&mut self, statistics: &mut Statistics) {
        while let Some(Pending { choice, is_ours, begin, end }) = self.pending.front() {
            let time = match self.engine.elapsed(&begin.mark, end) {
                Ok(Some(time)) => Some(time),
                Ok(None) => break,
                Err(_) => None,
            };
            let percent = if *is_ours { 100 + HANDICAP } else { 100 };
            // Programs that start many small operations wait for the host, too.
            let cost = time.map(|time| (time + begin.host_time) * percent / 100);
            self.log.record(choice, cost);
            if let Some(time) = time {
                statistics.add_time(choice.key, *is_ours, time);
            }
            if let Some(Pending { begin, end, .. }) = self.pending.pop_front() {
                self.engine.forget(begin.mark);
                self.forget(end);
            }
        }
    }
}

/// Joins the log and the engine of the ranks, in three steps that all take or none.
fn join(
    identity: &Identity,
    has_operations: bool,
    prepare: impl FnOnce() -> Result<Join>,
) -> Result<Domain> {
    let Identity { library, ranks, rank, seed } = *identity;
    let timeout = settings().join_timeout();
    let options = DomainOptions::new().job(&format!("{library}-{seed:016x}")).timeout(timeout);
    let key = CommDomainKey::of_first_ranks(ranks);
    let prepared = prepare();
    let (library_only, both) = (vec![LIBRARY], vec![LIBRARY, Parameters::default()]);
    // Without operations of its own there is nothing to choose from.
    let candidates = match settings().forced() {
        _ if !has_operations => library_only,
        None => both,
        Some(Forced::Ours) => vec![Parameters::default()],
        Some(Forced::Nccl) => library_only,
    };
    let choices = move |_| Choices { candidates: candidates.clone(), first_alpha: None };
    let mut log = ChoiceLog::join(&key, rank, &options, settings().digest(), choices)?;
    let other = || Error::Unavailable("another rank cannot".to_owned());
    let is_prepared = log.agree(prepared.is_ok(), timeout)?;
    let join = prepared?;
    if !is_prepared {
        return Err(other());
    }
    let joined = join(&key, rank, &options);
    let is_joined = log.agree(joined.is_ok(), timeout)?;
    let engine = joined?;
    if !is_joined {
        return Err(other());
    }
    Ok(Domain { engine, log, pending: VecDeque::new(), last: None, failure: None })
}

/// A digest that is the same in all processes (FNV-1a).
pub(crate) fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

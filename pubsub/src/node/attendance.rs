//! One process's membership in a node: what it shares with the thread that keeps it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use ipc::{Caller, Incarnation, MappedWords, Participant, Roster};

use super::line::OwnService;
use super::options::NodeOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::hall::Hall;
use crate::house::{Office, Retry};
use crate::lock::lock;
use crate::pool::{Direction, Piece, Pool, PoolId};
use crate::report::Row;
use crate::service::election::Membership;
use crate::service::protocol::Request;
use crate::topic::Topic;
use crate::wake::WakeFd;

/// What a request asked for.
pub(super) enum Answer {
    Topic { topic: Arc<Topic>, here: Arc<Pool>, arrivals: Arc<Pool> },
    Rows(Vec<Row>),
    Admitted,
}

/// What was answered is none to what was asked.
pub(super) fn another_answer(operation: &'static str) -> Error {
    Error::new(operation, ErrorKind::Malformed, "another answer")
}

/// A request that was not answered yet.
struct Pending {
    request: Request,
    answer: Sender<Result<Answer>>,
    rows: Vec<Row>,
}

/// A topic that this process uses.
struct Used {
    topic: Arc<Topic>,
    /// By how many handles.
    handles: usize,
    /// How often the service gave it: it forgets that this process uses the topic when it was
    /// told so of all that it gave.
    given: u64,
}

#[derive(Default)]
struct State {
    pools: HashMap<PoolId, Arc<Pool>>,
    /// Pools that are not what the service says, and why.
    strange: HashMap<PoolId, String>,
    topics: HashMap<u32, Used>,
    /// Those that publishers of this process wait at, and when the service was told so last.
    waited_at: BTreeSet<u32>,
    said_who_waits: Option<Instant>,
    pending: HashMap<u64, Pending>,
    outgoing: VecDeque<Request>,
    next: u64,
    closed: Option<String>,
}

pub(super) struct Shared {
    pub(super) options: NodeOptions,
    pub(super) hall: Hall,
    pub(super) me: Participant,
    pub(super) bell: WakeFd,
    pub(super) service: OwnService,
    state: Mutex<State>,
    /// Asked on the way of each message, so without a lock.
    is_closed: AtomicBool,
    /// The link looks how far streams are.
    is_tending: AtomicBool,
    /// What waits for locks of topics.
    unfinished: Mutex<Vec<(u32, Retry)>>,
    leaving_since: OnceLock<Instant>,
    /// The service said that it may go: nothing names this process any more.
    has_left: AtomicBool,
    /// While anybody holds it there is a hall.
    membership: Mutex<Option<Membership>>,
}

/// What this process hands over to the next service.
pub(super) struct Belongings {
    /// With their books, and their pieces.
    pub(super) pools: Vec<(PoolId, OwnedFd, Vec<Piece>)>,
    pub(super) topics: Vec<(u32, OwnedFd)>,
    pub(super) unanswered: Vec<Request>,
}

impl Shared {
    pub(super) fn new(
        options: NodeOptions,
        hall: Hall,
        me: Participant,
        bell: WakeFd,
        service: OwnService,
        membership: Membership,
    ) -> Self {
        Self {
            options,
            hall,
            me,
            bell,
            service,
            state: Mutex::default(),
            is_closed: AtomicBool::new(false),
            is_tending: AtomicBool::new(false),
            unfinished: Mutex::default(),
            leaving_since: OnceLock::new(),
            has_left: AtomicBool::new(false),
            membership: Mutex::new(Some(membership)),
        }
    }

    pub(super) fn roster(&self) -> &Arc<Roster<MappedWords>> {
        self.hall.roster()
    }

    pub(super) fn leaving_since(&self) -> Option<Instant> {
        self.leaving_since.get().copied()
    }

    /// The service has seen to what this process leaves.
    pub(super) fn has_left(&self) {
        self.has_left.store(true, Ordering::Release);
    }

    /// Is anybody else a member of the node?
    pub(super) fn has_company(&self) -> bool {
        let living = self.roster().the_living();
        living.into_iter().any(|who| who != self.me && self.hall.attends(who))
    }

    /// Nothing of the node is used any more.
    fn end(&self) {
        if !self.has_left.load(Ordering::Acquire) {
            // Whoever serves the node sees it sooner or later.
            self.roster().resign(self.me);
        }
        // Before the service, if it is this process's: who comes next does not have to wait for
        // somebody who brings the hall.
        lock(&self.membership).take();
        // Members that are still there find another one.
        self.service.end();
    }

    /// Sees to what streams of this process have done. True if they have still to do something:
    /// then it is looked again soon.
    pub(super) fn tend(&self) -> bool {
        if !self.is_tending.swap(false, Ordering::AcqRel) {
            return false;
        }
        let pools: Vec<_> = lock(&self.state).pools.values().cloned().collect();
        let caller = Caller::new(self.me, &**self.roster());
        // All of them, also if the first is busy.
        let is_any_busy = pools.iter().filter(|pool| pool.tend(&caller)).count() > 0;
        if is_any_busy {
            self.is_tending.store(true, Ordering::Release);
        }
        is_any_busy
    }

    /// Tries again what waits for locks. True if it is to be tried once more.
    pub(super) fn retry(&self) -> bool {
        let mut unfinished = std::mem::take(&mut *lock(&self.unfinished));
        let caller = Caller { patience: Duration::ZERO, ..Caller::new(self.me, &**self.roster()) };
        unfinished.retain_mut(|(topic, attempt)| {
            let is_done = attempt(&caller);
            if is_done {
                self.say(Request::Changed { number: *topic });
            }
            !is_done
        });
        let mut all = lock(&self.unfinished);
        all.append(&mut unfinished);
        !all.is_empty()
    }

    /// Waits until no stream of this process writes messages any more. One that does not end may
    /// write for as long as this process lives.
    fn is_left_alone(&self) -> bool {
        let pools: Vec<_> = lock(&self.state).pools.values().cloned().collect();
        let caller = Caller::new(self.me, &**self.roster());
        let deadline = Instant::now() + FAREWELL;
        pools.iter().all(|pool| pool.is_left_alone(&caller, deadline))
    }

    /// It needs nothing of the node any more.
    pub(super) fn leaves(&self) {
        let _ = self.leaving_since.set(Instant::now());
        self.bell.ring();
    }

    /// What is to be said to the service.
    pub(super) fn requests(&self) -> VecDeque<Request> {
        std::mem::take(&mut lock(&self.state).outgoing)
    }

    fn say(&self, request: Request) {
        lock(&self.state).outgoing.push_back(request);
        self.bell.ring();
    }

    /// A publisher of this process begins to wait at a topic.
    pub(super) fn waits(&self, number: u32) {
        let mut state = lock(&self.state);
        if state.waited_at.is_empty() {
            state.said_who_waits = Some(Instant::now());
        }
        state.waited_at.insert(number);
        state.outgoing.push_back(Request::Waits { number });
        drop(state);
        self.bell.ring();
    }

    /// Tells the service every so often at which topics publishers wait, and forgets where none
    /// does. Gives when that is to be done again, if at all.
    pub(super) fn say_who_waits(&self, now: Instant, every: Duration) -> Option<Duration> {
        let mut state = lock(&self.state);
        let State { waited_at, said_who_waits, topics, outgoing, .. } = &mut *state;
        let said = said_who_waits.map(|said| now.saturating_duration_since(said));
        let mut left = every.saturating_sub(said.unwrap_or(every));
        if left.is_zero() && !waited_at.is_empty() {
            waited_at.retain(|number| {
                topics.get(number).is_some_and(|used| !used.topic.has_stopped_waiting())
            });
            outgoing.extend(waited_at.iter().map(|number| Request::Waits { number: *number }));
            (*said_who_waits, left) = (Some(now), every);
        }
        (!waited_at.is_empty()).then_some(left)
    }

    /// This process is not a member any more.
    pub(super) fn close(&self, why: &Error) {
        self.service.renounce();
        let mut state = lock(&self.state);
        state.closed = Some(why.to_string());
        self.is_closed.store(true, Ordering::Release);
        for (_, pending) in state.pending.drain() {
            let error =
                Error::new("ask the service of the node", ErrorKind::Closed, why.to_string());
            let _ = pending.answer.send(Err(error));
        }
        // Those that wait have nothing to wait for.
        for used in state.topics.values() {
            used.topic.here().ring_messages();
            used.topic.here().ring_room();
        }
    }

    #[inline]
    fn check(&self) -> Result<()> {
        if !self.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        match &lock(&self.state).closed {
            None => Ok(()),
            Some(why) => Err(Error::new("use a node", ErrorKind::Closed, why.clone())),
        }
    }

    /// Asks the service, and waits for the answer.
    pub(super) fn ask(
        &self,
        operation: &'static str,
        request: impl FnOnce(u64) -> Request,
    ) -> Result<Answer> {
        self.ask_within(operation, self.options.patience, request)
    }

    /// The same, but waits no longer than that.
    pub(super) fn ask_within(
        &self,
        operation: &'static str,
        timeout: Duration,
        request: impl FnOnce(u64) -> Request,
    ) -> Result<Answer> {
        let (sender, receiver) = bounded(1);
        let number = {
            let mut state = lock(&self.state);
            if let Some(why) = &state.closed {
                return Err(Error::new(operation, ErrorKind::Closed, why.clone()));
            }
            state.next += 1;
            let number = state.next;
            let request = request(number);
            state.outgoing.push_back(request.clone());
            state.pending.insert(number, Pending { request, answer: sender, rows: Vec::new() });
            number
        };
        self.bell.ring();
        match receiver.recv_timeout(timeout) {
            Ok(answer) => answer.map_err(|error| error.during(operation)),
            Err(_) => {
                lock(&self.state).pending.remove(&number);
                // It may have come at the last moment.
                receiver.try_recv().unwrap_or_else(|_| {
                    let detail = format!("no answer within {timeout:?}");
                    Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail))
                })
            }
        }
    }

    /// The service has a pool that this process is going to need.
    pub(super) fn meet_pool(&self, id: PoolId, books: OwnedFd) {
        let mut state = lock(&self.state);
        if state.pools.contains_key(&id) {
            return;
        }
        match Pool::keep(books) {
            Ok(pool) if pool.id() == id => {
                state.pools.insert(id, Arc::new(pool));
            }
            Ok(_) => drop(state.strange.insert(id, "its books are another pool's".into())),
            Err(error) => drop(state.strange.insert(id, error.to_string())),
        }
    }

    /// The service gives a piece of a pool.
    pub(super) fn has_piece(&self, id: PoolId, number: usize, piece: Piece) {
        self.use_pool(id, |pool| pool.follow_piece(number, piece));
        // Readers may have met messages in it already.
        for used in lock(&self.state).topics.values() {
            if used.topic.settings().place == id.place {
                used.topic.here().ring_messages();
            }
        }
    }

    /// Pieces of a pool are in use now. What cannot be mapped yet is tried again by what needs it.
    pub(super) fn has_grown(&self, id: PoolId) {
        let Some(pool) = lock(&self.state).pools.get(&id).cloned() else { return };
        if let Err(error) = pool.map_admitted() {
            tracing::warn!(%error, "cannot map a piece of a pool yet");
        }
    }

    fn use_pool(&self, id: PoolId, how: impl FnOnce(&Pool) -> Result<()>) {
        let Some(pool) = lock(&self.state).pools.get(&id).cloned() else { return };
        if let Err(error) = how(&pool) {
            tracing::error!(%error, "cannot use a piece of a pool");
            let mut state = lock(&self.state);
            state.pools.remove(&id);
            state.strange.insert(id, error.to_string());
        }
    }

    /// The service gives a topic, and this process could not receive it.
    pub(super) fn has_no_topic(&self, request: u64, number: u32, error: Error) {
        // The service believes that it is used.
        self.say(Request::Forget { number, given: 1 });
        self.is_answered(request, Err(error));
    }

    /// Nothing that was asked for can be received.
    pub(super) fn fail_all(&self, error: &Error) {
        for (_, pending) in lock(&self.state).pending.drain() {
            let _ = pending.answer.send(Err(error.clone()));
        }
    }

    /// The service gives a topic that was asked for.
    pub(super) fn has_topic(&self, request: u64, number: u32, segment: OwnedFd) {
        let mut state = lock(&self.state);
        let given = state.use_topic(number, segment);
        if given.is_err() {
            // The service believes that it is used.
            state.outgoing.push_back(Request::Forget { number, given: 1 });
            self.bell.ring();
        }
        let pending = state.pending.remove(&request);
        let Some(pending) = pending else {
            // Whoever asked did not wait so long.
            if given.is_ok() {
                drop(state);
                self.let_go(number);
            }
            return;
        };
        let is_given = given.is_ok();
        if pending.answer.send(given).is_err() && is_given {
            drop(state);
            self.let_go(number);
        }
    }

    /// The service has answered a request.
    pub(super) fn is_answered(&self, request: u64, answer: Result<Answer>) {
        if let Some(pending) = lock(&self.state).pending.remove(&request) {
            let _ = pending.answer.send(answer);
        }
    }

    pub(super) fn has_rows(&self, request: u64, rows: Vec<Row>, is_last: bool) {
        let mut state = lock(&self.state);
        let Some(pending) = state.pending.get_mut(&request) else { return };
        pending.rows.extend(rows);
        if is_last && let Some(pending) = state.pending.remove(&request) {
            let _ = pending.answer.send(Ok(Answer::Rows(pending.rows)));
        }
    }

    /// A handle of a topic is not used any more.
    fn let_go(&self, number: u32) {
        let mut state = lock(&self.state);
        let Some(used) = state.topics.get_mut(&number) else { return };
        used.handles -= 1;
        if used.handles == 0 {
            let given = used.given;
            state.topics.remove(&number);
            state.outgoing.push_back(Request::Forget { number, given });
            self.bell.ring();
        }
    }

    /// All that the next service needs, and what the last one has not answered.
    pub(super) fn belongings(&self) -> Result<Belongings> {
        let operation = "hand over what a process knows of its node";
        let failed = |error: std::io::Error| Error::of(operation, error);
        let mut state = lock(&self.state);
        // The next service looks by itself, and what was asked for is asked again.
        state.outgoing.clear();
        // It learns at once who waits.
        state.said_who_waits = None;
        let copy = |file: std::os::fd::BorrowedFd<'_>| file.try_clone_to_owned().map_err(failed);
        let pools = state
            .pools
            .iter()
            .map(|(id, pool)| {
                let pieces = (0..pool.held()).filter_map(|number| pool.piece(number).transpose());
                Ok((*id, copy(pool.books())?, pieces.collect::<Result<_>>()?))
            })
            .collect::<Result<_>>()?;
        let topics = state
            .topics
            .iter_mut()
            .map(|(number, used)| {
                // It gives what is handed to it.
                used.given = 1;
                Ok((*number, copy(used.topic.segment())?))
            })
            .collect::<Result<_>>()?;
        let unanswered = state
            .pending
            .values_mut()
            .map(|pending| {
                pending.rows.clear();
                pending.request.clone()
            })
            .collect();
        Ok(Belongings { pools, topics, unanswered })
    }
}

impl State {
    fn use_topic(&mut self, number: u32, segment: OwnedFd) -> Result<Answer> {
        let operation = "open a topic";
        if let Some(used) = self.topics.get(&number) {
            let topic = Arc::clone(&used.topic);
            let answer = self.with_pools(topic)?;
            if let Some(used) = self.topics.get_mut(&number) {
                used.given += 1;
                used.handles += 1;
            }
            return Ok(answer);
        }
        let topic = Arc::new(Topic::open(segment)?);
        let answer = self.with_pools(Arc::clone(&topic)).map_err(|error| error.on(topic.name()))?;
        if topic.number() != number {
            let detail = "the service speaks of another topic than it sends";
            return Err(Error::new(operation, ErrorKind::Malformed, detail));
        }
        self.topics.insert(number, Used { topic, handles: 1, given: 1 });
        Ok(answer)
    }

    fn with_pools(&self, topic: Arc<Topic>) -> Result<Answer> {
        let pool = |direction| {
            let id = PoolId { place: topic.settings().place, direction };
            let Some(pool) = self.pools.get(&id) else {
                let why = self.strange.get(&id);
                let why = why.map_or("its pools were not sent", String::as_str);
                return Err(Error::new("map the memory of a topic", ErrorKind::NoDevice, why));
            };
            pool.check_view()?;
            Ok(Arc::clone(pool))
        };
        let (here, arrivals) = (pool(Direction::Here)?, pool(Direction::Arrivals)?);
        Ok(Answer::Topic { topic, here, arrivals })
    }
}

/// Held by all that a process has of a node; it leaves when the last of that is dropped.
pub(super) struct Attendance {
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    born: Incarnation,
}

impl Attendance {
    pub(super) fn new(shared: Arc<Shared>, thread: JoinHandle<()>) -> Self {
        Self { shared, thread: Some(thread), born: Incarnation::current() }
    }
}

impl fmt::Debug for Attendance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attendance({} at {})", self.shared.me, self.shared.options.directory.display())
    }
}

impl Office for Attendance {
    fn grow(&self, pool: PoolId, bytes: u64) {
        self.shared.say(Request::Grow { pool, bytes });
    }

    fn admit(&self, number: u32, publisher: u64) -> Result<()> {
        let operation = "make a publisher";
        let request = |request| Request::Publish { request, number, publisher };
        match self.shared.ask(operation, request)? {
            Answer::Admitted => Ok(()),
            _ => Err(another_answer(operation)),
        }
    }

    fn changed(&self, topic: u32) {
        self.shared.say(Request::Changed { number: topic });
    }

    fn waits(&self, topic: u32) {
        self.shared.waits(topic);
    }

    fn forget(&self, topic: u32) {
        self.shared.let_go(topic);
    }

    fn retry(&self, topic: u32, attempt: Retry) {
        lock(&self.shared.unfinished).push((topic, attempt));
        self.shared.bell.ring();
    }

    fn tend(&self) {
        if !self.shared.is_tending.swap(true, Ordering::AcqRel) {
            self.shared.bell.ring();
        }
    }

    fn check(&self) -> Result<()> {
        self.shared.check()
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        if !self.born.is_current() {
            // In a forked child: thread, service and membership are the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        if !self.shared.is_left_alone() {
            tracing::warn!("a stream still writes a message: this process stays at its node");
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.leaves();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that kept this process at its node panicked");
        }
        self.shared.end();
    }
}

/// How long one that leaves waits for its streams.
const FAREWELL: Duration = Duration::from_secs(10);

/// How long it may take until one that asks from outside is answered.
pub(super) const ASKING: Duration = Duration::from_secs(5);

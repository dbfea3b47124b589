//! One process's membership in a node: the state that it shares with its membership thread.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use gpu::{Device, Properties, Uuid};
use ipc::{Caller, MappedWords, Participant, ParticipantTable};
use threads::lock;

use super::connector::LocalService;
use super::{Membership, MembershipState};
use crate::context::{Retry, ServiceClient};
use crate::endpoint_list::Endpoints;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::node_options::NodeOptions;
use crate::node_segment::NodeSegment;
use crate::pool::{Direction, GrowthRequest, NodeCopies, Piece, PieceStored, Pool, PoolId};
use crate::report::Row;
use crate::service::election::MemberLock;
use crate::service::protocol::Request;
use crate::settings::SharedLocation;
use crate::topic::Topic;
use crate::wake::WakeFd;

pub(super) enum Answer {
    Topic { topic: Arc<Topic>, local: Arc<Pool>, inbound: Arc<Pool> },
    Rows(Vec<Row>),
    Admitted,
}

pub(super) fn unexpected_answer(operation: &'static str) -> Error {
    Error::new(operation, ErrorKind::Malformed, "unexpected answer")
}

struct PendingRequest {
    request: Request,
    answer: Sender<Result<Answer>>,
    rows: Vec<Row>,
}

struct OpenTopic {
    topic: Arc<Topic>,
    handles: usize,
    /// How often the service sent it. The service releases the topic for this process once all of
    /// them are closed.
    granted: u64,
}

#[derive(Default)]
pub(super) struct MembershipInner {
    pools: HashMap<PoolId, Arc<Pool>>,
    /// For pools that it cannot map.
    copies: Option<Arc<NodeCopies>>,
    /// Pools that this process cannot use, with the reason.
    unusable_pools: HashMap<PoolId, String>,
    topics: HashMap<u32, OpenTopic>,
    /// Devices that this process sees and opened topics on, with their memory in bytes: the service
    /// may need it to make pieces there.
    devices: HashMap<[u8; 16], u64>,
    /// Topics at which publishers of this process wait, and when they were last reported.
    blocked_topics: BTreeSet<u32>,
    blocked_reported_at: Option<Instant>,
    pending: HashMap<u64, PendingRequest>,
    outgoing: VecDeque<Request>,
    next: u64,
    closed: Option<String>,
}

impl MembershipState {
    pub(super) fn new(
        options: NodeOptions,
        node_segment: NodeSegment,
        me: Participant,
        bell: WakeFd,
        service: LocalService,
        member_lock: MemberLock,
    ) -> Self {
        Self {
            options,
            node_segment,
            me,
            bell,
            service,
            state: Mutex::default(),
            is_closed: AtomicBool::new(false),
            polls_streams: AtomicBool::new(false),
            unfinished: Mutex::default(),
            leaving_since: OnceLock::new(),
            has_left: AtomicBool::new(false),
            open_topics: Endpoints::default(),
            member_lock: Mutex::new(Some(member_lock)),
        }
    }

    pub(super) fn participants(&self) -> &Arc<ParticipantTable<MappedWords>> {
        self.node_segment.participants()
    }

    pub(super) fn leaving_since(&self) -> Option<Instant> {
        self.leaving_since.get().copied()
    }

    /// The service has reclaimed what this process held.
    pub(super) fn has_left(&self) {
        self.has_left.store(true, Ordering::Release);
    }

    pub(super) fn has_other_members(&self) -> bool {
        let living = self.participants().living_participants();
        living.into_iter().any(|it| it != self.me && self.node_segment.is_member(it))
    }

    /// Ends the membership; nothing of the node is in use any more.
    fn end(&self) {
        if !self.has_left.load(Ordering::Acquire) {
            // The service detects it sooner or later.
            self.participants().leave(self.me);
        }
        // Before the service, if this process runs it: the next process then need not wait for a
        // member that returns the node segment.
        lock(&self.member_lock).take();
        // The remaining members find another one.
        self.service.end();
    }

    /// Polls streams of this process. True if some are still busy: then poll again soon.
    pub(super) fn poll_streams(&self) -> bool {
        if !self.polls_streams.swap(false, Ordering::AcqRel) {
            return false;
        }
        let pools: Vec<_> = lock(&self.state).pools.values().cloned().collect();
        let caller = Caller::new(self.me, &**self.participants());
        // All of them, even if the first is busy.
        let is_any_busy = pools.iter().filter(|pool| pool.poll_streams(&caller)).count() > 0;
        if is_any_busy {
            self.polls_streams.store(true, Ordering::Release);
        }
        is_any_busy
    }

    /// Tries operations again that wait for locks. True if some are left.
    pub(super) fn retry(&self) -> bool {
        let mut unfinished = std::mem::take(&mut *lock(&self.unfinished));
        let caller =
            Caller { timeout: Duration::ZERO, ..Caller::new(self.me, &**self.participants()) };
        unfinished.retain_mut(|(topic, attempt)| {
            let is_done = attempt(&caller);
            if is_done {
                self.enqueue(Request::ParticipantsChanged { number: *topic });
            }
            !is_done
        });
        let mut all = lock(&self.unfinished);
        all.append(&mut unfinished);
        !all.is_empty()
    }

    /// Waits until no stream of this process writes messages. A stream that does not end may write
    /// for as long as this process lives.
    fn drain_streams(&self) -> bool {
        let pools: Vec<_> = lock(&self.state).pools.values().cloned().collect();
        let caller = Caller::new(self.me, &**self.participants());
        let deadline = Instant::now() + STREAM_DRAIN_TIMEOUT;
        pools.iter().all(|pool| pool.drain_streams(&caller, deadline))
    }

    pub(super) fn begin_leave(&self) {
        let _ = self.leaving_since.set(Instant::now());
        self.bell.ring();
    }

    /// Takes the requests that are to be sent to the service.
    pub(super) fn requests(&self) -> VecDeque<Request> {
        std::mem::take(&mut lock(&self.state).outgoing)
    }

    /// Reports to the service that this process sees a device, once.
    pub(super) fn report_device(&self, device: &Device) {
        lock(&self.state).report_device(device);
        self.bell.ring();
    }

    /// Makes the piece of a pool that the service requests.
    pub(super) fn make_piece(&self, id: PoolId, number: usize, length: u64) -> Result<Piece> {
        let operation = "create piece of pool";
        let pool = lock(&self.state).pools.get(&id).cloned().ok_or_else(|| {
            let detail = "this process does not have the pool";
            Error::new(operation, ErrorKind::NotFound, detail).on(id)
        })?;
        let piece = pool.make_piece(length)?;
        let name = piece.name;
        if pool.store_piece(number, piece) == PieceStored::Rejected {
            let detail = format!("this process has another piece {number}");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail).on(id));
        }
        pool.piece(number)?.filter(|stored| stored.name == name).ok_or_else(|| {
            let detail = format!("piece {number} was replaced");
            Error::new(operation, ErrorKind::Closed, detail).on(id)
        })
    }

    fn enqueue(&self, request: Request) {
        lock(&self.state).outgoing.push_back(request);
        self.bell.ring();
    }

    /// A publisher of this process begins to wait at a topic.
    pub(super) fn publisher_blocked(&self, number: u32) {
        let mut state = lock(&self.state);
        if state.blocked_topics.is_empty() {
            state.blocked_reported_at = Some(Instant::now());
        }
        state.blocked_topics.insert(number);
        state.outgoing.push_back(Request::PublisherBlocked { number });
        drop(state);
        self.bell.ring();
    }

    /// Reports blocked topics to the service every so often, and drops those without a waiting
    /// publisher. Returns when to call it again, if at all.
    pub(super) fn report_blocked_topics(&self, now: Instant, every: Duration) -> Option<Duration> {
        let mut state = lock(&self.state);
        let MembershipInner { blocked_topics, blocked_reported_at, topics, outgoing, .. } =
            &mut *state;
        let elapsed = blocked_reported_at.map(|at| now.saturating_duration_since(at));
        let mut left = every.saturating_sub(elapsed.unwrap_or(every));
        if left.is_zero() && !blocked_topics.is_empty() {
            blocked_topics.retain(|number| {
                topics.get(number).is_some_and(|used| !used.topic.clear_if_unblocked())
            });
            let blocked = blocked_topics.iter().copied();
            outgoing.extend(blocked.map(|number| Request::PublisherBlocked { number }));
            (*blocked_reported_at, left) = (Some(now), every);
        }
        (!blocked_topics.is_empty()).then_some(left)
    }

    /// This process is no longer a member: publishers end, and subscribers behind what is queued.
    pub(super) fn close(&self, reason: &Error) {
        self.service.release_priority();
        let text = reason.to_string();
        self.open_topics.on_lost_membership(&Arc::from(text.as_str()));
        self.refuse_calls(&text);
        // Wakes waiting threads: they fail now.
        for used in lock(&self.state).topics.values() {
            used.topic.local().messages().ring();
            used.topic.local().room().ring();
        }
    }

    /// This process closes the node: all its topics end. The membership lasts as long as its
    /// samples and loans.
    pub(super) fn close_topics(&self) {
        let reason = format!("the node {} was closed", self.options.directory.display());
        self.refuse_calls(&reason);
        self.open_topics.close(&Arc::from(reason));
    }

    /// Calls of the service fail from now on, also those that wait.
    fn refuse_calls(&self, reason: &str) {
        let mut state = lock(&self.state);
        state.closed.get_or_insert_with(|| reason.to_owned());
        self.is_closed.store(true, Ordering::Release);
        for (_, pending) in state.pending.drain() {
            let error = Error::new("call service of node", ErrorKind::Closed, reason);
            let _ = pending.answer.send(Err(error));
        }
    }

    pub(super) fn call(
        &self,
        operation: &'static str,
        timeout: Duration,
        request: impl FnOnce(u64) -> Request,
    ) -> Result<Answer> {
        let (sender, receiver) = bounded(1);
        let number = {
            let mut state = lock(&self.state);
            if let Some(reason) = &state.closed {
                return Err(Error::new(operation, ErrorKind::Closed, reason.clone()));
            }
            state.next += 1;
            let number = state.next;
            let request = request(number);
            state.outgoing.push_back(request.clone());
            let pending = PendingRequest { request, answer: sender, rows: Vec::new() };
            state.pending.insert(number, pending);
            number
        };
        self.bell.ring();
        match receiver.recv_timeout(timeout) {
            Ok(answer) => answer.map_err(|error| error.during(operation)),
            Err(_) => {
                lock(&self.state).pending.remove(&number);
                // The answer may have arrived at the last moment.
                receiver.try_recv().unwrap_or_else(|_| {
                    let detail = format!("no answer within {timeout:?}");
                    Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail))
                })
            }
        }
    }

    /// The service announces a pool before the first topic that uses it.
    pub(super) fn on_pool(&self, id: PoolId, control_segment: OwnedFd) {
        let mut state = lock(&self.state);
        if state.pools.contains_key(&id) {
            return;
        }
        let NodeOptions { directory, label, .. } = &self.options;
        let copies =
            state.copies.get_or_insert_with(|| Arc::new(NodeCopies::new(directory, label)));
        let copies = Some(Arc::clone(copies));
        let reason = match Pool::keep(control_segment, copies) {
            Ok(pool) if pool.id() == id => {
                state.pools.insert(id, Arc::new(pool));
                return;
            }
            Ok(_) => "its control segment belongs to another pool".to_owned(),
            Err(error) => error.to_string(),
        };
        state.unusable_pools.insert(id, reason);
    }

    pub(super) fn on_piece(&self, id: PoolId, number: usize, piece: Piece) {
        let pool = lock(&self.state).pools.get(&id).cloned();
        let adopted = pool.as_ref().map_or(Ok(()), |pool| pool.adopt_piece(number, piece));
        if let Err(error) = &adopted {
            tracing::error!(%error, "a piece of a pool is unusable");
        }
        // Unlocked before the last handle of the pool may be dropped.
        let mut state = lock(&self.state);
        if let Err(error) = adopted {
            state.pools.remove(&id);
            state.unusable_pools.insert(id, error.to_string());
        }
        // Readers may already have seen messages in it.
        for used in state.topics.values() {
            if used.topic.settings().place == id.place {
                used.topic.local().messages().ring();
            }
        }
    }

    /// Pieces of a pool are in use now. If mapping fails here, the next use of the pool tries
    /// again.
    pub(super) fn on_pool_grown(&self, id: PoolId) {
        let Some(pool) = lock(&self.state).pools.get(&id).cloned() else { return };
        if !id.place.is_visible() {
            // The copy service may have to map it, which this thread does not wait for.
            return;
        }
        if let Err(error) = pool.map_admitted_pieces() {
            tracing::warn!(%error, "mapping a piece of a pool failed; retrying");
        }
    }

    /// The service granted a topic whose descriptors this process could not receive.
    pub(super) fn on_topic_undelivered(&self, request: u64, number: u32, error: Error) {
        // The service counts the topic as used.
        self.enqueue(Request::CloseTopic { number, granted: 1 });
        self.on_answer(request, Err(error));
    }

    /// Fails all pending requests: their answers cannot be received.
    pub(super) fn fail_all(&self, error: &Error) {
        for (_, pending) in lock(&self.state).pending.drain() {
            let _ = pending.answer.send(Err(error.clone()));
        }
    }

    pub(super) fn on_topic(&self, request: u64, number: u32, segment: OwnedFd) {
        let mut state = lock(&self.state);
        let granted = state.use_topic(number, segment);
        if granted.is_err() {
            // The service counts the topic as used.
            state.outgoing.push_back(Request::CloseTopic { number, granted: 1 });
            self.bell.ring();
        }
        let is_granted = granted.is_ok();
        // Not taken if the caller has timed out.
        let pending = state.pending.remove(&request);
        let is_taken = pending.is_some_and(|pending| pending.answer.send(granted).is_ok());
        if is_granted && !is_taken {
            drop(state);
            self.release_topic(number);
        }
    }

    pub(super) fn on_answer(&self, request: u64, answer: Result<Answer>) {
        if let Some(pending) = lock(&self.state).pending.remove(&request) {
            let _ = pending.answer.send(answer);
        }
    }

    pub(super) fn on_rows(&self, request: u64, rows: Vec<Row>, is_last: bool) {
        let mut state = lock(&self.state);
        let Some(pending) = state.pending.get_mut(&request) else { return };
        pending.rows.extend(rows);
        if is_last && let Some(pending) = state.pending.remove(&request) {
            let _ = pending.answer.send(Ok(Answer::Rows(pending.rows)));
        }
    }

    fn release_topic(&self, number: u32) {
        let mut state = lock(&self.state);
        let Some(used) = state.topics.get_mut(&number) else { return };
        used.handles -= 1;
        if used.handles == 0 {
            let granted = used.granted;
            state.topics.remove(&number);
            state.outgoing.push_back(Request::CloseTopic { number, granted });
            self.bell.ring();
        }
    }

    /// Requests that return all objects to the next service, and the unanswered requests; each with
    /// its descriptors.
    pub(super) fn handover_requests(&self) -> Result<Vec<(Request, Vec<OwnedFd>)>> {
        let copy = |file: BorrowedFd<'_>| -> Result<_> {
            Ok(vec![file.try_clone_to_owned().during("hand over to new service of node")?])
        };
        let mut requests = Vec::new();
        let mut state = lock(&self.state);
        // The next service inspects the topics itself, and pending requests are sent again.
        state.outgoing.clear();
        // Blocked topics are reported to it at once.
        state.blocked_reported_at = None;
        for (device, memory) in &state.devices {
            let request = Request::SeesDevice { device: *device, memory: *memory };
            requests.push((request, Vec::new()));
        }
        for (id, pool) in &state.pools {
            let pool_id = *id;
            requests.push((Request::Pool { pool: pool_id }, copy(pool.control_segment())?));
            for first in (0..pool.held()).step_by(MAX_PIECES_PER_MESSAGE) {
                let some = (first..pool.held()).take(MAX_PIECES_PER_MESSAGE);
                let pieces = some.filter_map(|number| pool.piece(number).transpose());
                let parts = |piece: Piece| (piece.memory, (piece.length, piece.name));
                let pieces = pieces.map(|piece| piece.map(parts)).collect::<Result<Vec<_>>>()?;
                let (files, pieces) = pieces.into_iter().unzip();
                let first = first as u32;
                requests.push((Request::Pieces { pool: pool_id, first, pieces }, files));
            }
        }
        for (number, used) in &mut state.topics {
            // The next service counts one grant for each returned topic.
            used.granted = 1;
            requests.push((Request::Topic { number: *number }, copy(used.topic.segment())?));
        }
        requests.push((Request::RejoinDone, Vec::new()));
        for pending in state.pending.values_mut() {
            pending.rows.clear();
            requests.push((pending.request.clone(), Vec::new()));
        }
        Ok(requests)
    }
}

impl MembershipInner {
    fn report_device(&mut self, device: &Device) {
        let Properties { uuid: Uuid(device), total_memory: memory, .. } = *device.properties();
        if self.devices.insert(device, memory).is_none() {
            self.outgoing.push_back(Request::SeesDevice { device, memory });
        }
    }

    fn use_topic(&mut self, number: u32, segment: OwnedFd) -> Result<Answer> {
        if let Some(topic) = self.topics.get(&number).map(|used| Arc::clone(&used.topic)) {
            let answer = self.with_pools(topic)?;
            if let Some(used) = self.topics.get_mut(&number) {
                used.granted += 1;
                used.handles += 1;
            }
            return Ok(answer);
        }
        let topic = Arc::new(Topic::open(segment)?);
        let answer = self.with_pools(Arc::clone(&topic)).on(topic.name())?;
        if topic.number() != number {
            let detail = "the service sent another topic than it announced";
            return Err(Error::new("open topic", ErrorKind::Malformed, detail));
        }
        self.topics.insert(number, OpenTopic { topic, handles: 1, granted: 1 });
        Ok(answer)
    }

    fn with_pools(&mut self, topic: Arc<Topic>) -> Result<Answer> {
        let pool = |direction| {
            let id = PoolId { place: topic.settings().place, direction };
            let Some(pool) = self.pools.get(&id) else {
                let reason = self.unusable_pools.get(&id);
                let reason = reason.map_or("its pools were not sent", String::as_str);
                return Err(Error::new("map memory of topic", ErrorKind::NoDevice, reason));
            };
            pool.ensure_mapped()?;
            Ok(Arc::clone(pool))
        };
        let (local, inbound) = (pool(Direction::Local)?, pool(Direction::Inbound)?);
        if let (SharedLocation::Device(uuid), Some(device)) = (local.id().place, local.device())
            && device.properties().uuid == Uuid(uuid)
        {
            self.report_device(device);
        }
        Ok(Answer::Topic { topic, local, inbound })
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Membership({} at {})", self.shared.me, self.shared.options.directory.display())
    }
}

impl ServiceClient for Membership {
    fn request_growth(&self, request: GrowthRequest) {
        self.shared.enqueue(Request::Grow(request));
    }

    fn admit(&self, number: u32, publisher: u64) -> Result<()> {
        let operation = "create publisher of topic";
        let request = |request| Request::AdmitPublisher { request, number, publisher };
        match self.shared.call(operation, self.shared.options.service_timeout, request)? {
            Answer::Admitted => Ok(()),
            _ => Err(unexpected_answer(operation)),
        }
    }

    fn participants_changed(&self, topic: u32) {
        self.shared.enqueue(Request::ParticipantsChanged { number: topic });
    }

    fn publisher_blocked(&self, topic: u32) {
        self.shared.publisher_blocked(topic);
    }

    fn forget(&self, topic: u32) {
        self.shared.release_topic(topic);
    }

    fn retry(&self, topic: u32, attempt: Retry) {
        lock(&self.shared.unfinished).push((topic, attempt));
        self.shared.bell.ring();
    }

    fn poll_streams(&self) {
        if !self.shared.polls_streams.swap(true, Ordering::AcqRel) {
            self.shared.bell.ring();
        }
    }

    fn check(&self, operation: &'static str) -> Result<()> {
        if !self.shared.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        match &lock(&self.shared.state).closed {
            None => Ok(()),
            Some(reason) => Err(Error::new(operation, ErrorKind::Closed, reason.clone())),
        }
    }

    fn open_topics(&self) -> &Endpoints {
        &self.shared.open_topics
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            // In a forked child: thread, service and membership are the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        if !self.shared.drain_streams() {
            tracing::warn!(
                "a stream still writes a message: this process stays a member of its node"
            );
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.begin_leave();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the membership thread panicked");
        }
        self.shared.end();
    }
}

const MAX_PIECES_PER_MESSAGE: usize = 32;

/// How long a leaving process waits for its streams.
const STREAM_DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of a report for a process that has not joined.
pub(super) const REPORT_TIMEOUT: Duration = Duration::from_secs(5);

//! The thread that copies for all clients.
//!
//! Requests between the same two devices share a stream in each direction, and short ones have one
//! of their own. A stream serves its clients in turn by bytes, with a few pieces in flight.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Block, CopyMethod, DeviceName, Pause};
use threads::{ExactTimer, RetryBackoff};

use super::clients::{Client, Pair, PairState};
use super::fair_queue::{FairQueue, QueuedRequest, TURN};
use super::shared::Shared;
use crate::blocks::Blocks;
use crate::copy_queue::{CopyQueue, CopyRequest};
use crate::copy_requests::{PostedRequest, Start};
use crate::error::{Error, ErrorKind, Result};
use crate::path::Operation;

const COPY: &str = "copy for client";
/// Requests with fewer bytes do not wait behind larger ones.
const SMALL_REQUEST: u64 = 1 << 20;
/// Bytes in flight on a stream, so that the device is not idle between pieces.
const MAX_BYTES_IN_FLIGHT: u64 = 2 * TURN;
/// Pieces in flight on a stream.
const MAX_PIECES_IN_FLIGHT: usize = 64;
/// How long the thread polls after it was busy: a client often has the next request at once.
const SPIN: Duration = Duration::from_micros(25);
/// How often mappings of regions are checked whose owner may be gone.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);
/// Streams of clients ring no doorbell.
const STREAM_POLL: RetryBackoff =
    RetryBackoff::new(Duration::from_micros(20), Duration::from_millis(1));
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// How long the end of the service waits for copies.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Which device copies, the other memory's device, the direction, and whether requests are short.
type LaneKey = (DeviceName, Option<DeviceName>, bool, bool);

/// A stream with the requests that wait for it.
struct Lane {
    waiting: FairQueue,
    copies: CopyQueue<PieceInFlight>,
    pieces: usize,
    bytes: u64,
}

struct PieceInFlight {
    client: u64,
    request: u64,
    bytes: u64,
}

/// A request without an outcome.
struct ActiveRequest {
    pair: Arc<Pair>,
    operation: Operation,
    /// Number of the copy in the session with the owner.
    copy: u64,
    pieces: usize,
    is_submitted: bool,
    failure: Option<(ErrorKind, String)>,
}

struct EngineClient {
    client: Arc<Client>,
    active: HashMap<u64, ActiveRequest>,
    /// A client that did not keep to the protocol is not served any more.
    is_refused: bool,
}

/// The clients, and what the threads of the service share.
struct Served {
    shared: Arc<Shared>,
    clients: HashMap<u64, EngineClient>,
    /// Blocks of the piece that is being started.
    piece_blocks: Vec<Block>,
}

pub(super) struct Engine {
    served: Served,
    seen_changes: u64,
    /// Requests that follow a stream of their client, which has not written its word.
    behind_streams: Vec<(u64, PostedRequest)>,
    /// How long the thread sleeps before it looks at those words again.
    stream_poll: RetryBackoff,
    lanes: HashMap<LaneKey, Lane>,
    busy_until: Instant,
    next_sweep: Instant,
    has_pairs: bool,
}

impl Engine {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let now = Instant::now();
        Self {
            served: Served { shared, clients: HashMap::new(), piece_blocks: Vec::new() },
            seen_changes: 0,
            behind_streams: Vec::new(),
            stream_poll: STREAM_POLL,
            lanes: HashMap::new(),
            busy_until: now,
            next_sweep: now,
            has_pairs: false,
        }
    }

    /// Copies until the service ends.
    pub(super) fn run(mut self) {
        let serve = AssertUnwindSafe(|| {
            while !self.served.shared.is_over() {
                if self.progress(true) {
                    self.busy_until = Instant::now() + SPIN;
                } else {
                    self.pause();
                }
            }
        });
        match catch_unwind(serve) {
            Ok(()) => self.end(),
            Err(_) => self.abandon(),
        }
    }

    /// After a panic: waits for the devices, and tells the clients that no copy is in flight, so that
    /// they use the next service, or other paths. New ones are told the same.
    fn abandon(self) {
        tracing::error!("the copy service has ended: its thread panicked. Restart the program");
        self.served.shared.end();
        let end = ipc::deadline(END_TIMEOUT);
        let mut are_done = true;
        for lane in self.lanes.into_values() {
            are_done &= lane.copies.close(end).1;
        }
        for EngineClient { client, .. } in self.served.clients.values().filter(|_| are_done) {
            client.end();
        }
    }

    /// Waits for copies in flight, and tells the clients that none is.
    fn end(mut self) {
        let end = Instant::now() + END_TIMEOUT;
        while self.lanes.values().any(|lane| lane.pieces > 0) && Instant::now() < end {
            if !self.progress(false) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        let has_ended = self.lanes.values().all(|lane| lane.pieces == 0);
        for EngineClient { client, .. } in self.served.clients.values().filter(|_| has_ended) {
            client.end();
        }
    }

    /// False if nothing changed.
    fn progress(&mut self, takes_requests: bool) -> bool {
        let mut has_moved = self.update_clients();
        if takes_requests {
            has_moved |= self.take_requests();
        }
        for lane in self.lanes.values_mut() {
            has_moved |= self.served.complete(lane);
            has_moved |= takes_requests && self.served.submit(lane);
        }
        let now = Instant::now();
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP_INTERVAL;
            self.has_pairs = false;
            self.served.shared.owners().refresh();
            for connected in self.served.clients.values() {
                self.has_pairs |= connected.client.end_stale_pairs();
            }
            self.drop_idle_lanes();
        }
        has_moved
    }

    /// Adds clients that connected, and forgets those that left, after their copies.
    fn update_clients(&mut self) -> bool {
        let Served { shared, clients, .. } = &mut self.served;
        let Some(all) = shared.clients().changed(&mut self.seen_changes) else { return false };
        for client in all {
            clients.entry(client.number()).or_insert_with(|| EngineClient {
                client,
                active: HashMap::new(),
                is_refused: false,
            });
        }
        for (number, left) in clients.iter_mut().filter(|(_, it)| it.client.has_left()) {
            self.lanes.values_mut().for_each(|lane| lane.waiting.remove(*number).for_each(drop));
            left.active.retain(|_, request| {
                request.is_submitted = true;
                let has_ended = request.pieces == 0;
                if has_ended {
                    request.pair.end_copy(request.copy);
                }
                !has_ended
            });
        }
        clients.retain(|_, it| {
            let is_over = it.client.has_left() && it.active.is_empty();
            if is_over {
                // The process may live, and wait for requests that are not served any more.
                it.client.end();
            }
            !is_over
        });
        true
    }

    fn take_requests(&mut self) -> bool {
        let mut has_any = false;
        let mut taken = Vec::new();
        for (number, connected) in &mut self.served.clients {
            if connected.is_refused {
                continue;
            }
            loop {
                match connected.client.take_request() {
                    Ok(Some(request)) => taken.push((*number, request)),
                    Ok(None) => break,
                    Err(error) => {
                        let client = connected.client.label();
                        tracing::warn!(client, %error, "a client of the copy service is refused");
                        connected.is_refused = true;
                        connected.client.disconnect();
                        break;
                    }
                }
            }
        }
        taken.extend(self.behind_streams.extract_if(.., |(client, request)| {
            let connected = self.served.clients.get(client);
            connected.is_none_or(|it| it.client.start_of(request.number()) != Start::Later)
        }));
        for (client, request) in taken {
            has_any = true;
            self.stream_poll.reset();
            let number = request.number();
            if request.follows_stream()
                && let Some(connected) = self.served.clients.get(&client)
            {
                match connected.client.start_of(number) {
                    Start::Now => {}
                    Start::Later => {
                        self.behind_streams.push((client, request));
                        continue;
                    }
                    Start::Abandoned => {
                        let cause = "the client does not wait for its stream".to_owned();
                        self.served.report(client, number, Err((ErrorKind::Cancelled, cause)));
                        continue;
                    }
                }
            }
            if let Err(error) = self.accept(client, request) {
                self.served.report(client, number, Err((error.kind(), error.reason())));
            }
        }
        has_any
    }

    /// Checks a request against what the owners exported, and queues it.
    fn accept(&mut self, client: u64, request: PostedRequest) -> Result<()> {
        let refused = |kind, detail: String| Err(Error::new(COPY, kind, detail));
        let Some(connected) = self.served.clients.get_mut(&client) else { return Ok(()) };
        let (number, operation) = (request.number(), request.operation());
        let pair = match connected.client.pair(request.pair()) {
            Some(PairState::Open(pair)) => pair,
            Some(PairState::Ended(kind, cause)) => return refused(kind, cause.to_owned()),
            None => {
                let detail = format!("pair {} is not open", request.pair());
                return refused(ErrorKind::Unknown, detail);
            }
        };
        if !pair.rights().permit(operation) {
            let detail = "the region's rights do not allow it";
            return refused(ErrorKind::NotAllowed, detail.to_owned());
        }
        let (local, remote) = pair.lengths();
        let (to, from) = operation.to_and_from(local, remote);
        let blocks = request.into_blocks();
        let bytes = match Blocks::from(&blocks).check(to, from) {
            Ok(bytes) => bytes,
            Err(detail) => return refused(ErrorKind::OutOfBounds, detail),
        };
        let copy = match pair.begin_copy() {
            Ok(copy) => copy,
            Err((kind, cause)) => return refused(kind, cause.to_owned()),
        };
        if bytes == 0 {
            pair.end_copy(copy);
            self.served.report(client, number, Ok(()));
            return Ok(());
        }
        let device = pair.device().name();
        let is_put = operation == Operation::Put;
        let lane_key = (device, pair.remote_device(), is_put, bytes < SMALL_REQUEST);
        let lane = match self.lanes.entry(lane_key) {
            std::collections::hash_map::Entry::Occupied(lane) => lane.into_mut(),
            std::collections::hash_map::Entry::Vacant(slot) => {
                let copies = CopyQueue::new(pair.device()).inspect_err(|_| pair.end_copy(copy))?;
                slot.insert(Lane { waiting: FairQueue::default(), copies, pieces: 0, bytes: 0 })
            }
        };
        lane.waiting.push(client, QueuedRequest::new(number, blocks));
        let active =
            ActiveRequest { pair, operation, copy, pieces: 0, is_submitted: false, failure: None };
        connected.active.insert(number, active);
        Ok(())
    }

    fn pause(&mut self) {
        let now = Instant::now();
        let look = self.lanes.values().filter_map(|lane| lane.copies.pause(now)).min();
        let interval = if self.has_pairs { SWEEP_INTERVAL } else { IDLE_INTERVAL };
        let until = match look {
            _ if now < self.busy_until => return std::hint::spin_loop(),
            Some(Pause::Spin) => return std::hint::spin_loop(),
            Some(Pause::Until(look)) => look,
            None => now + interval,
        };
        let until = match self.behind_streams.is_empty() {
            true => until,
            false => until.min(now + self.stream_poll.next_pause()),
        };
        let _exact = look.map(|_| ExactTimer::set());
        // The clients' doorbells, then a last look at their rings, then this thread's own doorbell.
        let Served { shared, clients, .. } = &self.served;
        for connected in clients.values() {
            connected.client.announce_waiter();
        }
        let seen = self.seen_changes;
        let has_posted = |it: &EngineClient| !it.is_refused && it.client.has_posted();
        shared.sleep(until, || {
            shared.is_over()
                || shared.clients().has_changed(seen)
                || clients.values().any(has_posted)
        });
    }

    /// Ends streams that no pair uses: each keeps resources of its device.
    fn drop_idle_lanes(&mut self) {
        if self.has_pairs {
            return;
        }
        self.lanes.retain(|_, lane| lane.pieces > 0);
    }
}

impl Served {
    /// Starts pieces on a stream while it has room.
    fn submit(&mut self, lane: &mut Lane) -> bool {
        let mut has_any = false;
        while lane.pieces < MAX_PIECES_IN_FLIGHT && lane.bytes < MAX_BYTES_IN_FLIGHT {
            let Some(piece) = lane.waiting.next(&mut self.piece_blocks) else { break };
            let (client, request, bytes) = (piece.client(), piece.request(), piece.bytes());
            let active = self.clients.get_mut(&client).and_then(|it| it.active.get_mut(&request));
            let Some(active) = active else { continue };
            let (to, from) = active.pair.ends(active.operation);
            let (to, from) = (to.whole(), from.whole());
            let blocks = Blocks::from(&self.piece_blocks);
            let by = CopyMethod::Best;
            let in_flight = PieceInFlight { client, request, bytes };
            lane.copies.push(in_flight, bytes, CopyRequest::new(&to, &from, blocks, by));
            lane.pieces += 1;
            lane.bytes += bytes;
            active.pieces += 1;
            active.is_submitted = piece.is_last();
            has_any = true;
        }
        has_any
    }

    /// Handles the pieces that a stream has completed.
    fn complete(&mut self, lane: &mut Lane) -> bool {
        let mut done = Vec::new();
        lane.copies.progress(|piece, outcome| done.push((piece, outcome)));
        for (piece, outcome) in &done {
            lane.pieces -= 1;
            lane.bytes -= piece.bytes;
            if outcome.is_err() {
                lane.waiting.remove_request(piece.client, piece.request);
            }
        }
        let has_any = !done.is_empty();
        for (piece, outcome) in done {
            self.shared.count(piece.bytes);
            self.complete_piece(&piece, outcome);
        }
        has_any
    }

    fn complete_piece(&mut self, piece: &PieceInFlight, outcome: Result<()>) {
        let PieceInFlight { client, request, .. } = *piece;
        let Some(connected) = self.clients.get_mut(&client) else { return };
        let Some(active) = connected.active.get_mut(&request) else { return };
        active.pieces -= 1;
        if let Err(error) = outcome {
            // The rest is not started.
            active.is_submitted = true;
            active.failure.get_or_insert((error.kind(), error.reason()));
        }
        if active.pieces > 0 || !active.is_submitted {
            return;
        }
        let Some(active) = connected.active.remove(&request) else { return };
        active.pair.end_copy(active.copy);
        if !connected.client.has_left() {
            self.report(client, request, active.failure.map_or(Ok(()), Err));
        } else if connected.active.is_empty() {
            connected.client.end();
            self.clients.remove(&client);
        }
    }

    /// Writes the outcome of a request, and wakes its client.
    fn report(
        &mut self,
        client: u64,
        request: u64,
        outcome: std::result::Result<(), (ErrorKind, String)>,
    ) {
        if let Some(EngineClient { client, .. }) = self.clients.get(&client) {
            client.finish(request, outcome);
        }
    }
}

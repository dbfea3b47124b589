//! The client of the copy service.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::{Block, Device, DeviceName, Point, Stream};
use ipc::{Channel, ChannelError, PidFd};
use threads::{ForkGeneration, lock};

use super::opening::{
    MAX_PIECES_PER_MESSAGE, OfferedPieces, Opening, RegionName, Remote, Reply, Request,
};
use super::request_ring::{ClientRing, DEPTH, MAX_PART_BLOCKS, StreamRelease};
use super::socket_in;
use crate::blocks::{BlockListPool, BlockQueue, Blocks, Rows};
use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::path::Operation;
use crate::region::{RegionDescriptor, RegisteredRegion, Rights};
use crate::remaining;
use crate::wire::malformed;

const CONNECT: &str = "connect to copy service";
const OPEN: &str = "open memory at copy service";
const COPY: &str = "copy by the copy service";
/// How long transfers wait for a service that has ended to be started again.
const RESTART_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a service is looked for that has ended, and whether one has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// How long a connected service may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a transfer is tried by a service that ends while it opens the pair.
const MAX_LOSSES: u32 = 100;
/// Blocks that are posted and without an outcome, at most: as many as the ring has.
const MAX_POSTED_BLOCKS: usize = 4 * MAX_PART_BLOCKS;

/// The agent of a client, as it introduces itself.
#[derive(Debug)]
pub(crate) struct ClientIdentity {
    hello: Vec<u8>,
    pidfd: OwnedFd,
    /// What the service rings after it has written outcomes.
    doorbell: OwnedFd,
    /// Users whose service is trusted with memory, besides root.
    trusted_users: Vec<u32>,
}

impl ClientIdentity {
    /// An agent with its pidfd, the doorbell that the service rings, and the users whose service it
    /// trusts besides root.
    pub(crate) fn new(
        identity: [u8; 16],
        label: &str,
        pidfd: OwnedFd,
        doorbell: OwnedFd,
        trusted_users: Vec<u32>,
    ) -> Self {
        let hello = Request::Hello(identity, label.to_owned()).encode();
        Self { hello, pidfd, doorbell, trusted_users }
    }
}

/// The other memory of a pair.
pub(crate) enum PairRemote {
    /// A region of another agent, which exports it to the service.
    Region(RegionName),
    /// Memory in one piece, which this process has and cannot map.
    Exported(ExportedPiece),
}

/// Memory that another process exported, in one piece.
pub(crate) struct ExportedPiece {
    descriptor: RegionDescriptor,
    file: OwnedFd,
}

impl ExportedPiece {
    /// The memory that is described, with its file.
    pub(crate) fn new(descriptor: RegionDescriptor, file: OwnedFd) -> Self {
        Self { descriptor, file }
    }
}

/// A local region and other memory, between which the service copies.
pub(crate) struct ServicePair {
    local: Arc<RegisteredRegion>,
    remote: PairRemote,
    /// The connection that it was opened by (upper half), and its number there; 0 before that.
    opened: AtomicU64,
    closing: Arc<ClosingPairs>,
}

impl fmt::Debug for ServicePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let local = self.local.descriptor.number;
        match &self.remote {
            PairRemote::Region(region) => {
                write!(f, "ServicePair(local region {local}, remote region {})", region.number())
            }
            PairRemote::Exported(piece) => {
                let bytes = piece.descriptor.length;
                write!(f, "ServicePair(local region {local}, {bytes} exported bytes)")
            }
        }
    }
}

impl Drop for ServicePair {
    fn drop(&mut self) {
        self.closing.close(self.opened.load(Ordering::Acquire));
    }
}

/// Tells the service that pairs are not used any more, from any thread.
#[derive(Debug)]
struct ClosingPairs {
    /// The number of the connection, and its channel.
    channel: Mutex<Option<(u32, Arc<Channel>)>>,
    /// Pairs whose message found the socket full.
    unsent: Mutex<Vec<u64>>,
    fork_generation: ForkGeneration,
}

impl ClosingPairs {
    fn new() -> Self {
        let (channel, unsent) = (Mutex::default(), Mutex::default());
        Self { channel, unsent, fork_generation: ForkGeneration::current() }
    }

    fn close(&self, opened: u64) {
        // A forked child does not close the parent's pairs.
        if opened != 0 && self.fork_generation.is_current() && !self.send(opened) {
            lock(&self.unsent).push(opened);
        }
    }

    /// False if the socket is full. With a connection all its pairs end.
    fn send(&self, opened: u64) -> bool {
        let channel = lock(&self.channel).clone();
        let Some((_, channel)) = channel.filter(|(of, _)| u64::from(*of) == opened >> 32) else {
            return true;
        };
        let sent = channel.send(&Request::Close(opened as u32).encode(), &[], Duration::ZERO);
        !matches!(sent, Err(ChannelError::DeadlineExceeded { .. }))
    }

    fn send_rest(&self) {
        let unsent = std::mem::take(&mut *lock(&self.unsent));
        unsent.into_iter().for_each(|opened| self.close(opened));
    }
}

/// A connection to a service.
#[derive(Debug)]
struct Connection {
    number: u32,
    channel: Arc<Channel>,
    pidfd: PidFd,
    ring: ClientRing,
    last_pair: u32,
    /// Local regions that the service has mapped before, by their numbers.
    offered: HashSet<u64>,
}

/// A transfer that is not complete.
#[derive(Debug)]
struct Transfer<T> {
    context: T,
    pair: Arc<ServicePair>,
    operation: Operation,
    /// The point of a stream of this process after which it begins; None later.
    after: Option<Point>,
    /// All blocks, to repeat the transfer by another service.
    blocks: BlockQueue,
    unposted: Unposted,
    /// Requests without an outcome.
    open_requests: u32,
    /// How often a service ended while it opened the pair.
    losses: u32,
    failure: Option<Error>,
}

/// Blocks that were not posted.
#[derive(Debug)]
enum Unposted {
    /// Those in this range of the list.
    List(Range<usize>),
    Rows(Rows),
}

/// A stream that waits for a request.
#[derive(Debug)]
struct DelayedStream {
    transfer: u64,
    release: StreamRelease,
}

/// Does a stream wait for a transfer?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamDelay {
    /// Yes, from now on.
    Begun,
    /// Not all of the transfer is posted yet.
    NotPosted,
    /// There is no such transfer.
    Over,
}

/// A posted request.
#[derive(Debug)]
struct PostedPart {
    number: u64,
    transfer: u64,
    blocks: usize,
}

/// Transfers by the copy service of a directory. After the service has ended, they are repeated by
/// the next one: a service that was killed has copied all, a part or nothing.
#[derive(Debug)]
pub(crate) struct CopyClient<T> {
    socket: PathBuf,
    identity: ClientIdentity,
    connection: Option<Connection>,
    connections: u32,
    /// Since when no service was found.
    lost_since: Option<Instant>,
    next_check: Instant,
    closing: Arc<ClosingPairs>,
    /// Transfers by their numbers.
    transfers: HashMap<u64, Transfer<T>>,
    /// Transfers with blocks that were not posted, in order.
    unposted: VecDeque<u64>,
    /// Transfers that may be over.
    ended: VecDeque<u64>,
    last_transfer: u64,
    posted: VecDeque<PostedPart>,
    posted_blocks: usize,
    /// Streams that write the words of requests that follow a stream.
    word_streams: HashMap<DeviceName, Stream>,
    delayed_streams: Vec<DelayedStream>,
    block_lists: BlockListPool,
    /// Rows of the request that is being posted.
    part: Vec<Block>,
}

/// Why no copy service can be expected in a directory, without connecting to it.
pub(crate) fn absence(directory: &Path) -> Option<String> {
    let socket = socket_in(directory);
    (!socket.exists()).then(|| {
        let directory = directory.display();
        format!("none listens in {directory}: run \"fabricast node --directory {directory}\"")
    })
}

impl<T> CopyClient<T> {
    pub(crate) fn new(directory: &Path, identity: ClientIdentity) -> Self {
        Self {
            socket: socket_in(directory),
            identity,
            connection: None,
            connections: 0,
            lost_since: None,
            next_check: Instant::now(),
            closing: Arc::new(ClosingPairs::new()),
            transfers: HashMap::new(),
            unposted: VecDeque::new(),
            ended: VecDeque::new(),
            last_transfer: 0,
            posted: VecDeque::new(),
            posted_blocks: 0,
            word_streams: HashMap::new(),
            delayed_streams: Vec::new(),
            block_lists: BlockListPool::default(),
            part: Vec::new(),
        }
    }

    /// Opens a pair: the service maps both memories.
    pub(crate) fn open_pair(
        &mut self,
        local: &Arc<RegisteredRegion>,
        remote: PairRemote,
        end: Instant,
    ) -> Result<Arc<ServicePair>> {
        let end = end.min(ipc::deadline(ANSWER_TIMEOUT));
        self.check_service();
        if self.connection.is_none() {
            self.connect(end).map_err(|error| error.at(&self.socket))?;
        }
        let pair = Arc::new(ServicePair {
            local: Arc::clone(local),
            remote,
            opened: AtomicU64::new(0),
            closing: Arc::clone(&self.closing),
        });
        if let Some(connection) = &mut self.connection {
            connection.open(&pair, end).map_err(|error| error.at(&self.socket))?;
        }
        Ok(pair)
    }

    fn connect(&mut self, end: Instant) -> Result<()> {
        let channel = Channel::connect(&self.socket, remaining(end)).during(CONNECT)?;
        let user = channel.credentials().during(CONNECT)?.user;
        if user != 0 && !self.identity.trusted_users.contains(&user) {
            let detail = format!(
                "the socket belongs to user {user}, who is not trusted. Add the user to the admission"
            );
            return Err(Error::new(CONNECT, ErrorKind::Denied, detail));
        }
        let descriptors = [self.identity.pidfd.as_fd(), self.identity.doorbell.as_fd()];
        channel.send(&self.identity.hello, &descriptors, remaining(end)).during(CONNECT)?;
        let message = channel.receive(remaining(end)).during(CONNECT)?;
        match Reply::read(CONNECT, &message.bytes)? {
            Reply::Welcome => {}
            Reply::Refused(_, refusal) => return Err(refusal.into_error(CONNECT)),
            Reply::Opened(_) => return Err(malformed(CONNECT, "expected a welcome")),
        }
        let Ok([pidfd, ring]) = <[_; 2]>::try_from(message.descriptors) else {
            return Err(malformed(CONNECT, "expected two descriptors"));
        };
        let pidfd = PidFd::from_fd(pidfd).map_err(|e| malformed(CONNECT, e.to_string()))?;
        let ring = ClientRing::open(ring)?;
        self.connections += 1;
        let (number, channel) = (self.connections, Arc::new(channel));
        *lock(&self.closing.channel) = Some((number, Arc::clone(&channel)));
        let offered = HashSet::new();
        self.connection = Some(Connection { number, channel, pidfd, ring, last_pair: 0, offered });
        self.lost_since = None;
        Ok(())
    }

    /// Can a transfer of so many blocks follow a stream of this device, without progress of this
    /// process?
    pub(crate) fn can_follow(&mut self, device: &Device, blocks: usize) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        let ready = connection.ring.pin(device).and_then(|()| {
            if let Entry::Vacant(slot) = self.word_streams.entry(device.name()) {
                slot.insert(device.stream().during(COPY)?);
            }
            Ok(())
        });
        let is_ready = ready.inspect_err(|error| {
            tracing::debug!(%error, "the copy service does not follow streams of this device");
        });
        // Those that wait for streams leave half of the ring to others.
        let behind_streams = self.posted.iter().filter(|part| {
            self.transfers.get(&part.transfer).is_some_and(|transfer| transfer.after.is_some())
        });
        let (parts, posted) =
            behind_streams.fold((0, 0), |(parts, posted), part| (parts + 1, posted + part.blocks));
        is_ready.is_ok()
            && blocks <= MAX_PART_BLOCKS
            && parts < DEPTH / 2
            && posted + blocks <= MAX_POSTED_BLOCKS / 2
    }

    /// Starts a transfer between the memories of a pair, after a point of a stream that it
    /// [can follow](Self::can_follow), if one is given.
    pub(crate) fn begin(
        &mut self,
        context: T,
        pair: &Arc<ServicePair>,
        operation: Operation,
        blocks: Blocks<'_>,
        after: Option<Point>,
    ) {
        self.last_transfer += 1;
        let transfer = Transfer {
            context,
            pair: Arc::clone(pair),
            operation,
            after,
            unposted: Unposted::all_of(blocks),
            blocks: self.block_lists.copy_blocks(blocks),
            open_requests: 0,
            losses: 0,
            failure: None,
        };
        self.transfers.insert(self.last_transfer, transfer);
        self.unposted.push_back(self.last_transfer);
        self.post();
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.transfers.is_empty()
    }

    /// The contexts of the transfers that are not complete.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = &T> {
        self.transfers.values().map(|transfer| &transfer.context)
    }

    /// Is there something for [`progress`](Self::progress) now?
    #[inline]
    pub(crate) fn has_outcomes(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.ring.has_outcomes())
    }

    /// Passes completed transfers to `done`, and posts more requests. False if nothing changed.
    pub(crate) fn progress(&mut self, mut done: impl FnMut(T, Result<()>)) -> bool {
        if self.is_idle() {
            return false;
        }
        if self.has_outcomes() {
            self.take_outcomes();
        }
        let now = Instant::now();
        if now >= self.next_check {
            self.next_check = now + CHECK_INTERVAL;
            self.closing.send_rest();
            self.check_service();
            self.check_points();
            self.reconnect(now);
        }
        self.post();
        let mut has_moved = false;
        while let Some(number) = self.ended.pop_front() {
            if !self.transfers.get(&number).is_some_and(Transfer::is_over) {
                continue;
            }
            let Some(transfer) = self.transfers.remove(&number) else { continue };
            self.release_streams(number);
            self.block_lists.recycle(transfer.blocks);
            done(transfer.context, transfer.failure.map_or(Ok(()), Err));
            has_moved = true;
        }
        has_moved
    }

    /// Stops a transfer: nothing more of it is posted, and it ends as cancelled when the posted
    /// requests are over. False if all of it is posted.
    pub(crate) fn stop(&mut self, is_meant: impl Fn(&T) -> bool) -> bool {
        let mut transfers = self.transfers.iter_mut();
        let found = transfers.find(|(_, transfer)| is_meant(&transfer.context));
        let Some((number, transfer)) = found else { return false };
        if transfer.is_posted() && transfer.after.is_none() {
            return false;
        }
        transfer.abandon_start(*number, &self.posted, self.connection.as_ref());
        let error = Error::new(COPY, ErrorKind::Cancelled, "the transfer was cancelled");
        transfer.failure.get_or_insert(error);
        self.ended.push_back(*number);
        true
    }

    /// Ends transfers: nothing more of them is posted, and posted requests are waited for until
    /// `end`. Returns their contexts, and false if the service may still copy for one: its memory is
    /// never freed then.
    pub(crate) fn cancel(
        &mut self,
        is_cancelled: impl Fn(&T) -> bool,
        end: Instant,
    ) -> (Vec<T>, bool) {
        let mut cancelled = Vec::new();
        for (number, transfer) in &mut self.transfers {
            if is_cancelled(&transfer.context) {
                transfer.blocks = BlockQueue::default();
                transfer.unposted = Unposted::List(0..0);
                transfer.abandon_start(*number, &self.posted, self.connection.as_ref());
            }
        }
        let is_over = |transfer: &Transfer<T>| {
            transfer.open_requests == 0 || !is_cancelled(&transfer.context)
        };
        while !self.transfers.values().all(is_over) && Instant::now() < end {
            if self.has_outcomes() {
                self.take_outcomes();
            }
            self.check_service();
            std::thread::sleep(Duration::from_micros(100));
        }
        let mut is_settled = true;
        let removed = self.transfers.extract_if(|_, transfer| is_cancelled(&transfer.context));
        let removed: Vec<_> = removed.collect();
        for (number, transfer) in removed {
            // Otherwise the service lets streams go on that wait for it.
            if transfer.open_requests == 0 {
                self.release_streams(number);
            } else {
                is_settled = false;
                std::mem::forget(transfer.pair);
            }
            cancelled.push(transfer.context);
        }
        (cancelled, is_settled)
    }

    /// Ends the streams that write words, after all transfers, and waits for them until `end`.
    pub(crate) fn close_streams(&mut self, end: Instant) {
        for (_, stream) in self.word_streams.drain() {
            if let Err(error) = stream.close(remaining(end)) {
                tracing::debug!(%error, "a stream is still waited for");
            }
        }
    }

    /// Lets a stream wait for a transfer.
    pub(crate) fn delay(
        &mut self,
        is_meant: impl Fn(&T) -> bool,
        stream: &Stream,
    ) -> Result<StreamDelay> {
        let found = self.transfers.iter().find(|(_, transfer)| is_meant(&transfer.context));
        let Some((number, transfer)) = found else { return Ok(StreamDelay::Over) };
        let Some(connection) = self.connection.as_mut().filter(|_| transfer.is_posted()) else {
            return Ok(StreamDelay::NotPosted);
        };
        connection.ring.pin(stream.device())?;
        for part in self.posted.iter().filter(|part| part.transfer == *number) {
            let (word, value) = connection.ring.end_word(stream.device(), part.number)?;
            stream.wait_for_word(&word, value).during(COPY)?;
            let release = connection.ring.release_of(part.number);
            self.delayed_streams.push(DelayedStream { transfer: *number, release });
        }
        Ok(StreamDelay::Begun)
    }

    /// A transfer is over: streams go on whose service ended before it had written an outcome.
    fn release_streams(&mut self, transfer: u64) {
        let over = self.delayed_streams.extract_if(.., |delayed| delayed.transfer == transfer);
        over.for_each(|delayed| delayed.release.release());
    }

    /// Starts transfers whose streams have passed their points: the streams that write the words may
    /// wait for others. Fails those whose streams have failed.
    fn check_points(&mut self) {
        let Some(connection) = &self.connection else { return };
        for (number, transfer) in &mut self.transfers {
            let Some(after) = &transfer.after else { continue };
            let is_done = match after.is_done() {
                Ok(is_done) => is_done,
                Err(error) if gpu::proves_idle(&error) => {
                    transfer.failure.get_or_insert_with(|| Error::caused_by(COPY, error));
                    self.ended.push_back(*number);
                    true
                }
                // Only the query failed.
                Err(_) => false,
            };
            if !is_done {
                continue;
            }
            transfer.after = None;
            for part in self.posted.iter().filter(|part| part.transfer == *number) {
                match transfer.failure {
                    None => connection.ring.start_now(part.number),
                    Some(_) => connection.ring.abandon(part.number),
                }
            }
        }
    }

    fn take_outcomes(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let (transfers, posted_blocks) = (&mut self.transfers, &mut self.posted_blocks);
        let ended = &mut self.ended;
        self.posted.retain(|part| {
            let Some(outcome) = connection.ring.outcome(part.number) else { return true };
            *posted_blocks -= part.blocks;
            if let Some(transfer) = transfers.get_mut(&part.transfer) {
                transfer.open_requests -= 1;
                if transfer.open_requests == 0 {
                    ended.push_back(part.transfer);
                }
                if let Err(error) = outcome {
                    transfer.failure.get_or_insert(error);
                }
            }
            false
        });
    }

    /// Posts requests while the ring has room.
    fn post(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let mut has_posted = false;
        'transfers: while let Some(number_of_transfer) = self.unposted.front().copied() {
            let unposted = self.transfers.get_mut(&number_of_transfer);
            let Some(transfer) = unposted.filter(|it| it.failure.is_none()) else {
                self.unposted.pop_front();
                continue;
            };
            // It was opened by an earlier connection.
            if !connection.has(&transfer.pair) {
                let opened = connection.open(&transfer.pair, ipc::deadline(ANSWER_TIMEOUT));
                match opened {
                    Ok(()) => {}
                    // The service ended meanwhile: the next one is asked.
                    Err(_) if connection.channel.is_shut_down() && transfer.losses < MAX_LOSSES => {
                        transfer.losses += 1;
                        break;
                    }
                    Err(error) => {
                        transfer.failure = Some(error.at(&self.socket));
                        self.ended.push_back(number_of_transfer);
                        continue;
                    }
                }
            }
            let pair = transfer.pair.opened.load(Ordering::Acquire) as u32;
            while !transfer.is_posted() {
                let oldest = self.posted.front().map(|oldest| oldest.number);
                let has_entry =
                    oldest.is_none_or(|oldest| connection.ring.posted() - oldest < DEPTH as u64);
                if !has_entry || self.posted_blocks + MAX_PART_BLOCKS > MAX_POSTED_BLOCKS {
                    break 'transfers;
                }
                let ordered = transfer.after.is_some();
                let part = transfer.unposted.take(&mut transfer.blocks, &mut self.part);
                let number = connection.ring.post(pair, transfer.operation, part, ordered);
                let blocks = part.len();
                if let Some(after) = &transfer.after
                    && let Err(error) = connection.write_after(after, &self.word_streams, number)
                {
                    transfer.failure = Some(error);
                    connection.ring.abandon(number);
                }
                let part = PostedPart { number, transfer: number_of_transfer, blocks };
                self.posted.push_back(part);
                self.posted_blocks += blocks;
                transfer.open_requests += 1;
                has_posted = true;
            }
            if transfer.open_requests == 0 {
                self.ended.push_back(number_of_transfer);
            }
            self.unposted.pop_front();
        }
        if has_posted {
            connection.ring.ring();
        }
    }

    /// Forgets a service that has ended, with all its copies.
    fn check_service(&mut self) {
        let is_idle = self.posted.is_empty();
        let is_over = self.connection.as_ref().is_some_and(|connection| {
            // A killed service copies until its process has ended, after its socket.
            connection.ring.has_ended()
                || connection.pidfd.has_exited()
                || is_idle && connection.channel.is_shut_down()
        });
        if !is_over {
            return;
        }
        // Also one that it had written, but not counted: a stream may have gone on.
        self.take_outcomes();
        let in_flight = self.posted.len();
        tracing::warn!(in_flight, "the copy service has ended");
        (self.connection, self.posted_blocks) = (None, 0);
        self.posted.clear();
        *lock(&self.closing.channel) = None;
        for transfer in self.transfers.values_mut() {
            transfer.unposted = Unposted::all_of(transfer.blocks.all());
            transfer.open_requests = 0;
        }
        let of_none = |delayed: &mut DelayedStream| !self.transfers.contains_key(&delayed.transfer);
        self.delayed_streams.extract_if(.., of_none).for_each(|delayed| delayed.release.release());
        let mut unposted: Vec<_> = self.transfers.keys().copied().collect();
        unposted.sort_unstable();
        self.ended.extend(&unposted);
        self.unposted = unposted.into();
    }

    /// Connects to the next service, or fails the transfers if none starts in time.
    fn reconnect(&mut self, now: Instant) {
        if self.connection.is_some() || self.is_idle() {
            return;
        }
        let since = *self.lost_since.get_or_insert(now);
        let Err(error) = self.connect(now + ANSWER_TIMEOUT) else { return };
        if now < since + RESTART_TIMEOUT && error.kind() != ErrorKind::Denied {
            return;
        }
        for (number, transfer) in &mut self.transfers {
            self.ended.push_back(*number);
            transfer.failure.get_or_insert_with(|| {
                let detail = format!(
                    "the service ended, and none was found for {RESTART_TIMEOUT:?}: {}. Start it, \
                     or join again for another path",
                    error.reason()
                );
                Error::new(COPY, ErrorKind::Closed, detail).at(&self.socket)
            });
        }
        self.lost_since = None;
    }
}

impl<T> Transfer<T> {
    /// Lets those requests of this transfer end without a copy that wait for a stream.
    fn abandon_start(
        &mut self,
        number: u64,
        posted: &VecDeque<PostedPart>,
        connection: Option<&Connection>,
    ) {
        if self.after.take().is_some()
            && let Some(connection) = connection
        {
            let posted = posted.iter().filter(|part| part.transfer == number);
            posted.for_each(|part| connection.ring.abandon(part.number));
        }
    }

    fn is_over(&self) -> bool {
        self.open_requests == 0 && (self.failure.is_some() || self.is_posted())
    }

    fn is_posted(&self) -> bool {
        match &self.unposted {
            Unposted::List(left) => left.is_empty(),
            Unposted::Rows(rows) => rows.size_hint().0 == 0,
        }
    }
}

impl Unposted {
    fn all_of(blocks: Blocks<'_>) -> Self {
        let list = || Self::List(0..blocks.list().len());
        blocks.rows().map_or_else(list, |rows| Self::Rows(rows.iter()))
    }

    /// The next part, with a store for blocks that are not in a list.
    fn take<'a>(&mut self, blocks: &'a mut BlockQueue, store: &'a mut Vec<Block>) -> &'a [Block] {
        match self {
            Self::List(left) => {
                let part = left.start..left.end.min(left.start + MAX_PART_BLOCKS);
                left.start = part.end;
                &blocks.all().list()[part]
            }
            Self::Rows(rows) => {
                store.clear();
                store.extend(rows.take(MAX_PART_BLOCKS));
                store
            }
        }
    }
}

impl Connection {
    /// Lets a stream write the word of a request after a point of another stream.
    fn write_after(
        &mut self,
        after: &Point,
        word_streams: &HashMap<DeviceName, Stream>,
        request: u64,
    ) -> Result<()> {
        let device = after.device();
        // The ring may be that of another service than before.
        self.ring.pin(device)?;
        let stream = word_streams.get(&device.name());
        let stream = stream.ok_or("no stream was made").map_err(failed(COPY))?;
        let (word, value) = self.ring.start_word(device, request)?;
        stream.wait_for(after).during(COPY)?;
        stream.write_word(&word, value).during(COPY)
    }

    /// Was the pair opened by this connection?
    fn has(&self, pair: &ServicePair) -> bool {
        pair.opened.load(Ordering::Acquire) >> 32 == u64::from(self.number)
    }

    fn open(&mut self, pair: &ServicePair, end: Instant) -> Result<()> {
        let memory = pair.local.descriptor.number;
        let mut is_offered = self.offered.contains(&memory);
        loop {
            match self.request(pair, is_offered, end) {
                // It has unmapped the memory since.
                Err(error) if is_offered && error.kind() == ErrorKind::Unknown => {
                    is_offered = false;
                }
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        self.offered.insert(memory);
        let opened = u64::from(self.number) << 32 | u64::from(self.last_pair);
        pair.opened.store(opened, Ordering::Release);
        Ok(())
    }

    fn request(&mut self, pair: &ServicePair, is_offered: bool, end: Instant) -> Result<()> {
        self.last_pair += 1;
        let (buffer, RegionDescriptor { number, agent, .. }) =
            (&pair.local.buffer, &pair.local.descriptor);
        let described = match is_offered {
            true => None,
            false => Some(RegionDescriptor {
                number: *number,
                rights: Rights::ALL,
                ..buffer.describe(*agent)?
            }),
        };
        let local = described.as_ref().map(RegionDescriptor::encode).transpose()?;
        let remote = match &pair.remote {
            PairRemote::Region(region) => Remote::Region(region.clone()),
            PairRemote::Exported(piece) => Remote::Offered(piece.descriptor.encode()?),
        };
        let opening = Opening::new(self.last_pair, *number, local, remote);
        self.send(&Request::Open(opening), &[], end)?;
        let total = described.as_ref().map_or(0, |described| described.pieces);
        let mut first = 0;
        while first < total {
            // A few at a time: the number of descriptors of a process is limited.
            let next = total.min(first + MAX_PIECES_PER_MESSAGE as u32);
            let exported = (first..next).map(|piece| buffer.export(piece, Rights::ALL));
            let (files, lengths): (Vec<_>, _) =
                exported.collect::<Result<Vec<_>>>()?.into_iter().unzip();
            let pieces = OfferedPieces::new(total, buffer.exported_bytes(), lengths);
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            self.send(&Request::Pieces(pieces), &files, end)?;
            first = next;
        }
        if let PairRemote::Exported(ExportedPiece { descriptor, file }) = &pair.remote {
            let pieces = OfferedPieces::new(1, descriptor.length, vec![descriptor.length]);
            self.send(&Request::Pieces(pieces), &[file.as_fd()], end)?;
        }
        loop {
            let message = self.channel.receive(remaining(end)).during(OPEN)?;
            match Reply::read(OPEN, &message.bytes)? {
                Reply::Opened(opened) if opened == self.last_pair => return Ok(()),
                Reply::Refused(refused, refusal) if refused == self.last_pair => {
                    return Err(refusal.into_error(OPEN));
                }
                // Of a request that was given up: the service must not keep its memories.
                Reply::Opened(late) => self.send(&Request::Close(late), &[], end)?,
                Reply::Refused(..) => {}
                Reply::Welcome => return Err(malformed(OPEN, "second welcome")),
            }
        }
    }

    fn send(&self, request: &Request, files: &[BorrowedFd<'_>], end: Instant) -> Result<()> {
        self.channel.send(&request.encode(), files, remaining(end)).during(OPEN)
    }
}

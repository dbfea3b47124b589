//! The thread that binds a mesh to sockets. It sleeps until something is to be done.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::event_queue::PeerEventQueue;
use super::mesh::{Action, Mesh};
use super::resolver::{Resolution, Resolver};
use super::session_arbitration::ConnectionId;
use super::socket::{self, IoOutcome, is_local_address};
use crate::lock::lock;
use crate::wake::WakeFd;

/// Bytes of one read, and reads of one connection before the others' turn.
const READ_BUFFER_LENGTH: usize = 1 << 16;
const READS_PER_TURN: usize = 4;
/// Bytes that are read before what they mean is handed on.
const READ_BYTES_PER_TURN: usize = 4 << 20;
/// Connections that are taken in before the others' turn.
const ACCEPTS_PER_TURN: usize = 16;
/// How long nobody is let in when the system has no room for one more.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// How long an attempt to connect is waited for before another one is made beside it: what the first
/// one sent may have been lost, and the system sends it again only after a second, and then ever later.
const SECOND_ATTEMPT_AFTER: Duration = Duration::from_millis(250);
/// Addresses that are dialled at the same time, beyond which each has one attempt.
const MAX_DOUBLE_DIALS: usize = 64;
/// How often it is looked whether the addresses of connections are still this machine's.
const ADDRESS_CHECK_INTERVAL: Duration = Duration::from_millis(400);
/// How long the other side has to hear why a connection ends, and how many may take so long.
const LINGER_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_CLOSING: usize = 64;

/// What the thread shares with its handle.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) mesh: Mutex<Mesh>,
    pub(super) events: PeerEventQueue,
    /// Rings when there is something to do for the thread.
    pub(super) bell: Arc<WakeFd>,
    pub(super) began: Instant,
    pub(super) is_over: AtomicBool,
}

impl Shared {
    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }
}

/// A connection that is being made.
#[derive(Debug)]
struct DialAttempt {
    address: String,
    /// One of those that the address stands for.
    to: SocketAddr,
    /// The first attempt, which may take long where the way is long, and the latest beside it.
    stream: TcpStream,
    second_stream: Option<TcpStream>,
    /// When there is to be another one.
    second_attempt_at: Duration,
    until: Duration,
    /// Where else the same may be reached.
    others: Vec<SocketAddr>,
}

/// A connection that is over, until the other side has taken the rest.
#[derive(Debug)]
struct ClosingConnection {
    stream: TcpStream,
    rest: Vec<u8>,
    until: Duration,
}

/// Whose descriptor it is.
#[derive(Debug, Clone, Copy)]
enum PollSource {
    Wake,
    Listener,
    Connection(ConnectionId),
    /// Whether it is the second attempt.
    DialAttempt(usize, bool),
    ClosingConnection,
}

#[derive(Debug)]
pub(super) struct PeerEventLoop {
    shared: Arc<Shared>,
    listener: Option<TcpListener>,
    own: Option<IpAddr>,
    dial_timeout: Duration,
    accepting_after: Duration,
    reading_paused: bool,
    /// When it was looked last what had come. Nobody is silent because of what came since.
    last_poll: Duration,
    /// What may still be read before the next look, and who was the first not to be read.
    read_budget: usize,
    next_to_read: Option<ConnectionId>,
    connections: BTreeMap<ConnectionId, TcpStream>,
    dialling: Vec<DialAttempt>,
    closing: Vec<ClosingConnection>,
    /// When it is looked next whether addresses are still here.
    addresses: Duration,
    names: Resolver,
    read_buffer: Box<[u8]>,
}

impl PeerEventLoop {
    pub(super) fn new(
        shared: Arc<Shared>,
        listener: Option<TcpListener>,
        own: Option<IpAddr>,
    ) -> Self {
        let names = Resolver::new(Arc::clone(&shared.bell));
        let dial_timeout = lock(&shared.mesh).timing.handshake_timeout;
        Self {
            shared,
            listener,
            own,
            dial_timeout,
            accepting_after: Duration::ZERO,
            reading_paused: false,
            last_poll: Duration::ZERO,
            read_budget: 0,
            next_to_read: None,
            connections: BTreeMap::new(),
            dialling: Vec::new(),
            closing: Vec::new(),
            addresses: Duration::ZERO,
            names,
            read_buffer: vec![0; READ_BUFFER_LENGTH].into(),
        }
    }

    /// Until it is over.
    pub(super) fn run(mut self) {
        while !self.shared.is_over.load(Ordering::Acquire) {
            let deadline = self.act();
            self.wait(deadline);
        }
        self.finish();
    }

    /// Says goodbye.
    fn finish(mut self) {
        if let Some(listener) = self.listener.take() {
            // Where a forked child has a copy, closing it here would not be enough: others would
            // connect to nobody, and whoever starts next could not listen there.
            socket::stop_listening(&listener);
        }
        self.dialling.clear();
        let shared = Arc::clone(&self.shared);
        let mut mesh = lock(&shared.mesh);
        mesh.leave();
        while let Some(action) = mesh.next_action() {
            if let Action::Close { connection, rest } = action
                && let Some(stream) = self.connections.remove(&connection)
            {
                let until = shared.now() + LINGER_TIMEOUT;
                self.closing.push(ClosingConnection { stream, rest, until });
            }
        }
        drop(mesh);
        loop {
            self.flush_closing();
            let Some(until) = self.closing.iter().map(|closing| closing.until).min() else {
                return;
            };
            self.wait(Some(until));
        }
    }

    /// Does what the mesh wants done by now. Gives the moment of the next thing to do.
    fn act(&mut self) -> Option<Duration> {
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        while let Some(answer) = self.names.next_answer() {
            self.dial(answer);
        }
        let is_late = |dialling: &mut DialAttempt| now >= dialling.until;
        for dialling in self.dialling.extract_if(.., is_late).collect::<Vec<_>>() {
            self.dial_next(dialling, "no answer");
        }
        self.dial_second(now);
        let mut mesh = lock(&shared.mesh);
        self.check_local_addresses(&mut mesh, now);
        mesh.tick(self.last_poll);
        while let Some(action) = mesh.next_action() {
            match action {
                Action::Tell(event) => shared.events.push(event),
                Action::Close { connection, rest } => {
                    if let Some(stream) = self.connections.remove(&connection) {
                        let until = now + LINGER_TIMEOUT;
                        self.closing.push(ClosingConnection { stream, rest, until });
                    }
                }
                Action::Dial { address } => {
                    // What comes of it may be known at once, and that is for the mesh, too.
                    drop(mesh);
                    if let Some(answer) = self.names.resolve(&address) {
                        self.dial(answer);
                    }
                    mesh = lock(&shared.mesh);
                }
            }
        }
        let is_full = shared.events.is_full(self.reading_paused);
        if is_full != self.reading_paused {
            self.reading_paused = is_full;
            mesh.pause_reading(is_full, now);
        }
        let next = mesh.deadline();
        drop(mesh);
        self.flush_closing();
        let dialling =
            self.dialling.iter().map(|dialling| dialling.until.min(dialling.second_attempt_at));
        let closing = self.closing.iter().map(|closing| closing.until);
        let rest = (self.accepting_after > now).then_some(self.accepting_after);
        next.into_iter().chain(dialling).chain(closing).chain(rest).min()
    }

    /// Sleeps until something can be done, and does it.
    fn wait(&mut self, deadline: Option<Duration>) {
        let now = self.shared.now();
        let mut whose = vec![PollSource::Wake];
        let mut flags = vec![PollFlags::POLLIN];
        let mut descriptors: Vec<BorrowedFd<'_>> = vec![self.shared.bell.as_fd()];
        let mut add = |who, descriptor, reads: bool, writes: bool| {
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::POLLIN, reads);
            wanted.set(PollFlags::POLLOUT, writes);
            if !wanted.is_empty() {
                whose.push(who);
                flags.push(wanted);
                descriptors.push(descriptor);
            }
        };
        if let Some(listener) = &self.listener {
            add(
                PollSource::Listener,
                listener.as_fd(),
                !self.reading_paused && now >= self.accepting_after,
                false,
            );
        }
        let mesh = lock(&self.shared.mesh);
        // Those first for whom nothing was left the last time.
        let next_to_read = self.next_to_read.take().unwrap_or(ConnectionId(0));
        for (connection, stream) in
            self.connections.range(next_to_read..).chain(self.connections.range(..next_to_read))
        {
            let has_output = !mesh.output(*connection).is_empty();
            add(
                PollSource::Connection(*connection),
                stream.as_fd(),
                !self.reading_paused,
                has_output,
            );
        }
        drop(mesh);
        for (index, dialling) in self.dialling.iter().enumerate() {
            add(PollSource::DialAttempt(index, false), dialling.stream.as_fd(), false, true);
            if let Some(second_stream) = &dialling.second_stream {
                add(PollSource::DialAttempt(index, true), second_stream.as_fd(), false, true);
            }
        }
        for closing in &self.closing {
            add(
                PollSource::ClosingConnection,
                closing.stream.as_fd(),
                true,
                !closing.rest.is_empty(),
            );
        }
        let mut entries: Vec<_> =
            descriptors.into_iter().zip(flags).map(|(fd, flags)| PollFd::new(fd, flags)).collect();
        let answer = poll(&mut entries, until(deadline, now));
        let found: Vec<_> = entries.iter().map(|entry| entry.revents()).collect();
        drop(entries);
        match answer {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => return,
            // Out of memory, say: not a reason to spin.
            Err(_) => return std::thread::sleep(ACCEPT_PAUSE),
        }
        self.last_poll = self.shared.now();
        self.read_budget = READ_BYTES_PER_TURN;
        let mut established = Vec::new();
        for (whose, found) in whose.into_iter().zip(found) {
            // A flag that nix does not know is not one that was asked for.
            let found = found.unwrap_or(PollFlags::POLLERR);
            if found.is_empty() {
                continue;
            }
            match whose {
                PollSource::Wake => self.shared.bell.silence(),
                PollSource::Listener => self.accept(),
                PollSource::Connection(connection) => self.serve(connection, found),
                PollSource::DialAttempt(index, is_second) => established.push((index, is_second)),
                // All of them are looked at before the next sleep.
                PollSource::ClosingConnection => {}
            }
        }
        // From the back, so that the numbers of the others stay what they were.
        established.dedup_by_key(|(index, _)| *index);
        for (index, is_second) in established.into_iter().rev() {
            let mut dialling = self.dialling.swap_remove(index);
            if is_second && let Some(second_stream) = &mut dialling.second_stream {
                std::mem::swap(second_stream, &mut dialling.stream);
            }
            self.established(dialling);
        }
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..ACCEPTS_PER_TURN {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
                    if !matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted) {
                        let now = self.shared.now();
                        if lock(&self.shared.mesh).log.allows(now) {
                            tracing::warn!(%error, "no connection of another node can be accepted");
                        }
                        self.accepting_after = now + ACCEPT_PAUSE;
                    }
                    return;
                }
            };
            let local_and_peer = stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true))
                .and_then(|()| socket::local_and_peer(&stream));
            // Who has gone already needs no answer.
            let Ok((local_address, peer_address)) = local_and_peer else { continue };
            let connection =
                lock(&self.shared.mesh).accepted(local_address, peer_address, self.shared.now());
            match connection {
                Some(connection) => {
                    self.connections.insert(connection, stream);
                }
                None => {
                    tracing::debug!(%peer_address, "a connection was rejected: too many connections")
                }
            }
        }
    }

    /// Reads and writes as much as is its share.
    fn serve(&mut self, connection: ConnectionId, found: PollFlags) {
        let Some(stream) = self.connections.get(&connection) else { return };
        let mut mesh = lock(&self.shared.mesh);
        let mut over = None;
        if found.contains(PollFlags::POLLOUT) {
            let output = mesh.output(connection);
            if !output.is_empty() {
                match socket::write(stream, output) {
                    IoOutcome::Bytes(count) => mesh.sent(connection, count, self.shared.now()),
                    IoOutcome::WouldBlock => {}
                    IoOutcome::Closed(how) => over = Some(how),
                }
            }
        }
        let can_read = found.intersects(!PollFlags::POLLOUT) && !self.reading_paused;
        for _ in 0..if can_read { READS_PER_TURN } else { 0 } {
            if self.read_budget == 0 {
                self.next_to_read.get_or_insert(connection);
                break;
            }
            match socket::read(stream, &mut self.read_buffer) {
                IoOutcome::Bytes(count) => {
                    self.read_budget = self.read_budget.saturating_sub(count);
                    mesh.received(connection, &self.read_buffer[..count], self.shared.now());
                    if count < READ_BUFFER_LENGTH {
                        break;
                    }
                }
                IoOutcome::WouldBlock => break,
                IoOutcome::Closed(how) => {
                    over = Some(how);
                    break;
                }
            }
        }
        // What came before is read first: it may say why.
        if let Some(how) = over {
            mesh.broken(connection, &how, self.shared.now());
        }
    }

    // ---------------------------------------------------------------- dialling

    /// Begins to connect to where an address leads.
    fn dial(&mut self, (address, found): Resolution) {
        let mut found = match found {
            Ok(found) => found,
            Err(why) => return self.on_unreachable(&address, why),
        };
        // The last is tried first, below.
        found.reverse();
        self.dial_others(address, found, "no address".to_owned());
    }

    fn dial_next(&mut self, dialling: DialAttempt, why: &str) {
        let why = reason(&dialling.address, dialling.to, why);
        self.dial_others(dialling.address, dialling.others, why);
    }

    fn dial_others(&mut self, address: String, mut others: Vec<SocketAddr>, mut why: String) {
        while let Some(next) = others.pop() {
            match socket::start_connect(next, self.own) {
                Ok(stream) => {
                    let now = self.shared.now();
                    return self.dialling.push(DialAttempt {
                        address,
                        to: next,
                        stream,
                        second_stream: None,
                        second_attempt_at: now + SECOND_ATTEMPT_AFTER,
                        until: now + self.dial_timeout,
                        others,
                    });
                }
                Err(error) => why = reason(&address, next, &error.to_string()),
            }
        }
        self.on_unreachable(&address, why);
    }

    /// Makes another attempt where the last one takes long.
    fn dial_second(&mut self, now: Duration) {
        let are_few = self.dialling.len() <= MAX_DOUBLE_DIALS;
        for dialling in
            self.dialling.iter_mut().filter(|dialling| now >= dialling.second_attempt_at)
        {
            dialling.second_attempt_at = now + SECOND_ATTEMPT_AFTER;
            if are_few {
                dialling.second_stream = socket::start_connect(dialling.to, self.own).ok();
            }
        }
    }

    /// Ends connections from addresses that this machine does not have any more.
    fn check_local_addresses(&mut self, mesh: &mut Mesh, now: Duration) {
        if now < self.addresses {
            return;
        }
        self.addresses = now + ADDRESS_CHECK_INTERVAL;
        let local_address: BTreeSet<_> =
            mesh.connections.values().map(|line| line.local_address.ip()).collect();
        let is_far = |address: &IpAddr| !address.to_canonical().is_loopback();
        let gone: BTreeSet<_> =
            local_address.into_iter().filter(is_far).filter(|it| !is_local_address(*it)).collect();
        if gone.is_empty() {
            return;
        }
        let of_gone =
            mesh.connections.iter().filter(|(_, line)| gone.contains(&line.local_address.ip()));
        for connection in of_gone.map(|(connection, _)| *connection).collect::<Vec<_>>() {
            mesh.broken(connection, "its local address was removed from this machine", now);
        }
    }

    fn established(&mut self, mut dialling: DialAttempt) {
        match socket::connected(&dialling.stream) {
            Ok(local_and_peer) => {
                let now = self.shared.now();
                let connection =
                    lock(&self.shared.mesh).dialled(&dialling.address, Ok(local_and_peer), now);
                if let Some(connection) = connection {
                    self.connections.insert(connection, dialling.stream);
                }
            }
            Err(error) => match dialling.second_stream.take() {
                Some(second_stream) => {
                    dialling.stream = second_stream;
                    self.dialling.push(dialling);
                }
                None => self.dial_next(dialling, &error.to_string()),
            },
        }
    }

    fn on_unreachable(&self, address: &str, why: String) {
        lock(&self.shared.mesh).dialled(address, Err(why), self.shared.now());
    }

    // ---------------------------------------------------------------- goodbyes

    /// Sends what is left on connections that are over, and closes them when the other side
    /// has closed its end: before that, closing would take back what was not read yet.
    fn flush_closing(&mut self) {
        let now = self.shared.now();
        let read_buffer = &mut self.read_buffer;
        self.closing.retain_mut(|closing| closing.flush(read_buffer) && now < closing.until);
        let excess = self.closing.len().saturating_sub(MAX_CLOSING);
        self.closing.drain(..excess);
    }
}

impl ClosingConnection {
    fn flush(&mut self, read_buffer: &mut [u8]) -> bool {
        while !self.rest.is_empty() {
            match socket::write(&self.stream, &self.rest) {
                IoOutcome::Bytes(count) => drop(self.rest.drain(..count)),
                IoOutcome::WouldBlock => break,
                IoOutcome::Closed(_) => return false,
            }
        }
        // Again and again is harmless.
        if self.rest.is_empty() && self.stream.shutdown(Shutdown::Write).is_err() {
            return false;
        }
        for _ in 0..READS_PER_TURN {
            match socket::read(&self.stream, read_buffer) {
                IoOutcome::Bytes(_) => {}
                IoOutcome::WouldBlock => return true,
                IoOutcome::Closed(_) => return false,
            }
        }
        true
    }
}

/// Why a target was not reached: it is named where the address is a name, which may stand for several.
fn reason(address: &str, target: SocketAddr, why: &str) -> String {
    match address.parse() == Ok(target) {
        true => why.to_owned(),
        false => format!("{target}: {why}"),
    }
}

/// Not earlier than that.
fn until(deadline: Option<Duration>, now: Duration) -> PollTimeout {
    let Some(deadline) = deadline else { return PollTimeout::NONE };
    let left = deadline.saturating_sub(now).as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(left.min(60_000) as u64).unwrap_or(PollTimeout::MAX)
}

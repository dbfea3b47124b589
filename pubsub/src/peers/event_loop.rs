//! The thread that connects a mesh to sockets. It sleeps until there is work.

use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use threads::lock;

use super::mesh::Action;
use super::resolver::{Resolution, Resolver};
use super::socket::{self, IoOutcome, is_local_address};
use super::{ConnectionId, Shared};

/// Bytes of one read, and reads of one connection in one turn.
const READ_BUFFER_LENGTH: usize = 1 << 16;
const READS_PER_TURN: usize = 4;
const READ_BYTES_PER_TURN: usize = 4 << 20;
const ACCEPTS_PER_TURN: usize = 16;
/// Pause of accepting after the system refused a connection for lack of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// Delay of a second attempt to connect beside the first: the first SYN may be lost, and the system
/// repeats it only after a second, and then ever later.
const SECOND_ATTEMPT_AFTER: Duration = Duration::from_millis(250);
/// Limit of simultaneous dials that have a second attempt.
const MAX_DOUBLE_DIALS: usize = 64;
/// Interval of checking that connections still use addresses of this machine.
const ADDRESS_CHECK_INTERVAL: Duration = Duration::from_millis(400);
/// How long a closing connection may take to deliver its goodbye, and the limit of such
/// connections.
const LINGER_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_CLOSING: usize = 64;

#[derive(Debug)]
struct DialAttempt {
    address: String,
    /// The resolved address.
    to: SocketAddr,
    /// The first attempt, which may take long, and the latest one beside it.
    stream: TcpStream,
    second_stream: Option<TcpStream>,
    second_attempt_at: Duration,
    until: Duration,
    /// Further resolved addresses.
    others: Vec<SocketAddr>,
}

#[derive(Debug)]
struct ClosingConnection {
    stream: TcpStream,
    unsent: Vec<u8>,
    until: Duration,
}

#[derive(Debug, Clone, Copy)]
enum PollSource {
    Wake,
    Listener,
    Connection(ConnectionId),
    /// Index of an attempt; true for its second stream.
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
    /// Time of the last poll; later silence does not count.
    last_poll: Duration,
    /// Bytes that may still be read in this turn, and the first connection that was left out.
    read_budget: usize,
    next_to_read: Option<ConnectionId>,
    connections: BTreeMap<ConnectionId, TcpStream>,
    dial_attempts: Vec<DialAttempt>,
    closing: Vec<ClosingConnection>,
    next_address_check: Duration,
    names: Resolver,
    read_buffer: Box<[u8]>,
}

impl PeerEventLoop {
    pub(super) fn new(
        shared: Arc<Shared>,
        listener: Option<TcpListener>,
        own: Option<IpAddr>,
        dial_timeout: Duration,
    ) -> Self {
        let names = Resolver::new(Arc::clone(&shared.bell));
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
            dial_attempts: Vec::new(),
            closing: Vec::new(),
            next_address_check: Duration::ZERO,
            names,
            read_buffer: vec![0; READ_BUFFER_LENGTH].into(),
        }
    }

    /// Runs until the handle stops it.
    pub(super) fn run(mut self) {
        while !self.shared.is_over.load(Ordering::Acquire) {
            let deadline = self.act();
            self.wait(deadline);
        }
        self.finish();
    }

    /// Closes all connections with a goodbye.
    fn finish(mut self) {
        if let Some(listener) = self.listener.take() {
            // If a forked child has a copy, closing the socket would not suffice: peers would
            // connect to no process, and the next service could not listen.
            socket::stop_listening(&listener);
        }
        self.dial_attempts.clear();
        let shared = Arc::clone(&self.shared);
        let mut mesh = lock(&shared.mesh);
        mesh.close_all();
        while let Some(action) = mesh.next_action() {
            if let Action::Close { connection, unsent } = action
                && let Some(stream) = self.connections.remove(&connection)
            {
                let until = shared.now() + LINGER_TIMEOUT;
                self.closing.push(ClosingConnection { stream, unsent, until });
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

    /// Handles due work, and returns the time of the next one.
    fn act(&mut self) -> Option<Duration> {
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        while let Some(resolution) = self.names.next_resolution() {
            self.dial(resolution);
        }
        let is_late = |attempt: &mut DialAttempt| now >= attempt.until;
        for attempt in self.dial_attempts.extract_if(.., is_late).collect::<Vec<_>>() {
            self.dial_next(attempt, "no answer");
        }
        self.dial_second(now);
        let mut mesh = lock(&shared.mesh);
        if now >= self.next_address_check {
            self.next_address_check = now + ADDRESS_CHECK_INTERVAL;
            mesh.close_without_address(is_local_address, now);
        }
        mesh.tick(self.last_poll);
        while let Some(action) = mesh.next_action() {
            match action {
                Action::Report(event) => shared.events.push(event),
                Action::Close { connection, unsent } => {
                    if let Some(stream) = self.connections.remove(&connection) {
                        let until = now + LINGER_TIMEOUT;
                        self.closing.push(ClosingConnection { stream, unsent, until });
                    }
                }
                Action::Dial { address } => {
                    // The result may be known at once, and needs the mesh.
                    drop(mesh);
                    if let Some(resolution) = self.names.resolve(&address) {
                        self.dial(resolution);
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
        let attempts = self.dial_attempts.iter().map(|it| it.until.min(it.second_attempt_at));
        let closing = self.closing.iter().map(|closing| closing.until);
        let accepting = (self.accepting_after > now).then_some(self.accepting_after);
        next.into_iter().chain(attempts).chain(closing).chain(accepting).min()
    }

    /// Polls all descriptors until the deadline, and handles their events.
    fn wait(&mut self, deadline: Option<Duration>) {
        let now = self.shared.now();
        let mut sources = vec![PollSource::Wake];
        let mut entries = vec![PollFd::new(self.shared.bell.as_fd(), PollFlags::POLLIN)];
        let mut add = |source, descriptor, reads: bool, writes: bool| {
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::POLLIN, reads);
            wanted.set(PollFlags::POLLOUT, writes);
            if !wanted.is_empty() {
                sources.push(source);
                entries.push(PollFd::new(descriptor, wanted));
            }
        };
        let reads = !self.reading_paused;
        if let Some(listener) = &self.listener {
            let accepts = reads && now >= self.accepting_after;
            add(PollSource::Listener, listener.as_fd(), accepts, false);
        }
        let mesh = lock(&self.shared.mesh);
        // Connections that were left out the last time come first.
        let next_to_read = self.next_to_read.take().unwrap_or(ConnectionId(0));
        for (connection, stream) in
            self.connections.range(next_to_read..).chain(self.connections.range(..next_to_read))
        {
            let has_output = !mesh.output(*connection).is_empty();
            add(PollSource::Connection(*connection), stream.as_fd(), reads, has_output);
        }
        drop(mesh);
        for (index, attempt) in self.dial_attempts.iter().enumerate() {
            add(PollSource::DialAttempt(index, false), attempt.stream.as_fd(), false, true);
            if let Some(second_stream) = &attempt.second_stream {
                add(PollSource::DialAttempt(index, true), second_stream.as_fd(), false, true);
            }
        }
        for closing in &self.closing {
            let has_unsent = !closing.unsent.is_empty();
            add(PollSource::ClosingConnection, closing.stream.as_fd(), true, has_unsent);
        }
        let result = poll(&mut entries, until(deadline, now));
        let found: Vec<_> = entries.iter().map(|entry| entry.revents()).collect();
        drop(entries);
        match result {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => return,
            // For example out of memory: no reason to spin.
            Err(_) => return std::thread::sleep(ACCEPT_PAUSE),
        }
        self.last_poll = self.shared.now();
        self.read_budget = READ_BYTES_PER_TURN;
        let mut established = Vec::new();
        for (source, found) in sources.into_iter().zip(found) {
            // nix does not know the flag, so it was not requested.
            let found = found.unwrap_or(PollFlags::POLLERR);
            if found.is_empty() {
                continue;
            }
            match source {
                PollSource::Wake => self.shared.bell.silence(),
                PollSource::Listener => self.accept(),
                PollSource::Connection(connection) => self.serve(connection, found),
                PollSource::DialAttempt(index, is_second) => established.push((index, is_second)),
                // All of them are flushed before the next sleep.
                PollSource::ClosingConnection => {}
            }
        }
        // In descending order, so that the other indices stay valid.
        established.dedup_by_key(|(index, _)| *index);
        for (index, is_second) in established.into_iter().rev() {
            let mut attempt = self.dial_attempts.swap_remove(index);
            if is_second && let Some(second_stream) = &mut attempt.second_stream {
                std::mem::swap(second_stream, &mut attempt.stream);
            }
            self.established(attempt);
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
                        lock(&self.shared.mesh).accept_failed(&error, now);
                        self.accepting_after = now + ACCEPT_PAUSE;
                    }
                    return;
                }
            };
            let prepared = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            let local_and_peer = prepared.and_then(|()| socket::local_and_peer(&stream));
            // A peer that is already gone needs no answer.
            let Ok((local_address, peer_address)) = local_and_peer else { continue };
            let connection =
                lock(&self.shared.mesh).accepted(local_address, peer_address, self.shared.now());
            match connection {
                Some(connection) => {
                    self.connections.insert(connection, stream);
                }
                None => {
                    let why = "a connection was rejected: too many connections";
                    tracing::debug!(%peer_address, "{why}");
                }
            }
        }
    }

    /// Reads and writes a bounded share.
    fn serve(&mut self, connection: ConnectionId, found: PollFlags) {
        let Some(stream) = self.connections.get(&connection) else { return };
        let mut mesh = lock(&self.shared.mesh);
        let mut closed = None;
        if found.contains(PollFlags::POLLOUT) {
            let output = mesh.output(connection);
            if !output.is_empty() {
                match socket::write(stream, output) {
                    IoOutcome::Bytes(count) => mesh.sent(connection, count, self.shared.now()),
                    IoOutcome::WouldBlock => {}
                    IoOutcome::Closed(how) => closed = Some(how),
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
                    closed = Some(how);
                    break;
                }
            }
        }
        // Received bytes are handled first: they may contain the reason.
        if let Some(how) = closed {
            mesh.broken(connection, &how, self.shared.now());
        }
    }

    // ---------------------------------------------------------------- dialling

    /// Starts to dial the resolved addresses.
    fn dial(&mut self, (address, found): Resolution) {
        let mut found = match found {
            Ok(found) => found,
            Err(why) => return self.on_unreachable(&address, why),
        };
        // The last one is popped first, below.
        found.reverse();
        self.dial_others(address, found, "no address".to_owned());
    }

    fn dial_next(&mut self, attempt: DialAttempt, why: &str) {
        let why = reason(&attempt.address, attempt.to, why);
        self.dial_others(attempt.address, attempt.others, why);
    }

    fn dial_others(&mut self, address: String, mut others: Vec<SocketAddr>, mut why: String) {
        while let Some(next) = others.pop() {
            match socket::start_connect(next, self.own) {
                Ok(stream) => {
                    let now = self.shared.now();
                    return self.dial_attempts.push(DialAttempt {
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

    /// Starts second attempts where the last one takes long.
    fn dial_second(&mut self, now: Duration) {
        let are_few = self.dial_attempts.len() <= MAX_DOUBLE_DIALS;
        for attempt in self.dial_attempts.iter_mut().filter(|it| now >= it.second_attempt_at) {
            attempt.second_attempt_at = now + SECOND_ATTEMPT_AFTER;
            if are_few {
                attempt.second_stream = socket::start_connect(attempt.to, self.own).ok();
            }
        }
    }

    fn established(&mut self, mut attempt: DialAttempt) {
        match socket::connected(&attempt.stream) {
            Ok(local_and_peer) => {
                let now = self.shared.now();
                let connection =
                    lock(&self.shared.mesh).dialled(&attempt.address, Ok(local_and_peer), now);
                if let Some(connection) = connection {
                    self.connections.insert(connection, attempt.stream);
                }
            }
            Err(error) => match attempt.second_stream.take() {
                Some(second_stream) => {
                    attempt.stream = second_stream;
                    self.dial_attempts.push(attempt);
                }
                None => self.dial_next(attempt, &error.to_string()),
            },
        }
    }

    fn on_unreachable(&self, address: &str, why: String) {
        lock(&self.shared.mesh).dialled(address, Err(why), self.shared.now());
    }

    // ---------------------------------------------------------------- goodbyes

    /// Sends the rest on closing connections, and closes them after the peer closed its end:
    /// closing earlier would discard bytes that the peer has not read.
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
        while !self.unsent.is_empty() {
            match socket::write(&self.stream, &self.unsent) {
                IoOutcome::Bytes(count) => drop(self.unsent.drain(..count)),
                IoOutcome::WouldBlock => break,
                IoOutcome::Closed(_) => return false,
            }
        }
        // Repeating the shutdown is harmless.
        if self.unsent.is_empty() && self.stream.shutdown(Shutdown::Write).is_err() {
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

/// Why a target was not reached, with the target itself where the address is a name, which may
/// resolve to several.
fn reason(address: &str, target: SocketAddr, why: &str) -> String {
    match address.parse() == Ok(target) {
        true => why.to_owned(),
        false => format!("{target}: {why}"),
    }
}

/// Rounded up to whole milliseconds.
fn until(deadline: Option<Duration>, now: Duration) -> PollTimeout {
    let Some(deadline) = deadline else { return PollTimeout::NONE };
    let left = deadline.saturating_sub(now).as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(left.min(60_000) as u64).unwrap_or(PollTimeout::MAX)
}

//! The thread that binds a mesh to sockets. It sleeps until something is to be done.

use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::mesh::{Action, Mesh};
use super::names::{Answer, Names};
use super::pair::Connection;
use super::queue::Queue;
use super::socket::{self, Moved};
use crate::lock::lock;
use crate::wake::WakeFd;

/// Bytes of one read, and reads of one connection before the others' turn.
const ROOM: usize = 1 << 16;
const READS_AT_ONCE: usize = 4;
/// Bytes that are read before what they mean is handed on.
const READ_AT_ONCE: usize = 4 << 20;
/// Connections that are taken in before the others' turn.
const ACCEPTED_AT_ONCE: usize = 16;
/// How long nobody is let in when the system has no room for one more.
const REST: Duration = Duration::from_millis(200);
/// How long the other side has to hear why a connection ends, and how many may take so long.
const LINGERING: Duration = Duration::from_millis(500);
const MOST_LEAVING: usize = 64;

/// What the thread shares with its handle.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) mesh: Mutex<Mesh>,
    pub(super) events: Queue,
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
struct Dialling {
    address: String,
    stream: TcpStream,
    until: Duration,
    /// Where else the same may be reached.
    others: Vec<SocketAddr>,
}

/// A connection that is over, until the other side has taken the rest.
#[derive(Debug)]
struct Leaving {
    stream: TcpStream,
    rest: Vec<u8>,
    until: Duration,
}

/// Whose descriptor it is.
#[derive(Debug, Clone, Copy)]
enum Whose {
    Bell,
    Listener,
    Line(Connection),
    Dialling(usize),
    Leaving,
}

#[derive(Debug)]
pub(super) struct Service {
    shared: Arc<Shared>,
    listener: Option<TcpListener>,
    own: Option<IpAddr>,
    patience: Duration,
    nobody_until: Duration,
    is_deaf: bool,
    /// When it was looked last what had come. Nobody is silent because of what came since.
    looked: Duration,
    /// What may still be read before the next look, and who was the first not to be read.
    budget: usize,
    first: Option<Connection>,
    lines: BTreeMap<Connection, TcpStream>,
    dialling: Vec<Dialling>,
    leaving: Vec<Leaving>,
    names: Names,
    room: Box<[u8]>,
}

impl Service {
    pub(super) fn new(
        shared: Arc<Shared>,
        listener: Option<TcpListener>,
        own: Option<IpAddr>,
    ) -> Self {
        let names = Names::new(Arc::clone(&shared.bell));
        let patience = lock(&shared.mesh).timing.introducing;
        Self {
            shared,
            listener,
            own,
            patience,
            nobody_until: Duration::ZERO,
            is_deaf: false,
            looked: Duration::ZERO,
            budget: 0,
            first: None,
            lines: BTreeMap::new(),
            dialling: Vec::new(),
            leaving: Vec::new(),
            names,
            room: vec![0; ROOM].into(),
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
                && let Some(stream) = self.lines.remove(&connection)
            {
                let until = shared.now() + LINGERING;
                self.leaving.push(Leaving { stream, rest, until });
            }
        }
        drop(mesh);
        loop {
            self.see_off();
            let Some(until) = self.leaving.iter().map(|leaving| leaving.until).min() else {
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
        let is_late = |dialling: &mut Dialling| now >= dialling.until;
        for dialling in self.dialling.extract_if(.., is_late).collect::<Vec<_>>() {
            self.try_next(dialling, "nobody answered");
        }
        let mut mesh = lock(&shared.mesh);
        mesh.tick(self.looked);
        while let Some(action) = mesh.next_action() {
            match action {
                Action::Tell(event) => shared.events.push(event),
                Action::Close { connection, rest } => {
                    if let Some(stream) = self.lines.remove(&connection) {
                        let until = now + LINGERING;
                        self.leaving.push(Leaving { stream, rest, until });
                    }
                }
                Action::Dial { address } => {
                    // What comes of it may be known at once, and that is for the mesh, too.
                    drop(mesh);
                    if let Some(answer) = self.names.look_up(&address) {
                        self.dial(answer);
                    }
                    mesh = lock(&shared.mesh);
                }
            }
        }
        let is_full = shared.events.is_full(self.is_deaf);
        if is_full != self.is_deaf {
            self.is_deaf = is_full;
            mesh.set_deaf(is_full, now);
        }
        let next = mesh.deadline();
        drop(mesh);
        self.see_off();
        let dialling = self.dialling.iter().map(|dialling| dialling.until);
        let leaving = self.leaving.iter().map(|leaving| leaving.until);
        let rest = (self.nobody_until > now).then_some(self.nobody_until);
        next.into_iter().chain(dialling).chain(leaving).chain(rest).min()
    }

    /// Sleeps until something can be done, and does it.
    fn wait(&mut self, deadline: Option<Duration>) {
        let now = self.shared.now();
        let mut whose = vec![Whose::Bell];
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
                Whose::Listener,
                listener.as_fd(),
                !self.is_deaf && now >= self.nobody_until,
                false,
            );
        }
        let mesh = lock(&self.shared.mesh);
        // Those first for whom nothing was left the last time.
        let first = self.first.take().unwrap_or(Connection(0));
        for (connection, stream) in self.lines.range(first..).chain(self.lines.range(..first)) {
            let has_output = !mesh.output(*connection).is_empty();
            add(Whose::Line(*connection), stream.as_fd(), !self.is_deaf, has_output);
        }
        drop(mesh);
        for (index, dialling) in self.dialling.iter().enumerate() {
            add(Whose::Dialling(index), dialling.stream.as_fd(), false, true);
        }
        for leaving in &self.leaving {
            add(Whose::Leaving, leaving.stream.as_fd(), true, !leaving.rest.is_empty());
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
            Err(_) => return std::thread::sleep(REST),
        }
        self.looked = self.shared.now();
        self.budget = READ_AT_ONCE;
        let mut has_connected = Vec::new();
        for (whose, found) in whose.into_iter().zip(found) {
            // A flag that nix does not know is not one that was asked for.
            let found = found.unwrap_or(PollFlags::POLLERR);
            if found.is_empty() {
                continue;
            }
            match whose {
                Whose::Bell => self.shared.bell.silence(),
                Whose::Listener => self.accept(),
                Whose::Line(connection) => self.serve(connection, found),
                Whose::Dialling(index) => has_connected.push(index),
                // All of them are looked at before the next sleep.
                Whose::Leaving => {}
            }
        }
        // From the back, so that the numbers of the others stay what they were.
        for index in has_connected.into_iter().rev() {
            let dialling = self.dialling.swap_remove(index);
            self.has_connected(dialling);
        }
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..ACCEPTED_AT_ONCE {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
                    if !matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted) {
                        let now = self.shared.now();
                        if lock(&self.shared.mesh).log.allows(now) {
                            tracing::warn!(%error, "no connection of another node can be accepted");
                        }
                        self.nobody_until = now + REST;
                    }
                    return;
                }
            };
            let ends = stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true))
                .and_then(|()| socket::ends(&stream));
            // Who has gone already needs no answer.
            let Ok((ours, theirs)) = ends else { continue };
            let connection = lock(&self.shared.mesh).accepted(ours, theirs, self.shared.now());
            match connection {
                Some(connection) => {
                    self.lines.insert(connection, stream);
                }
                None => tracing::debug!(%theirs, "one who came was not let in: there are enough"),
            }
        }
    }

    /// Reads and writes as much as is its share.
    fn serve(&mut self, connection: Connection, found: PollFlags) {
        let Some(stream) = self.lines.get(&connection) else { return };
        let mut mesh = lock(&self.shared.mesh);
        let mut over = None;
        if found.contains(PollFlags::POLLOUT) {
            let output = mesh.output(connection);
            if !output.is_empty() {
                match socket::write(stream, output) {
                    Moved::Bytes(count) => mesh.sent(connection, count, self.shared.now()),
                    Moved::Nothing => {}
                    Moved::Over(how) => over = Some(how),
                }
            }
        }
        let can_read = found.intersects(!PollFlags::POLLOUT) && !self.is_deaf;
        for _ in 0..if can_read { READS_AT_ONCE } else { 0 } {
            if self.budget == 0 {
                self.first.get_or_insert(connection);
                break;
            }
            match socket::read(stream, &mut self.room) {
                Moved::Bytes(count) => {
                    self.budget = self.budget.saturating_sub(count);
                    mesh.received(connection, &self.room[..count], self.shared.now());
                    if count < ROOM {
                        break;
                    }
                }
                Moved::Nothing => break,
                Moved::Over(how) => {
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
    fn dial(&mut self, (address, found): Answer) {
        let mut found = match found {
            Ok(found) => found,
            Err(why) => return self.not_reached(&address, why),
        };
        // The last is tried first, below.
        found.reverse();
        self.try_others(address, found, "it leads nowhere".to_owned());
    }

    fn try_next(&mut self, dialling: Dialling, why: &str) {
        let why = format!("{}: {why}", dialling.address);
        self.try_others(dialling.address, dialling.others, why);
    }

    fn try_others(&mut self, address: String, mut others: Vec<SocketAddr>, mut why: String) {
        while let Some(next) = others.pop() {
            match socket::begin_to_connect(next, self.own) {
                Ok(stream) => {
                    let until = self.shared.now() + self.patience;
                    return self.dialling.push(Dialling { address, stream, until, others });
                }
                Err(error) => why = format!("{next}: {error}"),
            }
        }
        self.not_reached(&address, why);
    }

    fn has_connected(&mut self, dialling: Dialling) {
        match socket::connected(&dialling.stream) {
            Ok(ends) => {
                let now = self.shared.now();
                let connection = lock(&self.shared.mesh).dialled(&dialling.address, Ok(ends), now);
                if let Some(connection) = connection {
                    self.lines.insert(connection, dialling.stream);
                }
            }
            Err(error) => self.try_next(dialling, &error.to_string()),
        }
    }

    fn not_reached(&self, address: &str, why: String) {
        lock(&self.shared.mesh).dialled(address, Err(why), self.shared.now());
    }

    // ---------------------------------------------------------------- goodbyes

    /// Sends what is left on connections that are over, and closes them when the other side
    /// has closed its end: before that, closing would take back what was not read yet.
    fn see_off(&mut self) {
        let now = self.shared.now();
        let room = &mut self.room;
        self.leaving.retain_mut(|leaving| leaving.goes_on(room) && now < leaving.until);
        let excess = self.leaving.len().saturating_sub(MOST_LEAVING);
        self.leaving.drain(..excess);
    }
}

impl Leaving {
    fn goes_on(&mut self, room: &mut [u8]) -> bool {
        while !self.rest.is_empty() {
            match socket::write(&self.stream, &self.rest) {
                Moved::Bytes(count) => drop(self.rest.drain(..count)),
                Moved::Nothing => break,
                Moved::Over(_) => return false,
            }
        }
        // Again and again is harmless.
        if self.rest.is_empty() && self.stream.shutdown(Shutdown::Write).is_err() {
            return false;
        }
        for _ in 0..READS_AT_ONCE {
            match socket::read(&self.stream, room) {
                Moved::Bytes(_) => {}
                Moved::Nothing => return true,
                Moved::Over(_) => return false,
            }
        }
        true
    }
}

/// Not earlier than that.
fn until(deadline: Option<Duration>, now: Duration) -> PollTimeout {
    let Some(deadline) = deadline else { return PollTimeout::NONE };
    let left = deadline.saturating_sub(now).as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(left.min(60_000) as u64).unwrap_or(PollTimeout::MAX)
}

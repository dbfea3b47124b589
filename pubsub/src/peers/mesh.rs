//! All connections of a node, without sockets, threads or a clock.
//!
//! Whoever drives it says what happened (somebody came, bytes came, time passed) and
//! does what it is told ([`Action`]). Moments are told as the time since it began.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::admission::Limits;
use super::book::{Book, End, Origin};
use super::directory::{Interests, Listing, Teller};
use super::event::Event;
use super::identity::{Chance, NodeIdentity, Run, SessionNumber};
use super::pair::{Connection, Pair};
use super::protocol::{Frame, Hello, LONGEST_LETTER, capability};
use super::reason::{Parting, Reason};
use super::report::Absent;
use super::session::{Session, Timing};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::text::shortened;

/// What a mesh begins with.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) identity: NodeIdentity,
    pub(super) run: Run,
    pub(super) label: String,
    pub(super) listens: Option<SocketAddr>,
    pub(super) peers: Vec<String>,
    pub(super) rendezvous: Option<String>,
    pub(super) timing: Timing,
    pub(super) limits: Limits,
}

/// What is to be done for the mesh.
#[derive(Debug)]
pub(super) enum Action {
    /// Connect to this address, and say [how it went](Mesh::dialled).
    Dial { address: String },
    /// Send the rest as far as it can be sent, and close.
    Close { connection: Connection, rest: Vec<u8> },
    /// Tell those above.
    Tell(Event),
}

/// A connection.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) session: Session,
    /// The address by which it came about, if we dialled.
    pub(super) dialled: Option<String>,
    pub(super) ours: SocketAddr,
    pub(super) theirs: SocketAddr,
    pub(super) peer: Option<Hello>,
    /// It is a session.
    pub(super) number: Option<SessionNumber>,
    pub(super) since: Duration,
    pub(super) teller: Teller,
    pub(super) listing: Listing,
    /// The peer wants to know whom we know; we have asked it whom it knows.
    pub(super) asks: bool,
    pub(super) has_asked: bool,
    /// The peer may not be told yet what is published and subscribed to here.
    pub(super) is_reserved: bool,
    /// It said goodbye, so there is nothing more to say.
    pub(super) is_told: bool,
    /// Nothing was heard for longer than it should take: another connection is tried.
    pub(super) is_stale: bool,
}

/// A node with which there are connections.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) run: Run,
    pub(super) pair: Pair,
}

#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) me: Hello,
    pub(super) timing: Timing,
    pub(super) limits: Limits,
    chance: Chance,
    pub(super) lines: BTreeMap<Connection, Line>,
    pub(super) nodes: HashMap<NodeIdentity, Node>,
    pub(super) book: Book,
    pub(super) absent: Absent,
    pub(super) interests: Interests,
    /// It is not known yet what they are.
    pub(super) is_silent: bool,
    /// Each node has to be let know of them.
    pub(super) is_reserved: bool,
    pub(super) actions: VecDeque<Action>,
    next_connection: u64,
    pub(super) next_session: u64,
    is_deaf: bool,
    /// Of what others can cause.
    pub(super) log: LogLimit,
    /// Of connections that are no node's.
    strangers_log: LogLimit,
}

impl Mesh {
    pub(super) fn new(start: Start, now: Duration) -> Self {
        let Start { identity, run, label, listens, peers, rendezvous, timing, limits } = start;
        let mut book = Book::default();
        for address in peers {
            book.add(address, Origin::Given, None, now);
        }
        if let Some(address) = rendezvous {
            book.add(address, Origin::Rendezvous, None, now);
        }
        let me = Hello {
            identity,
            run,
            label,
            capabilities: if listens.is_some() { capability::RENDEZVOUS } else { 0 },
            lost_after: u32::try_from(timing.lost_after.as_millis()).unwrap_or(u32::MAX),
            listens,
        };
        let mut chance = Chance(run.chance);
        // By chance, and not by a clock, which may have been set back: none that an earlier
        // service of this node used.
        let next_session = chance.draw();
        Self {
            me,
            timing,
            limits,
            chance,
            lines: BTreeMap::new(),
            nodes: HashMap::new(),
            book,
            absent: Absent::default(),
            interests: Interests::new(),
            is_silent: false,
            is_reserved: false,
            actions: VecDeque::new(),
            next_connection: 0,
            next_session,
            is_deaf: false,
            log: LogLimit::new(),
            strangers_log: LogLimit::short(),
        }
    }

    /// What is to be done next.
    pub(super) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    // ------------------------------------------------------------ connections

    /// Somebody came. None if there are too many; then it is to be closed.
    pub(super) fn accepted(
        &mut self,
        ours: SocketAddr,
        theirs: SocketAddr,
        now: Duration,
    ) -> Option<Connection> {
        self.make_room(theirs.ip(), now).then(|| self.open(None, ours, theirs, now))
    }

    /// How the dialling of an address went.
    pub(super) fn dialled(
        &mut self,
        address: &str,
        result: std::result::Result<(SocketAddr, SocketAddr), String>,
        now: Duration,
    ) -> Option<Connection> {
        let failed = match result {
            Ok((ours, theirs)) => {
                return Some(self.open(Some(address.to_owned()), ours, theirs, now));
            }
            Err(why) => why,
        };
        tracing::debug!(address, why = failed, "a peer was not reached");
        let Self { book, timing, chance, log, .. } = self;
        book.over(address, End::Failed(failed), (timing, chance, log), now);
        None
    }

    fn open(
        &mut self,
        dialled: Option<String>,
        ours: SocketAddr,
        theirs: SocketAddr,
        now: Duration,
    ) -> Connection {
        let connection = Connection(self.next_connection);
        self.next_connection += 1;
        let mut session = Session::new(&self.me, &self.timing, now);
        session.set_deaf(self.is_deaf, now);
        let line = Line {
            session,
            dialled,
            ours,
            theirs,
            peer: None,
            number: None,
            since: now,
            teller: Teller::new(),
            listing: Listing::default(),
            asks: false,
            has_asked: false,
            is_reserved: self.is_reserved,
            is_told: false,
            is_stale: false,
        };
        self.lines.insert(connection, line);
        connection
    }

    /// Bytes came.
    pub(super) fn received(&mut self, connection: Connection, bytes: &[u8], now: Duration) {
        let Some(line) = self.lines.get_mut(&connection) else { return };
        line.session.receive(bytes, now);
        line.is_stale = false;
        // What came may end it.
        while let Some(line) = self.lines.get_mut(&connection) {
            let done = match line.session.next() {
                Ok(None) => return,
                Ok(Some(came)) => self.came(connection, came, now),
                Err(reason) => Err(reason),
            };
            if let Err(reason) = done {
                self.end(connection, reason, now);
            }
        }
    }

    /// It can carry no more.
    pub(super) fn broken(&mut self, connection: Connection, how: &str, now: Duration) {
        self.end(connection, Reason::Broken(how.to_owned()), now);
    }

    /// Bytes that wait to be sent: some of them, if there are any.
    pub(super) fn output(&self, connection: Connection) -> &[u8] {
        self.lines.get(&connection).map_or(&[], |line| line.session.output())
    }

    /// So many of them were sent.
    pub(super) fn sent(&mut self, connection: Connection, count: usize, now: Duration) {
        if let Some(line) = self.lines.get_mut(&connection) {
            line.session.sent(count, now);
            self.tell_interests(connection, now);
        }
    }

    /// From now on nothing is read, or again.
    pub(super) fn set_deaf(&mut self, is_deaf: bool, now: Duration) {
        self.is_deaf = is_deaf;
        for line in self.lines.values_mut() {
            line.session.set_deaf(is_deaf, now);
        }
    }

    // ------------------------------------------------------------------- time

    pub(super) fn tick(&mut self, now: Duration) {
        let over: Vec<_> = self
            .lines
            .iter_mut()
            .filter_map(|(connection, line)| Some((*connection, line.session.tick(now).err()?)))
            .collect();
        for (connection, reason) in over {
            self.end(connection, reason, now);
        }
        self.absent.tick(now);
        let is_of = |line: &Line, address: &str| line.dialled.as_deref() == Some(address);
        let Self { lines, nodes, book, timing, log, .. } = self;
        book.log_silence(log, now, |address| lines.values().any(|line| is_of(line, address)));
        for line in lines.values_mut().filter(|line| !line.is_stale) {
            line.is_stale = line.session.is_stale(now);
            if let (true, Some(peer)) = (line.is_stale, &line.peer) {
                tracing::debug!(node = %peer.identity, "a session moves nothing: another is tried");
                book.is_stale(&peer.identity, line.dialled.as_deref(), now);
            }
        }
        let due = book.due(now, timing, |node| is_heard(nodes, lines, node));
        self.actions.extend(due.into_iter().map(|address| Action::Dial { address }));
    }

    /// When `tick` has something to do next.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let sessions = self.lines.values().filter_map(|line| line.session.deadline());
        let heard = self.lines.values().filter(|line| !line.is_stale);
        let stale = heard.filter_map(|line| line.session.stale_at());
        let dialling = self.book.deadline(|node| is_heard(&self.nodes, &self.lines, node));
        sessions.chain(stale).chain(dialling).min()
    }

    // --------------------------------------------------------------- commands

    /// What this node publishes and subscribes from now on.
    pub(super) fn set_interests(&mut self, interests: Interests, now: Duration) {
        self.interests = interests;
        self.is_silent = false;
        let connections: Vec<_> = self.lines.keys().copied().collect();
        for connection in connections {
            if let Some(line) = self.lines.get_mut(&connection) {
                line.teller.has_changed();
            }
            self.tell_interests(connection, now);
        }
    }

    /// From now on a node is told of what is published and subscribed to here, behind the letters that
    /// it was sent; as long as it is the same session.
    pub(super) fn speak_to(&mut self, node: NodeIdentity, session: SessionNumber, now: Duration) {
        let current = self.nodes.get(&node).and_then(|known| known.pair.current());
        let Some((connection, number)) = current else { return };
        if number == session
            && let Some(line) = self.lines.get_mut(&connection)
        {
            line.is_reserved = false;
            self.tell_interests(connection, now);
        }
    }

    /// Sends a letter to a node, as long as it is the same session.
    pub(super) fn tell(
        &mut self,
        node: NodeIdentity,
        session: SessionNumber,
        letter: Vec<u8>,
        now: Duration,
    ) -> Result<()> {
        let refuse = |kind, detail| Err(Error::new("tell a node", kind, detail).on(node));
        if letter.len() > LONGEST_LETTER {
            let detail = format!("a letter of {} bytes, {LONGEST_LETTER} at most", letter.len());
            return refuse(ErrorKind::TooLong, detail);
        }
        let current = self.nodes.get(&node).and_then(|known| known.pair.current());
        let line = match current {
            Some((connection, number)) if number == session => {
                self.lines.get_mut(&connection).map(|line| (connection, line))
            }
            _ => None,
        };
        let Some((connection, line)) = line else {
            return refuse(ErrorKind::Closed, format!("the session {session} is over"));
        };
        if let Err(reason) = line.session.send(&Frame::Letter(letter)) {
            let detail = reason.to_string();
            self.end(connection, reason, now);
            return refuse(ErrorKind::TooMany, detail);
        }
        Ok(())
    }

    /// Says goodbye to all.
    pub(super) fn leave(&mut self) {
        self.actions.clear();
        for (connection, mut line) in std::mem::take(&mut self.lines) {
            let rest = line.session.farewell(Some(Parting::Leaving), "");
            self.actions.push_back(Action::Close { connection, rest });
        }
        self.nodes.clear();
    }

    // ---------------------------------------------------------------- the end

    pub(super) fn end(&mut self, connection: Connection, reason: Reason, now: Duration) {
        let Some(mut line) = self.lines.remove(&connection) else { return };
        let parting = reason.parting().filter(|_| !line.is_told);
        let rest = match reason {
            Reason::Broken(_) => Vec::new(),
            _ => line.session.farewell(parting, &reason.to_string()),
        };
        self.actions.push_back(Action::Close { connection, rest });
        let (why, is_refusal) = (reason.to_string(), reason.is_refusal());
        if let Some(address) = &line.dialled {
            if reason == Reason::Ended(Parting::Oneself) {
                self.book.is_own(address, now);
            }
            let end = match line.number {
                _ if reason == Reason::Ended(Parting::Duplicate) => End::Duplicate,
                _ if reason.is_lasting() => End::Lasting(why.clone()),
                None if reason.is_occupied() => End::Occupied(why.clone()),
                Some(_) => End::Lost { why: why.clone(), lasted: now.saturating_sub(line.since) },
                None => End::Failed(why.clone()),
            };
            let Self { book, timing, chance, log, .. } = self;
            book.over(address, end, (timing, chance, log), now);
        }
        if line.number.is_some() {
            self.absent.goes(&line, &reason, &self.timing, now);
        }
        let Some(peer) = line.peer else {
            let (theirs, why) = (line.theirs, shortened(&why, 300));
            // One that was closed without a word is nothing to know of.
            let is_told = is_refusal && self.strangers_log.allows(now);
            match is_told {
                true => tracing::info!(%theirs, why, "a connection was refused: it is no node's"),
                false => {
                    tracing::debug!(%theirs, why, "a connection ended before it was known with whom");
                }
            }
            return;
        };
        let node = peer.identity;
        if let Some(session) = line.number {
            let interests = line.listing.len();
            tracing::debug!(%node, label = peer.label, %session, interests, why, "a node vanished");
            self.book.lost(&node, &why, &self.timing, &mut self.chance, now);
            self.actions.push_back(Action::Tell(Event::Vanished { node, session, reason }));
        }
        let step = self.nodes.get_mut(&node).and_then(|known| known.pair.gone(connection));
        self.perform(step, now);
        let has_lines = self
            .lines
            .values()
            .any(|line| line.peer.as_ref().is_some_and(|peer| peer.identity == node));
        if !has_lines {
            self.nodes.remove(&node);
        }
    }

    /// Was nothing heard of a node for longer than it should take, though it has a session?
    pub(super) fn is_stale(&self, node: &NodeIdentity, now: Duration) -> bool {
        let current = self.nodes.get(node).and_then(|known| known.pair.current());
        let line = current.and_then(|(connection, _)| self.lines.get(&connection));
        line.is_some_and(|line| line.session.is_stale(now))
    }

    /// Has this node a session?
    pub(super) fn has_session(&self, node: &NodeIdentity) -> bool {
        has_session(&self.nodes, node)
    }
}

fn has_session(nodes: &HashMap<NodeIdentity, Node>, node: &NodeIdentity) -> bool {
    nodes.get(node).is_some_and(|known| known.pair.current().is_some())
}

/// Has it one that moves something?
fn is_heard(
    nodes: &HashMap<NodeIdentity, Node>,
    lines: &BTreeMap<Connection, Line>,
    node: &NodeIdentity,
) -> bool {
    let current = nodes.get(node).and_then(|known| known.pair.current());
    let line = current.and_then(|(connection, _)| lines.get(&connection));
    line.is_some_and(|line| !line.is_stale)
}

//! What the mesh does about what is said to it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::event::Event;
use super::identity::{NodeIdentity, SessionNumber};
use super::mesh::{Action, Line, Mesh, Node};
use super::pair::{Connection, Pair, Step};
use super::protocol::{Acquaintance, Frame, Hello, capability, malformed};
use super::reason::{Parting, Reason};
use super::session::Came;

/// While more waits to be sent, a peer's knowledge of our interests may be old.
const ENOUGH_WAITS: usize = 1 << 18;
/// Acquaintances of one frame.
const ACQUAINTANCES_AT_ONCE: usize = 512;

impl Mesh {
    pub(super) fn came(
        &mut self,
        connection: Connection,
        came: Came,
        now: Duration,
    ) -> Result<(), Reason> {
        let frame = match came {
            Came::Hello(hello) => return self.introduced(connection, hello, now),
            Came::Frame(frame) => frame,
        };
        let Some(line) = self.lines.get_mut(&connection) else { return Ok(()) };
        let Some(peer) = &line.peer else { return Ok(()) };
        let node = peer.identity;
        match (frame, line.number) {
            (Frame::Goodbye { why, detail }, _) => {
                line.is_told = true;
                return Err(Reason::of_goodbye(why, detail));
            }
            (Frame::Claim { instead_of }, _) if node < self.me.identity => {
                let number = SessionNumber(self.next_session);
                self.next_session = self.next_session.wrapping_add(1);
                let is_stale = self.is_stale(&node, now);
                let Some(known) = self.nodes.get_mut(&node) else { return Ok(()) };
                let steps = known.pair.claims(connection, instead_of, (number, is_stale));
                self.perform(steps, now);
            }
            (Frame::Accept { session }, _) if node > self.me.identity => {
                let known = self.nodes.get_mut(&node);
                let steps = known
                    .and_then(|known| known.pair.accepted(connection, session))
                    .ok_or_else(|| malformed("an answer that was not asked for"))?;
                self.perform(steps, now);
            }
            (Frame::Heartbeat, Some(_)) => {}
            (Frame::Interests { number, changes }, Some(session)) => {
                line.listing.apply(number, &changes)?;
                let event = Event::Interests { node, session, changes };
                self.actions.push_back(Action::Tell(event));
            }
            (Frame::Letter(bytes), Some(session)) => {
                self.actions.push_back(Action::Tell(Event::Letter { node, session, bytes }));
            }
            (Frame::Ask, Some(_)) => self.is_asked(connection, now),
            (Frame::Known { others }, Some(_)) if line.has_asked => self.learn(&others, now),
            _ => return Err(malformed("a frame out of its turn")),
        }
        Ok(())
    }

    /// It is known who is there.
    fn introduced(
        &mut self,
        connection: Connection,
        hello: Hello,
        now: Duration,
    ) -> Result<(), Reason> {
        let node = hello.identity;
        if node == self.me.identity {
            if hello.run == self.me.run {
                return Err(Reason::Ended(Parting::Oneself));
            }
            if self.log.allows(now) {
                tracing::warn!(%node, label = hello.label, "another service has this node's identity");
            }
            return Err(Reason::Ended(Parting::Twin));
        }
        let Some(line) = self.lines.get_mut(&connection) else { return Ok(()) };
        let dialled = line.dialled.clone();
        let (run, label) = (hello.run, hello.label.clone());
        line.peer = Some(hello);
        let is_stale = self.is_stale(&node, now);
        let known = self.nodes.entry(node).or_insert_with(|| Node { run, pair: Pair::default() });
        if run != known.run && known.pair.current().is_some() && !is_stale {
            // As long as a session moves something nothing takes its place but a connection of the same
            // service: anything may say that it is this node, started later.
            if self.log.allows(now) {
                tracing::warn!(%node, label, "a node that has a session comes as another service");
            }
            return Err(Reason::Ended(Parting::Occupied));
        }
        if run < known.run {
            return Err(Reason::Ended(Parting::Superseded));
        }
        if run > known.run {
            known.run = run;
            let is_older = |line: &Line| {
                line.peer.as_ref().is_some_and(|peer| peer.identity == node && peer.run < run)
            };
            let older: Vec<_> =
                self.lines.iter().filter(|(_, line)| is_older(line)).map(|(old, _)| *old).collect();
            for old in older {
                self.end(old, Reason::Ended(Parting::Superseded), now);
            }
        }
        if let Some(address) = dialled
            && self.book.reached(&address, (node, &label), &mut self.log, now)
        {
            // It may have dialled us before we knew that we want to ask it.
            self.ask(node, now);
        }
        if self.me.identity < node {
            let is_stale = self.is_stale(&node, now);
            let known = self.nodes.get_mut(&node);
            let step = known.and_then(|known| known.pair.introduced(connection, is_stale));
            self.perform(step, now);
        }
        Ok(())
    }

    pub(super) fn perform(&mut self, steps: impl IntoIterator<Item = Step>, now: Duration) {
        for step in steps {
            match step {
                Step::Claim { on, instead_of } => self.send(on, &Frame::Claim { instead_of }, now),
                Step::Accept { on, session } => self.send(on, &Frame::Accept { session }, now),
                Step::Replace(old) => self.end(old, Reason::Ended(Parting::Replaced), now),
                Step::Refuse(duplicate) => {
                    self.end(duplicate, Reason::Ended(Parting::Duplicate), now)
                }
                Step::Establish { on, session } => self.establish(on, session, now),
            }
        }
    }

    fn establish(&mut self, connection: Connection, session: SessionNumber, now: Duration) {
        let Some(line) = self.lines.get_mut(&connection) else { return };
        let Some(peer) = &line.peer else { return };
        let (node, run, label) = (peer.identity, peer.run, peer.label.clone());
        line.session.establish(now);
        line.number = Some(session);
        line.since = now;
        self.absent.comes(line);
        let (ours, theirs) = (line.ours, line.theirs);
        tracing::debug!(%node, label, %session, %theirs, "a node appeared");
        let event = Event::Appeared { node, session, run, label, ours };
        self.actions.push_back(Action::Tell(event));
        let acquaintance = line.acquaintance();
        self.tell_interests(connection, now);
        if self.book.is_rendezvous(&node) {
            self.ask(node, now);
        }
        if let Some(acquaintance) = acquaintance {
            let asking =
                self.lines.iter().filter(|(other, line)| line.asks && **other != connection);
            let asking: Vec<_> = asking.map(|(other, _)| *other).collect();
            for other in asking {
                self.send(other, &Frame::Known { others: vec![acquaintance] }, now);
            }
        }
    }

    /// Asks a node for others, once in a session.
    fn ask(&mut self, node: NodeIdentity, now: Duration) {
        let current = self.nodes.get(&node).and_then(|known| known.pair.current());
        let Some((connection, _)) = current else { return };
        let Some(line) = self.lines.get_mut(&connection) else { return };
        let answers =
            line.peer.as_ref().is_some_and(|peer| peer.capabilities & capability::RENDEZVOUS != 0);
        if line.number.is_some() && answers && !line.has_asked {
            line.has_asked = true;
            self.send(connection, &Frame::Ask, now);
        }
    }

    fn is_asked(&mut self, connection: Connection, now: Duration) {
        let Some(line) = self.lines.get_mut(&connection) else { return };
        if std::mem::replace(&mut line.asks, true) {
            return;
        }
        let others: Vec<_> = self
            .lines
            .iter()
            .filter(|(other, line)| **other != connection && line.number.is_some())
            .filter_map(|(_, line)| line.acquaintance())
            .collect();
        for some in others.chunks(ACQUAINTANCES_AT_ONCE) {
            self.send(connection, &Frame::Known { others: some.to_vec() }, now);
        }
    }

    fn learn(&mut self, others: &[Acquaintance], now: Duration) {
        for Acquaintance { node, address } in others {
            let can_be = !address.ip().is_unspecified() && address.port() != 0;
            if *node == self.me.identity || !can_be {
                continue;
            }
            if !self.book.learn(*node, *address, now) {
                if self.log.allows(now) {
                    tracing::warn!(%node, %address, "more addresses are told of than can be kept");
                }
                return;
            }
        }
    }

    pub(super) fn tell_interests(&mut self, connection: Connection, now: Duration) {
        while !self.is_silent
            && let Some(line) = self.lines.get_mut(&connection)
            && line.number.is_some()
            && !line.is_reserved
            && line.session.waiting() < ENOUGH_WAITS
            && let Some((number, changes)) = line.teller.next(&self.interests)
        {
            self.send(connection, &Frame::Interests { number, changes }, now);
        }
    }

    fn send(&mut self, connection: Connection, frame: &Frame, now: Duration) {
        let Some(line) = self.lines.get_mut(&connection) else { return };
        if let Err(reason) = line.session.send(frame) {
            self.end(connection, reason, now);
        }
    }
}

impl Line {
    /// Who is there, and where others can reach it, if they can.
    pub(super) fn acquaintance(&self) -> Option<Acquaintance> {
        let peer = self.peer.as_ref()?;
        let address = reachable(peer.listens?, self.theirs.ip())?;
        Some(Acquaintance { node: peer.identity, address })
    }
}

/// Where others can reach one who listens there and was seen with this address.
fn reachable(listens: SocketAddr, seen: IpAddr) -> Option<SocketAddr> {
    let (said, seen) = (listens.ip().to_canonical(), seen.to_canonical());
    let address = if said.is_unspecified() { seen } else { said };
    // Its own loopback is not ours.
    (listens.port() != 0 && (!address.is_loopback() || seen.is_loopback()))
        .then(|| SocketAddr::new(address, listens.port()))
}

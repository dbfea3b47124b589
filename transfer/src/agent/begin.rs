//! Beginning transfers: everything that can be refused is, before a byte moves.

use std::collections::hash_map::Entry;

use gpu::{Block, BlocksBy};

use super::chore::Chore;
use super::lane::{Lane, Request, Ticket};
use super::notice::Notice;
use super::operations::{Begun, Token};
use super::route::{Means, Route};
use super::{Agent, PeerId, SMALL};
use crate::blocks::Blocks;
use crate::error::{Error, ErrorKind, Result};
use crate::path::{Operation, metrics};
use crate::region::RegionDescriptor;
use crate::share::check_fork;

impl Agent {
    /// Copies blocks from the local region of a route to the remote one, and then tells the
    /// peer, if a notice is given. Without blocks it is a notice alone.
    ///
    /// Blocks are a list of them, or a [description](crate::Strided) of rows at regular
    /// distances. In which order they are copied is not said: where one goes, no other may go.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds), [`NotAllowed`](ErrorKind::NotAllowed),
    /// [`Stale`](ErrorKind::Stale), [`Closed`](ErrorKind::Closed): before a byte moved.
    /// [`TooMany`](ErrorKind::TooMany) operations.
    pub fn put<'a>(
        &mut self,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin(Operation::Put, route, blocks, notice, BlocksBy::Best)
    }

    /// Copies blocks from the remote region of a route to the local one, and then tells the
    /// peer, if a notice is given.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    pub fn get<'a>(
        &mut self,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
    ) -> Result<Token> {
        self.begin(Operation::Get, route, blocks, notice, BlocksBy::Best)
    }

    /// Tells a peer something, without data.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed), [`TooMany`](ErrorKind::TooMany) operations.
    pub fn notify(&mut self, peer: PeerId, notice: Notice) -> Result<Token> {
        let name = "notify";
        check_fork(self.born, name)?;
        let begun = Begun { operation: name, bytes: 0, path: None, peer: peer.0 };
        let ticket = self.enter(begun, None, Some(notice))?;
        let token = ticket.token;
        self.conclude(ticket);
        Ok(token)
    }

    /// As [`put`](Self::put) or [`get`](Self::get), where the caller says by which means
    /// many blocks are copied: to measure them.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    pub fn begin<'a>(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: impl Into<Blocks<'a>>,
        notice: Option<Notice>,
        by: BlocksBy,
    ) -> Result<Token> {
        let blocks = blocks.into();
        let name = match operation {
            Operation::Put => "put",
            Operation::Get => "get",
        };
        check_fork(self.born, name)?;
        let inner = &route.0;
        if inner.agent != self.home.identity {
            return Err(Error::new(name, ErrorKind::Stale, "the route is another agent's"));
        }
        let (local, remote) = (inner.local.descriptor.length, inner.remote.length);
        let (from, to) = match operation {
            Operation::Put => (local, remote),
            Operation::Get => (remote, local),
        };
        let rights = inner.remote.rights;
        let may = if operation == Operation::Put { rights.write } else { rights.read };
        if !may && !blocks.is_empty() {
            let detail = "its rights do not allow it";
            return Err(
                Error::new(name, ErrorKind::NotAllowed, detail).with(self.label(inner.peer))
            );
        }
        let bytes = blocks
            .check(to, from)
            .map_err(|detail| Error::new(name, ErrorKind::OutOfBounds, detail))?;
        let begun = Begun { operation: name, bytes, path: Some(inner.path), peer: inner.peer };
        let ticket = self.enter(begun, Some(&inner.remote), notice)?;
        let token = ticket.token;
        metrics::count(inner.path, bytes, inner.fallback);
        self.move_bytes(operation, route, blocks, by, ticket)?;
        Ok(token)
    }

    /// Enters an operation into the books, unless the peer or its region is gone.
    fn enter(
        &mut self,
        begun: Begun,
        region: Option<&RegionDescriptor>,
        notice: Option<Notice>,
    ) -> Result<Ticket> {
        let (name, number, bytes) = (begun.operation, begun.peer, begun.bytes);
        let Some(peer) = self.peers.get_mut(&number) else {
            return Err(Error::new(name, ErrorKind::Closed, "the peer was left"));
        };
        let refuse = |kind, why: &str| Err(Error::new(name, kind, why).with(&peer.card.label));
        let is_by_rails = begun.path.is_some_and(|path| !path.is_local());
        if peer.visit.is_none() || (region.is_some() && is_by_rails) {
            if peer.links.is_empty() {
                return refuse(
                    ErrorKind::NoPath,
                    "it is not on this machine, and no fabric leads there",
                );
            }
            let links = peer.links.iter().copied();
            let region = region.map(|region| region.number);
            if let Some((kind, why)) = self.far.obstacle(links, region) {
                return refuse(kind, &why);
            }
        }
        let Some(visit) = &mut peer.visit else {
            let token = self.operations.begin(begun)?;
            return Ok(Ticket { token, peer: number, number: 0, bytes, notice });
        };
        if peer.is_gone {
            return refuse(ErrorKind::Closed, "its process is gone");
        }
        // First said, then looked: who withdraws a region first hides it, then looks.
        let place = visit.guest.begin();
        if region.is_some_and(|region| !visit.board.is_there(region.number)) {
            visit.guest.end(place);
            return match visit.life.is_over() {
                true => refuse(ErrorKind::Closed, "its process is gone"),
                false => refuse(ErrorKind::Stale, "the region was withdrawn"),
            };
        }
        match self.operations.begin(begun) {
            Ok(token) => Ok(Ticket { token, peer: number, number: place, bytes, notice }),
            Err(error) => {
                visit.guest.end(place);
                Err(error)
            }
        }
    }

    fn move_bytes(
        &mut self,
        operation: Operation,
        route: &Route,
        blocks: Blocks<'_>,
        by: BlocksBy,
        ticket: Ticket,
    ) -> Result<()> {
        if ticket.bytes == 0 {
            self.conclude(ticket);
            return Ok(());
        }
        match &route.0.means {
            Means::Rails(tracks) => {
                self.move_by_rails(operation, &route.0, tracks, blocks, ticket);
                Ok(())
            }
            Means::Processor { local, remote } => {
                let (to, from) = match operation {
                    Operation::Put => (remote.clone(), local.clone()),
                    Operation::Get => (local.clone(), remote.clone()),
                };
                let blocks = self.lists.copy_of(blocks);
                self.chores.push_back(Chore { ticket, to, from, blocks, block: Block::default() });
                Ok(())
            }
            Means::Device { device, local, remote } => {
                let (to, from) = match operation {
                    Operation::Put => (remote, local),
                    Operation::Get => (local, remote),
                };
                let key = (ticket.peer, device.name(), ticket.bytes < SMALL);
                let lane = match self.lanes.entry(key) {
                    Entry::Occupied(lane) => lane.into_mut(),
                    Entry::Vacant(place) => match Lane::new(device) {
                        Ok(lane) => place.insert(lane),
                        Err(error) => return Err(self.undo(ticket, error)),
                    },
                };
                lane.push(ticket, Request { to, from, blocks, by }).map_err(|failed| {
                    let (ticket, error) = *failed;
                    self.give_up(ticket, error)
                })
            }
        }
    }

    /// There is no data; at most a notice is to be sent.
    fn conclude(&mut self, ticket: Ticket) {
        match self.peers.get(&ticket.peer) {
            Some(peer) if peer.visit.is_none() && ticket.notice.is_some() => {
                self.notify_by_rail(ticket);
            }
            _ => self.complete(ticket, Ok(())),
        }
    }

    /// It was not begun after all.
    fn undo(&mut self, ticket: Ticket, error: Error) -> Error {
        let peer = self.peers.get_mut(&ticket.peer);
        if let Some(visit) = peer.and_then(|peer| peer.visit.as_mut()) {
            visit.guest.end(ticket.number);
        }
        self.give_up(ticket, error)
    }

    /// It failed, and nobody knows how much of it was begun: to the peer it is under way for
    /// as long as this process lives, so that it does not take its region for free.
    fn give_up(&mut self, ticket: Ticket, error: Error) -> Error {
        self.operations.forget(ticket.token);
        self.operations.finish(ticket.token, Ok(()));
        error.with(self.label(ticket.peer))
    }
}

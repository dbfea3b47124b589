//! Agents that share no memory with this one: what the rails do for them, and tell of them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::card::AgentCard;
use super::events::Event;
use super::lane::Ticket;
use super::notice::Notice;
use super::operations::Token;
use super::peer::{CONNECT, Peer, Tie};
use super::route::{JOIN, Means};
use super::track::{Track, registration, share_out};
use super::{Agent, REST};
use crate::blocks::Blocks;
use crate::error::{Error, ErrorKind, Result};
use crate::path::{Fabric, Operation, Registration};
use crate::rail::{Bytes, Command, Move, Rail, Report, There, is_reachable};
use crate::region::{RegionDescriptor, Registered};

/// Notices of a peer that are taken before its rail is told so.
const TOLD: u64 = 16;

/// A peer at one of our rails.
#[derive(Debug)]
struct Link {
    rail: usize,
    /// Which of the peer's fabrics it leads to.
    theirs: usize,
    /// None until it answered.
    met: Option<std::result::Result<(), Arc<Error>>>,
    lost: Option<String>,
    withdrawn: HashSet<u64>,
}

/// A transfer that several rails have a part in.
#[derive(Debug)]
struct Shared {
    left: usize,
    failure: Option<Error>,
    /// Sent by this link when all is there.
    notice: Option<(u32, Notice)>,
}

/// All that an agent knows of rails.
#[derive(Debug, Default)]
pub(super) struct Far {
    pub(super) rails: Vec<Rail>,
    links: HashMap<u32, Link>,
    next_link: u32,
    next_request: u64,
    /// The answer to the latest request.
    opened: Option<Result<()>>,
    shared: HashMap<Token, Shared>,
    /// Operations under way, by peer.
    under_way: HashMap<u32, usize>,
    taken: HashMap<(usize, u64), u64>,
    /// The peer that is being joined with, and what is done with it meanwhile.
    joining: Option<u32>,
    postponed: Vec<(Ticket, Result<()>)>,
    reports: VecDeque<Report>,
}

impl Far {
    /// Which of our rails lead to which fabrics of a peer's: all of the first provider that both
    /// have, since what is shared out among rails is as fast as the slowest.
    fn pairs(&self, card: &AgentCard) -> Vec<(usize, usize)> {
        let mut theirs: Vec<_> = card.fabrics.iter().map(Some).collect();
        let mut pairs = Vec::new();
        for (rail, ours) in self.rails.iter().enumerate() {
            let is_like = |fabric: &Option<&super::FabricAddress>| {
                fabric.is_some_and(|fabric| fabric.provider == ours.provider)
            };
            let is_another =
                |(first, _): &(usize, usize)| self.rails[*first].provider != ours.provider;
            if pairs.first().is_some_and(is_another) {
                continue;
            }
            if let Some(found) = theirs.iter().position(is_like) {
                theirs[found] = None;
                pairs.push((rail, found));
            }
        }
        pairs
    }

    /// Is there a fabric between the two?
    pub(super) fn leads_to(&self, card: &AgentCard) -> bool {
        !self.pairs(card).is_empty()
    }

    /// What the fabric between the two can do, as far as it is known without asking.
    pub(super) fn facts(
        &self,
        peer: &Peer,
        local: &Registered,
        remote: &RegionDescriptor,
    ) -> Fabric {
        self.facts_with(
            peer,
            |rail| {
                let takes_devices = self.rails[rail].takes_devices;
                registration(
                    local.memory(rail).is_some(),
                    !is_reachable(&local.buffer),
                    takes_devices,
                )
            },
            |domain| {
                let has_key = remote.keys.iter().any(|key| key.domain as usize == domain);
                // The peer's rail is of the same provider.
                let takes_devices = self.rails.iter().any(|rail| rail.takes_devices);
                registration(has_key, remote.place.is_device(), takes_devices)
            },
        )
    }

    /// The same, where memory is registered with our rails and the peer's as is said.
    pub(super) fn facts_with(
        &self,
        peer: &Peer,
        local: impl Fn(usize) -> Registration,
        remote: impl Fn(usize) -> Registration,
    ) -> Fabric {
        if let Some(why) = &peer.no_fabric {
            return Fabric::None { why: why.clone() };
        }
        if self.rails.is_empty() {
            return Fabric::None { why: "the agent that asks was started without one".to_owned() };
        }
        let pairs = self.pairs(&peer.card);
        let Some((rail, theirs)) = pairs.first() else {
            let ours: Vec<_> = self.rails.iter().map(|rail| rail.provider.as_str()).collect();
            let theirs: Vec<_> = peer.card.fabrics.iter().map(|f| f.provider.as_str()).collect();
            let theirs = if theirs.is_empty() { "none".to_owned() } else { theirs.join(", ") };
            let why = format!("we have {}, the peer has {theirs}", ours.join(", "));
            return Fabric::None { why };
        };
        Fabric::Connected {
            provider: self.rails[*rail].provider.clone(),
            remote_access: self.rails[*rail].has_remote_access,
            local: local(*rail),
            remote: remote(*theirs),
        }
    }

    fn lost(&self, link: u32) -> Option<&str> {
        match self.links.get(&link) {
            Some(link) => link.lost.as_deref(),
            None => Some("it was left"),
        }
    }

    /// Why nothing can be begun by these links, if so.
    pub(super) fn obstacle(
        &self,
        links: impl Iterator<Item = u32>,
        region: Option<u64>,
    ) -> Option<(ErrorKind, String)> {
        for link in links {
            if let Some(why) = self.lost(link) {
                return Some((ErrorKind::Closed, why.to_owned()));
            }
            let is_withdrawn = |link: &Link| region.is_some_and(|r| link.withdrawn.contains(&r));
            if self.links.get(&link).is_some_and(is_withdrawn) {
                return Some((ErrorKind::Stale, "the region was withdrawn".to_owned()));
            }
        }
        None
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.under_way.is_empty()
    }

    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.under_way.contains_key(&peer)
    }

    pub(super) fn has_reports(&self) -> bool {
        self.rails.iter().any(Rail::has_reports)
    }

    /// False if there is no such link.
    fn tell(&self, link: u32, command: Command) -> bool {
        let Some(link) = self.links.get(&link) else { return false };
        self.rails[link.rail].line.tell(command);
        true
    }

    /// Leaves a peer at all rails.
    pub(super) fn leave(&mut self, links: &[u32]) {
        for link in links {
            self.tell(*link, Command::Leave { link: *link });
            self.links.remove(link);
        }
    }

    /// The agent took a notice that came by a rail.
    pub(super) fn has_taken(&mut self, rail: usize, session: u64) {
        let taken = self.taken.entry((rail, session)).or_default();
        *taken += 1;
        if *taken >= TOLD {
            let notices = std::mem::take(taken);
            self.taken.remove(&(rail, session));
            self.rails[rail].line.tell(Command::Taken { session, notices });
        }
    }
}

impl Agent {
    /// Gets to know a peer by rails, if it is not known by them already.
    pub(super) fn meet_far(&mut self, peer: &mut Peer, end: Instant) -> Result<()> {
        let (kept, lost): (Vec<_>, Vec<_>) =
            peer.links.iter().partition(|link| self.far.lost(**link).is_none());
        self.far.leave(&lost);
        peer.links = kept;
        if !peer.links.is_empty() {
            return Ok(());
        }
        let mut links = Vec::new();
        for (rail, theirs) in self.far.pairs(&peer.card) {
            let link = self.far.next_link;
            self.far.next_link += 1;
            let known = Link { rail, theirs, met: None, lost: None, withdrawn: HashSet::new() };
            self.far.links.insert(link, known);
            let command = Command::Meet {
                link,
                identity: peer.card.identity,
                address: peer.card.fabrics[theirs].address.clone(),
                patience: end.saturating_duration_since(Instant::now()),
            };
            self.far.tell(link, command);
            links.push(link);
        }
        let met = self.await_links(&links, end);
        if met.is_ok() {
            peer.links = links;
        } else {
            self.far.leave(&links);
        }
        met
    }

    /// The same, where it is no error if it does not answer: then that is why it is not to be
    /// reached by a fabric.
    pub(super) fn try_fabric(&mut self, peer: &mut Peer, end: Instant) -> Result<()> {
        if !self.far.leads_to(&peer.card) {
            return Ok(());
        }
        match self.meet_far(peer, end) {
            Ok(()) => peer.no_fabric = None,
            Err(error)
                if matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded) =>
            {
                peer.no_fabric = Some(error.to_string());
            }
            Err(error) => return Err(error.with(&peer.card.label)),
        }
        Ok(())
    }

    fn await_links(&mut self, links: &[u32], end: Instant) -> Result<()> {
        loop {
            self.hear();
            let open = links.iter().find_map(|link| match &self.far.links.get(link)?.met {
                Some(Ok(())) => None,
                Some(Err(error)) => Some(Err(Arc::clone(error))),
                None => Some(Ok(())),
            });
            match open {
                None => return Ok(()),
                Some(Err(error)) => {
                    return Err(Error::new(CONNECT, error.kind(), error.to_string()));
                }
                Some(Ok(())) if Instant::now() >= end => {
                    let detail = "it does not answer by the fabric";
                    return Err(Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail));
                }
                Some(Ok(())) => self.rest_until_told(end),
            }
        }
    }

    pub(super) fn rest_until_told(&mut self, end: Instant) {
        let home = Arc::clone(&self.home);
        let mut waiting = self.waiting;
        let until = end.min(Instant::now() + 10 * REST);
        home.doorbell.wait(&mut waiting, until, || self.far.has_reports().then_some(()));
        self.waiting = waiting;
    }

    /// Takes a peer out, to be put back: what is made for it needs all of the agent.
    pub(super) fn take_out(&mut self, peer: u32) -> Option<Peer> {
        let taken = self.peers.remove(&peer)?;
        self.far.joining = Some(peer);
        Some(taken)
    }

    pub(super) fn put_back(&mut self, number: u32, peer: Peer) {
        self.peers.insert(number, peer);
        self.far.joining = None;
        for (ticket, outcome) in std::mem::take(&mut self.far.postponed) {
            self.rail_is_done(ticket, outcome);
        }
    }

    /// Makes what a fabric path needs: asks the peer for its region, and for staging memory.
    pub(super) fn lay_tracks(
        &mut self,
        peer: &mut Peer,
        local: &Arc<Registered>,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<Means> {
        self.meet_far(peer, end).inspect_err(|error| {
            peer.no_fabric = Some(error.to_string());
        })?;
        let of_fabric = |error| Error::of_fabric(JOIN, error);
        let mut tracks = Vec::new();
        for link in peer.links.clone() {
            let known = self.far.links.get(&link).map(|known| (known.rail, known.theirs));
            let Some((rail, theirs)) = known else { continue };
            let key = remote.keys.iter().find(|key| key.domain as usize == theirs);
            let memory = match key {
                Some(key) => {
                    let region = fabric::RemoteRegion::decode(&key.bytes).map_err(of_fabric)?;
                    let memory = self.far.rails[rail].domain.attach(&region).map_err(of_fabric)?;
                    if memory.len() < remote.length {
                        let detail = "its fabric key is for less than the region";
                        return Err(Error::new(JOIN, ErrorKind::Malformed, detail));
                    }
                    Some(memory)
                }
                None => None,
            };
            self.open_far(link, remote, memory.is_none(), end)?;
            let there = There { region: remote.number, ticket: remote.ticket, memory };
            let track = Track { link, rail, there };
            track.here(local)?;
            tracks.push(track);
        }
        if tracks.is_empty() {
            return Err(Error::new(JOIN, ErrorKind::Closed, "it was lost meanwhile"));
        }
        Ok(Means::Rails(tracks))
    }

    fn open_far(
        &mut self,
        link: u32,
        remote: &RegionDescriptor,
        stages: bool,
        end: Instant,
    ) -> Result<()> {
        self.far.opened = None;
        self.far.next_request += 1;
        let request = self.far.next_request;
        let (region, ticket) = (remote.number, remote.ticket);
        self.far.tell(link, Command::Open { link, request, region, ticket, stages });
        loop {
            self.hear();
            if let Some(outcome) = self.far.opened.take() {
                return outcome;
            }
            if Instant::now() >= end {
                let detail = "it does not answer by the fabric";
                return Err(Error::new(JOIN, ErrorKind::DeadlineExceeded, detail));
            }
            self.rest_until_told(end);
        }
    }

    /// Gives a transfer to the rails.
    pub(super) fn move_by_rails(
        &mut self,
        operation: Operation,
        local: &Arc<Registered>,
        tracks: &[Track],
        blocks: Blocks<'_>,
        mut ticket: Ticket,
    ) {
        let is_far = self.peers.get(&ticket.peer).is_some_and(|peer| matches!(peer.tie, Tie::Far));
        // A peer with which memory is shared is told by that.
        let mut notice = ticket.notice.take_if(|_| is_far);
        *self.far.under_way.entry(ticket.peer).or_default() += 1;
        let shares = share_out(blocks.each(), tracks.len());
        let busy: Vec<_> =
            tracks.iter().zip(shares).filter(|(_, blocks)| !blocks.is_empty()).collect();
        if busy.len() > 1 {
            let notice = notice.take().map(|notice| (tracks[0].link, notice));
            let shared = Shared { left: busy.len(), failure: None, notice };
            self.far.shared.insert(ticket.token, shared);
        }
        for (track, blocks) in busy {
            let there = track.there.clone();
            let outcome = track.here(local).and_then(|here| {
                let bytes = Bytes { operation, here, there, blocks, _local: Arc::clone(local) };
                let (link, ticket, notice) = (track.link, ticket.clone(), notice.take());
                let told = Move { link, ticket, notice, bytes: Some(bytes) };
                match self.far.tell(link, Command::Move(Box::new(told))) {
                    true => Ok(()),
                    false => Err(Error::new("transfer", ErrorKind::Closed, "it was left")),
                }
            });
            if outcome.is_err() {
                self.rail_is_done(ticket.clone(), outcome);
            }
        }
    }

    /// Tells a peer something by a rail.
    pub(super) fn notify_by_rail(&mut self, link: u32, mut ticket: Ticket) {
        let notice = ticket.notice.take();
        *self.far.under_way.entry(ticket.peer).or_default() += 1;
        let told = Move { link, ticket: ticket.clone(), notice, bytes: None };
        if !self.far.tell(link, Command::Move(Box::new(told))) {
            let left = Error::new("tell a peer", ErrorKind::Closed, "it was left");
            self.rail_is_done(ticket, Err(left));
        }
    }

    /// Takes note of what the rails tell. True if they told anything.
    pub(super) fn hear(&mut self) -> bool {
        if self.far.rails.is_empty() {
            return false;
        }
        let mut has_any = false;
        for rail in 0..self.far.rails.len() {
            if self.far.rails[rail].has_ended() {
                self.lose_rail(rail);
            }
            let mut reports = std::mem::take(&mut self.far.reports);
            self.far.rails[rail].reports(&mut reports);
            for report in reports.drain(..) {
                has_any = true;
                self.take_note(rail, report);
            }
            self.far.reports = reports;
        }
        has_any
    }

    /// A rail's thread is gone: so are its links, and what was under way by it, which is not
    /// heard of again.
    fn lose_rail(&mut self, rail: usize) {
        for link in self.far.links.values_mut().filter(|link| link.rail == rail) {
            let why = || Error::new(CONNECT, ErrorKind::Failed, "the rail's thread has ended");
            link.met.get_or_insert_with(|| Err(Arc::new(why())));
            link.lost.get_or_insert_with(|| "the rail's thread has ended".to_owned());
        }
        let peers: Vec<u32> = self.far.under_way.keys().copied().collect();
        for peer in peers {
            let is_of_it = |link: &u32| self.far.links.get(link).is_some_and(|l| l.rail == rail);
            let links = self.peers.get(&peer).map(|peer| peer.links.as_slice());
            if links.is_some_and(|links| links.iter().any(is_of_it)) {
                self.far.under_way.remove(&peer);
                self.operations.fail_all_of(peer, || {
                    Error::new("transfer", ErrorKind::Failed, "the rail's thread has ended")
                });
            }
        }
    }

    fn take_note(&mut self, rail: usize, report: Report) {
        match report {
            Report::Met { link, outcome } => {
                if let Some(link) = self.far.links.get_mut(&link) {
                    link.met = Some(outcome.map_err(Arc::new));
                }
            }
            Report::Opened { request, outcome } => {
                // One that nobody waits for any more is of no use.
                if request == self.far.next_request {
                    self.far.opened = Some(outcome);
                }
            }
            Report::Done { ticket, outcome } if self.far.joining == Some(ticket.peer) => {
                self.far.postponed.push((ticket, outcome));
            }
            Report::Done { ticket, outcome } => self.rail_is_done(ticket, outcome),
            Report::Withdrawn { link, region } => {
                if let Some(link) = self.far.links.get_mut(&link) {
                    link.withdrawn.insert(region);
                }
            }
            Report::Lost { link, why } => {
                if let Some(link) = self.far.links.get_mut(&link) {
                    link.lost = Some(why);
                }
            }
            Report::Happened(event) => self.events.push_back((event, None)),
            Report::Notice { session, from, notice } => {
                self.events.push_back((Event::Notice { from, notice }, Some((rail, session))));
            }
        }
    }

    fn rail_is_done(&mut self, ticket: Ticket, mut outcome: Result<()>) {
        let mut notice = None;
        if let Some(shared) = self.far.shared.get_mut(&ticket.token) {
            shared.left -= 1;
            if let Err(error) = outcome {
                shared.failure.get_or_insert(error);
            }
            if shared.left > 0 {
                return;
            }
            let shared = self.far.shared.remove(&ticket.token);
            outcome = Ok(());
            if let Some(Shared { failure, notice: kept, .. }) = shared {
                notice = kept;
                outcome = failure.map_or(Ok(()), Err);
            }
        }
        if let Some(count) = self.far.under_way.get_mut(&ticket.peer) {
            *count -= 1;
            if *count == 0 {
                self.far.under_way.remove(&ticket.peer);
            }
        }
        if let (Ok(()), Some((link, notice))) = (&outcome, notice) {
            return self.notify_by_rail(link, Ticket { notice: Some(notice), ..ticket });
        }
        match self.peers.get(&ticket.peer).map(|peer| &peer.tie) {
            Some(Tie::Visit(_) | Tie::Here { .. }) => self.complete(ticket, outcome),
            _ => {
                let label = self.label(ticket.peer);
                self.operations.finish(ticket.token, outcome.map_err(|error| error.with(label)));
            }
        }
    }
}

//! Agents that share no memory with this one: what the rails do for them, and tell of them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::Caps;

use super::card::AgentCard;
use super::company::{Company, Missing};
use super::events::Event;
use super::lane::Ticket;
use super::notice::Notice;
use super::operations::Token;
use super::peer::{CONNECT, Peer};
use super::route::{Inner as Joined, Means};
use super::track::{Track, share_out};
use super::{Agent, REST};
use crate::blocks::{Blocks, Share};
use crate::error::{Error, ErrorKind, Result};
use crate::path::{Fabric, Operation, Registration};
use crate::rail::{Bytes, Driver, Move, Rail, Report, Target};

#[cfg(test)]
mod tests;

/// Notices of a peer that are taken before its rail is told so.
const TOLD: u64 = 16;

/// Where several rails lead to a peer, the others may take so long behind the first.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// As often a transfer goes on with another rail when one was lost with it. What is given back each time
/// has something about it that no rail carries.
const MOST_LOSSES: u32 = 64;

/// What is known of a region by a link, if it is not withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is not there now, or it is not known yet.
    Asked,
    Open,
}

#[derive(Debug)]
pub(super) enum State {
    /// It has not answered yet.
    Meeting,
    Up,
    /// Why not.
    Down(Arc<Error>),
}

/// A peer at one of our rails.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) rail: usize,
    /// Which of the peer's fabrics it leads to.
    pub(super) theirs: usize,
    pub(super) target: Target,
    pub(super) label: String,
    pub(super) state: State,
    /// Somebody waits until it is met, and says then what is to be said of it.
    pub(super) is_awaited: bool,
    /// Regions that were asked for. One that is not among them any more was withdrawn.
    pub(super) regions: HashMap<u64, Standing>,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, State::Up)
    }

    pub(super) fn whom(&self) -> ([u8; 16], String) {
        (self.target.identity, self.label.clone())
    }
}

/// An operation that rails have parts in.
#[derive(Debug)]
pub(super) struct UnderWay {
    ticket: Ticket,
    /// Parts that have not come to their end.
    left: usize,
    failure: Option<Error>,
    /// Sent when all is there.
    notice: Option<Notice>,
}

/// All that an agent knows of rails.
#[derive(Debug, Default)]
pub(super) struct Far {
    pub(super) rails: Vec<Rail>,
    pub(super) links: HashMap<u32, Link>,
    pub(super) next_link: u32,
    /// The region that is asked for, and by which ticket.
    pub(super) asked: (u64, u64),
    /// The answers by link, if it is waited for them.
    pub(super) answers: BTreeMap<u32, Option<Result<()>>>,
    pub(super) under_way: HashMap<Token, UnderWay>,
    /// How many parts of an operation each rail has: if its thread ends in the middle of something,
    /// somebody has to know. It may have several, once another one was lost.
    parts: Vec<HashMap<Token, usize>>,
    taken: HashMap<(usize, u64), u64>,
    /// Which rail goes on with what another one left.
    turn: usize,
    pub(super) company: Company,
    reports: VecDeque<Report>,
}

impl Far {
    pub(super) fn add_rail(&mut self, rail: Rail) {
        self.rails.push(rail);
        self.parts.push(HashMap::new());
    }

    /// Which of our rails lead to which fabrics of a peer's: all of the first provider that both
    /// have, since what is shared out among rails is as fast as the slowest.
    pub(super) fn pairs(&self, card: &AgentCard) -> Vec<(usize, usize)> {
        let mut theirs: Vec<_> = card.fabrics.iter().map(Some).collect();
        let mut pairs = Vec::new();
        for (rail, ours) in self.rails.iter().enumerate() {
            let is_like = |fabric: &Option<&super::FabricAddress>| {
                fabric.is_some_and(|fabric| fabric.provider == ours.provider())
            };
            let is_another =
                |(first, _): &(usize, usize)| self.rails[*first].provider() != ours.provider();
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

    /// What the fabric between the two can do, as far as it is known without asking, where memory is
    /// registered with our rails and the peer's as is said.
    pub(super) fn facts(
        &self,
        peer: &Peer,
        local: impl Fn(usize) -> Registration,
        remote: impl Fn(usize) -> Registration,
    ) -> Fabric {
        if let Some(error) = &peer.no_fabric {
            return Fabric::None { why: error.to_string() };
        }
        if self.rails.is_empty() {
            return Fabric::None { why: "the agent that asks was started without one".to_owned() };
        }
        let pairs = self.pairs(&peer.card);
        let Some((rail, theirs)) = pairs.first() else {
            let ours: Vec<_> = self.rails.iter().map(Rail::provider).collect();
            let theirs: Vec<_> = peer.card.fabrics.iter().map(|f| f.provider.as_str()).collect();
            let theirs = if theirs.is_empty() { "none".to_owned() } else { theirs.join(", ") };
            let why = format!("we have {}, the peer has {theirs}", ours.join(", "));
            return Fabric::None { why };
        };
        Fabric::Connected {
            provider: self.rails[*rail].provider().to_owned(),
            remote_access: self.rails[*rail].has(Caps::RMA),
            local: local(*rail),
            remote: remote(*theirs),
        }
    }

    /// Is anything of a rail reckoned with: a link, a part, an answer, a guest?
    fn reckons_with(&self, rail: usize) -> bool {
        let is_its = |link: &&Link| link.rail == rail;
        let is_awaited = |(link, answer): (&u32, &Option<_>)| {
            answer.is_none() && self.links.get(link).is_some_and(|link| is_its(&link))
        };
        !self.parts[rail].is_empty()
            || self.links.values().filter(is_its).any(|link| !matches!(link.state, State::Down(_)))
            || self.answers.iter().any(is_awaited)
            || self.company.has_any_by(rail)
    }

    pub(super) fn is_up(&self, link: u32) -> bool {
        self.links.get(&link).is_some_and(Link::is_up)
    }

    /// Can bytes go by it now?
    fn is_open(&self, track: &Track) -> bool {
        self.links.get(&track.link).is_some_and(|link| {
            link.is_up() && link.regions.get(&track.there.region) == Some(&Standing::Open)
        })
    }

    /// Why nothing can be begun by any of these links, if so.
    pub(super) fn obstacle(
        &self,
        links: impl Iterator<Item = u32>,
        region: Option<u64>,
    ) -> Option<(ErrorKind, String)> {
        let (mut has_any, mut why) = (false, None);
        for link in links {
            let Some(link) = self.links.get(&link) else { continue };
            if region.is_some_and(|region| !link.regions.contains_key(&region)) {
                return Some((ErrorKind::Stale, "the region was withdrawn".to_owned()));
            }
            match &link.state {
                State::Up => has_any = true,
                State::Down(error) => drop(why.get_or_insert_with(|| error.reason())),
                State::Meeting => {}
            }
        }
        let why = || why.unwrap_or_else(|| "it was left".to_owned());
        (!has_any).then(|| (ErrorKind::Closed, why()))
    }

    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.under_way.values().any(|operation| operation.ticket.peer == peer)
    }

    pub(super) fn tell(&self, link: u32, command: impl FnOnce(&mut Driver) + Send + 'static) {
        if let Some(link) = self.links.get(&link) {
            self.rails[link.rail].line.tell(command);
        }
    }

    /// Leaves a peer at all rails.
    pub(super) fn leave(&mut self, links: &[u32]) {
        for link in links.iter().copied() {
            self.tell(link, move |driver| driver.leave(link));
            self.links.remove(&link);
            self.company.left(link);
        }
    }

    /// The agent took a notice that came by a rail.
    pub(super) fn has_taken(&mut self, rail: usize, session: u64) {
        if !self.company.is_here(rail, session) {
            // It does not send more.
            return;
        }
        let taken = self.taken.entry((rail, session)).or_default();
        *taken += 1;
        if *taken >= TOLD {
            let notices = std::mem::take(taken);
            self.taken.remove(&(rail, session));
            self.rails[rail].line.tell(move |driver| driver.taken(session, notices));
        }
    }
}

impl Agent {
    pub(super) fn rest_until_told(&mut self, end: Instant) {
        let home = Arc::clone(&self.home);
        let mut waiting = self.waiting;
        let until = end.min(Instant::now() + 10 * REST);
        let told = || self.far.rails.iter().any(Rail::has_reports).then_some(());
        home.doorbell.wait(&mut waiting, until, told);
        self.waiting = waiting;
    }

    /// Gives a transfer to the rails that are there.
    pub(super) fn move_by_rails(
        &mut self,
        operation: Operation,
        joined: &Arc<Joined>,
        tracks: &[Track],
        blocks: Blocks<'_>,
        mut ticket: Ticket,
    ) {
        let is_far = self.peers.get(&ticket.peer).is_some_and(|peer| peer.visit.is_none());
        // A peer with which memory is shared is told by that.
        let mut notice = ticket.notice.take_if(|_| is_far);
        let open = || tracks.iter().filter(|track| self.far.is_open(track));
        let shares = share_out(blocks, open().count());
        let busy: Vec<_> = open().zip(shares).filter(|(_, blocks)| !blocks.is_empty()).collect();
        if busy.is_empty() {
            let detail = "it is not there by any rail that the regions were joined by";
            return self
                .far_is_done(ticket, Err(Error::new("transfer", ErrorKind::Closed, detail)));
        }
        let (token, left) = (ticket.token, busy.len());
        let last = notice.take_if(|_| left > 1);
        self.far.under_way.insert(token, UnderWay { ticket, left, failure: None, notice: last });
        for (track, blocks) in busy {
            self.move_by(track, operation, joined, (blocks, 0), (token, notice.take()));
        }
    }

    /// Gives bytes to one rail.
    fn move_by(
        &mut self,
        track: &Track,
        operation: Operation,
        joined: &Arc<Joined>,
        (blocks, losses): (Share, u32),
        (token, notice): (Token, Option<Notice>),
    ) {
        let here = match track.here(&joined.local) {
            Ok(here) => here,
            Err(error) => return self.part_is_done(token, Err(error)),
        };
        let (link, there, joined) = (track.link, track.there.clone(), Arc::clone(joined));
        let bytes = Some(Bytes { operation, here, there, blocks, losses, joined });
        self.give(Move { link, token, notice, bytes });
    }

    fn give(&mut self, told: Move) {
        let Some(link) = self.far.links.get(&told.link) else {
            let left = Error::new("transfer", ErrorKind::Closed, "it was left");
            return self.part_is_done(told.token, Err(left));
        };
        let rail = link.rail;
        *self.far.parts[rail].entry(told.token).or_default() += 1;
        self.far.rails[rail].line.begin_move(told);
    }

    /// What a rail that was lost did not do, and has not begun, another one does.
    fn go_on_with(&mut self, told: Move, why: &str) {
        let Move { link: lost, token, notice, bytes } = told;
        let closed = || Error::new("transfer", ErrorKind::Closed, why);
        let Some(Bytes { operation, blocks, losses, joined, .. }) = bytes else {
            let peer = self.far.under_way.get(&token).map(|operation| operation.ticket.peer);
            return match (peer.and_then(|peer| self.speaker(peer)), notice) {
                (Some(link), Some(notice)) if link != lost => {
                    self.give(Move { link, token, notice: Some(notice), bytes: None });
                }
                _ => self.part_is_done(token, Err(closed())),
            };
        };
        let tracks = match &joined.means {
            Means::Rails(tracks) if losses < MOST_LOSSES => tracks,
            _ => return self.part_is_done(token, Err(closed())),
        };
        let open = || {
            let others = tracks.iter().filter(|track| track.link != lost);
            others.filter(|track| self.far.is_open(track))
        };
        let turn = self.far.turn;
        let Some(track) = open().nth(turn % open().count().max(1)) else {
            return self.part_is_done(token, Err(closed()));
        };
        self.far.turn = turn.wrapping_add(1);
        self.move_by(track, operation, &joined, (blocks, losses + 1), (token, notice));
    }

    /// By which link a peer is told things: the same one as before as long as that is there, so that
    /// it hears them in order. When it is lost, what it had not sent yet may come behind what is said
    /// by the next one.
    fn speaker(&mut self, peer: u32) -> Option<u32> {
        let peer = self.peers.get_mut(&peer)?;
        let is_up = |link: &u32| self.far.is_up(*link);
        if !peer.speaker.as_ref().is_some_and(is_up) {
            peer.speaker = peer.links.iter().copied().find(|link| is_up(link));
        }
        peer.speaker
    }

    /// Tells a peer something by a rail.
    pub(super) fn notify_by_rail(&mut self, mut ticket: Ticket) {
        let (token, notice) = (ticket.token, ticket.notice.take());
        let Some(link) = self.speaker(ticket.peer) else {
            let lost = Error::new("tell a peer", ErrorKind::Closed, "it is not there by any rail");
            return self.far_is_done(ticket, Err(lost));
        };
        let operation = UnderWay { ticket, left: 1, failure: None, notice: None };
        self.far.under_way.insert(token, operation);
        self.give(Move { link, token, notice, bytes: None });
    }

    /// Takes note of what the rails tell. True if they told anything.
    pub(super) fn hear(&mut self) -> bool {
        if self.far.rails.is_empty() {
            return false;
        }
        let (mut has_any, mut gone) = (false, Vec::new());
        for rail in 0..self.far.rails.len() {
            let has_ended = self.far.rails[rail].has_ended();
            let mut reports = std::mem::take(&mut self.far.reports);
            self.far.rails[rail].reports(&mut reports);
            for report in reports.drain(..) {
                has_any = true;
                match report {
                    // By another rail it may have come meanwhile, and did not leave then.
                    Report::Gone { .. } => gone.push((rail, report)),
                    _ => self.take_note(rail, report),
                }
            }
            self.far.reports = reports;
            if has_ended && self.far.reckons_with(rail) {
                gone.extend(self.lose_rail(rail).map(|report| (rail, report)));
            }
        }
        for (rail, report) in gone {
            self.take_note(rail, report);
        }
        has_any
    }

    /// A rail's thread is gone, and told of all that it knew. What else it was given has failed, and
    /// its guests are gone.
    fn lose_rail(&mut self, rail: usize) -> impl Iterator<Item = Report> + use<> {
        let why = || Error::new(CONNECT, ErrorKind::Closed, "the rail's thread has ended");
        let of_it = self.far.links.iter().filter(|(_, link)| link.rail == rail);
        let links: Vec<_> = of_it.map(|(number, _)| *number).collect();
        for (link, answer) in &mut self.far.answers {
            if links.contains(link) {
                answer.get_or_insert_with(|| Err(why()));
            }
        }
        for link in links {
            if self.far.links.get(&link).is_some_and(|link| !matches!(link.state, State::Down(_))) {
                self.take_note(rail, Report::Down { link, error: why() });
            }
        }
        for (token, count) in std::mem::take(&mut self.far.parts[rail]) {
            (0..count).for_each(|_| self.part_is_done(token, Err(why())));
        }
        let sessions = self.far.company.sessions_by(rail).into_iter();
        sessions.map(move |session| Report::Gone { session, lost: Some(why().reason()) })
    }

    /// A rail told of a part that it had.
    fn take_back(&mut self, rail: usize, token: Token) {
        if let Some(parts) = self.far.parts[rail].get_mut(&token) {
            *parts -= 1;
            if *parts == 0 {
                self.far.parts[rail].remove(&token);
            }
        }
    }

    fn take_note(&mut self, rail: usize, report: Report) {
        match report {
            Report::Up { link: number } => {
                if let Some(link) = self.far.links.get_mut(&number) {
                    link.state = State::Up;
                    let (with, label) = link.whom();
                    self.far.company.found(with, rail, Missing::Link(number), label);
                }
            }
            Report::Down { link: number, error } => {
                if let Some(link) = self.far.links.get_mut(&number) {
                    let reason = error.reason();
                    link.regions.values_mut().for_each(|standing| *standing = Standing::Asked);
                    link.state = State::Down(Arc::new(error));
                    if !link.is_awaited {
                        let missing = Missing::Link(number);
                        self.far.company.miss(rail, missing, link.whom(), reason);
                    }
                }
            }
            Report::Opened { link: number, region, outcome } => {
                // What was there and is refused is withdrawn, too, which the rail says itself.
                // Nor is one known that a join gave up.
                let link = self.far.links.get_mut(&number).filter(|_| outcome.is_ok());
                if let Some(known) = link.and_then(|link| link.regions.get_mut(&region.0)) {
                    *known = Standing::Open;
                }
                // One that nobody waits for any more is of no use.
                let Far { asked, answers, .. } = &mut self.far;
                if let Some(answer) = answers.get_mut(&number).filter(|_| *asked == region) {
                    *answer = Some(outcome);
                }
            }
            Report::Done { token, outcome } => {
                self.take_back(rail, token);
                self.part_is_done(token, outcome);
            }
            Report::Stranded { told, why } => {
                self.take_back(rail, told.token);
                self.go_on_with(*told, &why);
            }
            Report::Withdrawn { link, region } => {
                if let Some(link) = self.far.links.get_mut(&link) {
                    link.regions.remove(&region);
                }
            }
            Report::Came { session, from, visit, label } => {
                self.far.company.came(rail, session, (from, visit), label);
            }
            Report::Gone { session, lost } => {
                self.far.taken.remove(&(rail, session));
                self.far.company.gone(rail, session, lost);
            }
            Report::Notice { session, from, notice } => {
                self.events.push_back((Event::Notice { from, notice }, Some((rail, session))));
            }
        }
        self.tell_of_company();
    }

    /// Puts what is to be told of rails behind what happened before.
    pub(super) fn tell_of_company(&mut self) {
        self.events.extend(self.far.company.told.drain(..).map(|event| (event, None)));
    }

    /// A part of an operation has come to its end; maybe it was the last.
    fn part_is_done(&mut self, token: Token, outcome: Result<()>) {
        let Some(operation) = self.far.under_way.get_mut(&token) else { return };
        operation.left -= 1;
        if let Err(error) = outcome {
            operation.failure.get_or_insert(error);
        }
        if operation.left > 0 {
            return;
        }
        let Some(operation) = self.far.under_way.remove(&token) else { return };
        let UnderWay { ticket, failure, notice, .. } = operation;
        match (failure, notice) {
            (Some(error), _) => self.far_is_done(ticket, Err(error)),
            (None, None) => self.far_is_done(ticket, Ok(())),
            (None, notice) => self.notify_by_rail(Ticket { notice, ..ticket }),
        }
    }

    fn far_is_done(&mut self, ticket: Ticket, outcome: Result<()>) {
        if self.peers.get(&ticket.peer).is_some_and(|peer| peer.visit.is_some()) {
            return self.complete(ticket, outcome);
        }
        let Some(peer) = self.peers.get_mut(&ticket.peer) else {
            return self.operations.finish(ticket.token, outcome);
        };
        let outcome = outcome.map_err(|error| error.with(&peer.card.label));
        peer.finish(&ticket, outcome, &mut self.operations);
    }
}

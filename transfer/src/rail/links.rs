//! Hosts, as a rail knows them that visits them: getting to know them, losing them, and trying them
//! again.
//!
//! A link is one peer at one rail, under the same number as long as the agent does not leave it. Each
//! time that the peer is met the two have a new session. What the agent had asked for is asked for
//! again before it is told that the link is up, so that whoever joined by it need not join again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use fabric::{Address, RemoteMemory};

use super::driver::{Driver, LOOK, Party};
use super::flow::Stage;
use super::guest::Moving;
use super::message::Message;
use super::presence::Session;
use super::probe::Probe;
use super::replies::withdrawn;
use super::{Move, PATIENCE, Report, Target};
use crate::agent::{Notice, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::share::random;

pub(super) const MEET: &str = "connect to an agent";
const OPEN: &str = "open a region";
/// Regions that it asks again for at a time: there may be thousands, and what was said and is not heard
/// yet has a limit.
const MOST_ASKING: usize = 128;

/// The pause behind the first try, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// For how long it is tried. After that somebody has to ask for it, by joining.
const LONGEST_TRYING: Duration = Duration::from_secs(3600);

/// Tries to reach a peer again: with pauses that grow, and an end.
#[derive(Debug, Clone, Copy)]
struct Tries {
    next: Instant,
    pause: Duration,
    end: Instant,
}

impl Tries {
    fn new(now: Instant) -> Self {
        Self { next: now + PAUSES.0, pause: PAUSES.0, end: now + LONGEST_TRYING }
    }

    /// Is it to be tried now? Then the next try has its time already.
    fn is_due(&mut self, now: Instant) -> bool {
        if now < self.next || now >= self.end {
            return false;
        }
        self.pause = (2 * self.pause).min(PAUSES.1);
        self.next = now + self.pause;
        true
    }

    /// A try is over, and came to nothing: the pause begins only now.
    fn failed(&mut self, now: Instant) {
        self.next = now + self.pause;
    }
}

/// Staging memory of a host's.
#[derive(Debug)]
pub(super) struct TheirSlots {
    pub(super) memory: RemoteMemory,
    pub(super) length: u64,
    pub(super) free: Vec<u32>,
}

/// A region that the agent wants to reach.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    ticket: u64,
    pub(super) stages: bool,
}

/// What was asked of a host.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) region: u64,
    pub(super) wanted: Wanted,
    /// It was withdrawn before all was answered.
    pub(super) is_withdrawn: bool,
}

#[derive(Debug)]
pub(super) enum State {
    /// Until when it may take to say welcome, and when it is asked again.
    Meeting {
        began: Instant,
        until: Instant,
        asks: Instant,
        /// Whether anything listens at its address, once that was asked.
        probe: Probe,
    },
    /// It did. Regions are asked for that were known by an earlier session.
    Opening,
    Up,
}

/// How a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parting {
    /// The agent wants nothing more of it.
    Left,
    /// It says so itself, and is tried again only when the agent asks.
    Bye,
    /// It is not to be trusted, or nothing more comes of this rail. The same.
    Distrusted,
    /// It does not answer, and is tried again.
    Lost,
}

/// What is known of a host, whether it is there or not.
#[derive(Debug)]
pub(super) struct Known {
    target: Target,
    /// None where it is not tried again.
    tries: Option<Tries>,
    /// Regions that it gave, or that an earlier session knew.
    pub(super) wanted: HashMap<u64, Wanted>,
}

/// A host, as its guest knows it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) known: Known,
    pub(super) session: Session,
    pub(super) state: State,
    /// The agent waits for it.
    is_awaited: bool,
    pub(super) asked: HashMap<u64, Asked>,
    /// Regions that are wanted, and that it is to be asked for yet.
    reopening: VecDeque<u64>,
    /// Regions that it withdrew, and that transfers are still at.
    pub(super) withdrawn: HashSet<u64>,
    pub(super) slots: Option<TheirSlots>,
    /// Parts, and their bytes, that are under way.
    pub(super) flying: usize,
    pub(super) bytes: u64,
    /// One of them found no room in the provider's queue.
    pub(super) is_stuck: bool,
    /// Notices that wait to be sent, and those that were sent and not yet heard of.
    pub(super) unsent: VecDeque<(Token, Notice)>,
    pub(super) unheard: VecDeque<Token>,
    pub(super) sent: u64,
    pub(super) may_send: u64,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, State::Up)
    }

    pub(super) fn is_met(&self) -> bool {
        !matches!(self.state, State::Meeting { .. })
    }

    /// Where it is looked for.
    pub(super) fn address(&self) -> &[u8] {
        &self.known.target.address
    }

    /// The agent waits for its answer.
    pub(super) fn is_awaited(&self) -> bool {
        self.is_awaited && !self.is_met()
    }
}

impl Driver {
    // ------------------------------------------------------------------- meeting

    /// The agent wants to know a peer: for the first time, or again.
    pub(crate) fn meet(&mut self, number: u32, target: Target, patience: Duration) {
        if let Some(link) = self.links.get_mut(&number) {
            // It is back, or is tried just now.
            match link.state {
                State::Up => self.tell(Report::Up { link: number }),
                State::Meeting { ref mut until, .. } => {
                    // A try of the link's own has less time than whoever asks now.
                    *until = (*until).max(ipc::deadline(patience));
                    link.is_awaited = true;
                }
                State::Opening => link.is_awaited = true,
            }
            return;
        }
        if self.is_haunted(number) {
            let detail = "what was begun with it is not over";
            let error = Error::new(MEET, ErrorKind::Closed, detail);
            return self.tell(Report::Down { link: number, error });
        }
        let known = self.away.remove(&number);
        let known = known.unwrap_or_else(|| Known { target, tries: None, wanted: HashMap::new() });
        self.approach(number, known, patience, true);
    }

    /// What was begun with a peer that was lost, and is not over yet, would come back with it: when
    /// transfers are reported that began later. So it is not met before.
    fn is_haunted(&self, number: u32) -> bool {
        self.flying.values().any(|flying| flying.link == number)
    }

    /// Says hello.
    fn approach(&mut self, number: u32, mut known: Known, patience: Duration, is_awaited: bool) {
        let address = Address(known.target.address.clone());
        let entered = random(MEET).and_then(|random| {
            let peer = self.enter_peer(&address);
            let peer = peer.map_err(|error| Error::of_fabric(MEET, error))?;
            Ok((u64::from_le_bytes(std::array::from_fn(|at| random[at])), peer))
        });
        let now = Instant::now();
        let (session, peer) = match entered {
            Ok(entered) => entered,
            Err(error) => {
                known.tries.get_or_insert_with(|| Tries::new(now));
                self.away.insert(number, known);
                if is_awaited {
                    self.tell(Report::Down { link: number, error });
                }
                return;
            }
        };
        let link = Link {
            known,
            session: self.new_session(session, peer),
            state: State::Meeting {
                began: now,
                until: ipc::deadline(patience),
                asks: now,
                probe: Probe::NotAsked,
            },
            is_awaited,
            asked: HashMap::new(),
            reopening: VecDeque::new(),
            withdrawn: HashSet::new(),
            slots: None,
            flying: 0,
            bytes: 0,
            is_stuck: false,
            unsent: VecDeque::new(),
            unheard: VecDeque::new(),
            sent: 0,
            may_send: 0,
        };
        self.links.insert(number, link);
        self.say_hello(number, now);
    }

    fn say_hello(&mut self, number: u32, now: Instant) {
        let pause = self.first_pause();
        let Some(link) = self.links.get_mut(&number) else { return };
        if let State::Meeting { asks, .. } = &mut link.state {
            *asks = now + pause;
        }
        let (to, visit) = (link.known.target.identity, link.known.target.visit);
        // What the provider has yet is not lost.
        if self.is_saying(Party::Link(number)) {
            return;
        }
        let hello = Message::Hello {
            to,
            from: self.home.identity,
            visit,
            label: self.home.label.clone(),
            address: self.address().to_vec(),
        };
        self.say(Party::Link(number), &hello);
    }

    /// It said welcome.
    pub(super) fn is_met(&mut self, number: u32, may_send: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        link.may_send = may_send;
        link.state = State::Opening;
        link.reopening = link.known.wanted.keys().copied().collect();
        // So it knows that it was heard.
        self.say(Party::Link(number), &Message::Pong);
        self.ask_again(number);
    }

    /// Asks for what was known by an earlier session, a few regions at a time.
    fn ask_again(&mut self, number: u32) {
        let Some(link) = self.links.get(&number) else { return };
        for _ in link.asked.len()..MOST_ASKING {
            let Some(link) = self.links.get_mut(&number) else { return };
            // Some may be withdrawn by now.
            let next = std::iter::from_fn(|| link.reopening.pop_front())
                .find_map(|region| Some((region, *link.known.wanted.get(&region)?)));
            let Some((region, wanted)) = next else { break };
            self.ask_for(number, region, wanted);
        }
        self.look_whether_open(number);
    }

    fn ask_for(&mut self, number: u32, region: u64, wanted: Wanted) {
        let request = self.number();
        let Some(link) = self.links.get_mut(&number) else { return };
        link.asked.insert(request, Asked { region, wanted, is_withdrawn: false });
        let open = Message::Open { request, region, ticket: wanted.ticket };
        self.say(Party::Link(number), &open);
    }

    /// All that was known by an earlier session is open again.
    fn look_whether_open(&mut self, number: u32) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let is_open = link.reopening.is_empty() && link.asked.is_empty();
        if !matches!(link.state, State::Opening) || !is_open {
            return;
        }
        link.state = State::Up;
        (link.known.tries, link.is_awaited) = (None, false);
        self.tell(Report::Up { link: number });
    }

    pub(crate) fn open(&mut self, number: u32, (region, ticket): (u64, u64), stages: bool) {
        let Some(link) = self.links.get(&number).filter(|link| link.is_met()) else {
            let outcome = Err(Error::new(OPEN, ErrorKind::Closed, "it is not there"));
            return self.tell(Report::Opened { link: number, region: (region, ticket), outcome });
        };
        // One that needs staging does so for good.
        let stages = stages || link.known.wanted.get(&region).is_some_and(|before| before.stages);
        self.ask_for(number, region, Wanted { ticket, stages });
    }

    /// A region is there by this ticket: another link was told so. This one asks for it, too: now,
    /// or when its peer is back.
    pub(crate) fn want(&mut self, number: u32, (region, ticket): (u64, u64), stages: bool) {
        let is_it = |asked: &Asked| (asked.region, asked.wanted.ticket) == (region, ticket);
        let (asks, known) = match self.links.get_mut(&number) {
            Some(link) => {
                let asks = link.is_met() && !link.asked.values().any(is_it);
                (asks, &mut link.known)
            }
            None => match self.away.get_mut(&number) {
                Some(known) => (false, known),
                None => return,
            },
        };
        let before = known.wanted.get(&region).copied();
        if before.is_some_and(|before| before.ticket == ticket && before.stages >= stages) {
            return;
        }
        let stages = stages || before.is_some_and(|before| before.stages);
        let wanted = Wanted { ticket, stages };
        known.wanted.insert(region, wanted);
        if asks {
            self.ask_for(number, region, wanted);
        }
    }

    /// An answer to a request.
    pub(super) fn is_answered(&mut self, number: u32, request: u64, outcome: Result<()>) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let Some(asked) = link.asked.remove(&request) else { return };
        let Asked { region, wanted, is_withdrawn } = asked;
        let outcome = if is_withdrawn { Err(withdrawn()) } else { outcome };
        match &outcome {
            Ok(()) => drop(link.known.wanted.insert(region, wanted)),
            Err(error) if error.kind() == ErrorKind::Stale => {
                let known = link.known.wanted.get(&region);
                // Who asks with another ticket is refused, and the region stays where it is.
                if known.is_some_and(|known| known.ticket == wanted.ticket) {
                    link.known.wanted.remove(&region);
                    self.tell(Report::Withdrawn { link: number, region });
                }
            }
            Err(_) => {}
        }
        self.tell(Report::Opened { link: number, region: (region, wanted.ticket), outcome });
        self.ask_again(number);
    }

    // ------------------------------------------------------------------- losing

    pub(crate) fn leave(&mut self, number: u32) {
        let session = self.links.get(&number).map(|link| (link.session.id, link.session.peer));
        if let Some((session, peer)) = session {
            self.leaving.insert(session, peer);
            // It is used by one session more, until that was said.
            *self.peers.entry(peer).or_default() += 1;
        }
        let left = Error::new("leave a peer", ErrorKind::Closed, "it was left");
        self.part(number, Parting::Left, left);
        self.away.remove(&number);
        if let Some((session, _)) = session {
            self.take_leave(session);
        }
    }

    /// Says goodbye to one that was left, once nothing of the session is under way: it takes its
    /// memory back soon after. One that hears nothing more takes the session for lost, and its memory
    /// back much later.
    pub(super) fn take_leave(&mut self, session: u64) {
        if self.flying.values().any(|flying| flying.session == session) {
            return;
        }
        if let Some(peer) = self.leaving.remove(&session) {
            self.say_to(Party::Nobody, peer, Message::Bye.encode(session, 0, 0));
            self.leave_peer(peer);
        }
    }

    /// A session with a host ends.
    pub(super) fn part(&mut self, number: u32, parting: Parting, error: Error) {
        let Some(mut link) = self.links.remove(&number) else { return };
        let why = error.reason();
        let closed = |operation| Error::new(operation, ErrorKind::Closed, why.as_str());
        if parting != Parting::Left {
            // A try that came to nothing is nothing new.
            if link.is_up() || link.is_awaited {
                self.tell(Report::Down { link: number, error });
            }
            let now = Instant::now();
            match parting {
                Parting::Lost => {
                    link.known.tries.get_or_insert_with(|| Tries::new(now)).failed(now);
                }
                _ => link.known.tries = None,
            }
            self.away.insert(number, link.known);
        }
        for (_, Asked { region, wanted, .. }) in link.asked {
            let outcome = Err(closed(OPEN));
            self.tell(Report::Opened { link: number, region: (region, wanted.ticket), outcome });
        }
        for token in link.unheard {
            let detail = format!("{why}; it is not known whether it heard");
            let outcome = Err(Error::new("tell a peer", ErrorKind::Closed, detail));
            self.tell(Report::Done { token, outcome });
        }
        for (token, notice) in link.unsent {
            if parting == Parting::Left {
                let outcome = Err(closed("tell a peer"));
                self.tell(Report::Done { token, outcome });
            } else {
                let told = Move { link: number, token, notice: Some(notice), bytes: None };
                self.tell(Report::Stranded { told: Box::new(told), why: why.clone() });
            }
        }
        self.strand_moves(number, parting, &why);
        self.set_slots_aside(number);
        self.end_moves();
        self.forget_waiting(Party::Link(number));
        self.leave_peer(link.session.peer);
    }

    /// What was posted, or is copied by a device, may still touch the memory of the transfer and of
    /// its slot: it is over when that is. What waited for the peer, or was not posted, is. All that
    /// was not moved then may go another way.
    fn strand_moves(&mut self, number: u32, parting: Parting, why: &str) {
        let until = Instant::now() + PATIENCE;
        let closed = || Error::new("transfer", ErrorKind::Closed, why);
        for moving in self.moves.values_mut().filter(|moving| moving.link == number) {
            moving.flow.give_up();
            moving.ends_by.get_or_insert(until);
            if parting == Parting::Left {
                moving.failure.get_or_insert_with(closed);
            } else {
                moving.stranded.get_or_insert_with(|| why.to_owned());
            }
        }
        let unposted: HashSet<_> = self.unposted.iter().copied().collect();
        let resting: HashSet<_> = self.resting.iter().map(|(_, chunk)| *chunk).collect();
        let over = self.flying.iter().filter(|(_, flying)| flying.link == number);
        let over: Vec<_> = over
            .filter(|(key, flying)| {
                matches!(flying.stage, Stage::Ask | Stage::Deliver)
                    || unposted.contains(key)
                    || resting.contains(key)
            })
            .map(|(key, flying)| (*key, flying.stage))
            .collect();
        for (key, stage) in over {
            self.unposted.retain(|other| *other != key);
            self.resting.retain(|(_, other)| *other != key);
            match stage {
                // It may copy from its slot yet, when nobody here reckons with it any more.
                Stage::Deliver => {
                    let detail = format!("{why}; it is not known whether it took what was sent");
                    self.fail_part(key, Error::new("put", ErrorKind::Closed, detail));
                }
                _ => self.give_part_back(key),
            }
        }
    }

    // ------------------------------------------------------------------- looking after them

    pub(super) fn look_after_links(&mut self, now: Instant) {
        let (mut late, mut hello) = (vec![], vec![]);
        for (number, link) in &self.links {
            match link.state {
                State::Meeting { until, .. } if now >= until => late.push(*number),
                State::Meeting { asks, .. } if now >= asks => hello.push(*number),
                _ => {}
            }
        }
        for number in late {
            let detail = "it did not answer in time";
            self.part(number, Parting::Lost, Error::new(MEET, ErrorKind::DeadlineExceeded, detail));
        }
        for number in hello {
            self.say_hello(number, now);
        }
        self.look_for_refusals(now);
        self.end_late_moves(now);
        self.try_again(now);
    }

    /// Transfers with a peer that is gone, what was posted for which does not come back.
    fn end_late_moves(&mut self, now: Instant) {
        let late = |moving: &Moving| moving.ends_by.is_some_and(|end| now >= end);
        let late: Vec<_> =
            self.moves.iter().filter(|(_, moving)| late(moving)).map(|(key, _)| *key).collect();
        for key in late {
            self.pending.remove(&key);
            let Some(moving) = self.moves.remove(&key) else { continue };
            let detail = "the peer is gone, and what was under way may still touch the memory";
            let outcome = Err(Error::new("transfer", ErrorKind::Closed, detail));
            self.tell(Report::Done { token: moving.token, outcome });
        }
    }

    /// Tries those that are away and have their time.
    fn try_again(&mut self, now: Instant) {
        let mut due = Vec::new();
        for (number, away) in &mut self.away {
            if self.flying.values().any(|flying| flying.link == *number) {
                continue;
            }
            if away.tries.as_mut().is_some_and(|tries| tries.is_due(now)) {
                due.push(*number);
            }
        }
        let patience = self.lost_after.max(2 * LOOK);
        for number in due {
            if let Some(away) = self.away.remove(&number) {
                self.approach(number, away, patience, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_there_is_an_end() {
        let start = Instant::now();
        let mut tries = Tries::new(start);
        let at = |ms: u64| start + Duration::from_millis(ms);
        let times: Vec<_> = (0..4_000_000).step_by(50).filter(|ms| tries.is_due(at(*ms))).collect();
        assert_eq!(times[..7], [100, 300, 700, 1500, 3100, 6300, 11_300]);
        assert!(times.windows(2).all(|two| two[1] - two[0] <= 5000));
        assert_eq!(times.last().map(|ms| ms / 10_000), Some(359), "an hour");
    }

    #[test]
    fn the_pause_begins_when_a_try_has_failed() {
        let start = Instant::now();
        let mut tries = Tries::new(start);
        assert!(tries.is_due(start + PAUSES.0));
        let late = start + Duration::from_secs(10);
        tries.failed(late);
        assert!(!tries.is_due(late + PAUSES.0) && tries.is_due(late + 2 * PAUSES.0));
    }
}

//! The thread of a rail: it owns the endpoint, posts, polls, and passes on what it hears.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use fabric::{
    Access, AddressVector, Caps, CompletionKind, CompletionQueue, Domain, Endpoint, HostMemory,
    MemoryRegion, Outcome, Peer, QueueOptions, Waiting,
};

use super::aside::Aside;
use super::guest::{Flying, Moving};
use super::hearing::Hearing;
use super::host::{Errand, Guest, Retiring};
use super::links::{Known, Link, MEET, Parting};
use super::message::{For, Frame, LONGEST, Message};
use super::post::{Posted, Unsent};
use super::presence::{Presence, QUESTIONS, Session};
use super::staging::{DeviceCopies, Slots};
use super::{Command, PATIENCE, Report, START, Settings, Shared};
use crate::agent::Home;
use crate::error::{Error, ErrorKind, Result};
use crate::host::HostBuffer;
use crate::lock;

/// Messages that can be on their way to us before we look.
const RECEIVES: usize = 64;
const SENDS: usize = 64;
/// Failures of the queue itself, without a success between them, after which it is of no use.
const MOST_FAILURES: u32 = 1000;
/// How often it is looked whether peers are there.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// The longest rest while a device copies, or something found no room.
const SHORT: Duration = Duration::from_micros(50);
/// Going to sleep and being woken costs tens of microseconds: while something is under way here,
/// that is not done before it has rested for so long.
const EAGER: Duration = Duration::from_micros(200);
/// And where nothing is, but somebody was heard of just now.
const WAKEFUL: Duration = Duration::from_micros(50);
/// The longest that it may take until a peer is lost: with more, times would lie where no clock gets.
const LONGEST_SILENCE: Duration = Duration::from_secs(365 * 24 * 3600);
/// Commands, and outcomes, between two looks at everything else.
const BATCH: usize = 64;

/// Who a message is for, or is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Party {
    Link(u32),
    Guest(u64),
    /// One that was refused.
    Nobody,
}

pub(crate) struct Driver {
    // The endpoint goes first: it gives back what is posted.
    pub(super) endpoint: Endpoint,
    pub(super) queue: CompletionQueue,
    pub(super) addresses: AddressVector,
    pub(super) domain: Domain,
    address: Vec<u8>,
    pub(super) home: Arc<Home>,
    pub(super) shared: Arc<Shared>,
    pub(super) inbox: MemoryRegion,
    pub(super) outbox: MemoryRegion,
    pub(super) posted: Vec<Option<Posted>>,
    pub(super) free_posts: Vec<usize>,
    pub(super) free_sends: Vec<usize>,
    pub(super) waiting: VecDeque<Unsent>,
    /// Sessions that each peer's address is used by. It is removed when there is none, and nothing
    /// is under way to it: providers look at it until then.
    pub(super) peers: HashMap<Peer, usize>,
    told: Receiver<Command>,
    failures: u32,
    #[cfg(test)]
    is_broken: bool,
    next_look: Instant,
    pub(super) next_rouse: Instant,
    /// A guest has asked for it.
    pub(super) awake_until: Instant,
    pub(super) lost_after: Duration,
    /// Where registrations go that are not needed any more.
    pub(super) aside: Aside,
    pub(super) next_number: u64,
    // As a guest.
    pub(super) links: HashMap<u32, Link>,
    /// Peers that are not there, and are tried again.
    pub(super) away: HashMap<u32, Known>,
    /// Those that were left, by session: they are told so when nothing is under way any more.
    pub(super) leaving: HashMap<u64, Peer>,
    pub(super) moves: BTreeMap<u64, Moving>,
    pub(super) flying: HashMap<u64, Flying>,
    /// Of those, what found no room in the provider's queue.
    pub(super) unposted: VecDeque<u64>,
    /// What was posted and came to nothing since the connection broke: when it is posted again.
    pub(super) resting: Vec<(Instant, u64)>,
    /// Of those, what has parts that have not begun.
    pub(super) pending: BTreeSet<u64>,
    pub(super) slots: Option<Arc<Slots>>,
    pub(super) copies: DeviceCopies,
    // As a host.
    pub(super) guests: HashMap<u64, Guest>,
    pub(super) errands: HashMap<u64, Errand>,
    pub(super) retiring: HashMap<u64, Retiring>,
    /// Slots of guests that are gone, which those may still write to, and until when they are kept.
    pub(super) left_behind: VecDeque<(Instant, (MemoryRegion, HostBuffer))>,
    /// Regions that guests had opened which are gone, the same; with what is kept, once withdrawn.
    pub(super) haunted: HashMap<u64, (Instant, Option<Retiring>)>,
}

impl Driver {
    pub(super) fn new(
        domain: &Domain,
        shared: Arc<Shared>,
        home: Arc<Home>,
        settings: Settings,
        told: Receiver<Command>,
    ) -> Result<Self> {
        let of_fabric = |error| Error::of_fabric(START, error);
        let facts = domain.capabilities();
        if !facts.caps.contains(Caps::MESSAGE) {
            let detail = "rails need messages without tags (FI_MSG), which this provider does not \
                have, or loses";
            return Err(Error::new(START, ErrorKind::Failed, detail).with(&facts.provider));
        }
        let addresses = AddressVector::open(domain).map_err(of_fabric)?;
        let options = QueueOptions { size: 1024, waiting: Waiting::Block };
        let mut queue = CompletionQueue::open_with(domain, options).map_err(of_fabric)?;
        let endpoint = Endpoint::builder(domain).addresses(&addresses).queue(&mut queue).open();
        let endpoint = endpoint.map_err(of_fabric)?;
        let buffers = |count: usize, access| {
            let memory = HostMemory::zeroed(count * LONGEST)?;
            let region = domain.register(memory, access)?;
            region.enable_for(&endpoint)?;
            Ok(region)
        };
        let inbox = buffers(RECEIVES, Access::RECEIVE).map_err(of_fabric)?;
        let outbox = buffers(SENDS, Access::SEND).map_err(of_fabric)?;
        let address = endpoint.address().map_err(of_fabric)?.0;
        let mut driver = Self {
            endpoint,
            queue,
            addresses,
            domain: domain.clone(),
            address,
            home,
            shared: Arc::clone(&shared),
            inbox,
            outbox,
            posted: Vec::new(),
            free_posts: Vec::new(),
            free_sends: (0..SENDS).collect(),
            waiting: VecDeque::new(),
            peers: HashMap::new(),
            told,
            failures: 0,
            #[cfg(test)]
            is_broken: false,
            next_look: Instant::now(),
            next_rouse: Instant::now(),
            awake_until: Instant::now(),
            lost_after: settings.lost_after.min(LONGEST_SILENCE),
            aside: Aside::start(&shared)?,
            next_number: 1,
            links: HashMap::new(),
            away: HashMap::new(),
            leaving: HashMap::new(),
            moves: BTreeMap::new(),
            flying: HashMap::new(),
            unposted: VecDeque::new(),
            resting: Vec::new(),
            pending: BTreeSet::new(),
            slots: None,
            copies: DeviceCopies::default(),
            guests: HashMap::new(),
            errands: HashMap::new(),
            retiring: HashMap::new(),
            left_behind: VecDeque::new(),
            haunted: HashMap::new(),
        };
        for buffer in 0..RECEIVES {
            driver.receive(buffer).map_err(of_fabric)?;
        }
        Ok(driver)
    }

    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    pub(super) fn tell(&self, report: Report) {
        self.shared.report(report);
        self.home.doorbell.ring();
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    // ------------------------------------------------------------------- hearing

    fn heard(&mut self, outcome: Outcome) {
        let (operation, token, length, failure) = match outcome {
            Ok(done) => (done.operation, done.token, done.length, None),
            Err(failure) => {
                (failure.operation, failure.token, 0, Some((failure.kind, failure.error)))
            }
        };
        if failure.is_none() && self.failures < MOST_FAILURES {
            self.failures = 0;
        }
        if operation.is_none() {
            if let Some((_, error)) = failure {
                tracing::debug!(%error, "a rail's queue");
                self.failures += 1;
            }
            return;
        }
        match (self.posted(token), failure) {
            (Some(Posted::Receive(buffer)), failure) => {
                if failure.is_none() {
                    self.read(buffer, length);
                }
                self.receive_again(buffer);
            }
            (Some(Posted::Send(buffer, to, _)), failure) => {
                self.free_sends.push(buffer);
                if let Some((_, error)) = failure {
                    self.was_not_sent(to, &error.to_string());
                }
            }
            (Some(Posted::Data(chunk, _)), None) => self.stage_is_over(chunk, Ok(())),
            (Some(Posted::Data(chunk, _)), Some((kind, error))) => {
                let is_read = matches!(kind, Some(CompletionKind::Read));
                let operation = if is_read { "get" } else { "put" };
                self.stage_is_over(chunk, Err(Error::of_fabric(operation, error)));
            }
            (None, _) => {}
        }
    }

    fn receive_again(&mut self, buffer: usize) {
        if let Err(error) = self.receive(buffer) {
            // One place less to hear with; the others are posted again all the same.
            tracing::warn!(%error, "a rail's receive cannot be posted again");
        }
    }

    fn read(&mut self, buffer: usize, length: usize) {
        let mut bytes = [0; LONGEST];
        let bytes = &mut bytes[..length.min(LONGEST)];
        if self.inbox.read(buffer * LONGEST, bytes).is_err() {
            return;
        }
        match Message::decode(bytes) {
            Ok(frame) => self.take(frame),
            Err(error) => tracing::debug!(%error, "a message that is none was left aside"),
        }
    }

    /// Something came. It is looked at when it has its turn.
    pub(super) fn take(&mut self, frame: Frame) {
        let Frame { session, number, heard, message } = frame;
        let party = self.party(session, message.is_for());
        let (now, lost_after) = (Instant::now(), self.lost_after);
        let Some(Session { presence, hearing, .. }) = self.session(party) else {
            return self.hear(party, session, message);
        };
        if presence.is_lost(now, lost_after) {
            // What it had begun before is not gone on with when it is not reckoned with any more.
            return self.lose(party, "it was silent for too long");
        }
        presence.is_heard();
        let heard = hearing.is_heard(heard).and_then(|()| match number {
            0 => Ok(Some(message)),
            number => hearing.hear(number, message, now),
        });
        let mut next = match heard {
            Ok(next) => next,
            Err(lie) => {
                tracing::debug!(?lie, session, "what it says cannot be");
                return self.end(party, Parting::Distrusted, "what it says cannot be");
            }
        };
        while let Some(message) = next {
            self.hear(party, session, message);
            next = self.session(party).and_then(|session| session.hearing.take());
        }
        if self.session(party).is_some_and(|session| session.hearing.owes(now)) {
            self.say(party, &Message::Pong);
        }
        if let Party::Guest(session) = party {
            self.go_on_withdrawing(session);
        }
    }

    fn hear(&mut self, party: Party, session: u64, message: Message) {
        if matches!(party, Party::Guest(_)) && !matches!(message, Message::Hello { .. }) {
            self.guest_is_there(session);
        }
        match (message.is_for(), message) {
            (For::Host, message) => self.host_hears(session, message),
            (For::Guest, message) => self.guest_hears(session, message),
            (For::Either, Message::Ping) => self.say(party, &Message::Pong),
            (For::Either, Message::Bye) => {
                // A host leaves nobody as long as its agent and this rail of it are there.
                let why = match party {
                    Party::Link(_) => "the agent has ended, or its fabric",
                    Party::Guest(_) | Party::Nobody => "it left",
                };
                self.end(party, Parting::Bye, why);
            }
            (For::Either, _) => {}
        }
    }

    /// Whom a session is with.
    fn party(&mut self, session: u64, is_for: For) -> Party {
        if is_for != For::Guest && self.guests.contains_key(&session) {
            return Party::Guest(session);
        }
        let link = self.links.iter().find(|(_, link)| link.session.id == session);
        match link {
            Some((number, _)) if is_for != For::Host => Party::Link(*number),
            _ => Party::Nobody,
        }
    }

    pub(super) fn new_session(&self, id: u64, peer: Peer) -> Session {
        let hearing = Hearing::new(self.first_pause(), self.lost_after / 2);
        Session { id, peer, presence: Presence::new(), hearing }
    }

    pub(super) fn session(&mut self, party: Party) -> Option<&mut Session> {
        match party {
            Party::Link(link) => self.links.get_mut(&link).map(|link| &mut link.session),
            Party::Guest(session) => self.guests.get_mut(&session).map(|guest| &mut guest.session),
            Party::Nobody => None,
        }
    }

    /// All that there are sessions with.
    pub(super) fn parties(&self) -> Vec<Party> {
        let links = self.links.keys().map(|link| Party::Link(*link));
        links.chain(self.guests.keys().map(|session| Party::Guest(*session))).collect()
    }

    /// Before something is said again.
    pub(super) fn first_pause(&self) -> Duration {
        (self.lost_after / QUESTIONS).max(LOOK)
    }

    /// The other side is not there any more, or does not do as it should.
    pub(super) fn lose(&mut self, party: Party, why: &str) {
        self.end(party, Parting::Lost, why);
    }

    pub(super) fn end(&mut self, party: Party, parting: Parting, why: &str) {
        match party {
            Party::Link(link) => self.part(link, parting, Error::new(MEET, ErrorKind::Closed, why)),
            Party::Guest(session) => self.end_guest(session, parting, why),
            Party::Nobody => {}
        }
    }

    // ------------------------------------------------------------------- the thread

    fn commands(&mut self) -> bool {
        for done in 0..BATCH {
            let Ok(command) = self.told.try_recv() else { return done > 0 };
            command(self);
        }
        true
    }

    /// Ends as if the provider had failed.
    #[cfg(test)]
    pub(crate) fn fail(&mut self) {
        self.failures = MOST_FAILURES;
    }

    /// Ends by a panic, and by another one when it is cleared up behind that.
    #[cfg(test)]
    pub(crate) fn go_to_pieces(&mut self) {
        self.is_broken = true;
        panic!("asked for by a test");
    }

    fn look_after(&mut self) {
        let now = Instant::now();
        if now < self.next_look {
            return;
        }
        self.next_look = now + LOOK;
        self.look_after_links(now);
        self.look_after_guests(now);
        self.look_after_sessions(now);
        self.wake_resting(now);
        self.sweep_peers(now);
    }

    /// All that the thread does.
    pub(super) fn serve(mut self) {
        // However it ends, also by a panic: who waits for it is to know.
        let _end = End { shared: Arc::clone(&self.shared), home: Arc::clone(&self.home) };
        let ran = catch_unwind(AssertUnwindSafe(|| self.run()));
        if ran.is_err() || !self.shared.is_over.load(Ordering::Acquire) {
            // What is left of a panic may lead to the next one. What is not told then the agent sees
            // by itself: it knows what it gave to whom.
            let _ = catch_unwind(AssertUnwindSafe(|| self.give_all_up()));
        }
        lock(&self.shared.own).end();
        // All devices together, before what they copy to and from is let go of.
        let are_done = self.copies.close(Instant::now() + PATIENCE);
        self.shared.may_copy.store(!are_done, Ordering::Release);
        // What the fabric has yet ends with the endpoint.
        drop(self);
    }

    /// Nothing more comes of this rail: others may go on with what can be gone on with.
    fn give_all_up(&mut self) {
        #[cfg(test)]
        assert!(!self.is_broken, "asked for by a test");
        let why = "the rail's thread has ended";
        for party in self.parties() {
            self.end(party, Parting::Distrusted, why);
        }
        // What was told and not looked at yet is not begun, now that nobody is there: it is given back.
        while self.commands() {}
        for (_, moving) in std::mem::take(&mut self.moves) {
            let outcome = Err(Error::new("transfer", ErrorKind::Closed, why));
            self.tell(Report::Done { token: moving.token, outcome });
        }
    }

    /// Looks at everything once. True if anything happened.
    pub(super) fn turn(&mut self) -> bool {
        let mut has_moved = self.commands();
        self.flush();
        for _ in 0..BATCH {
            let Some(outcome) = self.queue.poll() else { break };
            self.heard(outcome);
            has_moved = true;
        }
        while let Some((number, outcome)) = self.copies.next_done() {
            has_moved = true;
            if self.errands.contains_key(&number) {
                self.errand_is_over(number, outcome);
            } else {
                self.stage_is_over(number, outcome);
            }
        }
        has_moved |= self.advance();
        self.rouse_hosts();
        self.look_after();
        has_moved
    }

    /// Until everything is looked at again. A message that finds no room is tried again soon, and
    /// less often the longer that lasts: a provider that cannot connect never has room.
    fn longest_rest(&self) -> Duration {
        if self.copies.are_under_way() || !self.unposted.is_empty() {
            return SHORT;
        }
        let latest = self.waiting.back().map(|unsent| unsent.since.elapsed() / 8);
        latest.map_or(LOOK, |rest| rest.clamp(SHORT, LOOK))
    }

    fn run(&mut self) {
        let mut moved = Instant::now();
        while !self.shared.is_over.load(Ordering::Acquire) && self.failures < MOST_FAILURES {
            if self.turn() {
                moved = Instant::now();
                continue;
            }
            let is_busy = !(self.moves.is_empty() && self.errands.is_empty());
            if Instant::now() < self.awake_until
                || moved.elapsed() < if is_busy { EAGER } else { WAKEFUL }
            {
                self.queue.pause();
                // Who waits for what this does may have no other core.
                std::thread::yield_now();
                continue;
            }
            if let Some(outcome) = self.queue.wait_or_wake(self.longest_rest()) {
                self.heard(outcome);
                moved = Instant::now();
            }
        }
        self.say_goodbye();
    }

    /// Lets what was posted come to its end, and tells everybody. Some providers crash when they are
    /// closed in the middle of a write.
    fn say_goodbye(&mut self) {
        const LONGEST_DRAIN: Duration = Duration::from_secs(2);
        const LONGEST_GOODBYE: Duration = Duration::from_millis(200);
        self.pending.clear();
        self.unposted.clear();
        let end = Instant::now() + LONGEST_DRAIN;
        let is_data = |posted: &Posted| matches!(posted, Posted::Data(..));
        while (self.posted.iter().flatten().any(is_data) || self.copies.are_under_way())
            && Instant::now() < end
        {
            if let Some(outcome) = self.queue.wait_or_wake(SHORT) {
                self.heard(outcome);
            }
            while self.copies.next_done().is_some() {}
        }
        // One whose memory is written to yet is told nothing, and takes us for lost.
        let posted = self.posted.iter().flatten().filter_map(|posted| match posted {
            Posted::Data(chunk, _) => self.flying.get(chunk).map(|flying| flying.session),
            Posted::Receive(_) | Posted::Send(..) => None,
        });
        let busy: HashSet<_> = posted.collect();
        for party in self.parties() {
            if self.session(party).is_some_and(|session| !busy.contains(&session.id)) {
                self.say(party, &Message::Bye);
            }
        }
        let end = Instant::now() + LONGEST_GOODBYE;
        while (self.free_sends.len() < SENDS || !self.waiting.is_empty()) && Instant::now() < end {
            self.flush();
            if let Some(outcome) = self.queue.wait_or_wake(SHORT) {
                self.heard(outcome);
            }
        }
    }
}

/// Says that the thread ends.
struct End {
    shared: Arc<Shared>,
    home: Arc<Home>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
        self.home.doorbell.ring();
    }
}

//! The thread that serves a node: lets processes in, tells them of each other, gives them
//! topics and pools, and sees to what the dead leave.
//!
//! What it sends waits in line, and what it awaits is looked for at the next turn. Locks in
//! shared memory are the one thing that it waits for, and not for long: what one of them is
//! in the way of is done at another turn.

/// Logs what came and went: as information, where the process is there to serve the node.
macro_rules! log_change {
    ($service:expr, $($what:tt)+) => {
        if $service.options.stands.load(std::sync::atomic::Ordering::Acquire) {
            tracing::info!($($what)+);
        } else {
            tracing::debug!($($what)+);
        }
    };
}

mod carrying;
mod eviction;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzzing;
#[cfg(test)]
mod fuzzing_tests;
mod gathering;
mod growth;
mod guests;
mod members;
mod refusals;
mod reports;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipc::{
    Caller, Channel, ChannelError, ChannelListener, DescriptorLimit, Life, LimitReached,
    MappedWords, Participant, Roster,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::carrying::Carrying;
use self::eviction::Watches;
use self::gathering::Gathering;
use self::refusals::Refusals;
use super::ServiceOptions;
use super::connection::{Connection, relieve};
use super::election::Membership;
use super::protocol::{Notice, Request};
use super::registry::Registry;
use crate::error::{Error, ErrorKind, Result};
use crate::hall::Hall;
use crate::pool::PoolId;
use crate::wake::WakeFd;

/// Connections that have not said yet who they are.
const MOST_STRANGERS: usize = 64;
/// How long one has to say who it is.
const INTRODUCING: Duration = Duration::from_secs(5);
/// How often it looks for what nobody tells it: who is in whose way, what could not be
/// buried yet.
const LOOK: Duration = Duration::from_millis(100);
/// How long it waits for a lock. None is held for so long but by one that is stopped, or starved.
const HELD_UP: Duration = Duration::from_millis(20);
/// How often it looks who is dead of whom it was not told.
const ROLL_CALL: Duration = Duration::from_secs(5);
/// Places in the roster that are kept for services.
const KEPT_PLACES: usize = 8;
/// The longest sleep.
const LONGEST: Duration = Duration::from_secs(5);
/// Messages of one process that are heard before the next has its turn.
const IN_A_ROW: usize = 64;

const SERVING: &str = "serve a node";

/// One who came, and has not said who it is.
#[derive(Debug)]
struct Stranger {
    connection: Connection,
    /// When it came, or took something last.
    since: Instant,
}

/// A process that takes part, and its connection.
#[derive(Debug)]
struct Guest {
    label: String,
    process: u32,
    connection: Connection,
    /// The topics that it uses, and how often each was given to it.
    topics: BTreeMap<u32, u64>,
    /// Pools that it knows, and how many pieces of each were sent to it, or came from it.
    pools: HashMap<PoolId, usize>,
    /// What it asked for while the others were still handing over.
    held: Vec<Request>,
    /// It said that it leaves.
    leaves: bool,
}

impl Guest {
    fn new(label: String, connection: Connection) -> Self {
        let credentials = connection.channel().credentials().ok();
        Self {
            label,
            process: credentials.and_then(|who| who.process).unwrap_or(0),
            connection,
            topics: BTreeMap::new(),
            pools: HashMap::new(),
            held: Vec::new(),
            leaves: false,
        }
    }
}

/// The node's hall, and who the service is in it.
#[derive(Debug)]
struct Seat {
    hall: Hall,
    me: Participant,
    roster: Arc<Roster<MappedWords>>,
    number: u32,
    /// Of this process.
    life: Life,
}

impl Seat {
    /// What a member is given: the hall, and this service's life.
    fn keys(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.hall.as_fd().try_clone_to_owned()?, self.life.as_fd().try_clone_to_owned()?])
    }

    /// All others wait while the service does: what a lock is in the way of it does later.
    fn caller(&self) -> Caller<'_> {
        Caller { patience: HELD_UP, ..Caller::new(self.me, &*self.roster) }
    }
}

pub(super) struct Reception {
    options: ServiceOptions,
    listener: ChannelListener,
    bell: Arc<WakeFd>,
    /// A descriptor for one that comes when there are no others.
    spare: Option<OwnedFd>,
    is_over: Arc<AtomicBool>,
    /// It is over since it could not go on.
    has_failed: bool,
    /// None until it is known which hall it is.
    seat: Option<Seat>,
    strangers: Vec<Stranger>,
    guests: BTreeMap<Participant, Guest>,
    /// The lives of all members whose end is waited for.
    lives: HashMap<Participant, Life>,
    /// Those that are dead or have left, and of whom something may be left.
    unburied: BTreeSet<Participant>,
    /// Members whose connection ended, though they live as far as is known: process and label.
    disconnected: HashMap<Participant, (u32, String)>,
    /// Somebody came late, and brought what those may have left something in who were seen to
    /// before.
    has_news: bool,
    roll_call: Instant,
    registry: Registry,
    gathering: Option<Gathering>,
    watches: Watches,
    refusals: Refusals,
    carrying: Carrying,
    /// Topics, or who uses them, have changed: these, for one.
    tell_carrier: bool,
    changed: BTreeSet<u32>,
    next_ticket: u64,
}

impl Reception {
    pub(super) fn new(
        options: ServiceOptions,
        listener: ChannelListener,
        bell: Arc<WakeFd>,
        is_over: Arc<AtomicBool>,
    ) -> Result<Self> {
        let registry = Registry::new(options.budgets);
        let spare = bell.as_fd().try_clone_to_owned();
        let mut reception = Self {
            options,
            listener,
            bell,
            spare: Some(spare.map_err(|error| Error::of(SERVING, error))?),
            is_over,
            has_failed: false,
            seat: None,
            strangers: Vec::new(),
            guests: BTreeMap::new(),
            lives: HashMap::new(),
            unburied: BTreeSet::new(),
            disconnected: HashMap::new(),
            has_news: false,
            roll_call: Instant::now(),
            registry,
            gathering: None,
            watches: Watches::default(),
            refusals: Refusals::new(),
            carrying: Carrying::new(),
            tell_carrier: false,
            changed: BTreeSet::new(),
            next_ticket: 1,
        };
        if !reception.found_if_nobody_is_there()? {
            let node = Membership::node_of(SERVING, &reception.options.directory)?;
            reception.gathering = Some(Gathering::begin(Instant::now(), node));
        }
        Ok(reception)
    }

    /// Serves until it is over. True if it could not go on.
    pub(super) fn serve(mut self) -> bool {
        while !self.is_over.load(Ordering::Acquire) {
            self.turn();
        }
        let has_failed = self.has_failed;
        self.close();
        has_failed
    }

    /// Waits until something happens, and sees to it.
    fn turn(&mut self) {
        let Some(ready) = self.wait() else {
            // Out of memory, say: not a reason to spin.
            std::thread::sleep(LOOK);
            return;
        };
        if ready.bell {
            self.bell.silence();
        }
        for who in ready.dead {
            self.has_died(who);
        }
        let strangers = std::mem::take(&mut self.strangers);
        for (stranger, is_ready) in strangers.into_iter().zip(ready.strangers) {
            if is_ready {
                self.introduce(stranger);
            } else if stranger.since.elapsed() < INTRODUCING {
                self.strangers.push(stranger);
            }
        }
        for who in ready.guests {
            self.attend(who);
        }
        if ready.listener {
            self.let_in();
        }
        self.look();
    }

    /// What nobody tells it of.
    fn look(&mut self) {
        let guests = self.guests.values_mut().map(|guest| &mut guest.connection);
        for connection in guests.filter(|connection| connection.is_held_up()) {
            connection.flush();
        }
        let guests = self.guests.values_mut().map(|guest| &mut guest.connection);
        relieve(Instant::now(), guests);
        let broken: Vec<_> = self
            .guests
            .iter()
            .filter(|(_, guest)| guest.connection.is_broken())
            .map(|(who, _)| *who)
            .collect();
        for who in broken {
            self.loses(who);
        }
        self.gather();
        if self.gathering.is_some() {
            // Other nodes are to see that this one is there, though it cannot say yet what it
            // wants: so they keep it.
            self.start_carrying();
        } else {
            self.call_the_roll();
            self.look_for_the_dead();
            self.bury_all();
            self.go_on_growing();
            self.carry_on();
            self.evict();
        }
    }

    fn longest_wait(&self) -> Duration {
        let looks = self.gathering.is_some()
            || !self.unburied.is_empty()
            || self.has_news
            || self.grows()
            || !self.strangers.is_empty()
            || self
                .guests
                .values()
                .map(|guest| &guest.connection)
                .any(|it| it.is_held_up() || it.keeps_files())
            || self.registry.unused().next().is_some();
        let longest = if looks { LOOK } else { LONGEST };
        let longest = self.watches.longest_wait().map_or(longest, |wait| longest.min(wait));
        self.carrying.longest_wait().map_or(longest, |carrier| longest.min(carrier))
    }

    fn wait(&self) -> Option<Ready> {
        fn entry(descriptor: BorrowedFd<'_>) -> PollFd<'_> {
            PollFd::new(descriptor, PollFlags::POLLIN)
        }
        let mut entries = vec![entry(self.bell.as_fd()), entry(self.listener.as_fd())];
        let strangers = self.strangers.iter().map(|stranger| &stranger.connection);
        let guests = self.guests.values().map(|guest| &guest.connection);
        for connection in strangers.chain(guests) {
            let mut flags = PollFlags::POLLIN;
            flags.set(PollFlags::POLLOUT, connection.has_waiting());
            entries.push(PollFd::new(connection.as_fd(), flags));
        }
        let lives: Vec<_> = self.lives.iter().collect();
        entries.extend(lives.iter().map(|(_, life)| entry(life.as_fd())));
        // What other nodes say is heard when all are back.
        let carrier = self
            .carrying
            .carrier
            .iter()
            .flat_map(|it| it.descriptors())
            .filter(|_| self.gathering.is_none());
        entries.extend(carrier.map(entry));
        let timeout = PollTimeout::try_from(self.longest_wait()).unwrap_or(PollTimeout::ZERO);
        match poll(&mut entries, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return None,
        }
        let mut is_ready = entries.iter().map(|entry| entry.any().unwrap_or(true));
        let (bell, listener) = (is_ready.next()?, is_ready.next()?);
        let strangers = is_ready.by_ref().take(self.strangers.len()).collect();
        let spoke: Vec<_> = is_ready.by_ref().take(self.guests.len()).collect();
        let guests = self.guests.keys().zip(spoke);
        let guests = guests.filter(|(_, spoke)| *spoke).map(|(who, _)| *who).collect();
        let dead = lives.iter().zip(is_ready.by_ref());
        let dead = dead.filter(|(_, is_over)| *is_over).map(|((who, _), _)| **who).collect();
        Some(Ready { bell, listener, strangers, guests, dead })
    }

    fn let_in(&mut self) {
        match self.listener.accept(Duration::ZERO) {
            Ok(channel) => self.receive(channel),
            Err(ChannelError::DeadlineExceeded { .. }) => {}
            Err(ChannelError::System { cause, .. }) => match LimitReached::of(&cause) {
                Some(LimitReached::Descriptors(limit)) => self.refuse_next(limit),
                _ => std::thread::sleep(LOOK),
            },
            Err(_) => std::thread::sleep(LOOK),
        }
    }

    /// Out of descriptors: what comes is told so, by the one that is kept for this.
    fn refuse_next(&mut self, limit: DescriptorLimit) {
        drop(self.spare.take());
        if let Ok(channel) = self.listener.accept(Duration::ZERO) {
            self.refusals.lacks_descriptors(&mut Connection::new(channel), limit);
        }
        self.spare = self.bell.as_fd().try_clone_to_owned().ok();
        // Another thread may have taken it: others may let go of some.
        if self.spare.is_none() {
            std::thread::sleep(LOOK);
        }
    }

    fn receive(&mut self, channel: Channel) {
        let own = ipc::Credentials::of_this_process().user;
        let is_admitted = channel.credentials().is_ok_and(|who| who.user == own || who.user == 0);
        let mut connection = Connection::new(channel);
        if !is_admitted {
            self.refusals.see_off(&mut connection, ErrorKind::Denied, "this user is not admitted");
            return;
        }
        if self.strangers.len() >= MOST_STRANGERS {
            // The oldest had its time.
            let mut oldest = self.strangers.remove(0);
            self.refusals.see_off(
                &mut oldest.connection,
                ErrorKind::TooMany,
                "too many came and said nothing",
            );
        }
        self.strangers.push(Stranger { connection, since: Instant::now() });
    }

    /// Founds the node, if there are no members of another.
    fn found_if_nobody_is_there(&mut self) -> Result<bool> {
        let directory = &self.options.directory;
        if Membership::is_held(SERVING, directory)? {
            return Ok(false);
        }
        let before = Membership::node_of(SERVING, directory)?;
        Membership::name_node(SERVING, directory, Some(self.options.identity))?;
        if Membership::is_held(SERVING, directory)? {
            // One who was let in by the last service has just become a member: it looks whose
            // after it holds the lock, so it has seen one name or the other.
            Membership::name_node(SERVING, directory, before)?;
            return Ok(false);
        }
        self.take_seat(Hall::create(self.options.identity)?)?;
        Ok(true)
    }

    /// Founds the node anew, whoever may still hold what there was.
    fn found(&mut self) -> Result<()> {
        let node = Some(self.options.identity);
        Membership::name_node(SERVING, &self.options.directory, node)?;
        self.take_seat(Hall::create(self.options.identity)?)
    }

    fn take_seat(&mut self, hall: Hall) -> Result<()> {
        let life = || Life::of_this_process().map_err(|error| Error::of(SERVING, error));
        let (own, watched) = (life()?, life()?);
        let roster = Arc::clone(hall.roster());
        let Some(me) = roster.admit(life()?) else {
            let detail = format!("it has {} members already", Participant::PLACES);
            return Err(Error::new(SERVING, ErrorKind::TooMany, detail));
        };
        self.lives.insert(me, watched);
        let number = hall.count_a_service();
        self.seat = Some(Seat { hall, me, roster, number, life: own });
        self.inherit_network();
        Ok(())
    }

    /// Tells a process something, if it is there.
    fn tell(&mut self, who: Participant, notice: &Notice, files: Vec<OwnedFd>) {
        if let Some(guest) = self.guests.get_mut(&who) {
            guest.connection.send(notice, files);
        }
    }

    /// Ends in order: members find another service.
    fn close(mut self) {
        // What carries messages uses names of this service.
        self.carrying.carrier = None;
        // What was not complete is for the next service to complete.
        let gathering = self.gathering.take();
        if self.carrying.is_at_work() {
            // A worker that was given up may still do something in the name of this service,
            // which therefore stays until the process ends.
            tracing::warn!("the next service cleans up after this one when its process has ended");
        } else if let Some(seat) = &self.seat {
            match self.registry.bury(&seat.caller(), seat.me) {
                Ok(()) => drop(seat.roster.strike_off(seat.me)),
                Err(error) => {
                    tracing::debug!(%error, "the next service cleans up after this one");
                    seat.roster.resign(seat.me);
                }
            }
        }
        // The socket goes first, so that nobody comes to a service that has ended.
        drop(self.listener);
        for guest in self.guests.values_mut() {
            guest.connection.end();
        }
        let newcomers = gathering.into_iter().flat_map(|gathering| gathering.newcomers);
        let connections = newcomers.map(guests::Newcomer::into_connection);
        for mut connection in connections.chain(self.strangers.into_iter().map(|it| it.connection))
        {
            connection.end();
        }
    }
}

/// What there is to see to.
struct Ready {
    bell: bool,
    listener: bool,
    strangers: Vec<bool>,
    guests: Vec<Participant>,
    dead: Vec<Participant>,
}

//! The topics and pools of a node, and who uses which.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};

use crate::error::{Error, ErrorKind, Result};
use crate::node::Budgets;
use crate::peers::MOST_INTERESTS;
use crate::pool::{Direction, Kept as PieceKept, MOST_PIECES, Piece, Pool, PoolId};
use crate::settings::{LONGEST_TOPIC, Reserve, SharedPlace, SharedSettings};
use crate::text::counted;
use crate::topic::Topic;

/// Bytes by which a pool grows at least, and as many as it is worth to ask for at once.
const LEAST_PIECE: u64 = 4 << 20;
const MOST_PIECE: u64 = 1 << 30;
/// Blocks of a pool, free ones too. Of books that large only what is used takes memory.
const MOST_BLOCKS: u32 = 1 << 19;
/// How long a pool's new piece waits for all to have it. One who did not take it in this time
/// is stopped, or starved: it gets it later, and what lies there waits for it.
const HANDING_OUT: Duration = Duration::from_secs(2);

/// A topic, and who uses it.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) topic: Arc<Topic>,
    users: BTreeSet<Participant>,
    /// The process that it was made for, unless another service made it.
    creator: Option<String>,
    /// Somebody publishes, or subscribes, on this node.
    pub(super) publishes: bool,
    pub(super) subscribes: bool,
}

impl Kept {
    fn made_by(&self) -> String {
        self.creator.as_ref().map_or_else(String::new, |creator| format!(", made by {creator}"))
    }
}

/// A pool, and whether it is growing.
#[derive(Debug)]
pub(super) struct Keeping {
    pub(super) pool: Arc<Pool>,
    pub(super) growing: Option<Growing>,
}

/// A piece that is not used yet, since not all have mapped it.
#[derive(Debug)]
pub(super) struct Growing {
    pub(super) number: usize,
    /// From those that are named here an acknowledgement of this is awaited.
    pub(super) ticket: u64,
    pub(super) awaits: BTreeSet<Participant>,
    pub(super) since: Instant,
}

impl Growing {
    /// Had those that are awaited their time?
    pub(super) fn has_had_its_time(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= HANDING_OUT
    }
}

#[derive(Debug)]
pub(super) struct Registry {
    pub(super) topics: BTreeMap<u32, Kept>,
    by_name: HashMap<String, u32>,
    /// Topics that nobody uses.
    unused: BTreeSet<u32>,
    pub(super) pools: HashMap<PoolId, Keeping>,
    budgets: Budgets,
    most_topics: usize,
}

/// The pools that a topic draws from.
pub(super) fn pools_of(place: SharedPlace) -> [PoolId; 2] {
    Direction::BOTH.map(|direction| PoolId { place, direction })
}

/// How many messages a pool can keep, whatever free blocks lie between them and in each piece.
fn room(most_blocks: u32) -> u64 {
    (u64::from(most_blocks) / 2).saturating_sub(MOST_PIECES as u64)
}

impl Registry {
    pub(super) fn new(budgets: Budgets) -> Self {
        Self {
            topics: BTreeMap::new(),
            by_name: HashMap::new(),
            unused: BTreeSet::new(),
            pools: HashMap::new(),
            budgets,
            most_topics: MOST_INTERESTS,
        }
    }

    pub(super) fn named(&self, name: &str) -> Option<&Kept> {
        self.by_name.get(name).and_then(|number| self.topics.get(number))
    }

    /// Finds a topic, or makes it, with its pools.
    pub(super) fn open(
        &mut self,
        name: &str,
        settings: Option<SharedSettings>,
        number: impl FnOnce() -> u32,
    ) -> Result<u32> {
        let operation = "open a topic";
        if name.is_empty() || name.len() > LONGEST_TOPIC || name.chars().any(char::is_control) {
            let detail =
                format!("a name has 1 to {LONGEST_TOPIC} bytes and no control characters in it");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        if let Some(kept) = self.named(name) {
            let found = kept.topic.settings();
            return match settings {
                Some(wanted) if found.differs_within(&wanted).next().is_some() => {
                    let differs = found.differs_within(&wanted).collect::<Vec<_>>().join(", ");
                    let detail = format!(
                        "it is {found}{}; asked for was {wanted}: another {differs}. Opened without settings \
                         it is taken as it is; it can be made anew when no process uses it any more",
                        kept.made_by()
                    );
                    Err(Error::new(operation, ErrorKind::SettingsDiffer, detail).on(name))
                }
                _ => Ok(kept.topic.number()),
            };
        }
        let Some(settings) = settings else {
            let detail = "nobody has made it, and no settings were given";
            return Err(Error::new(operation, ErrorKind::Unknown, detail).on(name));
        };
        settings.check(operation)?;
        if self.topics.len() >= self.most_topics {
            let detail = format!(
                "a node has at most {} topics. Close some that are not used",
                self.most_topics
            );
            return Err(Error::new(operation, ErrorKind::TooMany, detail).on(name));
        }
        let wanted = settings.reserves(0).blocks;
        self.afford(operation, &settings, wanted).map_err(|error| error.on(name))?;
        for id in pools_of(settings.place) {
            self.make_pool(id).map_err(|error| error.on(name))?;
        }
        let topic = Topic::create(number(), name, &settings).map_err(|error| error.on(name))?;
        Ok(self.insert(topic))
    }

    fn insert(&mut self, topic: Topic) -> u32 {
        let number = topic.number();
        self.by_name.insert(topic.name().to_owned(), number);
        let kept = Kept {
            topic: Arc::new(topic),
            users: BTreeSet::new(),
            creator: None,
            publishes: false,
            subscribes: false,
        };
        self.topics.insert(number, kept);
        self.unused.insert(number);
        number
    }

    /// Takes note of the process, or node, that a topic was made for.
    pub(super) fn set_creator(&mut self, number: u32, creator: String) {
        if let Some(kept) = self.topics.get_mut(&number) {
            kept.creator = Some(creator);
        }
    }

    /// A process uses a topic. True if nobody did.
    pub(super) fn uses(&mut self, number: u32, who: Participant) -> bool {
        let Some(kept) = self.topics.get_mut(&number) else { return false };
        kept.users.insert(who);
        self.unused.remove(&number)
    }

    /// A process does not use a topic any more. True if it did.
    pub(super) fn uses_no_more(&mut self, number: u32, who: Participant) -> bool {
        let Some(kept) = self.topics.get_mut(&number) else { return false };
        let has_used = kept.users.remove(&who);
        if kept.users.is_empty() {
            self.unused.insert(number);
        }
        has_used
    }

    /// A process uses none of these topics any more; gives those that it did use.
    pub(super) fn uses_none(&mut self, who: Participant, of: impl Fn(u32) -> bool) -> Vec<u32> {
        let of = self.topics.keys().copied().filter(|number| of(*number)).collect::<Vec<_>>();
        of.into_iter().filter(|number| self.uses_no_more(*number, who)).collect()
    }

    /// Topics that nobody uses, and that are kept all the same.
    pub(super) fn unused(&self) -> impl Iterator<Item = u32> {
        self.unused.iter().copied()
    }

    pub(super) fn is_unused(&self, number: u32) -> bool {
        self.unused.contains(&number)
    }

    /// What topics may reserve of a place's memory; nothing if that cannot be told.
    pub(super) fn budget(&self, place: SharedPlace) -> u64 {
        self.budgets.of(place).unwrap_or_default()
    }

    /// Reserves memory for the loans of one publisher more of a topic, for as long as it is one.
    /// The first one's were reserved with the topic. Done again it is harmless.
    pub(super) fn admit_publisher(&self, number: u32, who: Participant, id: u64) -> Result<()> {
        let operation = "make a publisher";
        let gone = || Error::new(operation, ErrorKind::Unknown, "it has gone again");
        let topic = &self.topics.get(&number).ok_or_else(gone)?.topic;
        let line = topic.publisher(id);
        if !line.is_of(who, id) {
            return Err(gone().on(topic.name()));
        }
        if line.is_promised() {
            return Ok(());
        }
        let (settings, promised) = (topic.settings(), topic.promised());
        let of = |publishers| settings.reserves(publishers).blocks;
        let more = of(promised + 1) - of(promised);
        if more > 0 {
            self.afford(operation, settings, more).map_err(|error| error.on(topic.name()))?;
        }
        if line.promise(who) { Ok(()) } else { Err(gone().on(topic.name())) }
    }

    /// Refuses so many messages more that the budget cannot bear together with what there is.
    fn afford(
        &self,
        operation: &'static str,
        settings: &SharedSettings,
        wanted: u64,
    ) -> Result<()> {
        let budget = self.budgets.of(settings.place)?;
        let topics = self.topics.values().map(|kept| &*kept.topic);
        let taken = topics
            .filter(|other| other.settings().place == settings.place)
            .map(|other| other.settings().reserves(other.promised()))
            .fold(Reserve::default(), Reserve::and);
        let bytes = settings.memory_of(wanted);
        let refuse = |detail| Err(Error::new(operation, ErrorKind::OverBudget, detail));
        if taken.bytes.saturating_add(bytes) > budget {
            return refuse(format!(
                "{} waiting or on loan × {} = {}, where topics reserve {} of a budget of {budget} \
                 bytes already",
                counted(wanted, "message"),
                counted(settings.largest, "byte"),
                counted(bytes, "byte"),
                taken.bytes
            ));
        }
        let known = pools_of(settings.place).into_iter().filter_map(|id| self.pools.get(&id));
        let room = known.map(|keeping| room(keeping.pool.ledger().most_blocks())).min();
        let room = room.unwrap_or_else(|| self::room(MOST_BLOCKS));
        if taken.blocks.saturating_add(wanted) > room {
            return refuse(format!(
                "{} waiting or on loan, where topics reserve {} of the {room} that a pool keeps \
                 already",
                counted(wanted, "message"),
                taken.blocks
            ));
        }
        Ok(())
    }

    fn make_pool(&mut self, id: PoolId) -> Result<()> {
        if !self.pools.contains_key(&id) {
            // Some more than topics may need: what is free lies between what is not.
            let budget = self.budgets.of(id.place)?;
            let pool = Pool::create(id, budget.saturating_add(budget / 4), MOST_BLOCKS)?;
            self.pools.insert(id, Keeping { pool: Arc::new(pool), growing: None });
        }
        Ok(())
    }

    /// Takes back a pool that another service made.
    pub(super) fn return_pool(&mut self, id: PoolId, books: OwnedFd) -> Result<()> {
        let operation = "take back a pool";
        if let Some(keeping) = self.pools.get(&id) {
            if keeping.pool.has_books(books.as_fd())? {
                return Ok(());
            }
            let detail = "another one was made while this process was away";
            return Err(Error::new(operation, ErrorKind::Closed, detail).on(id));
        }
        let pool = Pool::keep(books)?;
        if pool.id() != id {
            let detail = "its books are those of another pool";
            return Err(Error::new(operation, ErrorKind::Malformed, detail));
        }
        if pool.device().is_none() {
            tracing::warn!(pool = %id, "this service does not see the device, and only keeps it");
        }
        self.pools.insert(id, Keeping { pool: Arc::new(pool), growing: None });
        Ok(())
    }

    /// Takes back pieces of a pool. Gives how many of the first ones whoever brings these has,
    /// as far as they are the right ones; and from which on others may have wrong ones.
    pub(super) fn return_pieces(
        &mut self,
        id: PoolId,
        first: u32,
        pieces: impl Iterator<Item = Piece>,
    ) -> Result<(usize, Option<usize>)> {
        let Some(keeping) = self.pools.get(&id) else {
            let detail = "its pool was not handed over";
            return Err(Error::new("take back a piece of a pool", ErrorKind::Malformed, detail));
        };
        let (mut has, mut replaced) = (first as usize, None);
        for (number, piece) in (first as usize..).zip(pieces) {
            match keeping.pool.keep_piece(number, piece) {
                PieceKept::No => break,
                PieceKept::InPlaceOfAnother => replaced = replaced.or(Some(number)),
                PieceKept::Yes => {}
            }
            has = number + 1;
        }
        Ok((has, replaced))
    }

    /// Takes back a topic that another service made. The same one is left as it is.
    pub(super) fn return_topic(&mut self, number: u32, segment: OwnedFd) -> Result<()> {
        let operation = "take back a topic";
        if self.topics.contains_key(&number) {
            return Ok(());
        }
        let topic = Topic::open(segment)?;
        let has_pools =
            pools_of(topic.settings().place).iter().all(|id| self.pools.contains_key(id));
        if topic.number() != number || !has_pools {
            let detail = "it is another one, or its pools were not handed over";
            return Err(Error::new(operation, ErrorKind::Malformed, detail).on(topic.name()));
        }
        if self.by_name.contains_key(topic.name()) {
            let detail = "a topic of that name was made meanwhile";
            return Err(Error::new(operation, ErrorKind::Closed, detail).on(topic.name()));
        }
        self.insert(topic);
        Ok(())
    }

    /// A topic and its two pools.
    pub(super) fn desk(&self, number: u32) -> Option<(&Arc<Topic>, [&Arc<Pool>; 2])> {
        let topic = &self.topics.get(&number)?.topic;
        let [here, arrivals] = pools_of(topic.settings().place);
        Some((topic, [&self.pools.get(&here)?.pool, &self.pools.get(&arrivals)?.pool]))
    }

    /// Lets a topic go that nobody uses. True if it went.
    pub(super) fn forget_unused(&mut self, number: u32) -> bool {
        let is_unused = self.unused.remove(&number);
        if is_unused && let Some(kept) = self.topics.remove(&number) {
            self.by_name.remove(kept.topic.name());
        }
        is_unused
    }

    /// Finds a piece for a pool that is to hold so many bytes more: one that it does not use
    /// yet, or a new one. None if it is growing already, or may not.
    pub(super) fn grow(
        &mut self,
        caller: &Caller<'_>,
        id: PoolId,
        bytes: u64,
    ) -> Result<Option<usize>> {
        let Some(keeping) = self.pools.get(&id) else { return Ok(None) };
        let pool = &keeping.pool;
        if keeping.growing.is_some() || !pool.may_grow(bytes) {
            return Ok(None);
        }
        let (held, admitted) = (pool.held(), pool.admitted());
        if held > admitted {
            return Ok(Some(admitted));
        }
        if held < admitted || pool.statistics(caller)?.total > pool.length() {
            let detail = "a piece of it is with processes that are not back";
            return Err(Error::new("let a pool grow", ErrorKind::Unknown, detail).on(id));
        }
        // Twice as much as there was, so that many loans need few pieces.
        let generous = pool.length().clamp(LEAST_PIECE, MOST_PIECE).max(bytes);
        let at_least = if pool.may_grow(generous) { generous } else { bytes };
        let kept = pool.keep_piece(held, pool.make_piece(at_least)?);
        Ok((kept != PieceKept::No).then_some(held))
    }

    /// Lets the pool use a piece that all have. If that cannot be done now, it is still growing.
    pub(super) fn admit_piece(&mut self, caller: &Caller<'_>, id: PoolId) -> Result<()> {
        let Some(keeping) = self.pools.get_mut(&id) else { return Ok(()) };
        let Some(growing) = &keeping.growing else { return Ok(()) };
        let admitted = keeping.pool.admit_piece(caller, growing.number);
        // Whoever holds the allocator's lock lets it go, or dies.
        if !admitted.as_ref().is_err_and(|error| error.kind() == ErrorKind::DeadlineExceeded) {
            keeping.growing = None;
        }
        admitted
    }

    /// Those in whose names there is anything.
    pub(super) fn names(&self, caller: &Caller<'_>) -> Result<BTreeSet<Participant>> {
        let mut names = BTreeSet::new();
        for kept in self.topics.values() {
            names.extend(kept.topic.names());
        }
        for keeping in self.pools.values() {
            names.extend(keeping.pool.owners(caller)?);
        }
        Ok(names)
    }

    /// Removes from topics and pools all that belongs to one who is dead or has left.
    pub(super) fn bury(&self, caller: &Caller<'_>, who: Participant) -> Result<()> {
        // Topics first: a message that was published belongs to its topic, and whether it was
        // is told by the topic's books. One whose lock is held keeps what is in its pools, and
        // nothing of other topics. No time is spent on a second one.
        let (mut outcome, mut kept) = (Ok(()), BTreeSet::new());
        let brief = Caller { patience: Duration::ZERO, ..*caller };
        for number in self.topics.keys() {
            let Some((topic, [here, arrivals])) = self.desk(*number) else { continue };
            let caller = if outcome.is_ok() { caller } else { &brief };
            let buried = topic.bury_in(caller, who, here.ledger(), arrivals.ledger());
            if buried.is_err() {
                kept.insert(topic.settings().place);
                outcome = outcome.and(buried);
            }
        }
        for keeping in self.pools.values().filter(|it| !kept.contains(&it.pool.id().place)) {
            let caller = if outcome.is_ok() { caller } else { &brief };
            outcome = outcome.and(keeping.pool.reclaim(caller, who).map(drop));
        }
        outcome
    }

    /// The descriptor of a piece, to be sent.
    pub(super) fn piece(&self, id: PoolId, number: usize) -> Result<Option<Piece>> {
        self.pools.get(&id).map_or(Ok(None), |keeping| keeping.pool.piece(number))
    }

    /// A pool's books, to be sent.
    pub(super) fn books(&self, id: PoolId) -> Result<OwnedFd> {
        let books = self.pools.get(&id).map(|keeping| keeping.pool.books().try_clone_to_owned());
        sendable("hand out a pool", books)
    }

    /// A topic's segment, to be sent.
    pub(super) fn segment(&self, number: u32) -> Result<OwnedFd> {
        let segment =
            self.topics.get(&number).map(|kept| kept.topic.segment().try_clone_to_owned());
        sendable("hand out a topic", segment)
    }
}

/// A copy of the descriptor of what there is.
fn sendable(operation: &'static str, copy: Option<io::Result<OwnedFd>>) -> Result<OwnedFd> {
    match copy {
        Some(copy) => copy.map_err(|error| Error::of(operation, error)),
        None => Err(Error::new(operation, ErrorKind::Unknown, "it has gone again")),
    }
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;

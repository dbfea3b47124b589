//! The topics and pools of a node, and who uses which.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ipc::{Caller, Participant};

use crate::error::{Error, ErrorKind, Result};
use crate::node::Budgets;
use crate::pool::{Direction, Pool, PoolId};
use crate::settings::{LONGEST_TOPIC, SharedPlace, SharedSettings};
use crate::topic::Topic;

/// Bytes by which a pool grows at least, and as many as it is worth to ask for at once.
const LEAST_PIECE: u64 = 4 << 20;
const MOST_PIECE: u64 = 1 << 30;
/// Messages and loans that lie in a pool at a time.
const MOST_BLOCKS: u32 = 1 << 14;
/// Loans that a topic is expected to have under way, beside the messages that wait.
const LOANS: u64 = 4;

/// A topic, and who uses it.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) topic: Arc<Topic>,
    pub(super) users: BTreeSet<Participant>,
    /// Somebody publishes, or subscribes, on this node.
    pub(super) publishes: bool,
    pub(super) subscribes: bool,
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
}

#[derive(Debug)]
pub(super) struct Registry {
    pub(super) topics: BTreeMap<u32, Kept>,
    by_name: HashMap<String, u32>,
    pub(super) pools: HashMap<PoolId, Keeping>,
    budgets: Budgets,
}

/// The pools that a topic draws from.
pub(super) fn pools_of(place: SharedPlace) -> [PoolId; 2] {
    [Direction::Here, Direction::Arrivals].map(|direction| PoolId { place, direction })
}

/// What a topic may need at a time.
fn reserve(settings: &SharedSettings) -> u64 {
    let messages = u64::from(settings.depth) + LOANS;
    messages.saturating_mul(settings.largest.checked_next_multiple_of(256).unwrap_or(u64::MAX))
}

impl Registry {
    pub(super) fn new(budgets: Budgets) -> Self {
        Self { topics: BTreeMap::new(), by_name: HashMap::new(), pools: HashMap::new(), budgets }
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
                Some(wanted) if wanted != *found => {
                    let detail = format!("it is {found}; asked for was {wanted}");
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
        self.afford(&settings).map_err(|error| error.on(name))?;
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
            publishes: false,
            subscribes: false,
        };
        self.topics.insert(number, kept);
        number
    }

    /// Refuses a topic that the budget cannot bear together with those that there are.
    fn afford(&self, settings: &SharedSettings) -> Result<()> {
        let budget = self.budgets.of(settings.place)?;
        let taken: u64 = self
            .topics
            .values()
            .filter(|kept| kept.topic.settings().place == settings.place)
            .map(|kept| reserve(kept.topic.settings()))
            .fold(0, u64::saturating_add);
        let wanted = reserve(settings);
        if taken.saturating_add(wanted) > budget {
            let detail = format!(
                "({} waiting messages + {LOANS} loans) × {} bytes = {wanted} bytes, where other \
                 topics reserve {taken} of a budget of {budget}",
                settings.depth, settings.largest
            );
            return Err(Error::new("open a topic", ErrorKind::OverBudget, detail));
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

    /// Takes back a pool that another service made. Known ones are left as they are.
    pub(super) fn return_pool(&mut self, id: PoolId, books: OwnedFd) -> Result<()> {
        if self.pools.contains_key(&id) {
            return Ok(());
        }
        let pool = Pool::open(books)?;
        if pool.id() != id {
            let detail = "its books are those of another pool";
            return Err(Error::new("take back a pool", ErrorKind::Malformed, detail));
        }
        self.pools.insert(id, Keeping { pool: Arc::new(pool), growing: None });
        Ok(())
    }

    /// Takes back pieces of a pool.
    pub(super) fn return_pieces(
        &mut self,
        id: PoolId,
        first: u32,
        pieces: impl Iterator<Item = (OwnedFd, u64)>,
    ) -> Result<()> {
        let Some(keeping) = self.pools.get(&id) else {
            let detail = "its pool was not handed over";
            return Err(Error::new("take back a piece of a pool", ErrorKind::Malformed, detail));
        };
        for (number, (descriptor, length)) in (first as usize..).zip(pieces) {
            keeping.pool.map_piece(number, descriptor, length)?;
        }
        Ok(())
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
        let is_unused = self.topics.get(&number).is_some_and(|kept| kept.users.is_empty());
        if is_unused && let Some(kept) = self.topics.remove(&number) {
            self.by_name.remove(kept.topic.name());
        }
        is_unused
    }

    /// Makes a piece for a pool that is to hold so many bytes more, and maps it here. None if
    /// it is growing already, or may not.
    pub(super) fn grow(&mut self, id: PoolId, bytes: u64) -> Result<Option<usize>> {
        let Some(keeping) = self.pools.get(&id) else { return Ok(None) };
        let pool = &keeping.pool;
        if keeping.growing.is_some() || !pool.may_grow(bytes) {
            return Ok(None);
        }
        // Twice as much as there was, so that many loans need few pieces.
        let generous = pool.length().clamp(LEAST_PIECE, MOST_PIECE).max(bytes);
        let at_least = if pool.may_grow(generous) { generous } else { bytes };
        let number = pool.pieces()?.len();
        let (descriptor, length) = pool.make_piece(at_least)?;
        pool.map_piece(number, descriptor, length)?;
        Ok(Some(number))
    }

    /// Lets the pool use a piece that all have mapped.
    pub(super) fn admit_piece(&mut self, caller: &Caller<'_>, id: PoolId) -> Result<()> {
        let Some(keeping) = self.pools.get_mut(&id) else { return Ok(()) };
        if let Some(growing) = keeping.growing.take() {
            keeping.pool.admit_piece(caller, growing.number)?;
        }
        Ok(())
    }

    /// Removes from topics and pools all that belongs to one who is dead or has left.
    pub(super) fn bury(&self, caller: &Caller<'_>, who: Participant) -> Result<()> {
        // Topics first: a message that was published belongs to its topic, and whether it was
        // is told by the topic's books.
        for number in self.topics.keys() {
            if let Some((topic, [here, arrivals])) = self.desk(*number) {
                topic.bury(caller, who, here, arrivals)?;
            }
        }
        self.pools.values().try_for_each(|keeping| keeping.pool.reclaim(caller, who).map(drop))
    }

    /// The descriptor of a piece, to be sent.
    pub(super) fn piece(&self, id: PoolId, number: usize) -> Result<Option<(OwnedFd, u64)>> {
        let Some(keeping) = self.pools.get(&id) else { return Ok(None) };
        Ok(keeping.pool.pieces()?.into_iter().nth(number))
    }

    /// A pool's books, to be sent.
    pub(super) fn books(&self, id: PoolId) -> Option<OwnedFd> {
        self.pools.get(&id)?.pool.books().try_clone_to_owned().ok()
    }

    /// A topic's segment, to be sent.
    pub(super) fn segment(&self, number: u32) -> Option<OwnedFd> {
        self.topics.get(&number)?.topic.segment().try_clone_to_owned().ok()
    }
}

//! The topics and pools of a node, and their users.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ipc::{Caller, Participant};

use super::process::describe_process;
use crate::budgets::Budgets;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::peers::MAX_INTERESTS;
use crate::pool::{Direction, MAX_PIECES, Piece, PieceStored, Pool, PoolId};
use crate::replication::LocalTopic;
use crate::settings::{MAX_TOPIC_NAME, Reserve, SharedLocation, SharedSettings};
use crate::text::counted;
use crate::topic::Topic;

/// Blocks of a pool, free ones included. Unused parts of such a large control segment take no
/// memory.
const MAX_BLOCKS: u32 = 1 << 19;
/// Memory locations with pools: clients may name devices that this process does not see, and so
/// cannot check.
const MAX_LOCATIONS: usize = 64;
/// Range of the size of a new piece, which doubles its pool; a message may need a larger one.
const MIN_PIECE: u64 = 4 << 20;
const MAX_PIECE: u64 = 1 << 30;

/// Where the memory for a pool that grows comes from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextPiece {
    /// The piece with this number, which this process has and no process uses yet.
    Held(usize),
    /// A piece of a device that this process does not see, to be made by one that does.
    OfMember { number: usize, length: u64 },
}

#[derive(Debug)]
struct TopicEntry {
    topic: Arc<Topic>,
    users: BTreeSet<Participant>,
    /// The process that it was created for, if this service created it.
    creator: Option<String>,
    /// True if the topic has publishers on this node.
    publishes: bool,
    subscribes: bool,
}

#[derive(Debug)]
pub(super) struct Registry {
    topics: BTreeMap<u32, TopicEntry>,
    by_name: HashMap<String, u32>,
    /// Topics without users.
    unused: BTreeSet<u32>,
    pools: HashMap<PoolId, Arc<Pool>>,
    budgets: Budgets,
    max_topics: usize,
}

fn pools_of(place: SharedLocation) -> [PoolId; 2] {
    Direction::BOTH.map(|direction| PoolId { place, direction })
}

/// The number of messages that always fit into a pool, in spite of fragmentation.
fn block_capacity(max_blocks: u32) -> u64 {
    (u64::from(max_blocks) / 2).saturating_sub(MAX_PIECES as u64)
}

/// The size of the next piece of a pool that needs so many bytes: it doubles the pool, so that many
/// loans need few pieces, unless the pool would exceed its limit.
fn next_piece_size(pool: &Pool, bytes: u64) -> u64 {
    let generous = pool.length().clamp(MIN_PIECE, MAX_PIECE).max(bytes);
    if pool.may_grow(generous) { generous } else { bytes }
}

/// The address range of a pool for topics that reserve up to this many bytes: somewhat more, for
/// fragmentation.
fn pool_limit(budget: u64) -> u64 {
    budget.saturating_add(budget / 4)
}

/// The budget that a pool was created for.
fn budget_of_limit(limit: u64) -> u64 {
    limit - limit / 5
}

impl Registry {
    pub(super) fn new(budgets: Budgets) -> Self {
        Self {
            topics: BTreeMap::new(),
            by_name: HashMap::new(),
            unused: BTreeSet::new(),
            pools: HashMap::new(),
            budgets,
            max_topics: MAX_INTERESTS,
        }
    }

    pub(super) fn has_topic(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub(super) fn topic_numbers(&self) -> Vec<u32> {
        self.topics.keys().copied().collect()
    }

    pub(super) fn topics(&self) -> impl Iterator<Item = &Topic> {
        self.topics.values().map(|entry| &*entry.topic)
    }

    pub(super) fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values().map(|pool| &**pool)
    }

    pub(super) fn pool(&self, id: PoolId) -> Option<&Pool> {
        self.pools.get(&id).map(|pool| &**pool)
    }

    /// All topics, as replication needs them.
    pub(super) fn local_topics(&self) -> BTreeMap<String, LocalTopic> {
        let topics = self.topics.iter().filter_map(|(number, entry)| {
            let (topic, [local, inbound]) = self.topic_and_pools(*number)?;
            let local_topic = LocalTopic {
                topic: Arc::clone(topic),
                local: Arc::clone(local),
                inbound: Arc::clone(inbound),
                publishes: entry.publishes,
                subscribes: entry.subscribes,
            };
            Some((topic.name().to_owned(), local_topic))
        });
        topics.collect()
    }

    /// Publishers or subscribers of a topic joined or left. False if there is no such topic.
    pub(super) fn update_activity(&mut self, number: u32) -> bool {
        let Some(entry) = self.topics.get_mut(&number) else { return false };
        (entry.publishes, entry.subscribes) = entry.topic.activity();
        true
    }

    /// Finds a topic, or creates it with its pools: on a device that has `device_memory` bytes, as
    /// processes report that see it.
    pub(super) fn open(
        &mut self,
        name: &str,
        settings: Option<SharedSettings>,
        device_memory: Option<u64>,
        number: impl FnOnce() -> u32,
    ) -> Result<u32> {
        let operation = "open topic";
        if name.is_empty() || name.len() > MAX_TOPIC_NAME || name.chars().any(char::is_control) {
            let detail =
                format!("a name has 1 to {MAX_TOPIC_NAME} bytes and no control characters in it");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        if let Some(entry) = self.by_name.get(name).and_then(|number| self.topics.get(number)) {
            let found = entry.topic.settings();
            let requested = settings.as_ref().unwrap_or(found);
            let differs = found.differences_within_node(requested).collect::<Vec<_>>().join(", ");
            if differs.is_empty() {
                return Ok(entry.topic.number());
            }
            let created_by = entry.creator.as_ref().map(|it| format!(", created by {it}"));
            let detail = format!(
                "{differs}: the topic has {found}{}; requested was {requested}. Open it \
                 without settings to use it as it is, or close it in all processes first",
                created_by.unwrap_or_default()
            );
            return Err(Error::new(operation, ErrorKind::SettingsDiffer, detail).on(name));
        }
        let Some(settings) = settings else {
            let detail = "the topic does not exist, and no settings were given to create it";
            return Err(Error::new(operation, ErrorKind::NotFound, detail).on(name));
        };
        settings.check(operation)?;
        if self.topics.len() >= self.max_topics {
            let detail = format!(
                "a node has at most {} topics. Close some that are not used",
                self.max_topics
            );
            return Err(Error::new(operation, ErrorKind::TooMany, detail).on(name));
        }
        let requested = settings.reserves(0).blocks;
        let budget = self.budget_of(settings.place, device_memory).on(name)?;
        self.check_budget(operation, &settings, requested, budget).on(name)?;
        for id in pools_of(settings.place) {
            self.make_pool(id, budget).on(name)?;
        }
        Ok(self.insert(Topic::create(number(), name, &settings).on(name)?))
    }

    fn insert(&mut self, topic: Topic) -> u32 {
        let number = topic.number();
        self.by_name.insert(topic.name().to_owned(), number);
        let (topic, users) = (Arc::new(topic), BTreeSet::new());
        let entry = TopicEntry { topic, users, creator: None, publishes: false, subscribes: false };
        self.topics.insert(number, entry);
        self.unused.insert(number);
        number
    }

    /// Records the process, or node, that a topic was created for.
    pub(super) fn set_creator(&mut self, number: u32, creator: String) {
        if let Some(entry) = self.topics.get_mut(&number) {
            entry.creator = Some(creator);
        }
    }

    /// Adds a user of a topic. True if it is the first one.
    pub(super) fn add_user(&mut self, number: u32, participant: Participant) -> bool {
        let Some(entry) = self.topics.get_mut(&number) else { return false };
        entry.users.insert(participant);
        self.unused.remove(&number)
    }

    /// Removes a user of a topic. True if the process used it.
    pub(super) fn remove_user(&mut self, number: u32, participant: Participant) -> bool {
        let Some(entry) = self.topics.get_mut(&number) else { return false };
        let has_used = entry.users.remove(&participant);
        if entry.users.is_empty() {
            self.unused.insert(number);
        }
        has_used
    }

    /// Removes a user of these topics; returns those that it used.
    pub(super) fn remove_user_from(
        &mut self,
        participant: Participant,
        of: impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        let of = self.topics.keys().copied().filter(|number| of(*number)).collect::<Vec<_>>();
        of.into_iter().filter(|number| self.remove_user(*number, participant)).collect()
    }

    pub(super) fn unused(&self) -> impl Iterator<Item = u32> {
        self.unused.iter().copied()
    }

    pub(super) fn is_unused(&self, number: u32) -> bool {
        self.unused.contains(&number)
    }

    /// The budget of a memory location; 0 if it cannot be determined.
    pub(super) fn budget(&self, place: SharedLocation) -> u64 {
        self.budget_of(place, None).unwrap_or_default()
    }

    /// The budget of a memory location. Of a device that this process does not see, its pools record
    /// it, and before these exist, processes that see the device report its memory.
    fn budget_of(&self, place: SharedLocation, device_memory: Option<u64>) -> Result<u64> {
        if let Some(budget) = self.budgets.of(place)? {
            return Ok(budget);
        }
        let pool = pools_of(place).into_iter().find_map(|id| self.pools.get(&id));
        let recorded = pool.map(|pool| budget_of_limit(pool.limit()));
        recorded.or(device_memory.map(Budgets::of_device)).ok_or_else(|| {
            let detail = format!(
                "neither {} nor a process that uses the topic sees the device {place}. Open the topic \
                 first in a process that sees it, or serve the node by \"fabricast node\", started \
                 where all devices are visible",
                describe_process(std::process::id())
            );
            Error::new("compute memory of topic", ErrorKind::NoDevice, detail)
        })
    }

    /// Reserves memory for the loans of another publisher of a topic, as long as it exists. Those
    /// of the first publisher were reserved with the topic. Idempotent.
    pub(super) fn admit_publisher(&self, number: u32, owner: Participant, id: u64) -> Result<()> {
        let operation = "create publisher of topic";
        let removed = || Error::new(operation, ErrorKind::NotFound, "the topic was removed");
        let topic = &self.topics.get(&number).ok_or_else(removed)?.topic;
        let slot = topic.publisher(id);
        if !slot.is_of(owner, id) {
            return Err(removed().on(topic.name()));
        }
        if slot.has_reservation() {
            return Ok(());
        }
        let (settings, reserved_publishers) = (topic.settings(), topic.reserved_publishers());
        let of = |publishers| settings.reserves(publishers).blocks;
        let more = of(reserved_publishers + 1) - of(reserved_publishers);
        if more > 0 {
            let budget = self.budget_of(settings.place, None).on(topic.name())?;
            self.check_budget(operation, settings, more, budget).on(topic.name())?;
        }
        if slot.reserve(owner) { Ok(()) } else { Err(removed().on(topic.name())) }
    }

    /// Fails if the budget does not allow this many more messages.
    fn check_budget(
        &self,
        operation: &'static str,
        settings: &SharedSettings,
        requested: u64,
        budget: u64,
    ) -> Result<()> {
        let others = self.topics().filter(|other| other.settings().place == settings.place);
        let reserves = others.map(|it| it.settings().reserves(it.reserved_publishers()));
        let taken = reserves.fold(Reserve::default(), Reserve::and);
        let bytes = Reserve::bytes_of(requested, settings.largest);
        let refuse = |detail| Err(Error::new(operation, ErrorKind::OverBudget, detail));
        if taken.bytes.saturating_add(bytes) > budget {
            return refuse(format!(
                "{} for queue, held samples and loans × {} = {}; topics already reserve {} of a budget \
                 of {budget} bytes",
                counted(requested, "message"),
                counted(settings.largest, "byte"),
                counted(bytes, "byte"),
                taken.bytes
            ));
        }
        let known = pools_of(settings.place).into_iter().filter_map(|id| self.pools.get(&id));
        let block_capacity = known.map(|pool| block_capacity(pool.control().max_blocks())).min();
        let block_capacity = block_capacity.unwrap_or_else(|| self::block_capacity(MAX_BLOCKS));
        if taken.blocks.saturating_add(requested) > block_capacity {
            return refuse(format!(
                "{} for queue, held samples and loans; topics already reserve {} of the {block_capacity} \
                 that a pool holds",
                counted(requested, "message"),
                taken.blocks
            ));
        }
        Ok(())
    }

    fn make_pool(&mut self, id: PoolId, budget: u64) -> Result<()> {
        if self.pools.contains_key(&id) {
            return Ok(());
        }
        if self.pools.len() >= MAX_LOCATIONS * Direction::BOTH.len() {
            let detail = format!("a node has topics on at most {MAX_LOCATIONS} devices");
            return Err(Error::new("create pool", ErrorKind::TooMany, detail).on(id));
        }
        let pool = Pool::create(id, pool_limit(budget), MAX_BLOCKS)?;
        self.pools.insert(id, Arc::new(pool));
        Ok(())
    }

    /// Restores a pool of an earlier service.
    pub(super) fn restore_pool(&mut self, id: PoolId, control_segment: OwnedFd) -> Result<()> {
        let operation = "restore pool";
        if let Some(pool) = self.pools.get(&id) {
            if pool.has_control_segment(control_segment.as_fd())? {
                return Ok(());
            }
            let detail = "another pool was created before this process rejoined";
            return Err(Error::new(operation, ErrorKind::Closed, detail).on(id));
        }
        let pool = Pool::keep(control_segment, None)?;
        if pool.id() != id {
            let detail = "its control segment belongs to another pool";
            return Err(Error::new(operation, ErrorKind::Malformed, detail));
        }
        if !id.place.is_visible() {
            tracing::debug!(pool = %id, "processes that see the device make the pool's memory");
        } else if pool.device().is_none() {
            tracing::warn!(
                pool = %id,
                "the service cannot use the device; it only distributes the pool"
            );
        }
        self.pools.insert(id, Arc::new(pool));
        Ok(())
    }

    /// Restores pieces of a pool. Returns how many of the first pieces the process has, if they are
    /// the right ones, and from which number on other processes may have wrong ones.
    pub(super) fn restore_pieces(
        &mut self,
        id: PoolId,
        first: u32,
        pieces: impl Iterator<Item = Piece>,
    ) -> Result<(usize, Option<usize>)> {
        let Some(pool) = self.pools.get(&id) else {
            let detail = "its pool was not returned";
            return Err(Error::new("restore piece of pool", ErrorKind::Malformed, detail));
        };
        let (mut has, mut replaced) = (first as usize, None);
        for (number, piece) in (first as usize..).zip(pieces) {
            match pool.store_piece(number, piece) {
                PieceStored::Rejected => break,
                PieceStored::Replaced => replaced = replaced.or(Some(number)),
                PieceStored::Stored => {}
            }
            has = number + 1;
        }
        Ok((has, replaced))
    }

    /// Restores a topic of an earlier service. A topic that is restored already stays.
    pub(super) fn restore_topic(&mut self, number: u32, segment: OwnedFd) -> Result<()> {
        let operation = "restore topic";
        if self.topics.contains_key(&number) {
            return Ok(());
        }
        let topic = Topic::open(segment)?;
        let has_pools =
            pools_of(topic.settings().place).iter().all(|id| self.pools.contains_key(id));
        if topic.number() != number || !has_pools {
            let detail = "another topic has that number, or its pools were not returned";
            return Err(Error::new(operation, ErrorKind::Malformed, detail).on(topic.name()));
        }
        if self.by_name.contains_key(topic.name()) {
            let detail = "a topic with that name was created in the meantime";
            return Err(Error::new(operation, ErrorKind::Closed, detail).on(topic.name()));
        }
        self.insert(topic);
        Ok(())
    }

    pub(super) fn topic_and_pools(&self, number: u32) -> Option<(&Arc<Topic>, [&Arc<Pool>; 2])> {
        let topic = &self.topics.get(&number)?.topic;
        let [local, inbound] = pools_of(topic.settings().place);
        Some((topic, [self.pools.get(&local)?, self.pools.get(&inbound)?]))
    }

    /// Removes a topic without users. True if it was removed.
    pub(super) fn remove_unused(&mut self, number: u32) -> bool {
        let is_unused = self.unused.remove(&number);
        if is_unused && let Some(entry) = self.topics.remove(&number) {
            self.by_name.remove(entry.topic.name());
        }
        is_unused
    }

    /// Finds a piece for a pool that needs more memory: one that is not in use yet, or a new one,
    /// made here if this process sees the device. None if the pool has reached its limit.
    pub(super) fn grow(
        &self,
        caller: &Caller<'_>,
        id: PoolId,
        bytes: u64,
    ) -> Result<Option<NextPiece>> {
        let Some(pool) = self.pool(id).filter(|pool| pool.may_grow(bytes)) else {
            return Ok(None);
        };
        let (held, admitted) = (pool.held(), pool.admitted());
        if held > admitted {
            return Ok(Some(NextPiece::Held(admitted)));
        }
        if held < admitted || pool.statistics(caller)?.total > pool.length() {
            let detail = "a piece of the pool is held by processes that have not rejoined";
            return Err(Error::new("grow pool", ErrorKind::NotFound, detail).on(id));
        }
        let length = next_piece_size(pool, bytes);
        if !id.place.is_visible() {
            return Ok(Some(NextPiece::OfMember { number: held, length }));
        }
        let stored = pool.store_piece(held, pool.make_piece(length)?);
        Ok((stored != PieceStored::Rejected).then_some(NextPiece::Held(held)))
    }

    /// All participants that own blocks, slots or subscriptions.
    pub(super) fn owners(&self, caller: &Caller<'_>) -> Result<BTreeSet<Participant>> {
        let mut owners: BTreeSet<_> = self.topics().flat_map(|topic| topic.owners()).collect();
        for pool in self.pools() {
            owners.extend(pool.owners(caller)?);
        }
        Ok(owners)
    }

    /// Removes everything of a participant that is dead or has left.
    pub(super) fn reclaim(&self, caller: &Caller<'_>, dead: Participant) -> Result<()> {
        // Topics first: whether a message was published, and so belongs to its topic, is recorded
        // there. If the lock of a topic is held, the pools of its memory location are left as well,
        // but no other topics. The second held lock is not waited for.
        let (mut outcome, mut locked) = (Ok(()), BTreeSet::new());
        let brief = Caller { timeout: Duration::ZERO, ..*caller };
        for number in self.topics.keys() {
            let Some((topic, [local, inbound])) = self.topic_and_pools(*number) else { continue };
            let caller = if outcome.is_ok() { caller } else { &brief };
            let reclaimed = topic.reclaim_in(caller, dead, local.control(), inbound.control());
            if reclaimed.is_err() {
                locked.insert(topic.settings().place);
                outcome = outcome.and(reclaimed);
            }
        }
        for pool in self.pools().filter(|pool| !locked.contains(&pool.id().place)) {
            let caller = if outcome.is_ok() { caller } else { &brief };
            outcome = outcome.and(pool.reclaim(caller, dead).map(drop));
        }
        outcome
    }

    pub(super) fn control_segment(&self, id: PoolId) -> Result<OwnedFd> {
        sendable("send pool", self.pools.get(&id).map(|pool| pool.control_segment()))
    }

    pub(super) fn segment(&self, number: u32) -> Result<OwnedFd> {
        sendable("send topic", self.topics.get(&number).map(|entry| entry.topic.segment()))
    }
}

/// Duplicates a descriptor, if its object exists.
fn sendable(operation: &'static str, file: Option<BorrowedFd<'_>>) -> Result<OwnedFd> {
    let removed = || Error::new(operation, ErrorKind::NotFound, "the topic was removed");
    file.ok_or_else(removed)?.try_clone_to_owned().during(operation)
}

#[cfg(test)]
#[path = "registry_tests.rs"]
mod tests;

//! Accounts of the publishers on other nodes: from which message on they publish for this node, and
//! how far this node has got.
//!
//! The account of a node's publishers begins when that node learns that this one subscribes: it
//! answers with its *start*, the serial of its last publisher, and what each of its publishers had
//! published. All messages of later publishers are for this node. The start stays until this node
//! has no subscriber any more, whatever happens to the connection, to services and to publishers in
//! the meantime. So what was published while the other node could not be reached is missed, and
//! counted by its sequence numbers.
//!
//! A subscriber joins the accounts where they stand: each records the next expected message, and
//! the position here from which on it is expected. There are two copies of these, so that the
//! earlier one stays valid until the delivery of a message. It is wrong only for a subscriber that
//! was created during the delivery of two messages of the same publisher.
//!
//! Only the service writes, its threads one at a time.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::fence;

use ipc::Words;
use serde::{Deserialize, Serialize};
use threads::lock;

use super::TopicWords;
use super::layout::{
    ACCOUNT_WORDS, ACCOUNTS, MAX_ACCOUNTS, MAX_REMOTE_STARTS, REMOTE_ACCOUNTS, REMOTE_START_WORDS,
    REMOTE_STARTS, store_all,
};
use super::publishers::Published;
use crate::ids::{id_from_words, id_to_words};

/// How often this node has ended its subscription.
const PERIOD: usize = REMOTE_ACCOUNTS;
/// The count of uses of all accounts.
const USES: usize = REMOTE_ACCOUNTS + 1;
/// The count of starts.
const STARTS: usize = REMOTE_ACCOUNTS + 2;

// Words of a start: the node's first half, which is zero in a free slot, is written last.
const NODE: usize = 0;
const SERIAL: usize = 2;
const ORDER: usize = 3;

// Words of an account.
const IDENTITY: usize = 0;
const STATE: usize = 3;
const FIRST: usize = 4;
const SINCE: usize = 5;
const COPIES: usize = 6;
/// Words of a copy: the next message, and from which position on it is expected.
const COPY: usize = 2;

/// State of a free slot. Otherwise the lowest bit names the valid copy, and the others the time of
/// use, from 1 on.
const FREE: u64 = 0;
/// A copy without content.
const NONE: u64 = u64::MAX;
/// Attempts to read an account that is being written.
const MAX_READS: usize = 16;
/// The sequence of a publisher's first message.
const FIRST_SEQUENCE: u64 = 1;

/// What the publishers of a topic on a node had published when this was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TopicStart {
    /// The serial of the last publisher.
    serial: u64,
    /// Publishers up to then, each with its last sequence.
    publishers: Vec<(u64, u64)>,
}

impl TopicStart {
    pub(crate) fn new(serial: u64, publishers: Vec<(u64, u64)>) -> Self {
        Self { serial, publishers }
    }

    pub(crate) fn publishers(&self) -> &[(u64, u64)] {
        &self.publishers
    }
}

/// Where the messages of a publisher on another node start for this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PublisherStart {
    /// The number of its first message for this node; 0 if unknown.
    first: u64,
    /// Subscribers from up to this inbound position are to receive all messages from the first on.
    since: u64,
}

impl PublisherStart {
    pub(crate) fn new(first: u64, since: u64) -> Self {
        Self { first, since }
    }

    /// Numbers of its first message and of the position, for shared memory.
    pub(crate) fn words(self) -> [u64; 2] {
        [self.first, self.since]
    }

    /// The number of the first message for a subscriber from this inbound position on that has
    /// received none, if it is known.
    pub(crate) fn first_for(self, subscribed_at: u64) -> Option<u64> {
        (self.first != 0 && subscribed_at <= self.since).then_some(self.first)
    }
}

/// A publisher, among those of all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RemotePublisher {
    node: [u8; 16],
    publisher: u64,
}

impl RemotePublisher {
    pub(crate) fn new(node: [u8; 16], publisher: u64) -> Self {
        Self { node, publisher }
    }

    fn words(&self) -> [u64; 3] {
        let [low, high] = id_to_words(&self.node);
        [low, high, self.publisher]
    }

    fn from_words([low, high, publisher]: [u64; 3]) -> Self {
        Self { node: id_from_words([low, high]), publisher }
    }

    fn serial(&self) -> u64 {
        Published::serial_of(self.publisher)
    }
}

struct Account<'a, W> {
    words: &'a W,
    at: usize,
}

impl<'a, W: Words> Account<'a, W> {
    fn all(words: &'a W) -> impl Iterator<Item = Self> {
        (0..MAX_ACCOUNTS).map(move |slot| Self { words, at: ACCOUNTS + slot * ACCOUNT_WORDS })
    }

    fn word(&self, which: usize) -> u64 {
        self.words.load(self.at + which, Acquire)
    }

    fn is_used(&self) -> bool {
        self.word(STATE) != FREE
    }

    fn is_of(&self, publisher: &RemotePublisher) -> bool {
        self.is_used() && self.publisher() == *publisher
    }

    fn publisher(&self) -> RemotePublisher {
        RemotePublisher::from_words([0, 1, 2].map(|at| self.word(IDENTITY + at)))
    }

    fn start(&self) -> PublisherStart {
        PublisherStart { first: self.word(FIRST), since: self.word(SINCE) }
    }

    /// Content of a copy. A reader that finds the next message finds its position, too.
    fn copy(&self, which: usize) -> (u64, u64) {
        let next = self.word(COPIES + which * COPY);
        (next, self.word(COPIES + which * COPY + 1))
    }

    fn current(&self) -> usize {
        (self.word(STATE) & 1) as usize
    }

    /// The next message that a subscriber from this inbound position on expects, if it is known,
    /// with its publisher. Called by any process.
    fn expected(&self, since: u64) -> Option<(RemotePublisher, u64)> {
        for _ in 0..MAX_READS {
            let state = self.word(STATE);
            let (publisher, current) = (self.publisher(), self.current());
            let copies = [current, 1 - current].map(|which| self.copy(which));
            fence(Acquire);
            if self.word(STATE) == state {
                let valid = |(next, from): &(u64, u64)| *next != NONE && *from <= since;
                let (next, _) = copies.into_iter().find(valid).filter(|_| state != FREE)?;
                return Some((publisher, next));
            }
        }
        None
    }

    /// The state with this copy valid, used now.
    fn used(&self, copy: usize) -> u64 {
        let uses = self.words.load(USES, Acquire).wrapping_add(1);
        self.words.store(USES, uses, Release);
        uses << 1 | copy as u64
    }

    /// Subscribers from the position `from` on expect `next`, or a later message.
    fn record(&self, next: u64, from: u64) {
        let current = self.current();
        let known = self.copy(current);
        let next = if known.0 == NONE { next } else { next.max(known.0) };
        if (next, from) == known {
            return;
        }
        let at = self.at + COPIES + (1 - current) * COPY;
        self.words.store(at, NONE, Release);
        self.words.store(at + 1, from, Release);
        self.words.store(at, next, Release);
        self.words.store(self.at + STATE, self.used(1 - current), Release);
    }

    /// Makes this slot the account of another publisher. A process that dies in the middle of this
    /// leaves a free slot.
    fn open(&self, publisher: RemotePublisher, start: PublisherStart) {
        self.words.store(self.at + STATE, FREE, Release);
        store_all(self.words, self.at + IDENTITY, publisher.words());
        let [first, since] = start.words();
        store_all(self.words, self.at + FIRST, [first, since, NONE, NONE, NONE, NONE]);
        self.words.store(self.at + STATE, self.used(0), Release);
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// Identifies the subscription of this node: another one is to be answered with another start.
    pub(crate) fn subscription(&self) -> u64 {
        u64::from(self.number()) << 32 | self.words().load(PERIOD, Acquire) & u64::from(u32::MAX)
    }

    /// What the publishers of this node have published.
    pub(crate) fn start(&self) -> TopicStart {
        // First: a publisher that is created in the meantime is a later one.
        let serial = self.published().serial;
        TopicStart { serial, publishers: self.begun_of_all() }
    }

    /// Begins the accounts of a node's publishers, unless they have begun.
    pub(crate) fn begin_accounts(&self, node: &[u8; 16], start: &TopicStart) {
        let _lock = lock(&self.accounts_lock);
        if self.start_serial(node).is_some() {
            return;
        }
        let since = self.inbound().position();
        for (publisher, last) in start.publishers.iter().copied() {
            let publisher = RemotePublisher { node: *node, publisher };
            if Account::all(self.words()).any(|account| account.is_of(&publisher)) {
                continue;
            }
            let first = last.saturating_add(1);
            let account = self.open_account(publisher, PublisherStart { first, since });
            account.record(first, since);
        }
        let order = self.words().load(STARTS, Acquire).wrapping_add(1);
        let at = self.start_slot();
        self.words().store(at + NODE, 0, Release);
        let [low, high] = id_to_words(node);
        store_all(self.words(), at + NODE + 1, [high, start.serial, order]);
        self.words().store(STARTS, order, Release);
        self.words().store(at + NODE, low, Release);
    }

    /// Ends all accounts: this node has no subscriber.
    pub(crate) fn end_accounts(&self) {
        let _lock = lock(&self.accounts_lock);
        let words = self.words();
        if words.load(STARTS, Acquire) == 0 {
            return;
        }
        // First: an answer to the former subscription is ignored from now on.
        words.store(PERIOD, words.load(PERIOD, Acquire).wrapping_add(1), Release);
        for at in Self::start_slots() {
            words.store(at + NODE, 0, Release);
        }
        for account in Account::all(words).filter(Account::is_used) {
            words.store(account.at + STATE, FREE, Release);
        }
        words.store(STARTS, 0, Release);
    }

    /// Records that a message of another node is about to be delivered at this inbound position.
    /// `slot` is the slot of its account, where it is looked for first.
    pub(crate) fn note_arrival(
        &self,
        slot: &mut usize,
        publisher: RemotePublisher,
        sequence: u64,
        position: u64,
    ) -> PublisherStart {
        self.record_progress(slot, publisher, sequence, position.saturating_add(1))
    }

    /// Records that no message up to this one will be delivered any more.
    pub(crate) fn note_passed(
        &self,
        slot: &mut usize,
        publisher: RemotePublisher,
        sequence: u64,
    ) -> PublisherStart {
        self.record_progress(slot, publisher, sequence, self.inbound().position())
    }

    fn record_progress(
        &self,
        slot: &mut usize,
        publisher: RemotePublisher,
        sequence: u64,
        from: u64,
    ) -> PublisherStart {
        let _lock = lock(&self.accounts_lock);
        let hinted = Account { words: self.words(), at: ACCOUNTS + *slot * ACCOUNT_WORDS };
        let known = if hinted.is_of(&publisher) {
            Some(hinted)
        } else {
            Account::all(self.words()).find(|account| account.is_of(&publisher))
        };
        let open = || {
            // Without a start the accounts have ended, or the next ones have not begun.
            let may_open = self.start_of(&publisher.node).is_some();
            may_open.then(|| self.open_account(publisher, self.start_of_new(&publisher)))
        };
        let Some(account) = known.or_else(open) else {
            return PublisherStart::new(0, self.inbound().position());
        };
        account.record(sequence.saturating_add(1), from);
        *slot = (account.at - ACCOUNTS) / ACCOUNT_WORDS;
        account.start()
    }

    /// For each publisher on another node the next message that a subscriber from this inbound
    /// position on expects, if it is known.
    pub(crate) fn expected_of_remote(&self, since: u64) -> Vec<(RemotePublisher, u64)> {
        Account::all(self.words()).filter_map(|account| account.expected(since)).collect()
    }

    /// The start of a publisher without an account.
    fn start_of_new(&self, publisher: &RemotePublisher) -> PublisherStart {
        let serial = self.start_serial(&publisher.node);
        let is_later = serial.is_some_and(|serial| publisher.serial() > serial);
        let first = if is_later { FIRST_SEQUENCE } else { 0 };
        PublisherStart { first, since: self.inbound().position() }
    }

    /// Opens an account: in a free slot, or in that of the account that was not used for longest.
    fn open_account(&self, publisher: RemotePublisher, start: PublisherStart) -> Account<'_, W> {
        let longest_unused =
            Account::all(self.words()).min_by_key(|account| account.word(STATE) >> 1);
        let account = longest_unused.unwrap_or(Account { words: self.words(), at: ACCOUNTS });
        if account.is_used() {
            // Otherwise all its messages would be for this node again.
            let replaced = account.publisher();
            self.raise_start(&replaced.node, replaced.serial());
        }
        account.open(publisher, start);
        account
    }

    fn start_slots() -> impl Iterator<Item = usize> {
        (0..MAX_REMOTE_STARTS).map(|slot| REMOTE_STARTS + slot * REMOTE_START_WORDS)
    }

    fn start_of(&self, node: &[u8; 16]) -> Option<usize> {
        let node = id_to_words(node);
        let word = |at| self.words().load(at, Acquire);
        Self::start_slots().find(|at| [word(at + NODE), word(at + NODE + 1)] == node)
    }

    fn start_serial(&self, node: &[u8; 16]) -> Option<u64> {
        self.start_of(node).map(|at| self.words().load(at + SERIAL, Acquire))
    }

    fn raise_start(&self, node: &[u8; 16], serial: u64) {
        if let Some(at) = self.start_of(node)
            && self.words().load(at + SERIAL, Acquire) < serial
        {
            self.words().store(at + SERIAL, serial, Release);
        }
    }

    /// A free slot, or that of the earliest start.
    fn start_slot(&self) -> usize {
        let word = |at| self.words().load(at, Acquire);
        let age = |at: &usize| if word(at + NODE) == 0 { 0 } else { word(at + ORDER) };
        Self::start_slots().min_by_key(age).unwrap_or(REMOTE_STARTS)
    }
}

#[cfg(test)]
impl TopicStart {
    /// The number of a publisher's first message that is not part of this, if it is known.
    pub(crate) fn first_after(&self, publisher: u64) -> Option<u64> {
        match self.publishers.iter().find(|(listed, _)| *listed == publisher) {
            Some((_, last)) => Some(last.saturating_add(1)),
            None => (Published::serial_of(publisher) > self.serial).then_some(FIRST_SEQUENCE),
        }
    }
}

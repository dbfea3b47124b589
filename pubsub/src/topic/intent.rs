//! Transfer of a block to a topic, so that no death in between loses it.
//!
//! A block belongs to its allocating process until it is published, and then to the topic, whose
//! readers free it. In between it belongs to the topic, but is in no queue. The publisher therefore
//! stores the block before as its *intent*, and a reclaim looks there.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::{Block, Caller, Owner, Published, QueueError, Words};

use super::TopicWords;
use super::entry::{Entry, TopicQueue, WORDS};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::pool::PoolControl;

/// The word with the block that a publisher is about to transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Intent<'a, W> {
    words: &'a W,
    at: usize,
}

#[derive(Debug)]
pub(super) struct BlockHandoff<'a, W: Words + Clone> {
    intent: Intent<'a, W>,
    queue: &'a TopicQueue<W>,
    control: &'a PoolControl<W>,
    topic: Owner,
}

impl<'a, W: Words> Intent<'a, W> {
    pub(super) fn new(words: &'a W, at: usize) -> Self {
        Self { words, at }
    }

    /// Stored plus one: no block has all bits set.
    fn declare(&self, block: Block) {
        self.words.store(self.at, block.to_bits().wrapping_add(1), Release);
    }

    fn clear(&self) {
        self.words.store(self.at, 0, Release);
    }

    fn block(&self) -> Option<Block> {
        let word = self.words.load(self.at, Acquire);
        (word != 0).then(|| Block::from_bits(word.wrapping_sub(1)))
    }
}

impl<W: Words + Clone> TopicWords<W> {
    pub(super) fn handoff<'a>(
        &self,
        intent: Intent<'a, W>,
        queue: &'a TopicQueue<W>,
        control: &'a PoolControl<W>,
    ) -> BlockHandoff<'a, W> {
        BlockHandoff { intent, queue, control, topic: self.owner }
    }
}

impl<W: Words + Clone> BlockHandoff<'_, W> {
    /// Publishes a message whose block is the caller's; then it is the topic's. `record` gets its
    /// position once only the death of the caller can prevent the delivery. No other thread may use
    /// the same intent at that time.
    #[inline]
    pub(super) fn publish(
        &self,
        caller: &Caller<'_>,
        entry: Entry,
        record: impl FnOnce(u64),
    ) -> std::result::Result<Published, QueueError> {
        let handoff = |position| {
            record(position);
            self.intent.declare(entry.block);
            let own = Owner::participant(caller.me);
            if let Err(error) = self.control.transfer(entry.block, own, self.topic) {
                // It stays the caller's, and is freed with all its blocks.
                tracing::error!(
                    block = ?entry.block,
                    %error,
                    "a message's block is not its publisher's"
                );
            }
        };
        let dispose = |words| self.dispose(caller, words);
        let published = self.queue.publish_with(caller, entry.to_words(), handoff, dispose)?;
        self.intent.clear();
        Ok(published)
    }

    /// After a death: frees a block that was transferred and not delivered. Idempotent.
    pub(super) fn recover(&self, caller: &Caller<'_>) -> Result<()> {
        let operation = "reclaim after publisher of topic";
        let Some(block) = self.intent.block() else { return Ok(()) };
        // Otherwise it still belongs to the dead process, and is freed with its blocks; or it was
        // delivered, read and freed.
        if self.control.owner(block) == Ok(self.topic) {
            let mut is_delivered = false;
            let each = |words: [u64; WORDS]| is_delivered |= words[0] == block.to_bits();
            self.queue.find_entries(caller, each).during(operation)?;
            if !is_delivered && !self.control.retire(caller, block, self.topic) {
                let detail = "a block could not be freed";
                return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail));
            }
        }
        self.intent.clear();
        Ok(())
    }

    /// Frees a block without readers.
    #[inline]
    pub(super) fn dispose(&self, caller: &Caller<'_>, words: [u64; WORDS]) {
        self.control.retire(caller, Block::from_bits(words[0]), self.topic);
    }
}

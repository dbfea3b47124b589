//! The ring of a client's requests to the copy service, in shared memory.
//!
//! ```text
//! word 0     doorbell of the service
//! word 8     requests that the client has posted
//! word 16    outcomes that the service has written
//! word 24    1 after the service has ended, and with it all copies
//! word 64    entries of 16 words
//!              client:  pair and operation, number of blocks, one block (to, from, length),
//!                       first of several blocks
//!              service: outcome (number of the request, 0 or the code of an error and 1 more),
//!                       text of the error
//! after it   blocks of three words, in a ring of their own
//! ```
//!
//! The service creates it for one client. It copies a request out before it checks it, so a client
//! that changes it afterwards, or writes garbage, harms only itself.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use gpu::Block;
use ipc::{Doorbell, Layout, MappedWords, Segment, WordRange, Words};

use crate::error::{Error, ErrorKind, Result, failed};
use crate::path::Operation;
use crate::refusal::{code_of, kind_of};
use crate::wire::malformed;

const LAYOUT: Layout = Layout::new("copy requests", 1);
/// Requests without an outcome, at most.
pub(crate) const DEPTH: usize = 256;
const POSTED_WORD: usize = 8;
const FINISHED_WORD: usize = 16;
const ENDED_WORD: usize = 24;
const ENTRIES_WORD: usize = 64;
const ENTRY_WORDS: usize = 16;
const OUTCOME: usize = 8;
const TEXT_WORDS: usize = 7;
const BLOCKS_WORD: usize = ENTRIES_WORD + DEPTH * ENTRY_WORDS;
const BLOCK_WORDS: usize = 3;
/// Blocks in the ring of blocks.
const BLOCKS: usize = 1 << 16;
/// Blocks of one request, at most. Longer lists are several requests.
pub(crate) const MAX_PART_BLOCKS: usize = BLOCKS / 4;
const WORDS: usize = BLOCKS_WORD + BLOCKS * BLOCK_WORDS;
const OPEN_RING: &str = "open ring of copy requests";

/// A request that the service has copied out of shared memory. Nothing of it is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PostedRequest {
    number: u64,
    pair: u32,
    operation: Operation,
    blocks: Vec<Block>,
}

impl PostedRequest {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The number of the pair.
    pub(crate) fn pair(&self) -> u32 {
        self.pair
    }

    pub(crate) fn operation(&self) -> Operation {
        self.operation
    }

    pub(crate) fn into_blocks(self) -> Vec<Block> {
        self.blocks
    }
}

/// Why a request failed.
pub(crate) type Failure = (ErrorKind, String);

fn entry(number: u64) -> usize {
    ENTRIES_WORD + (number % DEPTH as u64) as usize * ENTRY_WORDS
}

fn block_at(number: u64) -> usize {
    BLOCKS_WORD + (number % BLOCKS as u64) as usize * BLOCK_WORDS
}

fn doorbell(words: &MappedWords) -> Option<Doorbell<WordRange<MappedWords>>> {
    let range = WordRange::new(words.clone(), 0, Doorbell::<MappedWords>::WORDS)?;
    Doorbell::new(range)
}

/// The service's side of a ring.
#[derive(Debug)]
pub(crate) struct ServiceRing {
    segment: Segment,
    words: MappedWords,
    /// Requests that were taken.
    taken: u64,
    finished: u64,
    /// Blocks in the ring of blocks of each request that was taken and has no outcome.
    blocks: [u32; DEPTH],
    blocks_in_progress: usize,
}

impl ServiceRing {
    pub(crate) fn create() -> Result<Self> {
        let segment = Segment::create(LAYOUT, WORDS * size_of::<u64>());
        let segment = segment.map_err(failed("accept client of the copy service"))?;
        segment.mark_ready();
        let (words, blocks) = (segment.words(), [0; DEPTH]);
        Ok(Self { words, segment, taken: 0, finished: 0, blocks, blocks_in_progress: 0 })
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.segment.as_fd()
    }

    /// What the client rings after it has posted requests.
    pub(crate) fn doorbell(&self) -> Option<Doorbell<WordRange<MappedWords>>> {
        doorbell(&self.words)
    }

    pub(crate) fn has_posted(&self) -> bool {
        self.words.load(POSTED_WORD, Acquire) != self.taken
    }

    /// The next request, copied out of shared memory. An error if the client does not keep to the
    /// protocol.
    pub(crate) fn take(&mut self) -> Result<Option<PostedRequest>> {
        const OPERATION: &str = "read copy request";
        let posted = self.words.load(POSTED_WORD, Acquire);
        if posted == self.taken {
            return Ok(None);
        }
        // A smaller word than before would repeat requests without end.
        let in_progress = self.taken - self.finished;
        if posted.wrapping_sub(self.taken) > DEPTH as u64 - in_progress {
            return Err(malformed(OPERATION, format!("{posted} requests posted")));
        }
        let number = self.taken;
        let [route, count, to, from, length, first] = self.read(entry(number));
        let operation = match route >> 32 {
            0 => Operation::Put,
            1 => Operation::Get,
            other => return Err(malformed(OPERATION, format!("operation {other}"))),
        };
        let blocks = match count {
            0 => vec![Block { to, from, length }],
            1.. if count <= MAX_PART_BLOCKS as u64
                && self.blocks_in_progress + count as usize <= BLOCKS =>
            {
                (0..count)
                    .map(|at| {
                        let [to, from, length] = self.read(block_at(first.wrapping_add(at)));
                        Block { to, from, length }
                    })
                    .collect()
            }
            _ => return Err(malformed(OPERATION, format!("{count} blocks"))),
        };
        self.taken += 1;
        self.blocks[(number % DEPTH as u64) as usize] = count as u32;
        self.blocks_in_progress += count as usize;
        Ok(Some(PostedRequest { number, pair: route as u32, operation, blocks }))
    }

    fn read<const N: usize>(&self, at: usize) -> [u64; N] {
        std::array::from_fn(|word| self.words.load(at + word, Relaxed))
    }

    /// The client is not served any more: the service ends, or has disconnected it. No copy of it is in
    /// flight.
    pub(crate) fn end(&self) {
        self.words.store(ENDED_WORD, 1, Release);
    }

    /// Writes the outcome of a request that was taken. The client has to be woken.
    pub(crate) fn finish(&mut self, number: u64, outcome: std::result::Result<(), Failure>) {
        let at = entry(number) + OUTCOME;
        let code = match &outcome {
            Ok(()) => 0,
            Err((kind, text)) => {
                let mut bytes = [0; TEXT_WORDS * size_of::<u64>()];
                let mut end = text.len().min(bytes.len());
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
                for (word, part) in bytes.as_chunks().0.iter().enumerate() {
                    self.words.store(at + 1 + word, u64::from_le_bytes(*part), Relaxed);
                }
                u64::from(code_of(*kind)) + 1
            }
        };
        let blocks = std::mem::take(&mut self.blocks[(number % DEPTH as u64) as usize]);
        self.blocks_in_progress -= blocks as usize;
        self.words.store(at, (number + 1) << 8 | code, Release);
        self.finished += 1;
        self.words.store(FINISHED_WORD, self.finished, Release);
    }
}

/// The client's side of a ring.
#[derive(Debug)]
pub(crate) struct ClientRing {
    words: MappedWords,
    doorbell: Doorbell<WordRange<MappedWords>>,
    posted: u64,
    /// Outcomes that were taken.
    finished: u64,
    next_block: u64,
}

impl ClientRing {
    pub(crate) fn open(file: OwnedFd) -> Result<Self> {
        let segment =
            Segment::open(file, LAYOUT).map_err(|e| malformed(OPEN_RING, e.to_string()))?;
        let words = segment.words();
        let doorbell = doorbell(&words).filter(|_| words.count() >= WORDS);
        let doorbell = doorbell.ok_or_else(|| malformed(OPEN_RING, "the segment is too short"))?;
        Ok(Self { words, doorbell, posted: 0, finished: 0, next_block: 0 })
    }

    /// Posts a request of at most [`MAX_PART_BLOCKS`] blocks, and returns its number. The caller has
    /// room for it, and rings afterwards.
    pub(crate) fn post(&mut self, pair: u32, operation: Operation, blocks: &[Block]) -> u64 {
        let number = self.posted;
        let route = u64::from(pair) | u64::from(operation == Operation::Get) << 32;
        let request = match blocks {
            [Block { to, from, length }] => [route, 0, *to, *from, *length, 0],
            _ => {
                let first = self.next_block;
                for (block, at) in blocks.iter().zip(first..) {
                    self.write(block_at(at), [block.to, block.from, block.length]);
                }
                self.next_block = first.wrapping_add(blocks.len() as u64);
                [route, blocks.len() as u64, 0, 0, 0, first]
            }
        };
        self.write(entry(number), request);
        self.posted += 1;
        self.words.store(POSTED_WORD, self.posted, Release);
        number
    }

    fn write<const N: usize>(&self, at: usize, values: [u64; N]) {
        for (word, value) in values.into_iter().enumerate() {
            self.words.store(at + word, value, Relaxed);
        }
    }

    pub(crate) fn ring(&self) {
        self.doorbell.ring();
    }

    /// Number of requests that were posted.
    pub(crate) fn posted(&self) -> u64 {
        self.posted
    }

    /// Has the service ended, with all its copies?
    pub(crate) fn has_ended(&self) -> bool {
        self.words.load(ENDED_WORD, Acquire) == 1
    }

    /// Are there outcomes that were not taken?
    #[inline]
    pub(crate) fn has_outcomes(&self) -> bool {
        self.words.load(FINISHED_WORD, Acquire) != self.finished
    }

    /// The outcome of a request, once.
    pub(crate) fn outcome(&mut self, number: u64) -> Option<Result<()>> {
        const OPERATION: &str = "copy by the copy service";
        let at = entry(number) + OUTCOME;
        let word = self.words.load(at, Acquire);
        if word >> 8 != number + 1 {
            return None;
        }
        self.finished += 1;
        let code = word as u8;
        if code == 0 {
            return Some(Ok(()));
        }
        let text: Vec<u8> = (0..TEXT_WORDS)
            .flat_map(|word| self.words.load(at + 1 + word, Relaxed).to_le_bytes())
            .take_while(|byte| *byte != 0)
            .collect();
        let kind = kind_of(code - 1).unwrap_or(ErrorKind::Failed);
        Some(Err(Error::new(OPERATION, kind, String::from_utf8_lossy(&text))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rings() -> (ServiceRing, ClientRing) {
        let service = ServiceRing::create().unwrap();
        let client = ClientRing::open(service.as_fd().try_clone_to_owned().unwrap()).unwrap();
        (service, client)
    }

    fn blocks(count: u64, first: u64) -> Vec<Block> {
        (first..first + count).map(|at| Block { to: at, from: 2 * at, length: 3 }).collect()
    }

    #[test]
    fn requests_and_outcomes_arrive_as_they_were_written() {
        let (mut service, mut client) = rings();
        let mut first = 0;
        for round in 0..3 * DEPTH as u64 {
            let count = [1, 2, 100, MAX_PART_BLOCKS as u64][round as usize % 4];
            let (posted, operation) = (blocks(count, first), Operation::Get);
            first += count;
            assert!(!service.has_posted());
            let number = client.post(7, operation, &posted);
            assert!(service.has_posted());
            let taken = service.take().unwrap().unwrap();
            assert_eq!(taken, PostedRequest { number, pair: 7, operation, blocks: posted });
            assert!(!client.has_outcomes() && client.outcome(number).is_none());
            let failure = (ErrorKind::Stale, "the region was withdrawn".to_owned());
            let is_good = round % 2 == 0;
            service.finish(number, if is_good { Ok(()) } else { Err(failure) });
            assert!(client.has_outcomes());
            match client.outcome(number).unwrap() {
                Ok(()) => assert!(is_good),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Stale);
                    assert!(error.to_string().contains("the region was withdrawn"), "{error}");
                }
            }
        }
    }

    #[test]
    fn requests_that_were_taken_are_not_taken_again() {
        for posted in 0..3 {
            let (mut service, mut client) = rings();
            for _ in 0..3 {
                client.post(1, Operation::Put, &blocks(1, 0));
            }
            (0..3).for_each(|_| drop(service.take().unwrap().unwrap()));
            client.words.store(POSTED_WORD, posted, Release);
            assert_eq!(service.take().unwrap_err().kind(), ErrorKind::Malformed, "{posted}");
        }
    }

    /// More than a client has room for: the service would keep copies of them.
    #[test]
    fn blocks_beyond_their_ring_are_refused() {
        let (mut service, mut client) = rings();
        for _ in 0..5 {
            client.post(1, Operation::Put, &blocks(MAX_PART_BLOCKS as u64, 0));
        }
        (0..4).for_each(|_| drop(service.take().unwrap().unwrap()));
        assert_eq!(service.take().unwrap_err().kind(), ErrorKind::Malformed);
        service.finish(2, Ok(()));
        assert_eq!(service.take().unwrap().unwrap().number(), 4);
    }

    #[test]
    fn outcomes_are_taken_in_any_order() {
        let (mut service, mut client) = rings();
        let numbers: Vec<_> =
            (0..DEPTH).map(|at| client.post(at as u32, Operation::Put, &blocks(1, 0))).collect();
        while let Some(taken) = service.take().unwrap() {
            assert_eq!(taken.number, u64::from(taken.pair));
        }
        for number in numbers.iter().rev() {
            service.finish(*number, Ok(()));
            client.outcome(*number).unwrap().unwrap();
        }
        assert!(!client.has_outcomes());
    }

    #[test]
    fn false_words_end_the_client_and_long_texts_are_cut() {
        let (mut service, mut client) = rings();
        let number = client.post(1, Operation::Put, &blocks(1, 0));
        service.take().unwrap().unwrap();
        service.finish(number, Err((ErrorKind::Failed, "ä".repeat(100))));
        let error = client.outcome(number).unwrap().unwrap_err().to_string();
        assert!(error.ends_with(&"ä".repeat(28)), "{error}");
        for (at, value) in [
            (POSTED_WORD, 2 + DEPTH as u64),
            (POSTED_WORD, 0),
            (entry(1), 5 << 32),
            (entry(1) + 1, MAX_PART_BLOCKS as u64 + 1),
        ] {
            let (mut service, mut client) = rings();
            let number = client.post(1, Operation::Put, &blocks(2, 0));
            service.take().unwrap().unwrap();
            service.finish(number, Ok(()));
            client.post(1, Operation::Put, &blocks(2, 0));
            client.words.store(at, value, Release);
            assert_eq!(service.take().unwrap_err().kind(), ErrorKind::Malformed, "{at}");
        }
    }
}

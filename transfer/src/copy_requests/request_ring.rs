//! The ring of a client's requests to the copy service, in shared memory.
//!
//! ```text
//! word 0     doorbell of the service
//! word 8     requests that the client has posted
//! word 16    outcomes that the service has written
//! word 24    1 after the service has ended, and with it all copies
//! word 64    entries of 16 words
//!              client:  pair and operation, number of blocks, one block (to, from, length),
//!                       first of several blocks, 1 if it begins after a stream, word that the
//!                       stream then writes
//!              service: outcome (number of the request, 0 or the code of an error and 1 more),
//!                       text of the error
//! after it   blocks of three words, in a ring of their own
//! ```
//!
//! The service creates it for one client. It copies a request out before it checks it, so a client
//! that changes it afterwards, or writes garbage, harms only itself.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use gpu::{Block, Device, Implementation, Memory, Slice};
use ipc::{Doorbell, Layout, MappedWords, Segment, WordRange, Words};

use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::path::Operation;
use crate::pinned::pin;
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
/// A stream of the client writes [a number of the request](start_of) into its lower half, the client
/// [`ABANDONED`] into the whole, if the request is not to begin.
const START: usize = 7;
const ABANDONED: u64 = 1 << 63;
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
const ORDER: &str = "order copy with stream";

/// A request that the service has copied out of shared memory. Nothing of it is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PostedRequest {
    number: u64,
    pair: u32,
    operation: Operation,
    blocks: Vec<Block>,
    follows_stream: bool,
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

    /// Does it begin after a stream of the client?
    pub(crate) fn follows_stream(&self) -> bool {
        self.follows_stream
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

/// The start of a request that follows a stream of its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Now,
    /// When the stream has written its word.
    Later,
    /// The client does not wait for its stream any more.
    Abandoned,
}

/// What a stream writes to let a request begin: never 0.
fn start_of(number: u64) -> u32 {
    (number as u32) << 1 | 1
}

fn block_at(number: u64) -> usize {
    BLOCKS_WORD + (number % BLOCKS as u64) as usize * BLOCK_WORDS
}

fn doorbell(words: &MappedWords) -> Option<Doorbell<WordRange<MappedWords>>> {
    let range = WordRange::new(words.clone(), 0, Doorbell::<MappedWords>::WORDS)?;
    Doorbell::new(range)
}

/// The outcome of a request: 0, or the code of an error and 1 more.
fn outcome_of(number: u64, code: u64) -> u64 {
    (number + 1) << 8 | code
}

/// Lets streams of the client go on that wait for a request whose service has ended.
#[derive(Debug)]
pub(crate) struct StreamRelease {
    words: MappedWords,
    number: u64,
}

impl StreamRelease {
    pub(crate) fn release(self) {
        let at = entry(self.number) + OUTCOME;
        if self.words.load(at, Acquire) < outcome_of(self.number, 0) {
            self.words.store(at, outcome_of(self.number, 1), Release);
        }
    }
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
        let [route, count, to, from, length, first, order] = self.read(entry(number));
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
        let (pair, follows_stream) = (route as u32, order != 0);
        Ok(Some(PostedRequest { number, pair, operation, blocks, follows_stream }))
    }

    /// Does a request begin that [follows](PostedRequest::follows_stream) a stream?
    pub(crate) fn start(&self, request: u64) -> Start {
        match self.words.load(entry(request) + START, Acquire) {
            word if word & ABANDONED != 0 => Start::Abandoned,
            word if word as u32 == start_of(request) => Start::Now,
            _ => Start::Later,
        }
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
        self.words.store(at, outcome_of(number, code), Release);
        self.finished += 1;
        self.words.store(FINISHED_WORD, self.finished, Release);
    }
}

/// The client's side of a ring.
#[derive(Debug)]
pub(crate) struct ClientRing {
    segment: Segment,
    words: MappedWords,
    /// The ring, for the streams of an implementation of devices.
    pinned: HashMap<Implementation, Memory>,
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
        let pinned = HashMap::new();
        Ok(Self { segment, words, pinned, doorbell, posted: 0, finished: 0, next_block: 0 })
    }

    /// Posts a request of at most [`MAX_PART_BLOCKS`] blocks, and returns its number. The caller has
    /// room for it, and rings afterwards. If it follows a stream, that writes its
    /// [word](Self::start_word) then.
    pub(crate) fn post(
        &mut self,
        pair: u32,
        operation: Operation,
        blocks: &[Block],
        follows_stream: bool,
    ) -> u64 {
        let number = self.posted;
        let route = u64::from(pair) | u64::from(operation == Operation::Get) << 32;
        let order = u64::from(follows_stream);
        let request = match blocks {
            [Block { to, from, length }] => [route, 0, *to, *from, *length, 0, order],
            _ => {
                let first = self.next_block;
                for (block, at) in blocks.iter().zip(first..) {
                    self.write(block_at(at), [block.to, block.from, block.length]);
                }
                self.next_block = first.wrapping_add(blocks.len() as u64);
                [route, blocks.len() as u64, 0, 0, 0, first, order]
            }
        };
        self.write(entry(number), request);
        self.words.store(entry(number) + START, 0, Relaxed);
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

    /// Makes the ring accessible to streams of a device.
    pub(crate) fn pin(&mut self, device: &Device) -> Result<()> {
        let implementation = device.name().implementation;
        if !self.pinned.contains_key(&implementation) {
            self.pinned.insert(implementation, pin(&self.segment, device)?);
        }
        Ok(())
    }

    fn word(&self, device: &Device, at: usize) -> Result<Slice> {
        let memory = self.pinned.get(&device.name().implementation);
        let memory = memory.ok_or("the ring is not pinned").map_err(failed(ORDER))?;
        let size = size_of::<u64>() as u64;
        memory.slice(at as u64 * size, size / 2).during(ORDER)
    }

    /// What a stream of this device writes to let a request begin that follows it: a word, and its
    /// value.
    pub(crate) fn start_word(&self, device: &Device, number: u64) -> Result<(Slice, u32)> {
        Ok((self.word(device, entry(number) + START)?, start_of(number)))
    }

    /// Lets a request begin whose stream has passed its point.
    pub(crate) fn start_now(&self, number: u64) {
        self.words.store(entry(number) + START, u64::from(start_of(number)), Release);
        self.ring();
    }

    /// Ends a request that follows a stream, unless it has begun.
    pub(crate) fn abandon(&self, number: u64) {
        self.words.store(entry(number) + START, ABANDONED, Release);
        self.ring();
    }

    /// What streams of this device wait for that follow a request: a word, and its least value.
    pub(crate) fn end_word(&self, device: &Device, number: u64) -> Result<(Slice, u32)> {
        Ok((self.word(device, entry(number) + OUTCOME)?, outcome_of(number, 0) as u32))
    }

    /// What lets streams go on that wait for a request, although the service has written no outcome.
    pub(crate) fn release_of(&self, number: u64) -> StreamRelease {
        StreamRelease { words: self.words.clone(), number }
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
            let number = client.post(7, operation, &posted, false);
            assert!(service.has_posted());
            let taken = service.take().unwrap().unwrap();
            assert_eq!((taken.number(), taken.pair(), taken.operation()), (number, 7, operation));
            assert_eq!(taken.into_blocks(), posted);
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
                client.post(1, Operation::Put, &blocks(1, 0), false);
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
            client.post(1, Operation::Put, &blocks(MAX_PART_BLOCKS as u64, 0), false);
        }
        (0..4).for_each(|_| drop(service.take().unwrap().unwrap()));
        assert_eq!(service.take().unwrap_err().kind(), ErrorKind::Malformed);
        service.finish(2, Ok(()));
        assert_eq!(service.take().unwrap().unwrap().number(), 4);
    }

    #[test]
    fn outcomes_are_taken_in_any_order() {
        let (mut service, mut client) = rings();
        let numbers: Vec<_> = (0..DEPTH)
            .map(|at| client.post(at as u32, Operation::Put, &blocks(1, 0), false))
            .collect();
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
        let number = client.post(1, Operation::Put, &blocks(1, 0), false);
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
            let number = client.post(1, Operation::Put, &blocks(2, 0), false);
            service.take().unwrap().unwrap();
            service.finish(number, Ok(()));
            client.post(1, Operation::Put, &blocks(2, 0), false);
            client.words.store(at, value, Release);
            assert_eq!(service.take().unwrap_err().kind(), ErrorKind::Malformed, "{at}");
        }
    }
}

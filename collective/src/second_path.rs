//! The second path between devices: by memory of the host that all ranks have pinned.
//!
//! A rank that gives copies chunks into its slots, and the others copy them out. Streams of the devices wait
//! for words in that memory, so that no host does. It carries the part of an operation that the fast path
//! leaves, while that carries the rest.

use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use gpu::{Device, Memory, Slice, Stream};
use ipc::Words;

use crate::members::Members;

/// Bytes that are copied at once: fewer are slower, more delay the first copy out.
pub(crate) const CHUNK: u64 = 4 << 20;
/// Slots of a rank.
const SLOTS: u32 = 8;
/// Bytes of a word: it has a line of its own.
const WORD: u64 = 64;
const PAGE: u64 = 4096;
/// Ranks that have slots, at most: memory that is pinned is missed elsewhere.
const MAX_RANKS: u32 = 8;
/// More than the chunks of any domain: a word that has it lets all streams continue.
const RELEASED: u32 = 1 << 30;

/// The second path, as one rank uses it.
#[derive(Debug)]
pub(crate) struct SecondPath {
    members: Arc<Members>,
    /// Where its memory begins in the segment, in bytes.
    first: u64,
    device: Device,
    open: Option<Open>,
    has_failed: bool,
    /// How many chunks each rank has given.
    given: Vec<u32>,
}

#[derive(Debug)]
struct Open {
    pinned: Memory,
    /// The streams that copy chunks of this rank into slots, and those of others out.
    give: Stream,
    take: Stream,
}

impl SecondPath {
    /// The words of the segment that so many ranks need, with space to begin at a page.
    pub(crate) fn required_words(ranks: u32) -> usize {
        let bytes = if ranks > MAX_RANKS { 0 } else { Self::slots_at(ranks) + ranks_bytes(ranks) };
        (bytes + PAGE) as usize / size_of::<u64>()
    }

    /// In the memory from this word on.
    pub(crate) fn new(members: Arc<Members>, first_word: usize, device: &Device) -> Self {
        let first = (first_word as u64 * size_of::<u64>() as u64).next_multiple_of(PAGE);
        let ranks = members.count();
        let given = vec![0; ranks as usize];
        let has_failed = !(2..=MAX_RANKS).contains(&ranks);
        Self { members, first, device: device.clone(), open: None, has_failed, given }
    }

    /// Words: of each rank how many chunks it has given, and how many each other one has taken of it.
    fn word_at(ranks: u32, giver: u32, taker: Option<u32>) -> u64 {
        let index =
            u64::from(giver) * (u64::from(ranks) + 1) + taker.map_or(0, |it| 1 + u64::from(it));
        index * WORD
    }

    fn slots_at(ranks: u32) -> u64 {
        Self::word_at(ranks, ranks, None).next_multiple_of(PAGE)
    }

    /// Returns whether it has space for so many bytes more of each rank.
    fn has_numbers(&self, bytes: u64) -> bool {
        let chunks = bytes / CHUNK + 1;
        self.given.iter().all(|given| u64::from(*given) + chunks < u64::from(RELEASED))
    }

    /// Pins the memory, once. Returns whether this rank can use the path for so many bytes.
    pub(crate) fn open(&mut self, bytes: u64) -> bool {
        if self.open.is_none() && !self.has_failed {
            match self.pin() {
                Ok(open) => self.open = Some(open),
                Err(error) => {
                    tracing::debug!(%error, "no second path between devices");
                    self.has_failed = true;
                }
            }
        }
        self.open.is_some() && self.has_numbers(bytes)
    }

    fn pin(&self) -> Result<Open, Box<dyn std::error::Error>> {
        let pinned = transfer::pin(self.members.segment(), &self.device)?;
        Ok(Open { pinned, give: self.device.stream()?, take: self.device.stream()? })
    }

    fn word(&self, open: &Open, giver: u32, taker: Option<u32>) -> gpu::Result<Slice> {
        let at = self.first + Self::word_at(self.members.count(), giver, taker);
        open.pinned.slice(at, size_of::<u32>() as u64)
    }

    fn slot(&self, open: &Open, giver: u32, chunk: u32, bytes: u64) -> gpu::Result<Slice> {
        let slot = u64::from(giver) * u64::from(SLOTS) + u64::from(chunk % SLOTS);
        let at = self.first + Self::slots_at(self.members.count()) + slot * CHUNK;
        open.pinned.slice(at, bytes)
    }

    /// The streams of the path: they follow what the caller lets them wait for.
    pub(crate) fn streams(&self) -> Option<[&Stream; 2]> {
        self.open.as_ref().map(|open| [&open.give, &open.take])
    }

    /// Gives bytes of this rank to all others.
    pub(crate) fn give(&self, from: &Slice) -> gpu::Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        let own = self.members.rank();
        let others = || (0..self.members.count()).filter(|rank| *rank != own);
        let ready = self.word(open, own, None)?;
        let mut number = self.given[own as usize];
        for at in (0..from.length()).step_by(CHUNK as usize) {
            let bytes = CHUNK.min(from.length() - at);
            // Until the others have taken the chunk that was in this slot.
            if let Some(taken) = (number + 1).checked_sub(SLOTS) {
                for other in others() {
                    open.give.wait_for_word(&self.word(open, own, Some(other))?, taken)?;
                }
            }
            open.give.copy(&self.slot(open, own, number, bytes)?, &from.slice(at, bytes)?)?;
            number += 1;
            open.give.write_word(&ready, number)?;
        }
        Ok(())
    }

    /// Takes bytes of another rank.
    pub(crate) fn take(&self, giver: u32, to: &Slice) -> gpu::Result<()> {
        let Some(open) = &self.open else { return Ok(()) };
        let (ready, taken) =
            (self.word(open, giver, None)?, self.word(open, giver, Some(self.members.rank()))?);
        let mut number = self.given[giver as usize];
        for at in (0..to.length()).step_by(CHUNK as usize) {
            let bytes = CHUNK.min(to.length() - at);
            let slot = self.slot(open, giver, number, bytes)?;
            number += 1;
            open.take.wait_for_word(&ready, number)?;
            open.take.copy(&to.slice(at, bytes)?, &slot)?;
            open.take.write_word(&taken, number)?;
        }
        Ok(())
    }

    /// Notes that a rank has given so many bytes, which all others have taken: all ranks do so.
    pub(crate) fn note(&mut self, giver: u32, bytes: u64) {
        let chunks = bytes.div_ceil(CHUNK) as u32;
        self.given[giver as usize] += chunks;
    }

    /// What lets streams continue that wait for words.
    pub(crate) fn release(&self) -> ReleaseWords {
        ReleaseWords { members: Arc::clone(&self.members), first: self.first }
    }
}

fn ranks_bytes(ranks: u32) -> u64 {
    u64::from(ranks) * u64::from(SLOTS) * CHUNK
}

/// Lets streams continue that wait for words, when operations are given up.
#[derive(Debug, Clone)]
pub(crate) struct ReleaseWords {
    members: Arc<Members>,
    first: u64,
}

impl ReleaseWords {
    pub(crate) fn run(&self) {
        let ranks = self.members.count();
        if !(2..=MAX_RANKS).contains(&ranks) {
            return;
        }
        for giver in 0..ranks {
            for taker in std::iter::once(None).chain((0..ranks).map(Some)) {
                let at = self.first + SecondPath::word_at(ranks, giver, taker);
                let first_word = at as usize / size_of::<u64>();
                let Some(word) = self.members.part(first_word, 1) else { continue };
                // Devices write its lower half meanwhile, and other ranks may do the same.
                let mut found = word.load(0, Acquire);
                while found < u64::from(RELEASED)
                    && let Err(other) = word.compare_exchange(0, found, found | u64::from(RELEASED))
                {
                    found = other;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use gpu::DeviceName;
    use testkit::bytes::pattern;
    use testkit::temp_dir::TempDir;

    use super::*;
    use crate::domain_key::CommDomainKey;
    use crate::domain_options::{DomainOptions, Kind};
    use crate::rendezvous::Offer;

    /// Runs each rank in a thread, with the path and a device.
    fn run(ranks: u32, each: impl Fn(SecondPath, Device) + Sync) {
        let directory = TempDir::new("second-path");
        let options = DomainOptions::new().directory(&directory);
        let key = CommDomainKey::of_first_ranks(ranks);
        std::thread::scope(|scope| {
            for rank in 0..ranks {
                let (options, key, each) = (&options, &key, &each);
                scope.spawn(move || {
                    let words = SecondPath::required_words;
                    let kind = Kind::new("second", crate::status_file::DomainKind::DeviceMemory, 0);
                    let joined = options.join(kind, key, rank, None, words, Offer::default());
                    let joined = joined.unwrap();
                    let first = joined.first_extra();
                    let device = Device::open(DeviceName::emulated(rank % 2)).unwrap();
                    let mut path = SecondPath::new(joined.into_members().0, first, &device);
                    assert!(path.open(1));
                    each(path, device);
                });
            }
        });
    }

    #[test]
    fn bytes_of_each_rank_reach_all_others() {
        const BYTES: u64 = 2 * CHUNK + 77;
        for ranks in [2, 3] {
            run(ranks, |mut path, device| {
                let own = path.members.rank();
                let (input, output) =
                    (device.allocate(BYTES).unwrap(), device.allocate(BYTES).unwrap());
                let stream = device.stream().unwrap();
                // Slots are used again.
                for round in 0..5 {
                    let bytes = |rank: u32| pattern(BYTES as usize, u64::from(rank + 10 * round));
                    stream.upload(&input.whole(), &bytes(own), gpu::DEFAULT_TIMEOUT).unwrap();
                    path.give(&input.whole()).unwrap();
                    for giver in (0..ranks).filter(|giver| *giver != own) {
                        path.take(giver, &output.whole()).unwrap();
                        let [_, take] = path.streams().unwrap();
                        let mut found = vec![0; BYTES as usize];
                        take.download(&output.whole(), &mut found, gpu::DEFAULT_TIMEOUT).unwrap();
                        assert!(found == bytes(giver), "round {round}");
                    }
                    (0..ranks).for_each(|giver| path.note(giver, BYTES));
                    let [give, _] = path.streams().unwrap();
                    give.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
                }
            });
        }
    }

    #[test]
    fn streams_continue_when_operations_are_given_up() {
        run(2, |mut path, device| {
            if path.members.rank() == 1 {
                return;
            }
            let memory = device.allocate(20 * CHUNK).unwrap();
            path.give(&memory.whole()).unwrap();
            path.take(1, &memory.whole()).unwrap();
            path.note(0, memory.length());
            let [give, take] = path.streams().unwrap();
            assert!(!give.is_done().unwrap() && !take.is_done().unwrap());
            let began = Instant::now();
            path.release().run();
            for stream in [give, take] {
                stream.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
            }
            assert!(began.elapsed() < Duration::from_secs(2));
        });
    }
}

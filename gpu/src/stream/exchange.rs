//! Exchanges among the devices of several processes: each device copies to the others, waits for them,
//! and reduces what they have copied, in one kernel.
#![allow(unsafe_code)]

use reduction::{DataType, ReduceOp};

use super::Stream;
use crate::error::{ErrorKind, Result};
use crate::memory::Slice;
use crate::raw_exchange::{
    MAX_BLOCKS, MAX_RANKS, RawExchange, RawPiece, RawPlace, RawWords, WORD_BYTES,
};

/// A place of an exchange.
#[derive(Debug, Clone, Copy)]
pub enum ExchangePlace<'a> {
    /// All bytes.
    Buffer(&'a Slice),
    /// A stage, which has space for a chunk of an exchange with an even number: another one, for odd
    /// numbers, is [`stage_distance`](Exchange::stage_distance) bytes behind, in the same memory.
    Stage(&'a Slice),
}

impl<'a> ExchangePlace<'a> {
    fn slice(self) -> &'a Slice {
        match self {
            Self::Buffer(slice) | Self::Stage(slice) => slice,
        }
    }
}

/// A copy of an exchange.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeCopy<'a> {
    /// Where the bytes go.
    pub to: ExchangePlace<'a>,
    /// Where they are.
    pub from: ExchangePlace<'a>,
    /// How many there are.
    pub bytes: u64,
    /// How many are copied with each number of the exchange: equal on the device that reads them.
    pub chunk: u64,
}

impl<'a> ExchangeCopy<'a> {
    /// A copy from buffer to buffer, at once.
    #[must_use]
    pub fn whole(to: &'a Slice, from: &'a Slice) -> Self {
        let bytes = from.length();
        let (to, from) = (ExchangePlace::Buffer(to), ExchangePlace::Buffer(from));
        Self { to, from, bytes, chunk: bytes }
    }
}

/// A reduction of an exchange.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeReduction<'a> {
    /// The type of the elements.
    pub data_type: DataType,
    /// How they are reduced.
    pub op: ReduceOp,
    /// The elements of each device, in the order in which they are reduced.
    pub sources: &'a [ExchangePlace<'a>],
    /// Where the result goes: to one or more places.
    pub results: &'a [ExchangePlace<'a>],
    /// The bytes of the elements of a device.
    pub bytes: u64,
    /// How many are reduced with each number of the exchange.
    pub chunk: u64,
}

/// An exchange, as one of its devices takes part.
///
/// First the device makes its `pushes`, usually to memory of the others. When all devices have, it
/// carries out the reduction. If results go to other devices (`is_gathered`), it waits for all once more.
/// Last come its `copies`. With several chunks it does so for each.
#[derive(Debug, Clone, Copy)]
pub struct Exchange<'a> {
    /// The number of this device among those of the exchange.
    pub rank: u32,
    /// The number of the first chunk: that of the last chunk before, plus one, on all devices. The first
    /// one is 1; numbers wrap.
    pub number: u32,
    /// The number of chunks, equal on all devices.
    pub chunks: u32,
    /// Bytes from the space of even chunks of a stage to that of odd ones.
    pub stage_distance: u64,
    /// Memory of each device, [`Exchange::WORD_BYTES`] that were zeroed before the first exchange, and
    /// that only exchanges use.
    pub words: &'a [Slice],
    /// A word in memory of the host: an exchange is given up when it is not 0.
    pub stop: &'a Slice,
    /// A word that gets the number of an exchange that was given up.
    pub failed: &'a Slice,
    /// Copies that begin at once.
    pub pushes: &'a [ExchangeCopy<'a>],
    /// The reduction of what all have pushed.
    pub reduction: Option<ExchangeReduction<'a>>,
    /// Set if the copies need the results of other devices.
    pub is_gathered: bool,
    /// Copies of what all have pushed, or stored as results.
    pub copies: &'a [ExchangeCopy<'a>],
    /// Blocks of the kernel, equal on all devices: each occupies a multiprocessor.
    pub blocks: u32,
}

impl Exchange<'_> {
    /// The most devices of an exchange.
    pub const MAX_RANKS: usize = MAX_RANKS;
    /// The most blocks.
    pub const MAX_BLOCKS: u32 = MAX_BLOCKS;
    /// Bytes of the words of a device.
    pub const WORD_BYTES: u64 = WORD_BYTES;
}

const OPERATION: &str = "exchange";

impl Stream {
    /// Takes part in an exchange with the devices of other processes. The device waits for them: they
    /// must take part, too, or the word `stop` must be written.
    ///
    /// ```
    /// use gpu::{Exchange, ExchangeCopy};
    /// # let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let stream = device.stream()?;
    /// let (from, to) = (device.allocate(4096)?, device.allocate(4096)?);
    /// let words = device.allocate(Exchange::WORD_BYTES + 8)?;
    /// stream.fill(&words.whole(), 0)?;
    /// stream.fill(&from.whole(), 7)?;
    /// stream.exchange(&Exchange {
    ///     rank: 0,
    ///     number: 1,
    ///     chunks: 1,
    ///     stage_distance: 0,
    ///     // The only device. Others give theirs by shared memory.
    ///     words: &[words.slice(0, Exchange::WORD_BYTES)?],
    ///     stop: &words.slice(Exchange::WORD_BYTES, 4)?,
    ///     failed: &words.slice(Exchange::WORD_BYTES + 4, 4)?,
    ///     pushes: &[ExchangeCopy::whole(&to.whole(), &from.whole())],
    ///     reduction: None,
    ///     is_gathered: false,
    ///     copies: &[],
    ///     blocks: 8,
    /// })?;
    /// let mut found = [0; 4096];
    /// stream.download(&to.whole(), &mut found, gpu::DEFAULT_TIMEOUT)?;
    /// assert_eq!(found, [7; 4096]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [copying](Self::copy); [`InvalidArgument`](ErrorKind::InvalidArgument) if lengths differ,
    /// there are too many copies, devices or blocks, or a word has no four aligned bytes.
    pub fn exchange(&self, exchange: &Exchange<'_>) -> Result<()> {
        let raw = self.raw_exchange(exchange)?;
        let copies = exchange.pushes.iter().chain(exchange.copies);
        let mut touched: Vec<&Slice> =
            copies.flat_map(|copy| [copy.to.slice(), copy.from.slice()]).collect();
        if let Some(reduction) = &exchange.reduction {
            touched.extend(
                reduction.sources.iter().chain(reduction.results).map(|place| place.slice()),
            );
        }
        touched.extend(exchange.words.iter().chain([exchange.stop, exchange.failed]));
        self.begin(OPERATION, &touched, None, |driver| {
            // SAFETY: all ranges are kept alive until an event behind the exchange is done.
            self.waits.begin(|| unsafe { driver.exchange(&raw, exchange.blocks) })
        })
    }

    fn raw_exchange(&self, exchange: &Exchange<'_>) -> Result<RawExchange> {
        let invalid =
            |detail: &str| Err(self.refuse(OPERATION, ErrorKind::InvalidArgument, detail.into()));
        let ranks = exchange.words.len();
        if ranks == 0 || ranks > MAX_RANKS || exchange.rank as usize >= ranks {
            return invalid("an exchange has 1 to 16 devices, of which this is one");
        }
        if exchange.blocks == 0 || exchange.blocks > MAX_BLOCKS {
            return invalid("an exchange has 1 to 256 blocks");
        }
        for words in exchange.words {
            self.check_writable(OPERATION, words)?;
            if words.length() != WORD_BYTES || !words.address().is_multiple_of(4) {
                return invalid("the words of a device have another length, or are not aligned");
            }
        }
        self.check_word(OPERATION, exchange.stop)?;
        self.check_word(OPERATION, exchange.failed)?;
        self.check_writable(OPERATION, exchange.failed)?;
        let words = exchange.words.iter().map(Slice::address);
        let (stop, failed) = (exchange.stop.address(), exchange.failed.address());
        let words = RawWords::new(exchange.rank, words, stop, failed);
        let Exchange { rank, number, chunks, .. } = *exchange;
        let mut raw = RawExchange::new(ranks as u32, rank, number, chunks, words);
        let pushes = self.raw_pieces(exchange.pushes, exchange)?;
        let copies = self.raw_pieces(exchange.copies, exchange)?;
        let distance = exchange.stage_distance;
        raw.set_copies(pushes, copies, exchange.is_gathered, distance);
        if let Some(reduction) = &exchange.reduction {
            let ExchangeReduction { data_type, op, bytes, chunk, .. } = *reduction;
            let size = data_type.size() as u64;
            let is_valid = reduction.sources.len() == ranks
                && (1..=MAX_RANKS).contains(&reduction.results.len())
                && bytes.is_multiple_of(size)
                && chunk.is_multiple_of(size)
                && chunk.checked_mul(chunks.into()).is_some_and(|all| all >= bytes);
            if !is_valid {
                return invalid(
                    "a reduction needs a source of each device, a result, and elements",
                );
            }
            let all = || reduction.sources.iter().chain(reduction.results);
            if !all().all(|place| place.slice().address().is_multiple_of(size)) {
                return invalid("elements are not aligned to their size");
            }
            let places = |places: &[ExchangePlace<'_>], is_written| {
                let place = |it| self.place(it, bytes, chunk, distance, is_written);
                places.iter().map(place).collect::<Result<Vec<_>>>()
            };
            let sources = places(reduction.sources, false)?;
            let results = places(reduction.results, true)?;
            raw.set_reduction(data_type, op, &sources, &results, [bytes, chunk]);
        }
        Ok(raw)
    }

    /// A place that has space for so many bytes.
    fn place(
        &self,
        place: &ExchangePlace<'_>,
        bytes: u64,
        chunk: u64,
        distance: u64,
        is_written: bool,
    ) -> Result<RawPlace> {
        let (slice, is_staged) = (place.slice(), matches!(place, ExchangePlace::Stage(_)));
        if is_written {
            self.check_writable(OPERATION, slice)?;
        } else {
            self.check_reach(OPERATION, slice)?;
        }
        let needed = if is_staged { chunk.min(bytes) } else { bytes };
        if slice.length() < needed {
            let detail = format!("{needed} bytes, in {} bytes", slice.length());
            return Err(self.refuse(OPERATION, ErrorKind::InvalidArgument, detail));
        }
        if is_staged {
            slice.memory().slice(slice.offset().saturating_add(distance), needed)?;
        }
        Ok(RawPlace::new(slice.address(), is_staged))
    }

    fn raw_pieces(
        &self,
        copies: &[ExchangeCopy<'_>],
        exchange: &Exchange<'_>,
    ) -> Result<[RawPiece; MAX_RANKS]> {
        let mut pieces = [RawPiece::default(); MAX_RANKS];
        if copies.len() > MAX_RANKS {
            let detail = format!("{} copies, at most {MAX_RANKS}", copies.len());
            return Err(self.refuse(OPERATION, ErrorKind::InvalidArgument, detail));
        }
        let distance = exchange.stage_distance;
        for (piece, copy) in pieces.iter_mut().zip(copies) {
            let ExchangeCopy { bytes, chunk, .. } = *copy;
            if chunk.checked_mul(exchange.chunks.into()).is_none_or(|all| all < bytes) {
                let chunks = exchange.chunks;
                let detail = format!("{bytes} bytes, in {chunks} chunks of {chunk} bytes");
                return Err(self.refuse(OPERATION, ErrorKind::InvalidArgument, detail));
            }
            let to = self.place(&copy.to, bytes, chunk, distance, true)?;
            let from = self.place(&copy.from, bytes, chunk, distance, false)?;
            *piece = RawPiece::new(from, to, bytes, chunk);
        }
        Ok(pieces)
    }
}

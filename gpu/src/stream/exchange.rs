//! Exchanges among the devices of several processes: each device copies to the others, waits for them,
//! and reduces what they have copied, in one kernel.
#![allow(unsafe_code)]

use reduction::{DataType, ReduceOp};

use super::Stream;
use crate::error::{ErrorKind, Result};
use crate::memory::Slice;
use crate::raw_exchange::{MAX_BLOCKS, MAX_RANKS, RawExchange, RawPiece, WORD_BYTES};

/// A copy of an exchange, of equal lengths.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeCopy<'a> {
    /// Where the bytes go.
    pub to: &'a Slice,
    /// Where they are.
    pub from: &'a Slice,
}

/// A reduction of an exchange.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeReduction<'a> {
    /// The type of the elements.
    pub data_type: DataType,
    /// How they are reduced.
    pub op: ReduceOp,
    /// The elements of each device, in the order in which they are reduced, all of one length.
    pub sources: &'a [Slice],
    /// Where the result goes: to one or more places of the same length.
    pub results: &'a [Slice],
}

/// An exchange, as one of its devices takes part.
///
/// First the device makes its `pushes`, usually to memory of the others. When all devices have, it
/// carries out the reduction. If results go to other devices (`is_gathered`), it waits for all once more.
/// Last come its `copies`.
#[derive(Debug, Clone, Copy)]
pub struct Exchange<'a> {
    /// The number of this device among those of the exchange.
    pub rank: u32,
    /// The number of the exchange: one more than that of the one before, on all devices; wraps.
    pub number: u32,
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
    ///     // The only device. Others give theirs by shared memory.
    ///     words: &[words.slice(0, Exchange::WORD_BYTES)?],
    ///     stop: &words.slice(Exchange::WORD_BYTES, 4)?,
    ///     failed: &words.slice(Exchange::WORD_BYTES + 4, 4)?,
    ///     pushes: &[ExchangeCopy { to: &to.whole(), from: &from.whole() }],
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
        let mut touched: Vec<&Slice> = copies.flat_map(|copy| [copy.to, copy.from]).collect();
        if let Some(reduction) = &exchange.reduction {
            touched.extend(reduction.sources.iter().chain(reduction.results));
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
        let address = |slices: &[Slice]| {
            let mut addresses = [0; MAX_RANKS];
            addresses.iter_mut().zip(slices).for_each(|(to, slice)| *to = slice.address());
            addresses
        };
        let words = address(exchange.words);
        let mut raw = RawExchange {
            ranks: ranks as u32,
            rank: exchange.rank,
            number: exchange.number,
            data_type: 0,
            op: 0,
            results_count: 0,
            has_second_phase: u32::from(exchange.is_gathered),
            unused: 0,
            own_words: words[exchange.rank as usize],
            words,
            stop: exchange.stop.address(),
            failed: exchange.failed.address(),
            pushes: self.raw_pieces(exchange.pushes)?,
            sources: [0; MAX_RANKS],
            results: [0; MAX_RANKS],
            reduced_bytes: 0,
            copies: self.raw_pieces(exchange.copies)?,
        };
        if let Some(reduction) = &exchange.reduction {
            let lengths = || reduction.sources.iter().chain(reduction.results).map(Slice::length);
            let Some(length) = lengths().next() else {
                return invalid("a reduction without sources");
            };
            let size = reduction.data_type.size() as u64;
            let is_valid = reduction.sources.len() == ranks
                && (1..=MAX_RANKS).contains(&reduction.results.len())
                && lengths().all(|it| it == length)
                && length.is_multiple_of(size);
            if !is_valid {
                return invalid(
                    "a reduction needs a source of each device, a result, and equal lengths",
                );
            }
            for slice in reduction.sources {
                self.check_reach(OPERATION, slice)?;
            }
            for slice in reduction.results {
                self.check_writable(OPERATION, slice)?;
            }
            let mut all = reduction.sources.iter().chain(reduction.results);
            if !all.all(|slice| slice.address().is_multiple_of(size)) {
                return invalid("elements are not aligned to their size");
            }
            raw.data_type = reduction.data_type as u32;
            raw.op = reduction.op as u32;
            raw.results_count = reduction.results.len() as u32;
            raw.sources = address(reduction.sources);
            raw.results = address(reduction.results);
            raw.reduced_bytes = length;
        }
        Ok(raw)
    }

    fn raw_pieces(&self, copies: &[ExchangeCopy<'_>]) -> Result<[RawPiece; MAX_RANKS]> {
        let mut pieces = [RawPiece::default(); MAX_RANKS];
        if copies.len() > MAX_RANKS {
            let detail = format!("{} copies, at most {MAX_RANKS}", copies.len());
            return Err(self.refuse(OPERATION, ErrorKind::InvalidArgument, detail));
        }
        for (piece, ExchangeCopy { to, from }) in pieces.iter_mut().zip(copies) {
            if to.length() != from.length() {
                let detail = format!("{} bytes to {} bytes", from.length(), to.length());
                return Err(self.refuse(OPERATION, ErrorKind::InvalidArgument, detail));
            }
            self.check_writable(OPERATION, to)?;
            self.check_reach(OPERATION, from)?;
            *piece = RawPiece { from: from.address(), to: to.address(), bytes: to.length() };
        }
        Ok(pieces)
    }
}

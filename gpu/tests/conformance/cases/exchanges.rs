//! Exchanges. The ranks are streams of one device here.

use gpu::{Exchange, ExchangeCopy, ExchangePlace, ExchangeReduction, Memory, Slice, Stream};
use reduction::{DataType, ReduceOp};

use super::Skip;
use crate::fixture::Fixture;

const RANKS: usize = 3;
const BLOCKS: u32 = 4;

/// The ranks of an exchange: a stream, words, and memory for each.
struct Ranks {
    streams: Vec<Stream>,
    words: Vec<Slice>,
    /// The words to stop, and of failures.
    state: Memory,
    number: u32,
}

impl Ranks {
    fn new(fixture: &Fixture) -> Self {
        let stream = || fixture.first.stream().unwrap();
        let streams: Vec<_> = (0..RANKS).map(|_| stream()).collect();
        let words = |_| fixture.first.allocate(Exchange::WORD_BYTES).unwrap().whole();
        let words: Vec<Slice> = (0..RANKS).map(words).collect();
        let state = fixture.first.allocate(4096).unwrap();
        words.iter().chain([&state.whole()]).for_each(|it| fixture.stream.fill(it, 0).unwrap());
        fixture.stream.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
        Self { streams, words, state, number: 0 }
    }

    /// What is common to all exchanges of a rank.
    fn base<'a>(&'a self, rank: usize, words: &'a [Slice; 2]) -> Exchange<'a> {
        Exchange {
            rank: rank as u32,
            number: self.number,
            chunks: 1,
            stage_distance: 0,
            words: &self.words,
            stop: &words[0],
            failed: &words[1],
            pushes: &[],
            reduction: None,
            is_gathered: false,
            copies: &[],
            blocks: BLOCKS,
        }
    }

    fn state_words(&self, rank: usize) -> [Slice; 2] {
        let failed = self.state.slice(64 + 4 * rank as u64, 4).unwrap();
        [self.state.slice(0, 4).unwrap(), failed]
    }

    fn synchronize(&self) {
        self.streams.iter().for_each(|it| it.synchronize(gpu::DEFAULT_TIMEOUT).unwrap());
    }
}

pub fn exchange_gathers_bytes_at_any_alignment(fixture: &Fixture) -> Result<(), Skip> {
    let mut ranks = Ranks::new(fixture);
    for (length, offset) in
        [(1, 0), (15, 1), (4096, 0), (4096, 4), (100_003, 0), (100_003, 3), (1 << 20, 16)]
    {
        ranks.number += 1;
        let memory = || fixture.first.allocate(offset + length * RANKS as u64).unwrap();
        let (inputs, stages, outputs) = (
            [(); RANKS].map(|()| memory()),
            [(); RANKS].map(|()| memory()),
            [(); RANKS].map(|()| memory()),
        );
        let block = |memory: &Memory, rank: usize| {
            memory.slice(offset + length * rank as u64, length).unwrap()
        };
        for (rank, input) in inputs.iter().enumerate() {
            fixture.fill(&block(input, 0), rank as u64 + 1);
        }
        for rank in 0..RANKS {
            let from = block(&inputs[rank], 0);
            // The stages of the others get the block of this rank, and its own output.
            let stages_of_others: Vec<_> = (0..RANKS)
                .map(|other| match other == rank {
                    true => block(&outputs[rank], rank),
                    false => block(&stages[other], rank),
                })
                .collect();
            let pushes: Vec<_> =
                stages_of_others.iter().map(|to| ExchangeCopy::whole(to, &from)).collect();
            let others: Vec<_> = (0..RANKS).filter(|other| *other != rank).collect();
            let copied: Vec<_> = others
                .iter()
                .map(|other| (block(&outputs[rank], *other), block(&stages[rank], *other)))
                .collect();
            let copies: Vec<_> =
                copied.iter().map(|(to, from)| ExchangeCopy::whole(to, from)).collect();
            let words = ranks.state_words(rank);
            let base = ranks.base(rank, &words);
            let exchange = Exchange { pushes: &pushes, copies: &copies, ..base };
            ranks.streams[rank].exchange(&exchange).unwrap();
        }
        ranks.synchronize();
        for output in &outputs {
            for rank in 0..RANKS {
                fixture.check(&block(output, rank), rank as u64 + 1);
            }
        }
    }
    Ok(())
}

/// Elements without NaN: those of integers are any, those of floating-point numbers small ones.
fn elements(data_type: DataType, count: usize, rank: usize) -> Vec<u8> {
    let number = |at: usize| (at * 31 + rank * 7 + 3) % 97;
    let bytes = |at: usize| -> Vec<u8> {
        let number = number(at);
        match data_type {
            DataType::F16 => (0x3c00 + number as u16 * 5).to_le_bytes().to_vec(),
            DataType::Bf16 => (0x3f80 + number as u16).to_le_bytes().to_vec(),
            DataType::F32 => (number as f32 / 7.0 - 3.0).to_le_bytes().to_vec(),
            DataType::F64 => (number as f64 / 7.0 - 3.0).to_le_bytes().to_vec(),
            other => (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
                [8 - other.size()..]
                .to_vec(),
        }
    };
    (0..count).flat_map(bytes).collect()
}

pub fn exchange_reduces_all_types_as_the_host_does(fixture: &Fixture) -> Result<(), Skip> {
    let mut ranks = Ranks::new(fixture);
    let memory = || fixture.first.allocate(1 << 16).unwrap();
    let inputs = [(); RANKS].map(|()| memory());
    let outputs = [(); RANKS].map(|()| memory());
    for data_type in DataType::ALL {
        for (count, offset) in [(1, 0), (1003, 0), (2048, 1)] {
            let size = data_type.size();
            let part = |memory: &Memory| {
                memory.slice((offset * size) as u64, (count * size) as u64).unwrap()
            };
            let given: Vec<_> = (0..RANKS).map(|rank| elements(data_type, count, rank)).collect();
            for (input, bytes) in inputs.iter().zip(&given) {
                fixture.stream.upload(&part(input), bytes, gpu::DEFAULT_TIMEOUT).unwrap();
            }
            for op in ReduceOp::ALL {
                ranks.number += 1;
                let sources = inputs.each_ref().map(part);
                // Rank 0 reduces the first half for all, rank 1 the rest, rank 2 nothing.
                let half = count / 2 * size;
                for rank in 0..RANKS {
                    let (begin, length) = [(0, half), (half, count * size - half), (0, 0)][rank];
                    let cut = |slice: &Slice| slice.slice(begin as u64, length as u64).unwrap();
                    let own_sources = sources.each_ref().map(cut);
                    let results = outputs.each_ref().map(|output| cut(&part(output)));
                    let own_sources = own_sources.each_ref().map(ExchangePlace::Buffer);
                    let results = results.each_ref().map(ExchangePlace::Buffer);
                    let reduction = (length > 0).then_some(ExchangeReduction {
                        data_type,
                        op,
                        sources: &own_sources,
                        results: &results,
                        bytes: length as u64,
                        chunk: length as u64,
                    });
                    let words = ranks.state_words(rank);
                    let base = ranks.base(rank, &words);
                    let exchange = Exchange { reduction, is_gathered: true, ..base };
                    ranks.streams[rank].exchange(&exchange).unwrap();
                }
                ranks.synchronize();
                let pointers: Vec<_> = given.iter().map(|bytes| bytes.as_ptr()).collect();
                let mut expected = vec![0; count * size];
                // SAFETY: vectors of so many elements.
                #[allow(unsafe_code)]
                unsafe {
                    reduction::reduce(op, data_type, expected.as_mut_ptr(), &pointers, count);
                }
                for output in &outputs {
                    let mut found = vec![0; count * size];
                    fixture
                        .stream
                        .download(&part(output), &mut found, gpu::DEFAULT_TIMEOUT)
                        .unwrap();
                    assert!(found == expected, "{op} of {count} {data_type}");
                }
            }
        }
    }
    Ok(())
}

/// All bytes go through stages, in chunks whose last one is shorter.
pub fn exchange_passes_chunks_through_stages(fixture: &Fixture) -> Result<(), Skip> {
    const CHUNK: u64 = 10_000;
    let mut ranks = Ranks::new(fixture);
    ranks.number = 1;
    let stage = || fixture.first.allocate(2 * CHUNK * RANKS as u64).unwrap();
    let stages = [(); RANKS].map(|()| stage());
    for (round, length) in [35_000, 9_999, 60_001].into_iter().enumerate() {
        let memory = |blocks: u64| fixture.first.allocate(length * blocks).unwrap();
        let inputs = [(); RANKS].map(|()| memory(1));
        let outputs = [(); RANKS].map(|()| memory(RANKS as u64));
        let chunks = length.div_ceil(CHUNK) as u32;
        for (rank, input) in inputs.iter().enumerate() {
            fixture.fill(&input.whole(), (round * RANKS + rank) as u64);
        }
        let slot =
            |stage: usize, rank: usize| stages[stage].slice(rank as u64 * CHUNK, CHUNK).unwrap();
        let block = |output: usize, rank: usize| {
            outputs[output].slice(rank as u64 * length, length).unwrap()
        };
        for (rank, input) in inputs.iter().enumerate() {
            let from = input.whole();
            let others: Vec<_> = (0..RANKS).filter(|other| *other != rank).collect();
            let places: Vec<_> = others
                .iter()
                .map(|other| (slot(*other, rank), slot(rank, *other), block(rank, *other)))
                .collect();
            let copy = |to, from| ExchangeCopy { to, from, bytes: length, chunk: CHUNK };
            let mut pushes = Vec::new();
            let mut copies = Vec::new();
            for (there, here, to) in &places {
                pushes.push(copy(ExchangePlace::Stage(there), ExchangePlace::Buffer(&from)));
                copies.push(copy(ExchangePlace::Buffer(to), ExchangePlace::Stage(here)));
            }
            let own = block(rank, rank);
            pushes.push(copy(ExchangePlace::Buffer(&own), ExchangePlace::Buffer(&from)));
            let words = ranks.state_words(rank);
            let base = ranks.base(rank, &words);
            let stage_distance = CHUNK * RANKS as u64;
            let exchange =
                Exchange { chunks, stage_distance, pushes: &pushes, copies: &copies, ..base };
            ranks.streams[rank].exchange(&exchange).unwrap();
        }
        ranks.number = ranks.number.wrapping_add(chunks);
        ranks.synchronize();
        for output in 0..RANKS {
            for rank in 0..RANKS {
                fixture.check(&block(output, rank), (round * RANKS + rank) as u64);
            }
        }
    }
    Ok(())
}

pub fn exchange_is_given_up_when_it_is_stopped(fixture: &Fixture) -> Result<(), Skip> {
    let mut ranks = Ranks::new(fixture);
    ranks.number = 5;
    let words = ranks.state_words(0);
    // The others do not take part.
    ranks.streams[0].exchange(&ranks.base(0, &words)).unwrap();
    assert!(!ranks.streams[0].is_done().unwrap());
    fixture.stream.write_word(&words[0], 1).unwrap();
    ranks.streams[0].synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
    let mut failed = [0; 4];
    fixture.stream.download(&words[1], &mut failed, gpu::DEFAULT_TIMEOUT).unwrap();
    assert_eq!(u32::from_le_bytes(failed), 5);
    Ok(())
}

pub fn invalid_exchanges_are_refused(fixture: &Fixture) -> Result<(), Skip> {
    let ranks = Ranks::new(fixture);
    let words = ranks.state_words(0);
    let memory = fixture.first.allocate(64).unwrap();
    let (short, long) = (memory.slice(0, 8).unwrap(), memory.slice(16, 16).unwrap());
    let base = ranks.base(0, &words);
    let copy = ExchangeCopy::whole(&short, &long);
    let slices = [short.clone(), short.clone(), long.clone()];
    let sources = slices.each_ref().map(ExchangePlace::Buffer);
    let (to, from) = (ExchangePlace::Stage(&short), ExchangePlace::Buffer(&long));
    let staged = ExchangeCopy { to, from, bytes: 16, chunk: 8 };
    let reduction = ExchangeReduction {
        data_type: DataType::F32,
        op: ReduceOp::Sum,
        sources: &sources,
        results: &sources[..1],
        bytes: 16,
        chunk: 16,
    };
    for exchange in [
        Exchange { rank: 3, ..base },
        Exchange { blocks: 0, ..base },
        Exchange { blocks: 257, ..base },
        Exchange { pushes: &[copy], ..base },
        Exchange { copies: &[copy; 17], ..base },
        Exchange { reduction: Some(reduction), ..base },
        Exchange { stop: &long, ..base },
        Exchange { words: &ranks.words[..0], ..base },
        Exchange { words: &slices, ..base },
        // One chunk of eight bytes of sixteen.
        Exchange { pushes: &[staged], ..base },
    ] {
        let error = ranks.streams[0].exchange(&exchange).unwrap_err();
        assert_eq!(error.kind(), gpu::ErrorKind::InvalidArgument, "{error}");
    }
    Ok(())
}

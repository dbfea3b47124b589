//! `fabricast bench zero`: cost of zeroing memory after reading, as a reader that polls it must.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::time::Instant;

use fabric::{Access, Domain, HostMemory, MemoryRegion};
use serde::Serialize;

use super::core_pair::core_pair;
use super::report::{Common, Metrics, Report, rounded};
use super::ring;
use crate::exchange::plan::{Exchange, Mode, OfferQuery, Plan, RingExchange, Wait, name_of};
use crate::exchange::{initiator, polled_exchange};
use crate::process::pin;
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::size;

/// Smaller pieces are zeroed many at a time, so that the cost of the clock is small; all of them
/// fit the first-level cache.
const MIN_ROUND_BYTES: usize = 16 << 10;
/// The memory's content before: no byte is zero.
const WRITTEN: u8 = 0xa5;
/// Empty measurements, which calibrate the clock.
const CLOCK_SAMPLES: usize = 1001;

/// Zeroes registered memory that was just read, as a reader that polls memory must.
///
/// In each round the bytes are written and read, then zeroed with the clock running: by
/// MemoryRegion::fill, and, in a separate round, by memset. So they are in the caches as far as
/// they fit, as after a consumer. Writer, reader and zeroer are one core.
///
/// With --mode, two processes send messages through such memory and verify them: size, payload and
/// a done flag, without notices. The reader polls the flag and zeroes what it read. To be compared
/// with bench ring. The last line of the output is one JSON object.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Exact name of the provider that registers the memory: shm, tcp, net, …
    #[arg(long, value_name = "NAME")]
    provider: String,
    /// Send messages: latency or bandwidth [default: only zero memory]
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Bytes zeroed by one call, or of a message; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64")]
    size: u64,
    /// Rounds of either method, in one of which at least 16K are zeroed; or messages; accepts K, M,
    /// G
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "1000")]
    iterations: u64,
    /// Core of the process [default: not pinned]
    #[arg(long, value_name = "N", conflicts_with = "mode")]
    core: Option<usize>,
    /// Cores of the two processes, A,B [default: not pinned]
    #[arg(long, value_name = "A,B", value_delimiter = ',', requires = "mode")]
    cores: Option<Vec<usize>>,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
}

/// The common part is of one call of `MemoryRegion::fill`.
#[derive(Debug, Serialize)]
struct ZeroMetrics {
    memset_p50_us: Option<f64>,
    memset_p99_us: Option<f64>,
    memset_gb_per_s: f64,
    cache: &'static str,
    /// Calls in a round.
    calls: usize,
    /// Cost of the clock, subtracted from each round.
    clock_ns: u64,
    libfabric: String,
}

/// The memory, a whole number of pieces.
struct ZeroRegion {
    region: MemoryRegion,
    size: usize,
    count: usize,
}

#[derive(Debug, Clone, Copy)]
enum Method {
    Fill,
    Memset,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.size > 1 << 40 || arguments.iterations > 1 << 30 {
        return Err(Failure::new(Exit::Usage, "at most 1G rounds or messages, of 1024G each"));
    }
    match arguments.mode {
        Some(mode) => send_messages(arguments, mode),
        None => zero_memory(arguments),
    }
}

/// Sends messages through memory that the reader polls and zeroes.
fn send_messages(arguments: &Arguments, mode: Mode) -> Result<(), Failure> {
    let capacity = 8 << 20;
    let exchange = RingExchange {
        mode,
        size: arguments.size,
        capacity,
        watermark: capacity / 4,
        chunk: 1 << 20,
        notify: None,
        iterations: arguments.iterations,
        warmup: (arguments.iterations / 10 + 1).min(1000),
    };
    let [local, remote] = core_pair(arguments.cores.as_deref())?;
    let plan = Plan {
        offer_query: OfferQuery::new(&arguments.provider),
        waiting: Wait::Poll,
        core: remote,
        exchange: Exchange::Polled(exchange.clone()),
    };
    let result = polled_exchange::run(initiator::start(&plan, local)?, &exchange)?;
    let settings = Common {
        provider: arguments.provider.clone(),
        waiting: name_of(plan.waiting),
        cores: arguments.cores.clone(),
        ..Common::default()
    };
    ring::report(settings, &exchange, result).conclude(arguments.json)
}

fn zero_memory(arguments: &Arguments) -> Result<(), Failure> {
    let size = arguments.size as usize;
    if let Some(core) = arguments.core {
        pin(core)?;
    }
    let domain = Domain::open(&OfferQuery::new(&arguments.provider).offer()?)?;
    let count = MIN_ROUND_BYTES.div_ceil(size);
    let memory = HostMemory::zeroed(count * size)?;
    // As memory that a peer writes.
    let region = domain.register(memory, Access::REMOTE_WRITE)?;
    let pieces = ZeroRegion { region, size, count };
    let clock_ns = clock();
    let (mut fill, mut memset) = (Vec::new(), Vec::new());
    let mut verified = true;
    for round in 0..=arguments.iterations {
        for (method, samples) in [(Method::Fill, &mut fill), (Method::Memset, &mut memset)] {
            let (took, is_right) = pieces.round(method)?;
            verified &= is_right;
            // The first round allocates pages.
            if round > 0 {
                samples.push(took.saturating_sub(clock_ns));
            }
        }
    }
    let [fill, memset] = [fill, memset]
        .map(|all| Common::of(&all.into_iter().collect::<Histogram>(), 1.0 / count as f64));
    let rate = |all: &Common| {
        all.p50_us.map_or(0.0, |p50| rounded(arguments.size as f64 / p50.max(1e-6) / 1e3))
    };
    let found = ZeroMetrics {
        memset_p50_us: memset.p50_us,
        memset_p99_us: memset.p99_us,
        memset_gb_per_s: rate(&memset),
        cache: "written, then read, by the same core just before",
        calls: count,
        clock_ns,
        libfabric: fabric::Version::running().to_string(),
    };
    let common = Common {
        gb_per_s: rate(&fill),
        bytes: arguments.size,
        iterations: arguments.iterations,
        provider: arguments.provider.clone(),
        waiting: "none".to_owned(),
        cores: arguments.core.map(|core| vec![core]),
        verified,
        ..fill
    };
    Report::new(common, found).conclude(arguments.json)
}

/// Nanoseconds between two reads of the clock.
fn clock() -> u64 {
    let samples = (0..CLOCK_SAMPLES).map(|_| {
        let start = Instant::now();
        start.elapsed().as_nanos() as u64
    });
    samples.collect::<Histogram>().quantile(0.5).unwrap_or_default()
}

impl ZeroRegion {
    /// The elapsed nanoseconds, and whether all bytes were correct.
    fn round(&self, method: Method) -> Result<(u64, bool), Failure> {
        self.region.fill(0..self.count * self.size, WRITTEN)?;
        let was_written = self.holds(WRITTEN)?;
        let start = Instant::now();
        match method {
            Method::Fill => self.by_fill()?,
            Method::Memset => self.by_memset(),
        }
        let took = start.elapsed().as_nanos() as u64;
        Ok((took, was_written && self.holds(0)?))
    }

    fn by_fill(&self) -> Result<(), Failure> {
        for piece in 0..self.count {
            let from = black_box(piece * self.size);
            self.region.fill(from..from + self.size, 0)?;
        }
        Ok(())
    }

    fn by_memset(&self) {
        for piece in 0..self.count {
            let from = black_box(piece * self.size);
            // SAFETY: inside the region; no other clone of it exists, and no peer has its key.
            unsafe { self.region.as_ptr().add(from).write_bytes(0, self.size) };
        }
    }

    /// Does all of it have this value?
    fn holds(&self, byte: u8) -> Result<bool, Failure> {
        let mut bytes = [0; 4096];
        let length = self.count * self.size;
        let mut is_right = true;
        for from in (0..length).step_by(bytes.len()) {
            let bytes = &mut bytes[..(length - from).min(4096)];
            self.region.read(from, bytes)?;
            is_right &= bytes.iter().fold(true, |all, found| all & (*found == byte));
        }
        Ok(is_right)
    }
}

impl Metrics for ZeroMetrics {
    const FAILURE_TEXT: &str = "memory has wrong content";

    fn to_text(&self, common: &Common) -> String {
        let [p50, p99, _] = common.percentiles();
        format!(
            "{} of memory of {} zeroed: p50 {p50:.4}, p99 {p99:.4} us, {:.1} GB/s; by memset \
             {:.4}, {:.4} us, {:.1} GB/s\n",
            size::print(common.bytes),
            common.provider,
            common.gb_per_s,
            self.memset_p50_us.unwrap_or_default(),
            self.memset_p99_us.unwrap_or_default(),
            self.memset_gb_per_s,
        )
    }
}

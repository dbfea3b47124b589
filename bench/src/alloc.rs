//! `fabricast bench alloc`: allocate and free, in one process or in several at once.

use std::time::Instant;

use ipc::{Allocator, MappedWords, Owner, WordRange};
use serde::{Deserialize, Serialize};

use super::report::{Common, Metrics, Report};
use super::worker_group::{SharedSegment, Task, WorkerGroup, WorkerResult, empty_histogram};
use crate::process::count_involuntary_switches;
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::{size, text};

/// Blocks that each process holds.
const LIVE: u64 = 100;
/// Bytes of a granule.
const GRANULE: u64 = 256;

/// Allocates and frees blocks with an allocator whose metadata is in shared memory.
///
/// Each process holds some blocks, and repeatedly frees one of them and allocates another: one
/// pair. The last line of the output is one JSON object.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of processes
    #[arg(long, value_name = "N", value_parser = size::parse_positive, default_value = "1")]
    processes: u64,
    /// Cores of the processes, A,B,… [default: not pinned]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// The largest block, in bytes; sizes are random up to it; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64K")]
    size: u64,
    /// All blocks have the largest size
    #[arg(long)]
    fixed: bool,
    /// Pairs of each process; accepts K, M, G
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "1M")]
    iterations: u64,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
}

/// The task of each process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Work {
    largest: u64,
    is_fixed: bool,
    iterations: u64,
    seed: u64,
}

#[derive(Debug, Serialize)]
struct AllocMetrics {
    p9999_us: Option<f64>,
    max_us: Option<f64>,
    /// Of a pair, without the clock that is read around each for the percentiles.
    mean_ns: f64,
    processes: u64,
    /// Number of involuntary context switches of all processes. A process that is preempted while
    /// it holds the lock delays all others.
    involuntary_switches: u64,
    live_blocks: u64,
    fixed: bool,
    /// Hundreds of pairs: in the JSON line only.
    #[serde(skip_serializing_if = "Option::is_none")]
    histogram_ns: Option<Vec<(u64, u64)>>,
}

type SharedAllocator = Allocator<WordRange<MappedWords>>;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let refuse = |why: &str| Err(Failure::new(Exit::Usage, why));
    let processes = arguments.processes;
    if processes > 64 || arguments.size > 1 << 30 {
        return refuse("at most 64 processes, and blocks of 1G");
    }
    let cores = arguments.cores.clone();
    if cores.as_ref().is_some_and(|cores| cores.len() as u64 != processes) {
        return refuse("--cores needs one core per process");
    }
    let max_blocks = (4 * processes * (LIVE + 1) + 64) as u32;
    let mut group = WorkerGroup::new(SharedAllocator::required_words(max_blocks))?;
    let allocator =
        SharedAllocator::format(group.shared.part()?, max_blocks, GRANULE).map_err(Failure::of)?;
    // Twice the held memory, so that no search fails.
    let memory = 2 * processes * (LIVE + 1) * arguments.size.next_multiple_of(GRANULE);
    allocator.extend(&group.shared.caller(), 0, memory).map_err(Failure::of)?;
    let tasks: Vec<_> = (0..processes)
        .map(|number| {
            let work = Work {
                largest: arguments.size,
                is_fixed: arguments.fixed,
                iterations: arguments.iterations,
                seed: number + 1,
            };
            let core = cores.as_ref().map(|cores| cores[number as usize]);
            (work, core)
        })
        .collect();
    group.start_workers(&tasks)?;
    group.begin()?;
    let results = group.results()?;
    let caller = group.shared.caller();
    let is_sound = allocator.audit(&caller).map_err(Failure::of)?.is_ok()
        && allocator.statistics(&caller).map_err(Failure::of)?.free == memory;
    report(arguments, &results, is_sound).conclude(arguments.json)
}

impl Metrics for AllocMetrics {
    const FAILURE_TEXT: &str = "blocks overlapped or were lost";

    fn to_text(&self, common: &Common) -> String {
        let [p50, p99, p999] = common.percentiles();
        format!(
            "{}, {:.1} ns a pair; with the clock around each: p50 {p50:.3}, p99 {p99:.3}, \
             p99.9 {p999:.3}, p99.99 {:.3} us\n",
            text::count_of_irregular(self.processes, "process", "processes"),
            self.mean_ns,
            self.p9999_us.unwrap_or_default(),
        )
    }
}

fn report(arguments: &Arguments, results: &[WorkerResult], is_sound: bool) -> Report<AllocMetrics> {
    let samples: Histogram = results.iter().map(|done| &done.samples).collect();
    let pairs: u64 = results.iter().map(|done| done.iterations).sum();
    let elapsed: u64 = results.iter().map(|done| done.elapsed).sum();
    let common = Common {
        bytes: arguments.size,
        iterations: arguments.iterations,
        provider: "tlsf".to_owned(),
        waiting: "lock".to_owned(),
        cores: arguments.cores.clone(),
        verified: is_sound && results.iter().all(|done| done.verified),
        ..Common::of(&samples, 1.0)
    };
    let found = AllocMetrics {
        p9999_us: samples.microseconds(0.9999),
        max_us: samples.microseconds(1.0),
        mean_ns: elapsed as f64 / pairs.max(1) as f64,
        processes: arguments.processes,
        involuntary_switches: results.iter().map(|done| done.involuntary_switches).sum(),
        live_blocks: LIVE,
        fixed: arguments.fixed,
        histogram_ns: arguments.json.then(|| samples.buckets()),
    };
    Report::new(common, found)
}

impl Task for Work {
    const NAME: &'static str = "alloc";
    type Detail = ();

    fn run(
        &self,
        shared: &SharedSegment,
        ready: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<WorkerResult<Self::Detail>, Failure> {
        let allocator = SharedAllocator::attach(shared.part()?).map_err(Failure::of)?;
        let caller = shared.caller();
        let owner = Owner::participant(caller.me);
        let mut random = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let bytes = |random: u64| {
            if self.is_fixed { self.largest } else { random % self.largest + 1 }
        };
        let mut held = Vec::new();
        for _ in 0..LIVE {
            let (block, _) =
                allocator.allocate(&caller, owner, bytes(next()), 1).map_err(Failure::of)?;
            held.push(block);
        }
        ready()?;
        let involuntary_switches = count_involuntary_switches();
        let mut samples = empty_histogram();
        let mut pair = |which: u64, size: u64| {
            let held = &mut held[(which % LIVE) as usize];
            allocator.free(&caller, *held, owner).map_err(Failure::of)?;
            *held = allocator.allocate(&caller, owner, size, 1).map_err(Failure::of)?.0;
            Ok::<_, Failure>(())
        };
        let half = self.iterations.div_ceil(2);
        let start = Instant::now();
        for _ in 0..half {
            pair(next(), bytes(next()))?;
        }
        let elapsed = start.elapsed().as_nanos() as u64;
        for _ in 0..half {
            let (which, size) = (next(), bytes(next()));
            let before = Instant::now();
            pair(which, size)?;
            samples.add(before.elapsed().as_nanos() as u64);
        }
        // The held blocks of this process must not overlap; the audit at the end checks those of all.
        let mut places = Vec::new();
        for block in held {
            places.push(allocator.find(block).map_err(Failure::of)?);
            allocator.free(&caller, block, owner).map_err(Failure::of)?;
        }
        places.sort_unstable_by_key(|place| place.offset);
        let verified = places.windows(2).all(|two| two[0].offset + two[0].length <= two[1].offset);
        let involuntary_switches = count_involuntary_switches() - involuntary_switches;
        Ok(WorkerResult {
            samples,
            elapsed,
            iterations: half,
            verified,
            involuntary_switches,
            ..WorkerResult::default()
        })
    }
}

//! `fabricast bench queue`: from a publisher in one process to readers in others.

use std::time::{Duration, Instant};

use ipc::{MappedWords, OverflowPolicy, Queue, QueueSetup, WaitStrategy, WordRange};
use serde::{Deserialize, Serialize};

use super::report::{Common, Metrics, Report, rounded};
use super::worker_group::{
    LONGEST, SharedSegment, Task, WorkerGroup, WorkerResult, empty_histogram, now,
};
use crate::exchange::plan::{Wait, name_of};
use crate::process::{pin, processor_time};
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::{size, text};

/// Publication time, number, and their sum.
type BenchQueue = Queue<WordRange<MappedWords>, 3>;

const DEPTH: u32 = 64;

/// Publishes entries one at a time, and measures when each reader has them.
///
/// The last line of the output is one JSON object. Latency is one way, from before the call that
/// publishes to after the call that takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of readers, each a process
    #[arg(long, value_name = "N", value_parser = size::parse_positive, default_value = "1")]
    readers: u64,
    /// Cores of the publisher and the readers, A,B,… [default: not pinned]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// How readers wait
    #[arg(long, value_enum, default_value_t = Wait::Default)]
    waiting: Wait,
    /// Entries; accepts K, M, G
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "100K")]
    iterations: u64,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
}

/// The task of a reader.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ReaderTask {
    waiting: Wait,
    iterations: u64,
}

#[derive(Debug, Serialize)]
struct QueueMetrics {
    readers: u64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let refuse = |why: &str| Err(Failure::new(Exit::Usage, why));
    if arguments.readers > 32 {
        return refuse("at most 32 readers");
    }
    let cores = arguments.cores.as_ref();
    if cores.is_some_and(|cores| cores.len() as u64 != arguments.readers + 1) {
        return refuse("--cores needs one core for the publisher and one per reader");
    }
    let setup = QueueSetup { depth: DEPTH, max_held: 1, overflow_policy: OverflowPolicy::Reject };
    let mut group = WorkerGroup::new(BenchQueue::required_words(setup))?;
    let queue = BenchQueue::format(group.shared.part()?, setup).map_err(Failure::of)?;
    let reader_task = ReaderTask { waiting: arguments.waiting, iterations: arguments.iterations };
    let tasks: Vec<_> = (0..arguments.readers)
        .map(|reader| (reader_task.clone(), cores.map(|all| all[reader as usize + 1])))
        .collect();
    if let Some(cores) = cores {
        pin(cores[0])?;
    }
    group.start_workers(&tasks)?;
    group.begin()?;
    let caller = group.shared.caller();
    let mut here = Duration::ZERO;
    let pause = arguments.waiting.pause();
    let end = Instant::now() + LONGEST;
    let mut spin = WaitStrategy::Busy;
    for number in 0..arguments.iterations {
        let resting = Instant::now();
        while resting.elapsed() < pause {
            std::hint::spin_loop();
        }
        let processor_time_before = processor_time();
        let stamp = now();
        let entry = [stamp, number, stamp ^ number];
        let published =
            queue.publish_until(&caller, entry, &mut spin, end, |_| {}).map_err(Failure::of)?;
        while !queue.is_released(published.position) {
            std::hint::spin_loop();
            if Instant::now() > end {
                return Err(Failure::new(
                    Exit::Deadline,
                    "read queue failed: readers stopped reading",
                ));
            }
        }
        here += processor_time() - processor_time_before;
    }
    let results = group.results::<Duration>()?;
    let of_each =
        |time: Duration| Some(rounded(time.as_secs_f64() * 1e6 / arguments.iterations as f64));
    let samples: Histogram = results.iter().map(|done| &done.samples).collect();
    let common = Common {
        bytes: 24,
        iterations: arguments.iterations,
        provider: "queue".to_owned(),
        waiting: name_of(arguments.waiting),
        cpu_us: of_each(here),
        peer_cpu_us: of_each(results.iter().map(|done| done.detail).sum()),
        cores: arguments.cores.clone(),
        verified: results.iter().all(|done| done.verified),
        ..Common::of(&samples, 1.0)
    };
    Report::new(common, QueueMetrics { readers: arguments.readers }).conclude(arguments.json)
}

impl Metrics for QueueMetrics {
    const FAILURE_TEXT: &str = "entries were lost or corrupted";

    fn to_text(&self, common: &Common) -> String {
        let [p50, p99, p999] = common.percentiles();
        format!(
            "{}, {}: p50 {p50:.3}, p99 {p99:.3}, p99.9 {p999:.3} us one way\n",
            text::count_of(self.readers, "reader"),
            common.waiting,
        ) + &common.waiting_line("all readers")
    }
}

impl Task for ReaderTask {
    const NAME: &'static str = "queue";
    /// Processor time.
    type Detail = Duration;

    fn run(
        &self,
        shared: &SharedSegment,
        ready: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<WorkerResult<Self::Detail>, Failure> {
        let queue = BenchQueue::attach(shared.part()?).map_err(Failure::of)?;
        let mut subscriber = queue.subscribe(&shared.caller()).map_err(Failure::of)?;
        subscriber.set_wait_strategy(self.waiting.wait_strategy());
        let mut samples = empty_histogram();
        ready()?;
        let processor_time_before = processor_time();
        let (start, end) = (Instant::now(), Instant::now() + LONGEST);
        let mut verified = true;
        for number in 0..self.iterations {
            let taken = queue.take_until(&mut subscriber, end);
            let seen = now();
            let Some(taken) = taken else {
                return Err(Failure::new(
                    Exit::Deadline,
                    format!("read queue failed: entry {number} did not arrive"),
                ));
            };
            let [stamp, its_number, both] = taken.entry;
            verified &= its_number == number && both == stamp ^ number;
            samples.add(seen.saturating_sub(stamp));
            if queue.release(&subscriber, taken.position).is_some() {
                queue.mark_disposed(taken.position);
            }
        }
        let elapsed = start.elapsed().as_nanos() as u64;
        Ok(WorkerResult {
            samples,
            elapsed,
            iterations: self.iterations,
            verified,
            detail: processor_time() - processor_time_before,
            ..WorkerResult::default()
        })
    }
}

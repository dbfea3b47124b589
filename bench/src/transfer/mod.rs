//! `fabricast bench transfer`: puts and gets between the memories of two processes, compared with a
//! copy within one.

mod link_counters;
mod memcpy_baseline;
mod side;
mod staged_baseline;

use std::path::PathBuf;
use std::time::Duration;

use gpu::{Block, CopyMethod, Device, DeviceName, Implementation};
use serde::{Deserialize, Serialize};
use transfer::path::{Operation, Policy};
use transfer::{Agent, PeerId, PreparedTransfer, Route};

use link_counters::{LinkCounterSample, LinkTraffic};
use memcpy_baseline::MemcpyBaseline;
use side::{ANSWER, END, FILL, INITIATOR_LABEL, Side, TIMED, VERIFY, next_notice, notice};
use staged_baseline::StagedBaseline;

use super::core_pair::core_pair;
use super::exchange::plan::{Wait, name_of};
use super::report::{Common, Metrics, Report, median, rounded};
use super::worker_group::{WorkerGroup, leave, now, take};
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::size;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Interleaved rounds of transfer and baseline.
const ROUNDS: usize = 11;
/// How often everything is filled, moved and compared.
const VERIFY_ROUNDS: u64 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Direction {
    /// From the initiator's memory to the target's
    Put,
    /// From the target's memory to the initiator's
    Get,
}

/// Type of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Source {
    /// Allocated to be shared, as pools are
    Shared,
    /// Allocated like memory of cudaMalloc
    Plain,
    /// Host memory in a segment that both can map; --from and --to select which side
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Baseline {
    /// A copy and a wait for it, in one process that has both memories
    Memcpy,
    /// Copies through pinned host memory, of both directions at once, in one process that has both
    /// memories
    Staged,
}

/// The copies of a baseline.
enum BaselineCopies {
    Memcpy(Box<MemcpyBaseline>),
    Staged(Box<StagedBaseline>),
}

impl BaselineCopies {
    fn new(
        which: Baseline,
        from: &Device,
        to: DeviceName,
        operation: Operation,
        length: u64,
    ) -> Result<Self, Failure> {
        Ok(match which {
            Baseline::Memcpy => {
                Self::Memcpy(Box::new(MemcpyBaseline::new(from, to, operation, length)?))
            }
            Baseline::Staged => {
                Self::Staged(Box::new(StagedBaseline::new(from, to, operation, length)?))
            }
        })
    }

    fn once(&self) -> Result<u64, Failure> {
        match self {
            Self::Memcpy(copies) => copies.once(),
            Self::Staged(copies) => copies.once(),
        }
    }
}

/// Moves bytes between the memories of two processes, and notifies the other one.
///
/// The time of a put is from its start until the other process has the notification, that of a get
/// until the data is here. The last line of the output is one JSON object.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Device of the initiator [default: cuda:0 if there is one, else emulated:0]
    #[arg(long, value_name = "DEVICE", value_parser = device)]
    from: Option<DeviceName>,
    /// Device of the target [default: the next one, if there is one]
    #[arg(long, value_name = "DEVICE", value_parser = device)]
    to: Option<DeviceName>,
    /// Direction of the transfer
    #[arg(long, value_enum, default_value = "put")]
    op: Direction,
    /// Bytes of a block; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64M")]
    size: u64,
    /// Blocks of a request, in the order of a shuffle
    #[arg(long, value_name = "N", value_parser = size::parse_positive, default_value = "1")]
    batch: u64,
    /// Prepare the blocks once, and submit them for each request
    #[arg(long)]
    prepared: bool,
    /// Timed requests
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "200")]
    iterations: u64,
    /// Type of both memories
    #[arg(long, value_enum, default_value = "shared")]
    memory: Source,
    /// Paths to prefer (cuda-ipc), to require (=host-staged) or to deny (^cuda-ipc), separated by
    /// commas [default: the best]
    #[arg(long, value_name = "POLICY")]
    policy: Option<Policy>,
    /// Directory of both agents, such as that of a running copy service [default: a temporary one]
    #[arg(long, value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
    /// Open a fabric, too: the name of its provider, such as net (tcp since libfabric 1.18) or
    /// "tcp;ofi_rxm"
    #[arg(long, value_name = "PROVIDER")]
    fabric: Option<String>,
    /// Rails of that fabric, 1 to 8, each with a domain and a thread; blocks of 8 MiB and more are
    /// split among them
    #[arg(long, value_name = "N", default_value = "1", requires = "fabric", value_parser = clap::value_parser!(u8).range(1..=8))]
    rails: u8,
    /// Treat the peer as remote, so that data uses the fabric
    #[arg(long, requires = "fabric")]
    remote: bool,
    /// How both wait
    #[arg(long, value_enum, default_value_t = Wait::Default)]
    waiting: Wait,
    /// Interleave with this baseline
    #[arg(long, value_enum)]
    baseline: Option<Baseline>,
    /// Read the counters of links and network interfaces before and after, and print the bytes of
    /// each
    #[arg(long)]
    link_counters: bool,
    /// Start the other process in its own PID, IPC, mount and network namespaces
    #[arg(long)]
    isolated: bool,
    /// Cores of the two, A,B [default: not pinned]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// Print the verdict on every path
    #[arg(long)]
    explain: bool,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
}

/// The task of the target.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Target {
    directory: PathBuf,
    /// Directory of the agents.
    agents: PathBuf,
    device: String,
    length: u64,
    memory: Source,
    /// The provider and the rails of a fabric, besides shared memory or instead of it.
    fabric: Option<String>,
    rails: u8,
    is_remote: bool,
    waiting: Wait,
}

#[derive(Debug, Serialize)]
struct TransferMetrics {
    peer: String,
    fabric: Option<String>,
    rails: Option<u8>,
    op: Direction,
    memory: Source,
    batch: u64,
    path: &'static str,
    /// A device is emulated in host memory: no GPU took part, whatever the path is called.
    emulated: bool,
    fallback: Option<&'static str>,
    isolated: bool,
    prepared: bool,
    /// The call that starts a request, for each block.
    posting_p50_ns_per_block: f64,
    /// Until the initiator knows that the data is there.
    local_completion_p50_us: f64,
    baseline: Option<Baseline>,
    baseline_p50_us: Option<f64>,
    baseline_gb_per_s: Option<f64>,
    /// Bytes per second relative to the baseline's in the same round; the median of the rounds,
    /// which is not the quotient of the medians, since the speed of a machine changes.
    ratio: Option<f64>,
    /// A loop of single copies, for requests of several blocks.
    loop_gb_per_s: Option<f64>,
    links: Option<LinkTraffic>,
}

impl Metrics for TransferMetrics {
    fn to_text(&self, common: &Common) -> String {
        let mut text = format!(
            "{} x {} by {}{} between {} and {}: p50 {:.2} us, {:.1} GB/s\n",
            self.batch,
            size::print(common.bytes),
            self.path,
            // The path that GPUs would use.
            if self.emulated { " (emulated)" } else { "" },
            common.provider,
            self.peer,
            common.p50_us.unwrap_or_default(),
            common.gb_per_s,
        );
        text += &common.waiting_line("the peer");
        if let (Some(time), Some(rate), Some(ratio)) =
            (self.baseline_p50_us, self.baseline_gb_per_s, self.ratio)
        {
            text += &format!(
                "a copy in one process: {time:.2} us, {rate:.1} GB/s; ratio {ratio:.3} (its time by ours, in the same \
             round; the median of the rounds)\n"
            );
        }
        if self.batch > 1 {
            let what = if self.prepared { "prepared blocks" } else { "blocks" };
            text += &format!("posting {what}: {:.1} ns each\n", self.posting_p50_ns_per_block);
        }
        if let Some(rate) = self.loop_gb_per_s {
            text += &format!("by a loop of single copies: {rate:.1} GB/s\n");
        }
        if let Some(links) = &self.links {
            text += &links.to_text();
        }
        text
    }
}

fn device(text: &str) -> Result<DeviceName, String> {
    if text == "host" {
        return Err("the host is a memory, of both sides: --memory host".to_owned());
    }
    text.parse().map_err(|error: gpu::Error| error.to_string())
}

fn devices(arguments: &Arguments) -> Result<(Device, DeviceName), Failure> {
    let from = super::share::choose(arguments.from)?;
    let to = arguments.to.unwrap_or_else(|| {
        let next = DeviceName { number: from.name().number + 1, ..from.name() };
        let count = Device::count(next.implementation).unwrap_or(0);
        if next.number < count { next } else { from.name() }
    });
    Ok((from, to))
}

pub(super) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (from, to) = devices(arguments)?;
    let [first, second] = core_pair(arguments.cores.as_deref())?;
    let Some(length) = arguments.size.checked_mul(arguments.batch) else {
        return Err(Failure::new(Exit::Usage, "--size times --batch is too large"));
    };
    let is_of_host = |name: DeviceName| {
        arguments.memory == Source::Host || name.implementation != Implementation::Cuda
    };
    let of_host = [from.name(), to].into_iter().filter(|name| is_of_host(*name)).count() as u64;
    let remedy = "Use a smaller --size or --batch";
    command::memory::check("measure a transfer", length.saturating_mul(of_host), remedy)?;
    let mut group = WorkerGroup::new(1)?;
    let directory = group.directory().to_owned();
    if arguments.isolated {
        group.isolate();
    }
    let target = Target {
        directory: directory.clone(),
        agents: arguments.directory.clone().unwrap_or_else(|| directory.clone()),
        device: to.to_string(),
        length,
        memory: arguments.memory,
        fabric: arguments.fabric.clone(),
        rails: arguments.rails,
        is_remote: arguments.remote,
        waiting: arguments.waiting,
    };
    let mut agent = target.start_agent(INITIATOR_LABEL)?;
    leave(&directory, "card", &agent.card().encode()?)?;
    let side = Side::new(&agent, &from, arguments.memory, length)?;
    group.start_workers(&[(target, second)])?;
    if let Some(core) = first {
        crate::process::pin(core)?;
    }
    let (card, descriptor): (Vec<u8>, Vec<u8>) = take(&directory, "target")?;
    let peer = agent.connect(&card, TIMEOUT)?;
    let policy = arguments.policy.clone().unwrap_or_default();
    let route = agent.join(peer, &side.region, &descriptor, &policy, TIMEOUT)?;
    if arguments.explain {
        command::output::print(&format!("{}\n", route.choice()))?;
    }
    group.begin()?;
    let operation = match arguments.op {
        Direction::Put => Operation::Put,
        Direction::Get => Operation::Get,
    };
    let blocks = blocks(arguments);
    let mut prepare = || agent.prepare(operation, &route, blocks.clone());
    let prepared = arguments.prepared.then(&mut prepare).transpose()?;
    let mut run = Run { agent, peer, route, side, operation, blocks, prepared, length, moved: 0 };
    let mut report = run.measure(arguments, &from, to)?;
    run.notify(END, 0)?;
    let results = group.results::<Option<f64>>()?;
    report.common.verified &= results.iter().all(|done| done.verified);
    report.common.peer_cpu_us = results.iter().find_map(|done| done.detail);
    report.conclude(arguments.json)
}

/// Blocks with the same offset in both memories, in the order of a shuffle.
fn blocks(arguments: &Arguments) -> Vec<Block> {
    let mut blocks: Vec<_> = (0..arguments.batch)
        .map(|number| {
            let at = number * arguments.size;
            Block { to: at, from: at, length: arguments.size }
        })
        .collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (1..blocks.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        blocks.swap(at, (state >> 33) as usize % (at + 1));
    }
    blocks
}

struct Run {
    agent: Agent,
    peer: PeerId,
    route: Route,
    side: Side,
    operation: Operation,
    blocks: Vec<Block>,
    prepared: Option<PreparedTransfer>,
    length: u64,
    moved: u64,
}

/// Nanoseconds of a request from its start.
struct RequestTimes {
    /// Until the call that starts it has returned.
    posted: u64,
    /// Until it is complete here.
    done: u64,
    /// Until the other side is notified.
    seen: u64,
}

impl Run {
    fn notify(&mut self, tag: u64, number: u64) -> Result<(), Failure> {
        let token = self.agent.notify(self.peer, notice(tag, number)?)?;
        Ok(self.agent.wait(token, TIMEOUT).map(drop)?)
    }

    fn request(&mut self, tag: u64, number: u64) -> Result<u64, Failure> {
        self.notify(tag, number)?;
        next_notice(&mut self.agent).map(|(_, answer)| answer)
    }

    /// One request.
    fn once(&mut self, by: CopyMethod) -> Result<RequestTimes, Failure> {
        let begun = now();
        let is_put = self.operation == Operation::Put;
        let notice = is_put.then(|| notice(TIMED, begun)).transpose()?;
        let prepared = self.prepared.as_ref().filter(|_| by == CopyMethod::Best);
        let token = match prepared {
            Some(prepared) => self.agent.submit(prepared, None, notice),
            None => self.agent.begin(self.operation, &self.route, &self.blocks, notice, by),
        }?;
        let posted = now() - begun;
        self.agent.wait(token, TIMEOUT)?;
        let done = now() - begun;
        self.moved += self.length;
        let seen = if is_put { next_notice(&mut self.agent)?.1 } else { done };
        Ok(RequestTimes { posted, done, seen })
    }

    fn measure(
        &mut self,
        arguments: &Arguments,
        from: &Device,
        to: DeviceName,
    ) -> Result<Report<TransferMetrics>, Failure> {
        let make = |which| BaselineCopies::new(which, from, to, self.operation, self.length);
        let baseline = arguments.baseline.map(make).transpose()?;
        // Warm-up: touch pages, raise clocks.
        self.side.fill(0, self.length)?;
        for _ in 0..3 {
            self.once(CopyMethod::Best)?;
            baseline.as_ref().map(BaselineCopies::once).transpose()?;
        }
        let counters = arguments.link_counters.then(|| LinkCounterSample::begin(from, to));
        self.moved = 0;
        let mut samples = Histogram::default();
        let (mut ours, mut done, mut baselines, mut ratios) = (vec![], vec![], vec![], vec![]);
        let mut posted = vec![];
        let each = (arguments.iterations as usize).div_ceil(ROUNDS).max(1);
        let mut processor_time = Duration::ZERO;
        for round in 0..ROUNDS {
            let (mut transfers, mut raw) = (vec![], vec![]);
            for turn in 0..2 {
                if (turn + round) % 2 == 0 {
                    let before = crate::process::processor_time();
                    for _ in 0..each {
                        let times = self.once(CopyMethod::Best)?;
                        let time = match self.operation {
                            Operation::Put => times.seen,
                            Operation::Get => times.done,
                        };
                        samples.add(time);
                        transfers.push(time);
                        done.push(times.done);
                        posted.push(times.posted);
                    }
                    processor_time += crate::process::processor_time() - before;
                } else if let Some(baseline) = &baseline {
                    for _ in 0..each {
                        raw.push(baseline.once()?);
                        if arguments.link_counters {
                            self.moved += self.length;
                        }
                    }
                }
            }
            if let (Some(transfer), Some(raw)) = (middle(&transfers), middle(&raw)) {
                ratios.push((raw / transfer * 1e6) as u64);
            }
            ours.extend(transfers);
            baselines.extend(raw);
        }
        let links = counters.map(|counters| counters.end(self.moved));
        let mut single = vec![];
        if self.blocks.len() > 1 {
            for _ in 0..3 {
                single.push(self.once(CopyMethod::CopyEngine)?.done);
            }
        }
        let verified = self.verify()?;
        let rate = |time: f64| self.length as f64 / time;
        let ours = middle(&ours).unwrap_or(f64::NAN);
        let baseline_time = middle(&baselines);
        let common = Common {
            p50_us: Some(ours / 1e3),
            gb_per_s: rate(ours),
            bytes: arguments.size,
            iterations: (each * ROUNDS) as u64,
            provider: from.name().to_string(),
            waiting: name_of(arguments.waiting),
            cpu_us: Some(rounded(processor_time.as_secs_f64() * 1e6 / (each * ROUNDS) as f64)),
            cores: arguments.cores.clone(),
            verified,
            ..Common::of(&samples, 1.0)
        };
        let found = TransferMetrics {
            peer: to.to_string(),
            fabric: arguments.fabric.clone(),
            rails: arguments.fabric.as_ref().map(|_| arguments.rails),
            op: arguments.op,
            memory: arguments.memory,
            batch: arguments.batch,
            path: self.route.path().name(),
            emulated: [from.name(), to].iter().any(|it| it.implementation != Implementation::Cuda),
            fallback: self.route.fallback(),
            isolated: arguments.isolated,
            prepared: arguments.prepared,
            posting_p50_ns_per_block: middle(&posted).unwrap_or(f64::NAN) / arguments.batch as f64,
            local_completion_p50_us: middle(&done).unwrap_or(f64::NAN) / 1e3,
            baseline: arguments.baseline,
            baseline_p50_us: baseline_time.map(|time| time / 1e3),
            baseline_gb_per_s: baseline_time.map(rate),
            ratio: middle(&ratios).map(|ratio| ratio / 1e6),
            loop_gb_per_s: middle(&single).map(rate),
            links,
        };
        Ok(Report::new(common, found))
    }

    /// Fills, moves and compares everything.
    fn verify(&mut self) -> Result<bool, Failure> {
        let mut is_right = true;
        for number in 1..=VERIFY_ROUNDS {
            match self.operation {
                Operation::Put => {
                    let sum = self.side.fill(number, self.length)?;
                    // The other side must have all data with the notification.
                    let notification = Some(notice(VERIFY, sum)?);
                    let token = self.agent.put(&self.route, &self.blocks, notification)?;
                    self.agent.wait(token, TIMEOUT)?;
                    is_right &= next_notice(&mut self.agent)? == (ANSWER, sum);
                }
                Operation::Get => {
                    let sum = self.request(FILL, number)?;
                    let token = self.agent.get(&self.route, &self.blocks, None)?;
                    self.agent.wait(token, TIMEOUT)?;
                    is_right &= self.side.checksum(self.length)? == sum;
                }
            }
        }
        Ok(is_right)
    }
}

fn middle(values: &[u64]) -> Option<f64> {
    median(values.iter().map(|value| *value as f64))
}

//! `fabricast bench transfer`: puts and gets between the memories of two processes, beside a
//! raw copy in one.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpu::{Block, BlocksBy, Device, DeviceName, LinkBytes, LinkCounters, Memory, Slice, Stream};
use ipc::Spin;
use serde::{Deserialize, Serialize};
use transfer::path::{Operation, Policy};
use transfer::{Agent, AgentOptions, Event, HostBuffer, Notice, PeerId, Region, Rights, Route};

use super::histogram::Histogram;
use super::party::{Done, Party, Shared, Task};
use super::report::{Common, conclude};
use super::share::{of_device, of_transfer};
use crate::cli::exit::{Exit, Failure};
use crate::cli::size;

const PATIENCE: Duration = Duration::from_secs(60);
/// Measurements of ours and of the rival's that are made in turn.
const ROUNDS: usize = 11;
/// Times that everything is filled anew, moved and compared.
const PROOFS: u64 = 4;

// What notices mean.
/// Timed; the data is when it was begun.
const TIMED: u64 = 1;
/// Moved to be compared; the data is the checksum.
const PROOF: u64 = 2;
/// To be filled with the pattern of this number.
const FILL: u64 = 3;
/// It is as was asked; the data is the checksum, or 0 if it is not.
const ANSWER: u64 = 4;
/// That was all.
const END: u64 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Direction {
    /// From the memory of the process that begins it to the other's
    Put,
    /// From the other's memory
    Get,
}

/// Where memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Source {
    /// Allocated to be shared, as pools are
    Shared,
    /// As cudaMalloc does
    Plain,
    /// Of the host, in a segment that both can map; --from and --to say which side
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Rival {
    /// A copy and a wait for it, in one process that has both memories
    Memcpy,
}

/// Moves bytes between the memories of two processes, and tells the other one.
///
/// The time of a put is from its beginning to when the other process has its notice, that
/// of a get until the data is here. Both poll. The last line of the output is one JSON
/// object.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The device of the process that begins it [default: cuda:0 if there is one, else stand-in:0]
    #[arg(long, value_name = "DEVICE")]
    from: Option<DeviceName>,
    /// The device of the other process [default: the next one, if there is one]
    #[arg(long, value_name = "DEVICE")]
    to: Option<DeviceName>,
    /// Which way the bytes go
    #[arg(long, value_enum, default_value = "put")]
    op: Direction,
    /// Bytes of a block; takes K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64M")]
    size: u64,
    /// Blocks of a request, in the order of a shuffle
    #[arg(long, value_name = "N", value_parser = size::parse_positive, default_value = "1")]
    batch: u64,
    /// Requests that are timed
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "200")]
    iterations: u64,
    /// Where both memories come from
    #[arg(long, value_enum, default_value = "shared")]
    memory: Source,
    /// Which paths may be taken: NAME prefers, =NAME requires, ^NAME denies
    #[arg(long, value_name = "LIST", default_value = "")]
    paths: Policy,
    /// Measure this beside it, in turn
    #[arg(long, value_enum)]
    rival: Option<Rival>,
    /// Also tell the other process of each get
    #[arg(long)]
    notify: bool,
    /// Read the counters of links and network interfaces before and after, and print which
    /// carried how much
    #[arg(long)]
    prove: bool,
    /// Start the other process in PID, IPC, mount and network namespaces of its own
    #[arg(long)]
    isolated: bool,
    /// Cores of the two, A,B [default: wherever the system puts them]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// Print the verdict on every path
    #[arg(long)]
    explain: bool,
    /// Only the JSON line
    #[arg(long)]
    json: bool,
}

/// What the other process does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Target {
    directory: PathBuf,
    device: String,
    length: u64,
    memory: Source,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    common: Common,
    peer: String,
    op: Direction,
    memory: Source,
    batch: u64,
    path: &'static str,
    fallback: Option<&'static str>,
    isolated: bool,
    /// Until the process that began it knows that the data is there.
    done_p50_us: f64,
    rival: Option<Rival>,
    rival_p50_us: Option<f64>,
    rival_gb_per_s: Option<f64>,
    /// Bytes in a second, relative to the rival's; the median of the rounds.
    ratio: Option<f64>,
    /// A loop of single copies, for requests of many blocks.
    loop_gb_per_s: Option<f64>,
    carried: Option<Carried>,
    program: &'static str,
}

/// Which link carried how much while everything above happened, and what should have been.
#[derive(Debug, Clone, Default, Serialize)]
struct Carried {
    moved: u64,
    nvlink_sent: Option<u64>,
    nvlink_received: Option<u64>,
    pcie_sent: Option<u64>,
    pcie_received: Option<u64>,
    /// By all network interfaces of this process's namespace.
    interfaces_sent: Option<u64>,
    why_not: Option<String>,
}

/// What a side moves bytes from and to.
struct Side {
    region: Region,
    memory: Option<Memory>,
    host: Option<HostBuffer>,
    stream: Option<Stream>,
}

impl Side {
    fn new(agent: &Agent, device: &Device, source: Source, length: u64) -> Result<Self, Failure> {
        let memory = match source {
            Source::Shared => Some(device.allocate_shared(length, &[]).map_err(of_device)?),
            Source::Plain => Some(device.allocate(length).map_err(of_device)?),
            Source::Host => None,
        };
        let Some(memory) = memory else {
            let host = HostBuffer::new(length).map_err(of_transfer)?;
            let region = agent.register(&host, Rights::ALL).map_err(of_transfer)?;
            return Ok(Self { region, memory: None, host: Some(host), stream: None });
        };
        let region = agent.register(&memory, Rights::ALL).map_err(of_transfer)?;
        let stream = Some(device.stream().map_err(of_device)?);
        Ok(Self { region, memory: Some(memory), host: None, stream })
    }

    /// Fills all of it, differently for each number, and gives its checksum.
    fn fill(&self, number: u64, length: u64) -> Result<u64, Failure> {
        const SPOT: u64 = 64 << 10;
        let spot = SPOT.min(length);
        let bytes: Vec<u8> = (0..spot).map(|at| ((at * at + 31 * number) >> 3) as u8).collect();
        let places = [0, (length - spot) / 2, length - spot];
        let byte = (number * 37 + 1) as u8;
        if let (Some(memory), Some(stream)) = (&self.memory, &self.stream) {
            let filled = stream.fill(&memory.slice(0, length).map_err(of_device)?, byte);
            let filled = filled.and_then(|()| {
                places
                    .into_iter()
                    .try_for_each(|at| stream.upload(&memory.slice(at, spot)?, &bytes, PATIENCE))
            });
            filled.map_err(of_device)?;
        }
        if let Some(host) = &self.host {
            let all = vec![byte; length as usize];
            host.write(0, &all).map_err(of_transfer)?;
            for at in places {
                host.write(at, &bytes).map_err(of_transfer)?;
            }
        }
        self.checksum(length)
    }

    fn checksum(&self, length: u64) -> Result<u64, Failure> {
        if let (Some(memory), Some(stream)) = (&self.memory, &self.stream) {
            let range = memory.slice(0, length).map_err(of_device)?;
            return stream.checksum(&range, PATIENCE).map_err(of_device);
        }
        let mut bytes = vec![0; length as usize];
        if let Some(host) = &self.host {
            host.read(0, &mut bytes).map_err(of_transfer)?;
        }
        Ok(gpu::checksum(&bytes))
    }
}

/// Nanoseconds of a clock that all processes of a machine share.
fn now() -> Result<u64, Failure> {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_err(|error| Failure::failed(format!("clock_gettime: {error}")))?;
    Ok(time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

fn notice(tag: u64, number: u64) -> Result<Notice, Failure> {
    Notice::new(tag, &number.to_le_bytes()).map_err(of_transfer)
}

/// The next notice; what else happens does not matter here.
fn heard(agent: &mut Agent) -> Result<(u64, u64), Failure> {
    loop {
        match agent.next_event(PATIENCE).map_err(of_transfer)? {
            Event::Notice { notice, .. } => {
                let number = notice.data().try_into().map(u64::from_le_bytes);
                return Ok((notice.tag, number.unwrap_or_default()));
            }
            Event::Left { label, .. } => {
                return Err(Failure::failed(format!("{label} is gone")));
            }
            Event::Joined { .. } => {}
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|e| Failure::failed(format!("reading {}: {e}", path.display())))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    std::fs::write(path, bytes)
        .map_err(|e| Failure::failed(format!("writing {}: {e}", path.display())))
}

fn start(label: &str, directory: &Path) -> Result<Agent, Failure> {
    let options = AgentOptions::new(label).directory(directory).waiting(Spin::Always);
    Agent::start(options).map_err(of_transfer)
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
    let (first, second) = match arguments.cores.as_deref() {
        Some([first, second]) => (Some(*first), Some(*second)),
        None => (None, None),
        Some(_) => return Err(Failure::new(Exit::Usage, "--cores wants two, one for each side")),
    };
    let Some(length) = arguments.size.checked_mul(arguments.batch) else {
        return Err(Failure::new(Exit::Usage, "--size times --batch is more than can be"));
    };
    let mut party = Party::new(1)?;
    let directory = party.directory().to_owned();
    if arguments.isolated {
        party.isolate();
    }
    let mut agent = start("the one that begins", &directory)?;
    write(&directory.join("card"), &agent.card().encode().map_err(of_transfer)?)?;
    let side = Side::new(&agent, &from, arguments.memory, length)?;
    let target = Target {
        directory: directory.clone(),
        device: to.to_string(),
        length,
        memory: arguments.memory,
    };
    party.invite(&[(Task::Transfer(target), second)])?;
    if let Some(core) = first {
        crate::cli::process::pin(core)?;
    }
    let card = read(&directory.join("target-card"))?;
    let descriptor = read(&directory.join("target-region"))?;
    let peer = agent.connect(&card, PATIENCE).map_err(of_transfer)?;
    let joined = agent.join(peer, &side.region, &descriptor, &arguments.paths, PATIENCE);
    let route = joined.map_err(of_transfer)?;
    if arguments.explain {
        crate::cli::text::print(&format!("{}\n", route.choice()))?;
    }
    party.begin()?;
    let mut run = Run {
        agent,
        peer,
        route,
        side,
        operation: match arguments.op {
            Direction::Put => Operation::Put,
            Direction::Get => Operation::Get,
        },
        blocks: blocks(arguments),
        length,
        notify: arguments.notify || arguments.op == Direction::Put,
        moved: 0,
    };
    let report = run.measure(arguments, &from, to)?;
    run.tell(END, 0)?;
    let results = party.results()?;
    let verified = report.common.verified && results.iter().all(|done| done.verified);
    let report = Report { common: Common { verified, ..report.common }, ..report };
    conclude(&report, &report.common, arguments.json, for_people, "other bytes arrived")
}

/// Every block goes where it is in the other memory, but in the order of a shuffle.
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
    length: u64,
    notify: bool,
    moved: u64,
}

impl Run {
    fn tell(&mut self, tag: u64, number: u64) -> Result<(), Failure> {
        let token = self.agent.notify(self.peer, notice(tag, number)?).map_err(of_transfer)?;
        self.agent.wait(token, PATIENCE).map(drop).map_err(of_transfer)
    }

    fn ask(&mut self, tag: u64, number: u64) -> Result<u64, Failure> {
        self.tell(tag, number)?;
        heard(&mut self.agent).map(|(_, answer)| answer)
    }

    /// One request. Nanoseconds until it is done here, and until the other side knows.
    fn once(&mut self, by: BlocksBy) -> Result<(u64, u64), Failure> {
        let begun = now()?;
        let notice = self.notify.then(|| notice(TIMED, begun)).transpose()?;
        let token = self.agent.begin(self.operation, &self.route, &self.blocks, notice, by);
        self.agent.wait(token.map_err(of_transfer)?, PATIENCE).map_err(of_transfer)?;
        let done = now()? - begun;
        self.moved += self.length;
        let seen = if self.notify { heard(&mut self.agent)?.1 } else { done };
        Ok((done, seen))
    }

    fn measure(
        &mut self,
        arguments: &Arguments,
        from: &Device,
        to: DeviceName,
    ) -> Result<Report, Failure> {
        let rival = arguments.rival.map(|_| Raw::new(from, to, self.operation, self.length));
        let rival = rival.transpose()?;
        // Pages that nobody touched yet, clocks that are low yet.
        self.side.fill(0, self.length)?;
        for _ in 0..3 {
            self.once(BlocksBy::Best)?;
            rival.as_ref().map(Raw::once).transpose()?;
        }
        let watched = arguments.prove.then(|| Watched::begin(from, to));
        self.moved = 0;
        let mut samples = Histogram::default();
        let (mut ours, mut done, mut theirs, mut ratios) = (vec![], vec![], vec![], vec![]);
        let each = (arguments.iterations as usize).div_ceil(ROUNDS).max(1);
        for round in 0..ROUNDS {
            let (mut mine, mut raw) = (vec![], vec![]);
            for turn in 0..2 {
                if (turn + round) % 2 == 0 {
                    for _ in 0..each {
                        let (until_done, until_seen) = self.once(BlocksBy::Best)?;
                        let time = match self.operation {
                            Operation::Put => until_seen,
                            Operation::Get => until_done,
                        };
                        samples.add(time);
                        mine.push(time);
                        done.push(until_done);
                    }
                } else if let Some(rival) = &rival {
                    for _ in 0..each {
                        raw.push(rival.once()?);
                        if arguments.prove {
                            self.moved += self.length;
                        }
                    }
                }
            }
            if let (Some(mine), Some(raw)) = (median(&mine), median(&raw)) {
                ratios.push((raw / mine * 1e6) as u64);
            }
            ours.extend(mine);
            theirs.extend(raw);
        }
        let carried = watched.map(|watched| watched.end(self.moved));
        let mut single = vec![];
        if self.blocks.len() > 1 {
            for _ in 0..3 {
                single.push(self.once(BlocksBy::Loop)?.0);
            }
        }
        let verified = self.prove()?;
        let rate = |time: f64| self.length as f64 / time;
        let ours = median(&ours).unwrap_or(f64::NAN);
        let theirs = median(&theirs);
        Ok(Report {
            common: Common {
                p50_us: Some(ours / 1e3),
                p99_us: samples.microseconds(0.99),
                p999_us: samples.microseconds(0.999),
                gb_per_s: rate(ours),
                bytes: arguments.size,
                iterations: (each * ROUNDS) as u64,
                provider: from.name().to_string(),
                waiting: "poll".to_owned(),
                cores: arguments.cores.clone(),
                verified,
            },
            peer: to.to_string(),
            op: arguments.op,
            memory: arguments.memory,
            batch: arguments.batch,
            path: self.route.path().name(),
            fallback: self.route.fallback(),
            isolated: arguments.isolated,
            done_p50_us: median(&done).unwrap_or(f64::NAN) / 1e3,
            rival: arguments.rival,
            rival_p50_us: theirs.map(|time| time / 1e3),
            rival_gb_per_s: theirs.map(rate),
            ratio: median(&ratios).map(|ratio| ratio / 1e6),
            loop_gb_per_s: median(&single).map(rate),
            carried,
            program: env!("FABRICAST_VERSION_LINE"),
        })
    }

    /// Fills, moves and compares all of it.
    fn prove(&mut self) -> Result<bool, Failure> {
        let mut is_right = true;
        for number in 1..=PROOFS {
            match self.operation {
                Operation::Put => {
                    let sum = self.side.fill(number, self.length)?;
                    // At the other side all of it is to be there with the notice.
                    let tell = Some(notice(PROOF, sum)?);
                    let token = self.agent.put(&self.route, &self.blocks, tell);
                    let token = token.map_err(of_transfer)?;
                    self.agent.wait(token, PATIENCE).map_err(of_transfer)?;
                    is_right &= heard(&mut self.agent)? == (ANSWER, sum);
                }
                Operation::Get => {
                    let sum = self.ask(FILL, number)?;
                    let token = self.agent.get(&self.route, &self.blocks, None);
                    let token = token.map_err(of_transfer)?;
                    self.agent.wait(token, PATIENCE).map_err(of_transfer)?;
                    is_right &= self.side.checksum(self.length)? == sum;
                }
            }
        }
        Ok(is_right)
    }
}

/// The rival: both memories in one process, a copy, and a wait for it.
struct Raw {
    stream: Stream,
    to: Slice,
    from: Slice,
}

impl Raw {
    fn new(
        from: &Device,
        to: DeviceName,
        operation: Operation,
        length: u64,
    ) -> Result<Self, Failure> {
        let far = Device::open(to).map_err(of_device)?;
        from.enable_peer(&far).map_err(of_device)?;
        let mine = from.allocate(length).map_err(of_device)?.whole();
        let theirs = far.allocate(length).map_err(of_device)?.whole();
        let stream = from.stream().map_err(of_device)?;
        let (to, from) = match operation {
            Operation::Put => (theirs, mine),
            Operation::Get => (mine, theirs),
        };
        Ok(Self { stream, to, from })
    }

    fn once(&self) -> Result<u64, Failure> {
        let begun = now()?;
        self.stream.copy(&self.to, &self.from).map_err(of_device)?;
        while !self.stream.is_done().map_err(of_device)? {
            std::hint::spin_loop();
        }
        Ok(now()? - begun)
    }
}

/// Counters, as they were before.
struct Watched {
    counters: Result<(LinkCounters, LinkBytes), String>,
    interfaces: Option<u64>,
}

impl Watched {
    fn begin(from: &Device, to: DeviceName) -> Self {
        let counters = if from.name() == to {
            Err("one device: no link is taken".to_owned())
        } else {
            LinkCounters::of(from)
                .and_then(|counters| counters.read().map(|bytes| (counters, bytes)))
                .map_err(|error| error.to_string())
        };
        Self { counters, interfaces: interfaces_sent() }
    }

    fn end(self, moved: u64) -> Carried {
        let interfaces_sent =
            self.interfaces.and_then(|before| Some(interfaces_sent()?.wrapping_sub(before)));
        let after = self.counters.and_then(|(counters, before)| {
            let after = counters.read().map_err(|error| error.to_string())?;
            Ok(after.since(&before))
        });
        match after {
            Ok(bytes) => Carried {
                moved,
                nvlink_sent: bytes.nvlink_sent,
                nvlink_received: bytes.nvlink_received,
                pcie_sent: bytes.pcie_sent,
                pcie_received: bytes.pcie_received,
                interfaces_sent,
                why_not: None,
            },
            Err(why) => {
                Carried { moved, interfaces_sent, why_not: Some(why), ..Carried::default() }
            }
        }
    }
}

/// Bytes that all network interfaces of this namespace have ever sent.
fn interfaces_sent() -> Option<u64> {
    const SENT: usize = 8;
    let text = std::fs::read_to_string("/proc/net/dev").ok()?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.map(|(_, numbers)| numbers.split_whitespace().nth(SENT)?.parse::<u64>().ok()).sum()
}

fn median(values: &[u64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_unstable();
    values.get(values.len() / 2).map(|value| *value as f64)
}

fn for_people(report: &Report) -> String {
    let common = &report.common;
    let mut text = format!(
        "{} x {} by {} between {} and {}: {:.2} us, {:.1} GB/s\n",
        report.batch,
        size::print(common.bytes),
        report.path,
        common.provider,
        report.peer,
        common.p50_us.unwrap_or_default(),
        common.gb_per_s,
    );
    if let (Some(time), Some(rate), Some(ratio)) =
        (report.rival_p50_us, report.rival_gb_per_s, report.ratio)
    {
        text += &format!("a copy in one process: {time:.2} us, {rate:.1} GB/s; ratio {ratio:.3}\n");
    }
    if let Some(rate) = report.loop_gb_per_s {
        text += &format!("by a loop of single copies: {rate:.1} GB/s\n");
    }
    if let Some(carried) = &report.carried {
        let number = |bytes: Option<u64>| match bytes {
            Some(bytes) => bytes.to_string(),
            None => "not counted".to_owned(),
        };
        text += &format!(
            "moved {} bytes; NVLink sent {}, received {}; PCIe sent {}, received {}; interfaces sent {}\n",
            carried.moved,
            number(carried.nvlink_sent),
            number(carried.nvlink_received),
            number(carried.pcie_sent),
            number(carried.pcie_received),
            number(carried.interfaces_sent),
        );
        if let Some(why) = &carried.why_not {
            text += &format!("links are not counted: {why}\n");
        }
    }
    text
}

/// What the other process does.
pub(super) fn serve(
    _shared: &Shared,
    target: &Target,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<Done, Failure> {
    let name: DeviceName = target.device.parse().map_err(of_device)?;
    let device = Device::open(name).map_err(of_device)?;
    let mut agent = start("the other one", &target.directory)?;
    let side = Side::new(&agent, &device, target.memory, target.length)?;
    let region = side.region.descriptor().encode().map_err(of_transfer)?;
    write(&target.directory.join("target-region"), &region)?;
    let card = agent.card().encode().map_err(of_transfer)?;
    write(&target.directory.join("target-card"), &card)?;
    let peer =
        agent.connect(&read(&target.directory.join("card"))?, PATIENCE).map_err(of_transfer)?;
    ready()?;
    let mut samples = Histogram::default();
    let (mut verified, mut iterations, start) = (true, 0, Instant::now());
    loop {
        let (tag, number) = heard(&mut agent)?;
        let answer = match tag {
            TIMED => {
                let took = now()?.saturating_sub(number);
                samples.add(took);
                iterations += 1;
                took
            }
            PROOF => {
                let sum = side.checksum(target.length)?;
                verified &= sum == number;
                sum
            }
            FILL => side.fill(number, target.length)?,
            _ => break,
        };
        let token = agent.notify(peer, notice(ANSWER, answer)?).map_err(of_transfer)?;
        agent.wait(token, PATIENCE).map_err(of_transfer)?;
    }
    Ok(Done {
        samples,
        elapsed: start.elapsed().as_nanos() as u64,
        iterations,
        verified,
        preempted: 0,
        seen: None,
    })
}

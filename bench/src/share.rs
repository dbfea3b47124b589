//! `fabricast bench share`: how long it takes to open another process's buffer, and how
//! fast it is read through the mapping.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Memory, Slice, Stream};
use serde::{Deserialize, Serialize};
use transfer::{Admission, Client, Opener, ShareService, Shared as SharedMemory, Tensor};

use super::cores::of_two;
use super::party::{Done, Party, Shared, Task};
use super::report::{Common, Findings, Report, median};
use command::exit::Failure;
use command::histogram::Histogram;
use command::size;

const PATIENCE: Duration = Duration::from_secs(60);
const NAME: &str = "buffer";
/// Of the buffer's bytes, those that are not all the same.
const SPOT: u64 = 1 << 20;
/// Copies of each kind that are timed together, and how often: one kind, then the other.
const TOGETHER: u32 = 10;
const PAIRS: usize = 11;
/// Openings of a buffer that is mapped already, for each that was not.
const CACHED: u64 = 50;

/// Opens a buffer of another process again and again, and reads through the mapping.
///
/// The times are those of the first opening, each of memory that was not mapped, from
/// asking for it by name to its address; the speed is that of copies out of the mapping.
/// The last line of the output is one JSON object.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The device that the buffer lies on [default: cuda:0 if there is one, else stand-in:0]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
    /// The device that reads it [default: the same]
    #[arg(long, value_name = "DEVICE")]
    reader: Option<DeviceName>,
    /// Bytes of the buffer; takes K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64M")]
    size: u64,
    /// First openings
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "50")]
    iterations: u64,
    /// Cores of the owner and of the reader, A,B [default: wherever the system puts them]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// Only the JSON line
    #[arg(long)]
    json: bool,
}

/// What the reader does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Opening {
    socket: PathBuf,
    reader: String,
    iterations: u64,
    checksum: u64,
}

/// What the reader saw besides.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Nanoseconds to be given a handle.
    asked: Histogram,
    /// Nanoseconds to open a handle of what is mapped.
    cached: Histogram,
    /// Bytes per nanosecond of a copy out of the mapping, and of one out of memory of the
    /// reader's own on the same device; and the ratio of neighbours.
    through: f64,
    own: f64,
    ratio: f64,
}

#[derive(Debug, Serialize)]
struct Found {
    reader: String,
    ask_p50_us: Option<f64>,
    cached_p50_us: Option<f64>,
    cached_p99_us: Option<f64>,
    own_gb_per_s: f64,
    ratio_to_own: f64,
}

/// The one named, or the best there is.
pub(crate) fn choose(name: Option<DeviceName>) -> Result<Device, Failure> {
    let name = name.unwrap_or_else(|| match Device::count(gpu::Implementation::Cuda) {
        Ok(1..) => DeviceName::cuda(0),
        _ => DeviceName::stand_in(0),
    });
    Ok(Device::open(name)?)
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let device = choose(arguments.device)?;
    let reader = arguments.reader.unwrap_or(device.name());
    let [first, second] = of_two(arguments.cores.as_deref())?;
    if device.name().implementation != gpu::Implementation::Cuda {
        // The buffer, and memory of the reader's own.
        let needs = arguments.size.saturating_mul(2);
        command::memory::check("measure a shared buffer", needs, "Use a smaller --size")?;
    }
    let memory = device.allocate_shared(arguments.size, &[])?;
    let checksum = fill(&memory)?;
    let mut party = Party::new(1)?;
    let socket = party.directory().join("share");
    let service = ShareService::start(&socket, Admission::own_user())?;
    let tensor = Tensor::bytes(arguments.size);
    let shared = SharedMemory::new(&memory, &tensor)?;
    service.offer(NAME, shared)?;
    if let Some(core) = first {
        crate::process::pin(core)?;
    }
    let opening =
        Opening { socket, reader: reader.to_string(), iterations: arguments.iterations, checksum };
    party.invite(&[(Task::Share(opening), second)])?;
    party.begin()?;
    let results = party.results()?;
    drop(service);
    let Some((done, seen)) = results.first().and_then(|done| Some((done, done.seen.as_ref()?)))
    else {
        return Err(Failure::failed("the reader said nothing"));
    };
    let common = Common {
        gb_per_s: seen.through,
        bytes: arguments.size,
        iterations: arguments.iterations,
        provider: device.name().to_string(),
        waiting: "poll".to_owned(),
        cores: arguments.cores.clone(),
        verified: done.verified,
        ..Common::of(&done.samples, 1.0)
    };
    let found = Found {
        reader: reader.to_string(),
        ask_p50_us: seen.asked.microseconds(0.5),
        cached_p50_us: seen.cached.microseconds(0.5),
        cached_p99_us: seen.cached.microseconds(0.99),
        own_gb_per_s: seen.own,
        ratio_to_own: seen.ratio,
    };
    Report::new(common, found).conclude(arguments.json)
}

impl Findings for Found {
    const WRONG: &str = "the reader saw other bytes";

    fn for_people(&self, common: &Common) -> String {
        let [p50, p99, _] = common.percentiles();
        format!(
            "{} of {} opened for {}: first {p50:.1} us (p99 {p99:.1}), of which {:.1} to ask for \
             it; mapped already {:.2} us\n\
             read at {:.1} GB/s, {:.3} of what memory of its own gives\n",
            size::print(common.bytes),
            common.provider,
            self.reader,
            self.ask_p50_us.unwrap_or_default(),
            self.cached_p50_us.unwrap_or_default(),
            common.gb_per_s,
            self.ratio_to_own,
        )
    }
}

/// Puts bytes there that are not all the same, and gives their checksum.
fn fill(memory: &Memory) -> Result<u64, Failure> {
    let stream = memory.mapped_for().stream()?;
    let length = memory.length();
    let spot = SPOT.min(length);
    let bytes: Vec<u8> = (0..spot).map(|at| ((at * at) >> 3) as u8).collect();
    let filled = stream.fill(&memory.whole(), 0x5a).and_then(|()| {
        for offset in [0, (length - spot) / 2, length - spot] {
            stream.upload(&memory.slice(offset, spot)?, &bytes, PATIENCE)?;
        }
        stream.checksum(&memory.whole(), PATIENCE)
    });
    Ok(filled?)
}

/// What the worker does.
pub(crate) fn open(
    _shared: &Shared,
    opening: &Opening,
    ready: impl FnOnce() -> Result<(), Failure>,
) -> Result<Done, Failure> {
    let name: DeviceName = opening.reader.parse()?;
    let device = Device::open(name)?;
    let client = Client::connect(&opening.socket, PATIENCE)?;
    let opener = Opener::default();
    let stream = device.stream()?;
    ready()?;
    let start = Instant::now();
    let (mut first, mut asked, mut cached) =
        (Histogram::default(), Histogram::default(), Histogram::default());
    let since = |start: Instant| start.elapsed().as_nanos() as u64;
    let mut verified = true;
    for number in 0..opening.iterations {
        let asking = Instant::now();
        let handle = client.handle(NAME, PATIENCE)?;
        let given = since(asking);
        let opened = opener.open(&handle, Some(&device))?;
        first.add(since(asking));
        asked.add(given);
        for _ in 0..CACHED {
            let start = Instant::now();
            let again = opener.open(&handle, Some(&device))?;
            cached.add(since(start));
            verified &= again.memory.address() == opened.memory.address();
        }
        if number == 0 {
            let sum = stream.checksum(&opened.slice(), PATIENCE)?;
            verified &= sum == opening.checksum;
        }
    }
    let opened = client.open(NAME, Some(&device), PATIENCE)?;
    let (through, own, ratio) = compare(&stream, &opened.slice())?;
    let sum = stream.checksum(&opened.slice(), PATIENCE)?;
    verified &= sum == opening.checksum;
    Ok(Done {
        samples: first,
        elapsed: since(start),
        iterations: opening.iterations,
        verified,
        seen: Some(Seen { asked, cached, through, own, ratio }),
        ..Done::default()
    })
}

/// Copies out of the mapping against copies out of plain memory of this process, both
/// lying on the same device. Speeds in bytes per nanosecond, and the median ratio.
fn compare(stream: &Stream, shared: &Slice) -> gpu::Result<(f64, f64, f64)> {
    let length = shared.length();
    let resident = match shared.memory().device() {
        Some(name) => Device::open(name)?,
        None => stream.device().clone(),
    };
    stream.device().enable_peer(&resident)?;
    let own = resident.allocate(length)?;
    let target = stream.device().allocate(length)?;
    stream.fill(&own.whole(), 1)?;
    let time = |from: &Slice| -> gpu::Result<f64> {
        stream.synchronize(PATIENCE)?;
        let start = Instant::now();
        for _ in 0..TOGETHER {
            stream.copy(&target.whole(), from)?;
        }
        stream.synchronize(PATIENCE)?;
        let bytes = length as f64 * f64::from(TOGETHER);
        Ok(bytes / start.elapsed().as_nanos() as f64)
    };
    // Pages that nobody touched yet, clocks that are low yet.
    time(shared)?;
    time(&own.whole())?;
    let (mut through, mut plain, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        let (first, second) = if pair % 2 == 0 {
            let first = time(shared)?;
            (first, time(&own.whole())?)
        } else {
            let second = time(&own.whole())?;
            (time(shared)?, second)
        };
        through.push(first);
        plain.push(second);
        ratios.push(first / second);
    }
    let median = |values| median(values).unwrap_or_default();
    Ok((median(through), median(plain), median(ratios)))
}

//! `fabricast bench share`: how long it takes to open another process's buffer, and how fast it is
//! read through the mapping.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Memory, Slice, Stream};
use serde::{Deserialize, Serialize};
use transfer::{
    Admission, Opener, ShareClient, ShareService, SharedBuffer as SharedMemory, Tensor,
};

use super::core_pair::core_pair;
use super::exchange::plan::{Wait, name_of};
use super::report::{Common, Metrics, Report, median};
use super::worker_group::{SharedSegment, Task, WorkerGroup, WorkerResult};
use command::exit::Failure;
use command::histogram::Histogram;
use command::size;

const TIMEOUT: Duration = Duration::from_secs(60);
const NAME: &str = "buffer";
/// Bytes of the buffer that differ from each other.
const PATTERN_BYTES: u64 = 1 << 20;
/// Copies of each kind that are timed together, and the number of interleaved rounds.
const COPIES_PER_SAMPLE: u32 = 10;
const PAIRS: usize = 11;
/// Openings of an already mapped buffer, for each first opening.
const CACHED_OPENS: u64 = 50;

/// Opens a buffer of another process repeatedly, and reads through the mapping.
///
/// The times are those of the first opening of unmapped memory, from the request by name to the
/// address; the rate is that of copies out of the mapping. The last line of the output is one JSON
/// object.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The device of the buffer [default: cuda:0 if there is one, else emulated:0]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
    /// The device that reads it [default: the same]
    #[arg(long, value_name = "DEVICE")]
    reader: Option<DeviceName>,
    /// Bytes of the buffer; accepts K, M, G
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, default_value = "64M")]
    size: u64,
    /// First openings
    #[arg(long = "iters", value_name = "N", value_parser = size::parse_positive, default_value = "50")]
    iterations: u64,
    /// Cores of the owner and of the reader, A,B [default: not pinned]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cores: Option<Vec<usize>>,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
}

/// The task of the reader.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OpenTask {
    socket: PathBuf,
    reader: String,
    iterations: u64,
    checksum: u64,
}

/// Further results of the reader.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OpenResult {
    /// Nanoseconds to receive a handle.
    requested: Histogram,
    /// Nanoseconds to open a handle of mapped memory.
    cached: Histogram,
    /// Bytes per nanosecond of a copy out of the mapping, and of one out of the reader's own memory
    /// on the same device; and the ratio of neighbours.
    mapped_rate: f64,
    own: f64,
    ratio: f64,
}

#[derive(Debug, Serialize)]
struct ShareMetrics {
    reader: String,
    handle_request_p50_us: Option<f64>,
    cached_p50_us: Option<f64>,
    cached_p99_us: Option<f64>,
    local_gb_per_s: f64,
    ratio_to_local: f64,
}

/// The named device, or the best one.
pub(crate) fn choose(name: Option<DeviceName>) -> Result<Device, Failure> {
    let name = name.unwrap_or_else(|| match Device::count(gpu::Implementation::Cuda) {
        Ok(1..) => DeviceName::cuda(0),
        _ => DeviceName::emulated(0),
    });
    Ok(Device::open(name)?)
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let device = choose(arguments.device)?;
    let reader = arguments.reader.unwrap_or(device.name());
    let [first, second] = core_pair(arguments.cores.as_deref())?;
    if device.name().implementation != gpu::Implementation::Cuda {
        // The buffer, and the reader's own memory.
        let needs = arguments.size.saturating_mul(2);
        command::memory::check("measure a shared buffer", needs, "Use a smaller --size")?;
    }
    let memory = device.allocate_shared(arguments.size, &[])?;
    let checksum = fill(&memory)?;
    let mut group = WorkerGroup::new(1)?;
    let socket = group.directory().join("share");
    let service = ShareService::start(&socket, Admission::own_user())?;
    let tensor = Tensor::bytes(arguments.size);
    let shared = SharedMemory::new(&memory, &tensor)?;
    service.publish(NAME, shared)?;
    if let Some(core) = first {
        crate::process::pin(core)?;
    }
    let opening =
        OpenTask { socket, reader: reader.to_string(), iterations: arguments.iterations, checksum };
    group.start_workers(&[(opening, second)])?;
    group.begin()?;
    let results = group.results()?;
    drop(service);
    let Some(done) = results.first() else {
        return Err(Failure::failed("the reader sent no result"));
    };
    let open_result: &OpenResult = &done.detail;
    let common = Common {
        gb_per_s: open_result.mapped_rate,
        bytes: arguments.size,
        iterations: arguments.iterations,
        provider: device.name().to_string(),
        waiting: name_of(Wait::Default),
        cores: arguments.cores.clone(),
        verified: done.verified,
        ..Common::of(&done.samples, 1.0)
    };
    let found = ShareMetrics {
        reader: reader.to_string(),
        handle_request_p50_us: open_result.requested.microseconds(0.5),
        cached_p50_us: open_result.cached.microseconds(0.5),
        cached_p99_us: open_result.cached.microseconds(0.99),
        local_gb_per_s: open_result.own,
        ratio_to_local: open_result.ratio,
    };
    Report::new(common, found).conclude(arguments.json)
}

impl Metrics for ShareMetrics {
    fn to_text(&self, common: &Common) -> String {
        let [p50, p99, _] = common.percentiles();
        format!(
            "{} of {} opened for {}: first {p50:.1} us (p99 {p99:.1}), of which {:.1} to request \
             it; mapped already {:.2} us\n\
             read at {:.1} GB/s, {:.3} of a copy of its own memory\n",
            size::print(common.bytes),
            common.provider,
            self.reader,
            self.handle_request_p50_us.unwrap_or_default(),
            self.cached_p50_us.unwrap_or_default(),
            common.gb_per_s,
            self.ratio_to_local,
        )
    }
}

/// Fills the memory, and returns its checksum.
fn fill(memory: &Memory) -> Result<u64, Failure> {
    let stream = memory.mapped_for().stream()?;
    let length = memory.length();
    let spot = PATTERN_BYTES.min(length);
    let bytes: Vec<u8> = (0..spot).map(|at| ((at * at) >> 3) as u8).collect();
    let filled = stream.fill(&memory.whole(), 0x5a).and_then(|()| {
        for offset in [0, (length - spot) / 2, length - spot] {
            stream.upload(&memory.slice(offset, spot)?, &bytes, TIMEOUT)?;
        }
        stream.checksum(&memory.whole(), TIMEOUT)
    });
    Ok(filled?)
}

impl Task for OpenTask {
    const NAME: &'static str = "share";
    type Detail = OpenResult;

    fn run(
        &self,
        _shared: &SharedSegment,
        ready: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<WorkerResult<Self::Detail>, Failure> {
        let name: DeviceName = self.reader.parse()?;
        let device = Device::open(name)?;
        let client = ShareClient::connect(&self.socket, TIMEOUT)?;
        let opener = Opener::default();
        let stream = device.stream()?;
        ready()?;
        let start = Instant::now();
        let (mut first, mut requested, mut cached) =
            (Histogram::default(), Histogram::default(), Histogram::default());
        let since = |start: Instant| start.elapsed().as_nanos() as u64;
        let mut verified = true;
        for number in 0..self.iterations {
            let asking = Instant::now();
            let handle = client.handle(NAME, TIMEOUT)?;
            let request_time = since(asking);
            let opened = opener.open(&handle, Some(&device))?;
            first.add(since(asking));
            requested.add(request_time);
            for _ in 0..CACHED_OPENS {
                let start = Instant::now();
                let again = opener.open(&handle, Some(&device))?;
                cached.add(since(start));
                verified &= again.address() == opened.address();
            }
            if number == 0 {
                let sum = stream.checksum(&opened.slice()?, TIMEOUT)?;
                verified &= sum == self.checksum;
            }
        }
        let opened = client.open(NAME, Some(&device), TIMEOUT)?;
        let (mapped_rate, own, ratio) = compare(&stream, &opened.slice()?)?;
        let sum = stream.checksum(&opened.slice()?, TIMEOUT)?;
        verified &= sum == self.checksum;
        Ok(WorkerResult {
            samples: first,
            elapsed: since(start),
            iterations: self.iterations,
            verified,
            detail: OpenResult { requested, cached, mapped_rate, own, ratio },
            involuntary_switches: 0,
        })
    }
}

/// Interleaves copies out of the mapping with copies of plain memory of this process on the same
/// device. Rates in bytes per nanosecond, and the median ratio.
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
        stream.synchronize(TIMEOUT)?;
        let start = Instant::now();
        for _ in 0..COPIES_PER_SAMPLE {
            stream.copy(&target.whole(), from)?;
        }
        stream.synchronize(TIMEOUT)?;
        let bytes = length as f64 * f64::from(COPIES_PER_SAMPLE);
        Ok(bytes / start.elapsed().as_nanos() as f64)
    };
    // Warm-up: touch pages, raise clocks.
    time(shared)?;
    time(&own.whole())?;
    let (mut mapped_rate, mut plain, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        let (first, second) = if pair % 2 == 0 {
            let first = time(shared)?;
            (first, time(&own.whole())?)
        } else {
            let second = time(&own.whole())?;
            (time(shared)?, second)
        };
        mapped_rate.push(first);
        plain.push(second);
        ratios.push(first / second);
    }
    let median = |values| median(values).unwrap_or_default();
    Ok((median(mapped_rate), median(plain), median(ratios)))
}

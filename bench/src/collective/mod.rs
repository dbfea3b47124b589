//! `fabricast bench collective`: operations among ranks, beside another library in the same run.

mod buffers;
mod mpi;
mod nccl;
mod on_device;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use collective::{
    Algorithm, Blocks, CollectiveCall, CommDomain, CommDomainKey, DataType, DomainOptions, OpKey,
    Operation, Parameters, ReduceOp, SizeClass,
};
use command::exit::{Exit, Failure};
use command::{output, size, text};
use launch::{FabricUse, Group, GroupOptions};
use serde::Serialize;
use transfer::AgentOptions;

use self::buffers::Buffers;
use self::mpi::Mpi;
use self::on_device::OnDevice;
use super::report::{median, rounded};
use super::temp_dir::TempDir;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Operations before the first measurement: parameters are learnt meanwhile.
const WARM_UP: u64 = 40;
/// Thousandths of the bytes that take the fast path.
const DEFAULT_ALPHA: u16 = 900;
/// Set by Open MPI and by launchers with PMI for each of their processes.
const OF_LAUNCHERS: [&str; 2] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"];

/// Meaning of the columns, for `--help`.
const COLUMNS: &str = "\
Columns:
  size, GB/s  bytes of the block of one rank; these bytes divided by the time
  ratio       time of the rival divided by the time of this library: above 1 this library is faster
  algorithm, chunk
              parameters after the last operation; automatic: the algorithm depends on the size
  alpha       with devices: thousandths of the bytes that take the fast path
  direct      with devices: operations that accessed the buffers of other ranks
  host us     with devices: the time that the host takes to start an operation";

/// Measures a collective operation among ranks on this machine, with verified data.
///
/// Each size is measured in turns with the rival, if there is one. Times are those of the slowest rank.
/// The last line of the output is one JSON object.
#[derive(Debug, clap::Args)]
#[command(after_help = COLUMNS)]
pub(crate) struct Arguments {
    /// The operation
    #[arg(long = "op", value_name = "NAME", value_parser = operation_parser(), default_value = "all-reduce")]
    operation: Operation,
    /// Bytes of the block of a rank, of which operations such as all-gather have one for each rank;
    /// accepts K, M, G. A barrier has none
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = size::parse,
        default_value = "8,64K,1M,16M")]
    sizes: Vec<u64>,
    /// Number of ranks, each a process
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024),
        default_value = "2")]
    ranks: u32,
    /// Memory of the ranks: host, or that of the devices of an implementation, such as cuda
    #[arg(long, value_name = "NAME", default_value = "host")]
    device: String,
    /// The library to compare with
    #[arg(long, value_enum)]
    rival: Option<Rival>,
    /// The launcher of the rival
    #[arg(long, value_name = "PATH", default_value = "mpirun")]
    mpirun: String,
    /// A further option of the launcher; may be repeated
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    mpirun_option: Vec<String>,
    /// The library of the rival [default: the one that the launcher's processes find]
    #[arg(long, value_name = "PATH")]
    rival_library: Option<PathBuf>,
    /// How bytes go from rank to rank [default: learnt]
    #[arg(long, value_enum)]
    algorithm: Option<Route>,
    /// Bytes that are copied at once, with --algorithm; accepts K, M
    #[arg(long, value_name = "BYTES", value_parser = size::parse_positive, requires = "algorithm")]
    chunk: Option<u64>,
    /// The paths between devices
    #[arg(long, value_enum, default_value_t)]
    paths: Paths,
    /// Thousandths of the bytes that take the fast path, with --paths both [default: 900]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=1000))]
    alpha: Option<u16>,
    /// Reach ranks by the fabric, as if they were on other machines; needs a launcher such as mpirun
    #[arg(long, value_enum)]
    remote: Option<Remote>,
    /// Measurements of each size, of which the median counts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), default_value = "7")]
    rounds: u32,
    /// Milliseconds of a measurement
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..), default_value = "50")]
    milliseconds: u64,
    /// Print the JSON line only
    #[arg(long)]
    json: bool,
    /// Internal: the directory of a rank
    #[arg(long, hide = true)]
    directory: Option<PathBuf>,
    /// Internal: the rank of this process
    #[arg(long, hide = true)]
    rank: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Rival {
    /// The MPI library of the launcher
    Mpi,
    /// NCCL, with --device cuda
    Nccl,
    /// NCCL by copy engines: with windows and the policy to use no multiprocessors
    NcclCe,
}

impl Rival {
    fn name(self) -> &'static str {
        match self {
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
            Self::NcclCe => "nccl-ce",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Route {
    /// Each rank reduces all elements
    OneStep,
    /// Each rank reduces its share
    TwoStep,
    /// Ranks read the memory of each other
    Direct,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum Paths {
    /// NVLink or peer access only
    Fast,
    /// The rest of the bytes through the host
    Both,
    /// Split that is learnt
    #[default]
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Remote {
    /// All other ranks
    Ranks,
    /// Ranks with another FABRICAST_DIRECTORY
    Directories,
}

/// Reads the name of an operation.
fn operation_parser() -> impl TypedValueParser<Value = Operation> {
    PossibleValuesParser::new(Operation::ALL.map(Operation::name)).try_map(|name| {
        let found = Operation::ALL.into_iter().find(|operation| operation.name() == name);
        found.ok_or("unknown operation")
    })
}

impl Arguments {
    /// Returns true if the ranks use the memory of devices.
    fn is_device(&self) -> bool {
        self.device != "host"
    }
}

/// The result for one size.
#[derive(Debug, Serialize)]
struct Row {
    bytes: u64,
    time_us: f64,
    gb_per_s: f64,
    rival_time_us: Option<f64>,
    /// How many times as fast as the rival.
    ratio: Option<f64>,
    turns: u64,
    algorithm: String,
    /// Thousandths of the bytes that take the fast path.
    alpha: u16,
    chunk: u64,
    verified: bool,
    /// Microseconds that the host takes to start an operation of devices.
    host_us: f64,
    /// Operations of devices that accessed the buffers of other ranks.
    direct: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    operation: String,
    ranks: u32,
    rival: Option<String>,
    reads_peers: bool,
    rows: Vec<Row>,
    program: &'static str,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.alpha.is_some() && arguments.paths != Paths::Both {
        return Err(Failure::new(Exit::Usage, "--alpha needs --paths both"));
    }
    let is_launched = OF_LAUNCHERS.iter().any(|name| std::env::var_os(name).is_some());
    if arguments.rank.is_some() || is_launched {
        return run_rank(arguments);
    }
    if arguments.remote.is_some() {
        let why =
            "--remote needs a launcher: mpirun -n N fabricast bench collective --remote ranks";
        return Err(Failure::new(Exit::Usage, why));
    }
    if arguments.is_device() {
        // Once, instead of by each rank.
        OnDevice::open(&arguments.device, 0)?;
    }
    let directory = TempDir::create()?;
    let program = std::env::current_exe().map_err(Failure::of)?;
    let ranks = arguments.ranks.to_string();
    let passed = std::env::args_os().skip(1);
    let with_directory = |command: &mut Command| {
        command.args(passed).arg("--directory").arg(directory.path());
    };
    if arguments.rival == Some(Rival::Mpi) {
        let mut command = Command::new(&arguments.mpirun);
        command.args(["-n", &ranks]).args(&arguments.mpirun_option).arg(program);
        with_directory(&mut command);
        let status = command.status();
        let failed = |error| {
            Failure::new(Exit::NoProvider, format!("start {:?} failed: {error}", arguments.mpirun))
        };
        return match status.map_err(failed)?.code() {
            Some(0) => Ok(()),
            Some(code) => Err(Failure::new(
                Exit::from_code(code),
                format!(
                    "the job of {:?} ended with exit code {code}; the cause is above. \
                     --mpirun-option passes options to it",
                    arguments.mpirun
                ),
            )),
            None => Err(Failure::failed("the launcher was killed")),
        };
    }
    let passed: Vec<_> = std::env::args_os().skip(1).collect();
    let start = |rank: u32| {
        let mut command = Command::new(&program);
        command.args(&passed).arg("--directory").arg(directory.path());
        if arguments.rival == Some(Rival::NcclCe) {
            command.env("NCCL_CTA_POLICY", "2");
        }
        command.arg("--rank").arg(rank.to_string()).spawn().map_err(Failure::of)
    };
    let children: Vec<_> = (0..arguments.ranks).map(start).collect::<Result<_, _>>()?;
    let mut result = Ok(());
    for mut child in children {
        let status = child.wait().map_err(Failure::of)?;
        if !status.success() && result.is_ok() {
            result = Err(Failure::silent(Exit::from_code(status.code().unwrap_or(1))));
        }
    }
    result
}

/// One rank, and its rival.
struct Rank<'a> {
    arguments: &'a Arguments,
    domain: CommDomain,
    mpi: Option<Mpi>,
    device: Option<OnDevice>,
}

fn run_rank(arguments: &Arguments) -> Result<(), Failure> {
    // Started by a launcher, and not by this program.
    let is_alone = arguments.directory.is_some();
    let start = || {
        let options = GroupOptions::from_environment()?;
        Group::start_with(match arguments.remote {
            None => options,
            Some(Remote::Ranks) => options.force_remote(),
            Some(Remote::Directories) => {
                options.fabric_use(FabricUse::Always).agent(AgentOptions::new("").force_remote())
            }
        })
    };
    let mut group = (!is_alone).then(start).transpose().map_err(Failure::of)?;
    let library = arguments.rival_library.as_deref();
    let is_mpi = arguments.rival == Some(Rival::Mpi);
    let mpi = is_mpi.then(|| Mpi::start(library)).transpose()?;
    let (rank, ranks) = match (&group, &mpi, arguments.rank) {
        (Some(group), ..) => (group.rank(), group.size()),
        (None, Some(mpi), _) => mpi.place()?,
        (None, None, rank) => (rank.unwrap_or(0), arguments.ranks),
    };
    let options = DomainOptions::new();
    let mut options = match (&group, &arguments.directory) {
        (Some(group), _) => options.directory(group.directory()).job(group.job()),
        (None, Some(directory)) => options.directory(directory),
        (None, None) => options,
    };
    if let Some(route) = arguments.algorithm {
        let algorithm = match route {
            Route::OneStep => Algorithm::OneStep,
            Route::TwoStep => Algorithm::TwoStep,
            Route::Direct => Algorithm::Direct,
        };
        let chunk_bits = arguments.chunk.map_or(0, |chunk| chunk.ilog2() as u8);
        options =
            options.fixed_parameters(Parameters { algorithm, chunk_bits, ..Parameters::default() });
    }
    let key = CommDomainKey::of_first_ranks(ranks);
    let domain = match &mut group {
        Some(group) => CommDomain::of_group(group, &options),
        None => CommDomain::join(&key, rank, &options),
    };
    let mut domain = domain.map_err(Failure::of)?;
    let nccl = match arguments.rival {
        Some(Rival::Nccl) => Some((library, false)),
        Some(Rival::NcclCe) => Some((library, true)),
        _ => None,
    };
    let alpha = match arguments.paths {
        Paths::Fast => Some(Parameters::FAST_ONLY),
        Paths::Both => Some(arguments.alpha.unwrap_or(DEFAULT_ALPHA)),
        Paths::Auto => None,
    };
    if let Some(alpha) = alpha {
        options = options.fixed_parameters(Parameters { alpha, ..Parameters::default() });
    }
    let start = || OnDevice::start(&arguments.device, &mut domain, &options, nccl);
    let device = arguments.is_device().then(start).transpose()?;
    let mut bench = Rank { arguments, domain, mpi, device };
    let mut rows = Vec::new();
    let sizes: &[u64] = match arguments.operation {
        Operation::Barrier => &[0],
        _ => &arguments.sizes,
    };
    for bytes in sizes {
        rows.push(bench.measure(*bytes)?);
    }
    let Rank { domain, .. } = bench;
    let reads_peers = domain.reads_peers();
    domain.close(TIMEOUT).map_err(Failure::of)?;
    let is_right = rows.iter().all(|row| row.verified);
    if rank == 0 {
        let rival = arguments.rival.map(|rival| rival.name().to_owned());
        let operation = arguments.operation.to_string();
        let program = command::VERSION_LINE;
        Report { operation, ranks, rival, reads_peers, rows, program }.print(arguments)?;
    }
    match is_right {
        true => Ok(()),
        false => Err(Failure::new(Exit::DataCorrupted, "received data is corrupted")),
    }
}

impl Rank<'_> {
    fn measure(&mut self, bytes: u64) -> Result<Row, Failure> {
        let operation = self.arguments.operation;
        let count = usize::try_from(bytes).map_err(Failure::of)? / size_of::<f32>();
        let (rank, ranks) = (self.domain.rank(), self.domain.size());
        let mut buffers = Buffers::new(operation, rank, ranks, count);
        let direct_before = self.device.as_ref().map_or(0, OnDevice::direct_operations);
        self.set_up(&buffers)?;
        self.run(&mut buffers, WARM_UP)?;
        self.run_rival(&mut buffers, 4)?;
        self.run(&mut buffers, 4)?;
        let each = self.run(&mut buffers, 4)? / 4;
        let each = self.slowest(each)?;
        let wanted = Duration::from_millis(self.arguments.milliseconds).as_secs_f64();
        let turns = (wanted / each.max(1e-7)).clamp(4.0, 1e6) as u64;
        let (mut own, mut rival, mut verified) = (Vec::new(), Vec::new(), true);
        for round in 0..self.arguments.rounds {
            // Copies to and from a device take longer than operations: once is enough.
            let is_checked = round == 0;
            if is_checked {
                buffers.clear();
                self.set_up(&buffers)?;
                // Ranks open new buffers of each other.
                self.run(&mut buffers, 1)?;
                self.run(&mut buffers, 1)?;
            }
            self.domain.barrier(TIMEOUT).map_err(Failure::of)?;
            let took = self.run(&mut buffers, turns)?;
            own.push(self.slowest(took)? / turns as f64);
            if is_checked {
                verified &= self.is_right(&mut buffers)?;
                buffers.clear();
                self.set_up(&buffers)?;
            }
            self.domain.barrier(TIMEOUT).map_err(Failure::of)?;
            if let Some(took) = self.run_rival(&mut buffers, turns)? {
                rival.push(self.slowest(took)? / turns as f64);
                verified &= !is_checked || self.is_right(&mut buffers)?;
            }
        }
        let mut all_verified = [u8::from(verified)];
        self.domain.all_reduce(&mut all_verified, ReduceOp::Min, TIMEOUT).map_err(Failure::of)?;
        let own = median(own).unwrap_or(0.0);
        let rival = median(rival);
        let size_class = SizeClass::of(bytes);
        let key = OpKey { operation, size_class, data_type: DataType::F32 };
        let used = match &self.device {
            Some(device) => device.parameters(key),
            None => self.domain.parameters(key),
        };
        Ok(Row {
            bytes,
            time_us: rounded(own * 1e6),
            gb_per_s: rounded(bytes as f64 / own / 1e9),
            rival_time_us: rival.map(|time| rounded(time * 1e6)),
            ratio: rival.map(|time| rounded(time / own)),
            turns,
            algorithm: used.algorithm.to_string(),
            alpha: used.alpha,
            chunk: if used.chunk_bits == 0 { 0 } else { 1 << used.chunk_bits },
            verified: all_verified[0] == 1,
            host_us: self.device.as_ref().map_or(0.0, OnDevice::host_time) * 1e6,
            direct: self.device.as_ref().map_or(0, OnDevice::direct_operations) - direct_before,
        })
    }

    /// The longest time of all ranks in seconds.
    fn slowest(&mut self, own: Duration) -> Result<f64, Failure> {
        let mut time = [own.as_secs_f64()];
        self.domain.all_reduce(&mut time, ReduceOp::Max, TIMEOUT).map_err(Failure::of)?;
        Ok(time[0])
    }

    fn set_up(&mut self, buffers: &Buffers) -> Result<(), Failure> {
        self.device.as_mut().map_or(Ok(()), |device| device.set_up(buffers))
    }

    fn is_right(&self, buffers: &mut Buffers) -> Result<bool, Failure> {
        if let Some(device) = &self.device {
            device.read(buffers)?;
        }
        Ok(buffers.is_right())
    }

    /// Carries out operations by the rival, if there is one.
    fn run_rival(&self, buffers: &mut Buffers, turns: u64) -> Result<Option<Duration>, Failure> {
        let operation = self.arguments.operation;
        if let Some(device) = &self.device {
            return device.run_rival(operation, buffers.count(), turns);
        }
        let Some(mpi) = &self.mpi else { return Ok(None) };
        mpi.barrier()?;
        let began = Instant::now();
        mpi.run(operation, buffers, turns)?;
        Ok(Some(began.elapsed()))
    }

    /// Carries out operations, and returns how long they took.
    #[allow(unsafe_code)]
    fn run(&mut self, buffers: &mut Buffers, turns: u64) -> Result<Duration, Failure> {
        let operation = self.arguments.operation;
        let count = buffers.count();
        let (send, receive) = match operation {
            Operation::AllGather | Operation::Gather => (Blocks::One(count), Blocks::Each(count)),
            Operation::ReduceScatter | Operation::Scatter => {
                (Blocks::Each(count), Blocks::One(count))
            }
            Operation::AllToAll => (Blocks::Each(count), Blocks::Each(count)),
            _ => (Blocks::One(count), Blocks::One(count)),
        };
        let output: *mut u8 = buffers.output().cast();
        let input = match operation {
            Operation::Broadcast => output.cast_const(),
            _ => buffers.input().cast(),
        };
        let (data_type, reduce_op, root) = (DataType::F32, ReduceOp::Sum, 0);
        let call =
            CollectiveCall { operation, data_type, reduce_op, root, input, send, output, receive };
        if let Some(device) = &mut self.device {
            return device.run(&call, turns);
        }
        let began = Instant::now();
        for _ in 0..turns {
            // SAFETY: the buffers have as many elements as the operation needs.
            unsafe { self.domain.run(&call, TIMEOUT) }.map_err(Failure::of)?;
        }
        Ok(began.elapsed())
    }
}

impl Report {
    fn print(&self, arguments: &Arguments) -> Result<(), Failure> {
        let is_device = arguments.is_device();
        if !arguments.json {
            let mut columns =
                vec!["size", "time us", "GB/s", "rival us", "ratio", "algorithm", "chunk"];
            if is_device {
                columns.extend(["alpha", "direct", "host us"]);
            }
            let mut rows = vec![columns.into_iter().map(str::to_owned).collect()];
            for row in &self.rows {
                let rate =
                    if row.bytes == 0 { String::new() } else { format!("{:.2}", row.gb_per_s) };
                let mut cells = vec![
                    size::print(row.bytes),
                    format!("{:.2}", row.time_us),
                    rate,
                    row.rival_time_us.map_or_else(String::new, |time| format!("{time:.2}")),
                    row.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
                    row.algorithm.clone(),
                    if row.chunk == 0 { String::new() } else { size::print(row.chunk) },
                ];
                if is_device {
                    cells.push(row.alpha.to_string());
                    cells.push(row.direct.to_string());
                    cells.push(format!("{:.1}", row.host_us));
                }
                rows.push(cells);
            }
            let ranks = text::count_of(self.ranks.into(), "rank");
            output::print(&format!("{} of {ranks}\n{}", self.operation, text::table(&rows)))?;
        }
        output::print(&format!("{}\n", serde_json::to_string(self).map_err(Failure::of)?))
    }
}

//! A two-dimensional FFT of a matrix that is distributed by rows. Each rank transforms its rows, the
//! ranks transpose the matrix by strided puts, and each transforms what were columns before.
//!
//! ```text
//! mpirun -n 4 transpose --size 1024
//! mpirun -n 4 transpose --size 1024 --device cuda        # the matrix moves between GPUs
//! ```
//!
//! A put writes a tile of the matrix where the receiver needs it: nothing is unpacked there. Its
//! notice arrives after its data, so that a rank only waits for as many notices as there are peers.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use fabricast::transfer::path::Policy;
use fabricast::transfer::{Notice, Region, Rights, Route, Strided, Subarray};
use mpi_examples::arrivals::Arrivals;
use mpi_examples::fft::{Complex, Fft, transposed};
use mpi_examples::memory::{Location, Memory};
use mpi_examples::samples::Samples;
use mpi_examples::{CommonOptions, Job, Result, conclude, numbers};

/// Transforms a matrix by a distributed FFT, checks it against a serial one, and measures the
/// transposition.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonOptions,
    /// Rows and columns of the matrix: a power of two, and a multiple of the ranks
    #[arg(long, default_value = "512")]
    size: u64,
    /// Measured transpositions of each kind
    #[arg(long, default_value = "10")]
    repeat: u32,
    /// Where the matrix is while it moves
    #[arg(long, value_enum, default_value_t)]
    device: Location,
}

/// How the ranks transpose the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    /// Each rank transposes its rows, and puts tiles of which each row is contiguous.
    PutRows,
    /// The puts transpose: each element is a row of its own.
    PutElements,
    #[cfg(feature = "mpi")]
    AllToAll,
}

impl Method {
    const ALL: &[(Self, &str)] = &[
        (Self::PutRows, "put of rows"),
        (Self::PutElements, "put of elements"),
        #[cfg(feature = "mpi")]
        (Self::AllToAll, "MPI_Alltoall"),
    ];
}

/// What a rank needs to transpose.
struct Transposition {
    /// Rows and columns of the matrix, and the rows of each rank.
    size: u64,
    rows: u64,
    rank: u64,
    outbox: Memory,
    /// Used in turn. A peer that is a transposition ahead puts into the other one, and it cannot be
    /// further ahead: for that it would need this rank's notice.
    inboxes: [Memory; 2],
    /// Dropping them would end the access of the peers.
    _regions: [Region; 2],
    /// To the inboxes of each rank, also of this one.
    routes: Vec<(u32, [Route; 2])>,
    arrivals: Arrivals,
    count: u64,
}

impl Transposition {
    fn new(job: &mut Job, size: u64, at: Location) -> Result<Self> {
        let (rank, ranks, timeout) = (job.group.rank(), job.group.size(), job.timeout());
        let rows = size / u64::from(ranks);
        let buffer = || Memory::new(at, job.group.local().rank, size * rows * Complex::BYTES);
        let (outbox, inboxes) = (buffer()?, [buffer()?, buffer()?]);
        let agent = job.group.agent();
        let source = agent.register_local(outbox.buffer())?;
        let [first, second] = &inboxes;
        let regions = [first, second].map(|inbox| agent.register(inbox.buffer(), Rights::WRITE));
        let [first, second] = regions;
        let regions = [first?, second?];
        let [first, second] = [&regions[0], &regions[1]].map(|region| region.descriptor().encode());
        let first = job.group.all_gather(&first?, timeout)?;
        let second = job.group.all_gather(&second?, timeout)?;
        let mut routes = Vec::new();
        // Each rank begins with its next one, so that not all put into the same one at a time.
        for to in (1..=ranks).map(|distance| (rank + distance) % ranks) {
            let peer = job.peer(to)?;
            let mut join = |descriptors: &[Vec<u8>]| {
                let (descriptor, policy) = (&descriptors[to as usize], Policy::default());
                job.group.agent().join(peer, &source, descriptor, &policy, timeout)
            };
            routes.push((to, [join(&first)?, join(&second)?]));
        }
        let (rank, arrivals) = (u64::from(rank), Arrivals::default());
        Ok(Self {
            size,
            rows,
            rank,
            outbox,
            inboxes,
            _regions: regions,
            routes,
            arrivals,
            count: 0,
        })
    }

    /// The elements that go from this rank's outbox to the inbox of a rank.
    fn tile(&self, method: Method, to: u64) -> Result<Strided> {
        let Self { size, rows, rank, .. } = *self;
        let (target_row, target_column) = (0, rank * rows);
        let tile = match method {
            // The outbox has the transposed rows: `size` rows of `rows` elements.
            Method::PutRows => Strided::tile(
                Complex::BYTES,
                &[rows, rows],
                Subarray { extents: &[size, rows], origin: &[to * rows, 0] },
                Subarray { extents: &[rows, size], origin: &[target_row, target_column] },
            )?,
            // The outbox has the rows as they are. What is a row here is a column there.
            _ => {
                let (element, line) = (Complex::BYTES, Complex::BYTES * size);
                Strided::row(element)?
                    .repeat(rows, element, line)?
                    .repeat(rows, line, element)?
                    .shifted(to * rows * element, target_column * element)?
            }
        };
        Ok(tile)
    }

    /// Replaces this rank's rows by those of the transposed matrix. All ranks call it. Returns the
    /// time to move the data between the ranks.
    fn run(&mut self, job: &mut Job, method: Method, matrix: &mut [Complex]) -> Result<Duration> {
        #[cfg(feature = "mpi")]
        if method == Method::AllToAll {
            return self.run_by_mpi(job, matrix);
        }
        let (timeout, agent) = (job.timeout(), job.group.agent());
        let which = (self.count % 2) as usize;
        let notice = Notice::new(self.count, b"")?;
        self.outbox.write(
            0,
            &match method {
                Method::PutRows => to_bytes(&transposed(matrix, self.size as usize)),
                _ => to_bytes(matrix),
            },
        )?;
        let start = Instant::now();
        let mut puts = Vec::new();
        for (to, routes) in &self.routes {
            let tile = self.tile(method, u64::from(*to))?;
            puts.push(agent.put(&routes[which], &tile, Some(notice.clone()))?);
        }
        for put in puts {
            agent.wait(put, timeout)?;
        }
        self.arrivals.wait(job, self.count, self.routes.len() as u32, timeout)?;
        let moved = start.elapsed();
        self.count += 1;
        let mut bytes = vec![0; size_of_val(matrix)];
        self.inboxes[which].read(0, &mut bytes)?;
        from_bytes(&bytes, matrix);
        Ok(moved)
    }

    /// Transposes by MPI, which needs to pack and unpack tiles, and to stage those of a device.
    #[cfg(feature = "mpi")]
    fn run_by_mpi(&self, job: &Job, matrix: &mut [Complex]) -> Result<Duration> {
        use mpi::traits::CommunicatorCollectives;
        let (size, rows) = (self.size as usize, self.rows as usize);
        let mut send = to_bytes(&transposed(matrix, size));
        let mut tiles = vec![0; send.len()];
        let is_staged = matches!(self.outbox, Memory::Device(..));
        if is_staged {
            self.outbox.write(0, &send)?;
        }
        let start = Instant::now();
        if is_staged {
            self.outbox.read(0, &mut send)?;
        }
        job.world().all_to_all_into(&send, &mut tiles);
        if is_staged {
            self.outbox.write(0, &tiles)?;
        }
        let moved = start.elapsed();
        let line = rows * Complex::BYTES as usize;
        for (index, tile) in tiles.chunks_exact(rows * line).enumerate() {
            for (row, line) in tile.chunks_exact(line).enumerate() {
                from_bytes(line, &mut matrix[row * size + index * rows..][..rows]);
            }
        }
        Ok(moved)
    }
}

fn to_bytes(matrix: &[Complex]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(matrix)];
    for ([re, im], value) in bytes.as_chunks_mut().0.as_chunks_mut().0.iter_mut().zip(matrix) {
        (*re, *im) = (value.re.to_ne_bytes(), value.im.to_ne_bytes());
    }
    bytes
}

fn from_bytes(bytes: &[u8], matrix: &mut [Complex]) {
    for (value, [re, im]) in matrix.iter_mut().zip(bytes.as_chunks().0.as_chunks().0) {
        *value = Complex { re: f64::from_ne_bytes(*re), im: f64::from_ne_bytes(*im) };
    }
}

/// The matrix before the transform: a wave and noise.
fn element(row: u64, column: u64) -> Complex {
    let mixed = (row << 32 | column).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let noise = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 11;
    let (im, re) = (0.1 * row as f64 + 0.3 * column as f64).sin_cos();
    Complex { re: re + noise as f64 / (1_u64 << 53) as f64, im }
}

fn rows_before(first: u64, count: u64, size: u64) -> Vec<Complex> {
    let rows = first..first + count;
    rows.flat_map(|row| (0..size).map(move |column| element(row, column))).collect()
}

fn run(arguments: &Arguments) -> Result<()> {
    let mut job = Job::start("transpose", &arguments.common)?;
    let (size, ranks) = (arguments.size, job.group.size());
    let fft = Fft::new(size as usize).filter(|_| size.is_multiple_of(u64::from(ranks)));
    let fft = fft.ok_or_else(|| {
        format!(
            "distribute matrix failed: {size} is no power of two or not a multiple of {ranks} ranks"
        )
    })?;
    let mut transposition = Transposition::new(&mut job, size, arguments.device)?;
    let first = transposition.rank * transposition.rows;
    let before = rows_before(first, transposition.rows, size);

    // The transform: rows, columns, and back to the original distribution.
    let mut matrix = before.clone();
    for _ in 0..2 {
        fft.transform_rows(&mut matrix);
        transposition.run(&mut job, Method::PutRows, &mut matrix)?;
    }

    // Its check: each rank compares its rows with those of a serial transform.
    let mut serial = rows_before(0, size, size);
    for _ in 0..2 {
        fft.transform_rows(&mut serial);
        serial = transposed(&serial, size as usize);
    }
    let own = &serial[(first * size) as usize..][..matrix.len()];
    let largest = serial.iter().map(|value| value.norm_squared()).fold(0.0, f64::max);
    let differences = matrix.iter().zip(own).map(|(a, b)| (*a - *b).norm_squared());
    let error = (differences.fold(0.0, f64::max) / largest).sqrt();
    // Parseval: the sum of squares only grows by the number of elements.
    let sum = |values: &[Complex]| values.iter().map(|value| value.norm_squared()).sum();
    let sums = numbers::to_bytes(&[sum(&before), sum(&matrix), error]);
    let mut total = [0.0; 3];
    for bytes in job.group.all_gather(&sums, job.timeout())? {
        let mut found = [0.0; 3];
        numbers::from_bytes(&bytes, &mut found);
        total = [total[0] + found[0], total[1] + found[1], f64::max(total[2], found[2])];
    }
    let parseval = (total[1] / (total[0] * (size * size) as f64) - 1.0).abs();
    let is_right = |error: f64| error < 1e-12;
    let mut mistakes = u64::from(!is_right(total[2])) + u64::from(!is_right(parseval));
    if job.is_root() {
        println!(
            "transpose: {size} x {size} on {ranks} ranks, max error {:.1e}, Parseval {parseval:.1e}",
            total[2]
        );
    }

    // The whole transposition, and its part that moves data.
    let mut samples = vec![[Samples::default(), Samples::default()]; Method::ALL.len()];
    for _ in 0..arguments.repeat {
        for ((method, _), samples) in Method::ALL.iter().zip(&mut samples) {
            matrix.clone_from(&before);
            let start = Instant::now();
            let moved = transposition.run(&mut job, *method, &mut matrix)?;
            samples[0].add(start.elapsed());
            samples[1].add(moved);
            let transposed_element = |at: u64| element(at % size, first + at / size);
            let is_wrong = |(value, at): &(&Complex, u64)| **value != transposed_element(*at);
            mistakes += matrix.iter().zip(0..).filter(is_wrong).count() as u64;
        }
    }
    if job.is_root() && arguments.repeat > 0 {
        for ((_, name), [whole, moved]) in Method::ALL.iter().zip(&samples) {
            let (whole, moved) = (whole.median(), moved.median());
            println!(
                "transpose: {name}: median {whole:.0} us, of which data moves for {moved:.0} us"
            );
        }
    }
    job.finish("transpose", mistakes)
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()))
}

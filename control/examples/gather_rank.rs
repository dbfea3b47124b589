//! A rank of a job: gathers bytes of all ranks three times, and checks them.
//!
//! ```text
//! cargo build --locked --example gather_rank
//! torchrun --nproc-per-node 4 --no-python target/debug/examples/gather_rank
//! torchrun --nproc-per-node 4 --no-python target/debug/examples/gather_rank --absent 3
//! ```
//!
//! `--absent RANK`: this rank does not gather, and the error of the others must name it.
//! `--fail RANK`: this rank fails before its second exchange, the first time torchrun starts it.
//! `--timeout SECONDS`: of each call (30).

use std::process::ExitCode;
use std::time::{Duration, Instant};

use control::launcher::{Contribution, Environment, ErrorKind, Exchange, Result, gather, start};

/// Bytes of each rank in the three exchanges, and how many more than the rank before.
const LENGTHS: [(usize, usize); 3] = [(0, 1), (300, 7), (1 << 20, 1000)];

struct Options {
    absent: Option<u32>,
    fail: Option<u32>,
    timeout: Duration,
}

impl Options {
    /// None if an option is unknown or has no number.
    fn of(mut arguments: impl Iterator<Item = String>) -> Option<Self> {
        let mut options = Self { absent: None, fail: None, timeout: Duration::from_secs(30) };
        while let Some(option) = arguments.next() {
            let number = arguments.next()?.parse().ok()?;
            match option.as_str() {
                "--absent" => options.absent = Some(number),
                "--fail" => options.fail = Some(number),
                "--timeout" => options.timeout = Duration::from_secs(number.into()),
                _ => return None,
            }
        }
        Some(options)
    }
}

fn contribution(rank: u32, round: usize) -> Vec<u8> {
    let (length, step) = LENGTHS[round];
    let length = length + step * rank as usize;
    (0..length).map(|at| (at * 31 + rank as usize * 7 + round) as u8).collect()
}

fn run(options: &Options) -> Result<ExitCode> {
    let environment = Environment::of_this_process();
    let mut job = start(&environment, options.timeout)?;
    let (rank, size) = (job.rank(), job.size());
    println!("rank {rank} of {size}: started by {}, job {}", job.name(), job.job());
    let restarts = environment.number::<u32>("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
    if options.absent.is_some() {
        return Ok(absence(options, &mut *job));
    }
    for round in 0..LENGTHS.len() {
        if round == 1 && restarts == 0 && options.fail == Some(rank) {
            println!("rank {rank}: fails as requested");
            return Ok(ExitCode::from(3));
        }
        let own = contribution(rank, round);
        let begun = Instant::now();
        let gathered = gather(&mut *job, Contribution::Bytes(&own), options.timeout)?;
        let taken = begun.elapsed();
        let is_right = |from: u32| gathered[from as usize] == contribution(from, round);
        if gathered.len() != size as usize || !(0..size).all(is_right) {
            println!("rank {rank}: exchange {round} gathered other bytes than were contributed");
            return Ok(ExitCode::FAILURE);
        }
        println!("rank {rank}: {} bytes gathered in {taken:?}", gathered.concat().len());
    }
    println!("rank {rank}: ok after {restarts} restarts");
    Ok(ExitCode::SUCCESS)
}

/// Does the exchange fail, and does its error name the absent rank?
fn absence(options: &Options, job: &mut dyn Exchange) -> ExitCode {
    let rank = job.rank();
    if options.absent == Some(rank) {
        println!("rank {rank}: absent as requested");
        return ExitCode::SUCCESS;
    }
    match gather(job, Contribution::Bytes(b"card"), options.timeout) {
        Err(error)
            if error.kind() == ErrorKind::DeadlineExceeded
                && error.ranks() == options.absent.as_slice() =>
        {
            println!("rank {rank}: expected: {error}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("rank {rank}: another error: {error}");
            ExitCode::FAILURE
        }
        Ok(_) => {
            println!("rank {rank}: no error, although a rank is absent");
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    let Some(options) = Options::of(std::env::args().skip(1)) else {
        eprintln!("usage: gather_rank [--absent RANK] [--fail RANK] [--timeout SECONDS]");
        return ExitCode::from(2);
    };
    run(&options).unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::FAILURE
    })
}

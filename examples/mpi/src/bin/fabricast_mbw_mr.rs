//! Bandwidth and message rate of many pairs at the same time: rank n sends to rank n + half.

use std::process::ExitCode;

use clap::Parser;
use mpi_examples::benchmark::{self, Benchmark, BenchmarkOptions, Load, Outcome};
use mpi_examples::channel::Channel;
use mpi_examples::stream::{self, Direction};
use mpi_examples::{Job, Result, conclude};

/// Bandwidth and message rate of all pairs of ranks together: rank n sends to rank n + half.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    options: BenchmarkOptions,
}

const BENCHMARK: Benchmark = Benchmark {
    name: "fabricast_mbw_mr",
    window: stream::WINDOW,
    iterations: stream::ITERATIONS,
    figures: &["MB/s", "Messages/s"],
    is_time: false,
};

fn measure(job: &mut Job, channel: &mut dyn Channel, load: &Load) -> Result<Outcome> {
    let stream = stream::run(job, channel, load, Direction::FromLowerRank)?;
    // All pairs run at the same time: their rates add up.
    let is_sender = load.partner.is_some_and(|partner| job.group.rank() < partner);
    let rate = if is_sender { stream.megabytes_per_second() } else { 0.0 };
    let timeout = job.timeout();
    let rates = job.group.all_gather(&rate.to_le_bytes(), timeout)?;
    let of_rank = |bytes: &Vec<u8>| bytes[..].try_into().map_or(0.0, f64::from_le_bytes);
    let all: f64 = rates.iter().map(of_rank).sum();
    let messages = all * 1e6 / load.bytes as f64;
    Ok(Outcome { figures: vec![all, messages], ..stream.into() })
}

fn main() -> ExitCode {
    let Arguments { options } = Arguments::parse();
    conclude(benchmark::run(BENCHMARK, &options, benchmark::partner_in_halves, measure))
}

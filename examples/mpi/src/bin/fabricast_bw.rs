//! Bandwidth of messages from rank 0 to rank 1: a window of messages, then an acknowledgement.

use std::process::ExitCode;

use clap::Parser;
use mpi_examples::benchmark::{self, Benchmark, BenchmarkOptions, Load, Outcome};
use mpi_examples::channel::Channel;
use mpi_examples::stream::{self, Direction};
use mpi_examples::{Job, Result, conclude};

/// Bandwidth of messages from rank 0 to rank 1.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    options: BenchmarkOptions,
}

const BENCHMARK: Benchmark = Benchmark {
    name: "fabricast_bw",
    window: stream::WINDOW,
    iterations: stream::ITERATIONS,
    figures: &["Bandwidth (MB/s)"],
    is_time: false,
};

fn measure(job: &mut Job, channel: &mut dyn Channel, load: &Load) -> Result<Outcome> {
    let stream = stream::run(job, channel, load, Direction::FromLowerRank)?;
    Ok(Outcome { figures: vec![stream.megabytes_per_second()], ..stream.into() })
}

fn main() -> ExitCode {
    let Arguments { options } = Arguments::parse();
    conclude(benchmark::run(BENCHMARK, &options, benchmark::first_pair, measure))
}

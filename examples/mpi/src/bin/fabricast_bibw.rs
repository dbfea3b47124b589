//! Bandwidth of messages in both directions between ranks 0 and 1.

use std::process::ExitCode;

use clap::Parser;
use mpi_examples::benchmark::{self, Benchmark, BenchmarkOptions, Load, Outcome};
use mpi_examples::channel::Channel;
use mpi_examples::stream::{self, Direction};
use mpi_examples::{Job, Result, conclude};

/// Bandwidth of messages in both directions between ranks 0 and 1, of both together.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    options: BenchmarkOptions,
}

const BENCHMARK: Benchmark = Benchmark {
    name: "fabricast_bibw",
    window: stream::WINDOW,
    iterations: stream::ITERATIONS,
    figures: &["Bandwidth (MB/s)"],
    is_time: false,
};

fn measure(job: &mut Job, channel: &mut dyn Channel, load: &Load) -> Result<Outcome> {
    let stream = stream::run(job, channel, load, Direction::Both)?;
    Ok(Outcome { figures: vec![2.0 * stream.megabytes_per_second()], ..stream.into() })
}

fn main() -> ExitCode {
    let Arguments { options } = Arguments::parse();
    conclude(benchmark::run(BENCHMARK, &options, benchmark::first_pair, measure))
}

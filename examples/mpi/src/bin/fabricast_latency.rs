//! Latency of messages between ranks 0 and 1: half of a round trip.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use mpi_examples::benchmark::{self, Benchmark, BenchmarkOptions, Checked, Load, Outcome};
use mpi_examples::channel::Channel;
use mpi_examples::samples::Samples;
use mpi_examples::{Job, Result, conclude};

/// Latency of messages between ranks 0 and 1.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    options: BenchmarkOptions,
}

const BENCHMARK: Benchmark = Benchmark {
    name: "fabricast_latency",
    window: 1,
    iterations: [10_000, 1000],
    figures: &["Latency (us)"],
    is_time: true,
};

fn measure(job: &mut Job, channel: &mut dyn Channel, load: &Load) -> Result<Outcome> {
    let Some(partner) = load.partner else { return Ok(Outcome::default()) };
    let mut checked = Checked::new(job, load);
    let mut samples = Samples::with_capacity(load.iterations as usize);
    let is_first = job.group.rank() < partner;
    for iteration in 0..load.warmup + load.iterations {
        checked.fill(channel)?;
        if is_first {
            let before = Instant::now();
            channel.send(job, load.bytes)?;
            channel.expect(job, 1, load.bytes)?;
            channel.receive(job, 1, load.bytes)?;
            channel.flush(job)?;
            let round_trip = before.elapsed();
            if iteration >= load.warmup {
                samples.add(round_trip / 2);
            }
        } else {
            channel.expect(job, 1, load.bytes)?;
            channel.receive(job, 1, load.bytes)?;
            channel.send(job, load.bytes)?;
            channel.flush(job)?;
        }
        checked.check(channel, 1)?;
    }
    Ok(Outcome { figures: vec![samples.mean()], samples, mistakes: checked.mistakes })
}

fn main() -> ExitCode {
    let Arguments { options } = Arguments::parse();
    conclude(benchmark::run(BENCHMARK, &options, benchmark::first_pair, measure))
}

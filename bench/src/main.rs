//! `fabricast-bench`: benchmarks with verified data. `fabricast bench` starts it.
//!
//! Modules, each importing only those before it: `worker`, `process`, `progress`, `temp_dir`,
//! `worker_group`, `core_pair`, `report`, `local_offers`, `random_pattern`, `exchange`, `alloc`,
//! `queue`, `share`, `transfer`, `topic`, `fabric`, `ring`, `zero`, `collective`.

mod alloc;
mod collective;
mod core_pair;
mod exchange;
mod fabric;
mod local_offers;
mod process;
mod progress;
mod queue;
mod random_pattern;
mod report;
mod ring;
mod share;
mod temp_dir;
mod topic;
mod transfer;
mod worker;
mod worker_group;
mod zero;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use command::exit::{self, Failure};
use command::output;
use tracing_subscriber::filter::LevelFilter;
use worker_group::TaskType;

/// Benchmarks of Fabricast, with verified data.
#[derive(Debug, Parser)]
#[command(name = "fabricast bench", bin_name = "fabricast bench", version = command::VERSION_LINE)]
#[command(after_help = exit::HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Measurement,
}

#[derive(Debug, Subcommand)]
enum Measurement {
    /// Measure the fabric layer between two processes on this machine
    Fabric(fabric::Arguments),
    /// Measure messages through a ring, between two processes or two machines
    Ring(ring::Arguments),
    /// Measure zeroing of registered memory after reading it, and messages through such memory
    Zero(zero::Arguments),
    /// Measure the allocator with metadata in shared memory
    Alloc(alloc::Arguments),
    /// Measure the latency of queue entries from a publisher to its readers
    Queue(queue::Arguments),
    /// Measure opening and reading another process's buffer
    Share(share::Arguments),
    /// Measure puts and gets between the memories of two processes
    Transfer(transfer::Arguments),
    /// Measure messages of topics, within a node and between two nodes
    Topic(topic::Arguments),
    /// Measure collective operations among ranks, beside another library
    Collective(collective::Arguments),
    /// Internal: the second process of an exchange
    #[command(hide = true)]
    ExchangeTarget,
    /// Internal: a worker process
    #[command(hide = true)]
    BenchWorker {
        /// Socket of the coordinator
        socket: PathBuf,
    },
}

/// The tasks of worker processes.
const TASKS: [TaskType; 5] = [
    TaskType::of::<alloc::Work>(),
    TaskType::of::<queue::ReaderTask>(),
    TaskType::of::<share::OpenTask>(),
    TaskType::of::<transfer::Target>(),
    TaskType::of::<topic::WorkerRole>(),
];

fn run(measurement: &Measurement) -> Result<(), Failure> {
    match measurement {
        Measurement::Fabric(arguments) => fabric::run(arguments),
        Measurement::Ring(arguments) => ring::run(arguments),
        Measurement::Zero(arguments) => zero::run(arguments),
        Measurement::Alloc(arguments) => alloc::run(arguments),
        Measurement::Queue(arguments) => queue::run(arguments),
        Measurement::Share(arguments) => share::run(arguments),
        Measurement::Transfer(arguments) => transfer::run(arguments),
        Measurement::Topic(arguments) => topic::run(arguments),
        Measurement::Collective(arguments) => collective::run(arguments),
        Measurement::ExchangeTarget => exchange::target::run(),
        Measurement::BenchWorker { socket } => worker_group::work(socket, &TASKS),
    }
}

fn main() -> ExitCode {
    // Topics and processes use descriptors. If the limit cannot be raised, a later check fails.
    let _ = ipc::DescriptorLimit::raise();
    let arguments = command::arguments::read::<Arguments>();
    let result =
        command::log::start(None, LevelFilter::WARN).and_then(|()| run(&arguments.command));
    output::conclude(result)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn documentation_lists_the_benchmarks() {
        let text = testkit::reference::of_subcommands(Arguments::command());
        testkit::reference::check("bench.md", "benchmarks", &text);
    }
}

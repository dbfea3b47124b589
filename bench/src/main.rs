//! `fabricast-bench`: what things cost, with the data checked. `fabricast bench` starts it.

mod alloc;
mod cores;
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
use tracing_subscriber::filter::LevelFilter;

/// Measures what Fabricast costs, with the data checked.
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
    /// Measure how long it takes to zero registered memory that was read
    Zero(zero::Arguments),
    /// Measure the allocator whose books processes share
    Alloc(alloc::Arguments),
    /// Measure how long an entry takes from a publisher to its readers
    Queue(queue::Arguments),
    /// Measure how another process's buffer is opened and read
    Share(share::Arguments),
    /// Measure puts and gets between the memories of two processes
    Transfer(transfer::Arguments),
    /// Measure messages of topics, within a node and between two
    Topic(topic::Arguments),
    /// The second process of a measurement: started by the first one only
    #[command(hide = true)]
    ExchangeTarget,
    /// A process of a measurement: started by the first one only
    #[command(hide = true)]
    BenchWorker {
        /// Where to meet
        socket: PathBuf,
    },
}

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
        Measurement::ExchangeTarget => exchange::target::run(),
        Measurement::BenchWorker { socket } => worker_group::work(socket),
    }
}

fn main() -> ExitCode {
    // Topics and processes have some each. Where it cannot be raised, what takes more says so.
    let _ = ipc::DescriptorLimit::raise();
    let arguments = command::arguments::read::<Arguments>();
    let result =
        command::log::start(None, LevelFilter::WARN).and_then(|()| run(&arguments.command));
    exit::conclude(result)
}

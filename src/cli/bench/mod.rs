//! `fabricast bench`: what things cost, with the data checked.

mod alloc;
mod fabric;
mod party;
pub(in crate::cli) mod premises;
mod queue;
mod report;
mod ring;
mod share;
mod topic;
mod transfer;
mod zero;

use clap::Subcommand;

use super::exit::Failure;

pub(crate) use party::work;

#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
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
}

pub(crate) fn run(bench: &Bench) -> Result<(), Failure> {
    match bench {
        Bench::Fabric(arguments) => fabric::run(arguments),
        Bench::Ring(arguments) => ring::run(arguments),
        Bench::Zero(arguments) => zero::run(arguments),
        Bench::Alloc(arguments) => alloc::run(arguments),
        Bench::Queue(arguments) => queue::run(arguments),
        Bench::Share(arguments) => share::run(arguments),
        Bench::Transfer(arguments) => transfer::run(arguments),
        Bench::Topic(arguments) => topic::run(arguments),
    }
}

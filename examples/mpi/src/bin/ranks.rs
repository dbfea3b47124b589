//! Each rank sends a notice to the next one: the smallest program of a group.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use fabricast::pubsub::NodeOptions;
use fabricast::transfer::{Event, Notice};
use mpi_examples::{CommonOptions, Job, Result, conclude, start_up};

/// Each rank sends a notice to the next one, and prints which rank it is.
#[derive(Debug, Parser)]
struct Arguments {
    /// Join the node of the job, too, and print what the start cost
    #[arg(long)]
    start_up: bool,
    #[command(flatten)]
    common: CommonOptions,
}

fn run(arguments: &Arguments) -> Result<()> {
    let mut job = Job::start("ranks", &arguments.common)?;
    let (rank, size, timeout) = (job.group.rank(), job.group.size(), job.timeout());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut mistakes = 0;
    if next != rank {
        let peer = job.group.peer(next, timeout)?;
        let notice = Notice::new(1, &rank.to_le_bytes())?;
        let sent = job.group.agent().notify(peer, notice)?;
        job.group.agent().wait(sent, timeout)?;
        let (from, notice) = loop {
            if let Event::Notice { from, notice } = job.group.agent().next_event(timeout)? {
                break (from, notice);
            }
        };
        let is_right = job.group.rank_of(from) == Some(last) && notice.data() == last.to_le_bytes();
        mistakes = u64::from(!is_right);
    }
    let local = job.group.local();
    let launcher = job.group.launcher().to_owned();
    println!("rank {rank} of {size} ({} of {} here), by {launcher}", local.rank, local.size);
    if arguments.start_up {
        let start = Instant::now();
        let node = job.group.node(NodeOptions::default(), timeout)?;
        start_up::report(&mut job, start.elapsed())?;
        drop(node);
    }
    job.finish("ranks", mistakes)
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()))
}

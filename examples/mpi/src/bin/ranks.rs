//! Each rank sends a notice to the next one: the smallest program of a group.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use fabricast::pubsub::NodeOptions;
use fabricast::transfer::{Event, Notice};
use mpi_examples::start_up::{StartUp, resident_memory};
use mpi_examples::{CommonOptions, Job, Result, conclude};

/// Each rank sends a notice to the next one, and prints which rank it is.
#[derive(Debug, Parser)]
struct Arguments {
    /// Join the node of the job, too, and print what the start cost
    #[arg(long)]
    start_up: bool,
    #[command(flatten)]
    common: CommonOptions,
}

/// Prints the largest values of all ranks. `node` is the time to join the node of the job. All ranks
/// call it.
fn report_start_up(job: &mut Job, node: Duration) -> Result<()> {
    let StartUp { mpi, group, memory_before } = job.start_up();
    let more = resident_memory().saturating_sub(memory_before);
    let [mpi, group, node] = [mpi, group, node].map(|time| time.as_micros() as u64);
    let own = [mpi, group, node, memory_before, more].map(u64::to_le_bytes).concat();
    let timeout = job.timeout();
    let mut most = [0; 5];
    for bytes in job.group.all_gather(&own, timeout)? {
        for (most, word) in most.iter_mut().zip(bytes.as_chunks().0) {
            *most = u64::from_le_bytes(*word).max(*most);
        }
    }
    if job.is_root() {
        let [mpi, group, node, before, more] = most.map(|value| value as f64);
        let (ranks, mebibyte) = (job.group.size(), f64::from(1 << 20));
        println!(
            "start-up of {ranks} ranks, the largest values: MPI_Init {:.0} ms, group {:.0} ms, node {:.0} ms; \
             resident {:.1} MiB before the group, {:.1} MiB more now",
            mpi / 1e3,
            group / 1e3,
            node / 1e3,
            before / mebibyte,
            more / mebibyte
        );
    }
    Ok(())
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
        report_start_up(&mut job, start.elapsed())?;
        drop(node);
    }
    job.finish("ranks", mistakes)
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()))
}

//! Analysis of a running simulation: one half of the ranks simulate and publish the field, the
//! others analyse it, and any process may join to analyse it, too.
//!
//! ```text
//! mpirun -n 4 insitu                                        # prints the directory of the node
//! insitu --attach DIRECTORY                                 # analyses from outside of the job
//! mpirun -n 4 insitu --analysis-joins-late --analysis-leaves-after 3
//! mpirun -n 4 insitu --device cuda                          # fields in the memory of a GPU
//! ```
//!
//! A field exists once in the memory of a machine or its GPU, for any number of analyses there. The simulation
//! waits for none of them: a slow one misses the oldest fields, and a killed one is removed by the
//! node. Ranks that simulate exchange ghost rows by puts into each other's memory.

mod analysis;
mod frame;
mod simulation;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use fabricast::pubsub::{self, Node, NodeOptions, ServiceMode};
use mpi_examples::memory::Location;
use mpi_examples::{CommonOptions, Job, Result, conclude};

use analysis::{Analysed, analyse, wait_for_fields, wait_for_machines};
use frame::{FIELD, Frame};
use simulation::{Published, Run, prepare};

/// Simulates heat on the first half of the ranks, and analyses it on the others while it runs.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonOptions,
    /// Rows and columns of the grid
    #[arg(long, default_value = "256")]
    grid: u64,
    /// Steps of the simulation
    #[arg(long, default_value = "400")]
    steps: u64,
    /// Steps from one published field to the next
    #[arg(long, value_name = "STEPS", default_value = "10")]
    every: u64,
    /// Additional time from field to field, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value = "10")]
    pause: u64,
    /// Where the published fields and the ghost rows are
    #[arg(long, value_enum, default_value_t)]
    device: Location,
    /// Ranks that analyse subscribe after a third of the fields
    #[arg(long)]
    analysis_joins_late: bool,
    /// They unsubscribe after this number of fields
    #[arg(long, value_name = "FIELDS")]
    analysis_leaves_after: Option<u64>,
    /// Time to analyse a message, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value = "0")]
    analysis_takes: u64,
    /// Analyse fields of a job, without being one of its ranks: directory of its node
    #[arg(long, value_name = "DIRECTORY")]
    attach: Option<PathBuf>,
}

/// A process that is no rank of the job.
fn attach(arguments: &Arguments, directory: &Path) -> Result<()> {
    let timeout = arguments.common.timeout();
    let options = NodeOptions {
        directory: directory.to_owned(),
        label: "attached analysis".to_owned(),
        // The job's ranks serve the node.
        service: ServiceMode::External,
        ..NodeOptions::default()
    };
    let node = Node::join(options)?;
    let subscriber = node.subscribe(FIELD, timeout)?;
    println!("insitu: attached to {}", directory.display());
    let takes = Duration::from_millis(arguments.analysis_takes);
    let analysed = analyse(subscriber, arguments.analysis_leaves_after, takes, timeout)?;
    drop(node);
    // If the job has ended before.
    pubsub::remove_directory(directory)?;
    describe("attached analysis", &analysed);
    match analysed.mistakes {
        0 => println!("insitu: attached analysis: ok"),
        mistakes => return Err(format!("check fields failed: {mistakes} wrong messages").into()),
    }
    Ok(())
}

fn describe(which: &str, analysed: &Analysed) {
    let Analysed { fields, messages, missed, heat, is_complete, .. } = analysed;
    let end = if *is_complete { "to the last one" } else { "and left" };
    println!(
        "insitu: {which}: {fields} fields {end}, {messages} messages received, {missed} missed, heat {heat:.3}"
    );
}

fn run(arguments: &Arguments) -> Result<()> {
    if let Some(directory) = &arguments.attach {
        return attach(arguments, directory);
    }
    let mut job = Job::start("insitu", &arguments.common)?;
    let (rank, timeout) = (job.group.rank(), job.timeout());
    let &Arguments { grid, steps, every, .. } = arguments;
    let parts = u64::from(job.group.size() / 2).max(1);
    if every == 0 || steps < every || grid < parts {
        return Err("start simulation failed: there is no field to publish. Change --grid, --steps or --every".into());
    }
    let pause = Duration::from_millis(arguments.pause);
    let simulation = Run { grid, steps, every, pause, parts, at: arguments.device };
    let node = job.group.node(NodeOptions::default(), timeout)?;
    if job.is_root() {
        println!("insitu: node {}", node.directory().display());
    }
    let simulate = prepare(&mut job, &node, simulation)?;
    let topic = node.topic(FIELD, &Frame::settings(grid, parts, arguments.device))?;
    let mut mistakes = 0;
    let machines = other_machines_that_analyse(&mut job, parts)?;
    if u64::from(rank) < parts {
        job.group.barrier(timeout)?;
        if !arguments.analysis_joins_late {
            wait_for_machines(&node, machines, timeout)?;
        }
        let published = simulate(&mut job, &node)?;
        mistakes +=
            check_published(rank, &published, simulation, &topic.settings()?.release_deadline);
    } else {
        drop(simulate);
        let early = (!arguments.analysis_joins_late).then(|| topic.subscriber()).transpose()?;
        let is_early = early.is_some();
        // From here on fields are published.
        job.group.barrier(timeout)?;
        let subscriber = match early {
            Some(subscriber) => subscriber,
            None => {
                wait_for_fields(&node, simulation.fields() / 3, timeout)?;
                topic.subscriber()?
            }
        };
        let takes = Duration::from_millis(arguments.analysis_takes);
        let analysed = analyse(subscriber, arguments.analysis_leaves_after, takes, timeout)?;
        describe(&format!("rank {rank}"), &analysed);
        mistakes += analysed.mistakes;
        // Whatever was not received counts as missed.
        let all = analysed.messages + analysed.missed;
        if is_early && analysed.is_complete && all != parts * simulation.fields() {
            eprintln!("count messages of rank {rank} failed: {all} are known");
            mistakes += 1;
        }
    }
    // The last rank that leaves the node removes its directory.
    drop((topic, node));
    job.finish("insitu", mistakes)
}

/// The number of other machines with ranks that analyse. All ranks call it.
fn other_machines_that_analyse(job: &mut Job, parts: u64) -> Result<usize> {
    // The first rank of a machine stands for it.
    let own = job.group.local_ranks()[0].to_ne_bytes();
    let all = job.group.all_gather(&own, job.timeout())?;
    let of_analysis: BTreeSet<_> = all.iter().skip(parts as usize).collect();
    Ok(of_analysis.into_iter().filter(|machine| ***machine != own).count())
}

/// Checks that the simulation did not wait for its readers, and that they shared its messages.
fn check_published(rank: u32, published: &Published, run: Run, deadline: &Duration) -> u64 {
    let Published { fields, dropped, longest, copies } = published;
    if rank == 0 {
        println!(
            "insitu: simulation: {fields} fields published, {dropped} found no room, the longest took {longest:.1?}"
        );
    }
    if copies.unread > copies.messages && copies.subscribers > 1 {
        println!(
            "insitu: {} subscribers had {} messages to read, which were {} in memory: each message exists once",
            copies.subscribers, copies.unread, copies.messages
        );
    }
    u64::from(*fields != run.fields()) + u64::from(longest > deadline)
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()))
}

//! Parameters of a model from one rank to all, as new versions of several tensors: over a topic, and
//! over a tree of rings.
//!
//! ```text
//! mpirun -n 4 parameters --mebibytes 256 --device cuda
//! ```
//!
//! | way | on one machine | between machines |
//! |---|---|---|
//! | topic | a tensor is written once, all ranks read the same memory | once to each machine that subscribes |
//! | rings | each rank has a copy in its ring | a binomial tree, in pieces that are forwarded at once |
//!
//! Every rank checks each version: checksum and contents.

mod tensor;
mod tree;

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use fabricast::pubsub::{MemoryLocation, NodeOptions, Subscriber, TopicSettings};
use mpi_examples::memory::Location;
use mpi_examples::samples::{Samples, interleaved};
use mpi_examples::{CommonOptions, Job, Result, conclude, pattern};
use tensor::{Header, Tensor};
use tree::Tree;

/// Distributes versions of a model's parameters from rank 0 to all ranks.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonOptions,
    /// Size of all tensors
    #[arg(long, default_value = "64")]
    mebibytes: u64,
    /// Versions that are distributed in each way
    #[arg(long, default_value = "4")]
    versions: u32,
    /// Where the tensors and the messages of the topic are
    #[arg(long, value_enum, default_value_t)]
    device: Location,
}

/// Tensors, with their part of all parameters in sixteenths.
const TENSORS: [(&str, u64); 4] =
    [("embedding", 4), ("attention", 5), ("feed-forward", 6), ("norm", 1)];

/// The number of a tensor's pattern.
fn number(version: u64, tensor: u64) -> u64 {
    version << 8 | tensor
}

fn run(arguments: &Arguments) -> Result<()> {
    let mut job = Job::start("parameters", &arguments.common)?;
    let (is_root, timeout) = (job.is_root(), job.timeout());
    let device = arguments.device.first_device();
    let bytes = |part: u64| (arguments.mebibytes << 20) * part / 16;
    let mut tensors = TENSORS
        .iter()
        .map(|(_, part)| Tensor::new(device, bytes(*part)))
        .collect::<Result<Vec<_>>>()?;

    let node = job.group.node(NodeOptions::default(), timeout)?;
    let largest = tensors.iter().map(Tensor::length).max().unwrap_or(0);
    let memory = device.map_or(MemoryLocation::Host, MemoryLocation::Device);
    // Reliable: rank 0 waits while ranks have not released older tensors.
    let settings = TopicSettings { memory, depth: 4, largest, loans: 1, ..Default::default() };
    let topic = node.topic("parameters", &settings)?;
    let publisher = is_root.then(|| topic.publisher()).transpose()?;
    let mut subscriber = (!is_root).then(|| topic.subscriber()).transpose()?;
    let mut tree = Tree::new(&mut job)?;

    let (mut by_topic, mut by_rings, mut mistakes) = (Samples::default(), Samples::default(), 0);
    for ((_, is_topic), version) in interleaved(arguments.versions).zip(1..) {
        let mut headers = Vec::new();
        for (tensor, index) in tensors.iter_mut().zip(0..).filter(|_| is_root) {
            // The new version: the result of a training step.
            let mut bytes = vec![0; tensor.length() as usize];
            pattern::fill(&mut bytes, number(version, index));
            tensor.set(bytes, timeout)?;
            headers.push(Header { version, tensor: index, checksum: tensor.checksum(timeout)? });
        }
        // Time until all ranks have all tensors.
        job.group.barrier(timeout)?;
        let start = Instant::now();
        let mut received = Vec::new();
        for (index, tensor) in tensors.iter_mut().enumerate() {
            let own = headers.get(index).copied();
            let found = match (&publisher, &mut subscriber, own) {
                (Some(publisher), _, Some(header)) if is_topic => {
                    tensor.publish(publisher, header, timeout)?;
                    header
                }
                (_, Some(subscriber), _) if is_topic => tensor.pull(subscriber, timeout)?,
                _ => {
                    let none = Header { version: 0, tensor: 0, checksum: 0 };
                    tree.pass(tensor, own.unwrap_or(none), timeout)?
                }
            };
            received.push(found);
        }
        tensors.iter().try_for_each(|tensor| tensor.synchronize(timeout))?;
        job.group.barrier(timeout)?;
        if is_topic { &mut by_topic } else { &mut by_rings }.add(start.elapsed());

        for ((tensor, header), index) in tensors.iter().zip(received).zip(0..) {
            let expected = Header { version, tensor: index, checksum: tensor.checksum(timeout)? };
            mistakes += u64::from(header != expected);
            mistakes += pattern::mistakes(&tensor.bytes(timeout)?, number(version, index));
        }
    }
    tree.close(timeout)?;
    let missed = subscriber.as_ref().map_or(0, Subscriber::missed);
    if is_root && job.group.size() > 1 {
        for (way, samples) in [("topic", &by_topic), ("rings", &by_rings)] {
            let (median, ranks) = (samples.median() / 1e6, job.group.size() - 1);
            let rate = (arguments.mebibytes << 20) as f64 * f64::from(ranks) / median / 1e9;
            let milliseconds = median * 1e3;
            println!(
                "parameters: {way}: median {milliseconds:.1} ms to {ranks} ranks, {rate:.2} GB/s received"
            );
        }
    }
    drop((publisher, subscriber, topic, node));
    job.finish("parameters", mistakes + missed)
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()))
}

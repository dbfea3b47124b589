//! Benchmarks of messages of many sizes, in the manner of the OSU micro-benchmarks: their options,
//! their columns, and the loop over sizes.

use std::str::FromStr;

use clap::Args;

use crate::channel::{AgentChannel, Channel, EndpointChannel, RingChannel, Slots};
use crate::memory::Location;
use crate::options::size;
use crate::samples::{Samples, interleaved, median};
use crate::{CommonOptions, Job, Result, pattern};

/// Bytes of all slots of a rank in one direction.
const MAX_BYTES: usize = 64 << 20;
/// Longer messages are large: they are sent less often.
const LARGE: usize = 8 << 10;

/// The sizes of messages: `MIN:MAX`, or `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    smallest: usize,
    largest: usize,
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (smallest, largest) = text.split_once(':').unwrap_or(("1", text));
        let (smallest, largest) = (size(smallest)? as usize, size(largest)? as usize);
        if smallest == 0 || smallest > largest || largest > 1 << 30 {
            return Err("not MIN:MAX with 1 <= MIN <= MAX <= 1G".to_owned());
        }
        Ok(Self { smallest, largest })
    }
}

impl Sizes {
    /// Doubled from the smallest on.
    fn all(self) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(self.smallest), |size| size.checked_mul(2))
            .take_while(move |size| *size <= self.largest)
    }
}

/// Options of all benchmarks.
#[derive(Debug, Clone, Args)]
#[group(skip)]
pub struct BenchmarkOptions {
    /// Bytes of the messages, doubled from MIN to MAX; accepts K, M, G
    #[arg(short = 'm', long, value_name = "[MIN:]MAX", default_value = "1:4M")]
    message_size: Sizes,
    /// Measured iterations of each size [default: fewer above 8K]
    #[arg(short, long, value_name = "N")]
    iterations: Option<u32>,
    /// Iterations before
    #[arg(short = 'x', long, value_name = "N")]
    warmup: Option<u32>,
    /// Where the memory is
    #[arg(short, long, value_enum, default_value_t)]
    device: Location,
    /// Check each byte of each message
    #[arg(short, long)]
    validation: bool,
    /// By rings instead of puts
    #[arg(long)]
    ring: bool,
    /// By writes with immediates of this provider instead of puts, as "fabricast bench fabric"
    #[arg(long, value_name = "PROVIDER", conflicts_with = "ring")]
    endpoint: Option<String>,
    /// Compare with MPI, in turn
    #[cfg(feature = "mpi")]
    #[arg(long)]
    mpi: bool,
    /// Parts into which the iterations are split: with --mpi one of each in turn
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,
    /// Options of all programs.
    #[command(flatten)]
    pub common: CommonOptions,
}

/// What a benchmark is.
#[derive(Debug, Clone, Copy)]
pub struct Benchmark {
    /// The name of the program.
    pub name: &'static str,
    /// Messages in flight.
    pub window: usize,
    /// Iterations of small messages, and of large ones.
    pub iterations: [u32; 2],
    /// What it measures, with the unit: one or more columns.
    pub figures: &'static [&'static str],
    /// Is a smaller figure better?
    pub is_time: bool,
}

/// What is measured at a time.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Bytes of a message.
    pub bytes: usize,
    /// Messages in flight.
    pub window: usize,
    /// Measured iterations.
    pub iterations: u32,
    /// Iterations before.
    pub warmup: u32,
    /// Are messages checked?
    pub validates: bool,
    /// The other rank; None for a rank without.
    pub partner: Option<u32>,
}

/// Results of one rank.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The figures, at rank 0.
    pub figures: Vec<f64>,
    /// Times of single iterations, if the benchmark has them.
    pub samples: Samples,
    /// Wrong words.
    pub mistakes: u64,
}

/// A message that a rank sends and its partner checks.
#[derive(Debug)]
pub struct Checked {
    bytes: Vec<u8>,
    validates: bool,
    sent: u64,
    received: u64,
    own: u64,
    partner: u64,
    /// Wrong words so far.
    pub mistakes: u64,
}

impl Checked {
    /// For messages between this rank and its partner.
    #[must_use]
    pub fn new(job: &Job, load: &Load) -> Self {
        let (own, partner) = (job.group.rank(), load.partner.unwrap_or_default());
        let number = |rank| u64::from(rank) << 40;
        Self {
            bytes: vec![0; load.bytes],
            validates: load.validates,
            sent: 0,
            received: 0,
            own: number(own),
            partner: number(partner),
            mistakes: 0,
        }
    }

    /// Writes the next message.
    ///
    /// # Errors
    /// Errors of the channel.
    pub fn fill(&mut self, channel: &mut dyn Channel) -> Result<()> {
        if self.validates {
            pattern::fill(&mut self.bytes, self.own + self.sent);
            channel.fill(&self.bytes)?;
            self.sent += 1;
        }
        Ok(())
    }

    /// Checks the last messages, of which this many were received.
    ///
    /// # Errors
    /// Errors of the channel.
    pub fn check(&mut self, channel: &mut dyn Channel, count: usize) -> Result<()> {
        for before_last in (0..count as u64).rev().filter(|_| self.validates) {
            self.bytes.fill(0);
            channel.read(before_last, &mut self.bytes)?;
            self.mistakes += pattern::mistakes(&self.bytes, self.partner + self.received);
            self.received += 1;
        }
        Ok(())
    }
}

/// Measures one channel.
type Measure = fn(&mut Job, &mut dyn Channel, &Load) -> Result<Outcome>;

/// The ranks of a job in pairs: rank n and rank n + half.
#[must_use]
pub fn partner_in_halves(rank: u32, size: u32) -> Option<u32> {
    let half = size / 2;
    match rank {
        _ if rank < half => Some(rank + half),
        _ if rank < 2 * half => Some(rank - half),
        _ => None,
    }
}

/// Ranks 0 and 1 are a pair; the others wait.
#[must_use]
pub fn first_pair(rank: u32, size: u32) -> Option<u32> {
    (size > 1 && rank < 2).then(|| 1 - rank)
}

/// Measures all sizes, and prints a line for each. All ranks call it.
///
/// # Errors
/// Errors of the channels; wrong bytes.
pub fn run(
    benchmark: Benchmark,
    options: &BenchmarkOptions,
    partner: fn(u32, u32) -> Option<u32>,
    measure: Measure,
) -> Result<()> {
    let mut job = Job::start(benchmark.name, &options.common)?;
    if job.group.size() < 2 {
        return Err(format!("{} needs at least two ranks. Use mpirun -n 2", benchmark.name).into());
    }
    let partner = partner(job.group.rank(), job.group.size());
    let longest = options.message_size.largest;
    // One more than the window: for an acknowledgement.
    let window = benchmark.window.min(MAX_BYTES / longest).max(1);
    let slots = Slots { count: window + 1, longest };
    let mut ours: Option<Box<dyn Channel>> = None;
    let provider = options.common.fabric.as_deref();
    if options.ring {
        if let Some(partner) = partner {
            let validates = options.validation;
            ours = Some(Box::new(RingChannel::new(&mut job, partner, slots, validates, provider)?));
        }
    } else if let Some(provider) = &options.endpoint {
        let common = &options.common;
        let channel = EndpointChannel::new(&mut job, partner, slots, provider, common)?;
        ours = Some(Box::new(channel));
    } else {
        ours = Some(Box::new(AgentChannel::new(&mut job, partner, slots, options.device)?));
    }
    if options.device != Location::Host && (options.ring || options.endpoint.is_some()) {
        return Err("--device is for puts: rings and endpoints use host memory here".into());
    }
    #[cfg(feature = "mpi")]
    let mut theirs: Option<Box<dyn Channel>> = match options.mpi {
        true => Some(Box::new(crate::channel::MessageChannel::new(
            &job,
            partner,
            slots,
            options.device,
        )?)),
        false => None,
    };
    #[cfg(not(feature = "mpi"))]
    let mut theirs: Option<Box<dyn Channel>> = None;
    if job.is_root() {
        print_head(&job, &benchmark, options, ours.as_deref(), theirs.as_deref());
    }
    let mut mistakes = 0;
    for bytes in options.message_size.all() {
        let [small, large] = benchmark.iterations;
        let iterations = options.iterations.unwrap_or(if bytes > LARGE { large } else { small });
        let warmup = options.warmup.unwrap_or(iterations / 10 + 1);
        let load = Load {
            bytes,
            window,
            iterations: iterations.div_ceil(options.pairs),
            warmup: warmup.div_ceil(options.pairs),
            validates: options.validation,
            partner,
        };
        let (mut ours_found, mut theirs_found) = (Vec::new(), Vec::new());
        for (_, is_ours) in interleaved(options.pairs) {
            let (channel, found) = match is_ours {
                true => (ours.as_deref_mut(), &mut ours_found),
                false => (theirs.as_deref_mut(), &mut theirs_found),
            };
            if !is_ours && !has_mpi(options) {
                continue;
            }
            let timeout = job.timeout();
            job.group.barrier(timeout)?;
            let outcome = match channel {
                Some(channel) => measure(&mut job, channel, &load)?,
                // A rank without a ring.
                None => measure(&mut job, &mut Absent, &load)?,
            };
            mistakes += outcome.mistakes;
            found.push(outcome);
        }
        if job.is_root() {
            println!("{}", row(&benchmark, options, bytes, &ours_found, &theirs_found));
        }
    }
    drop((ours, theirs));
    job.finish(benchmark.name, mistakes)
}

fn has_mpi(options: &BenchmarkOptions) -> bool {
    #[cfg(feature = "mpi")]
    return options.mpi;
    #[cfg(not(feature = "mpi"))]
    {
        let _ = options;
        false
    }
}

fn print_head(
    job: &Job,
    benchmark: &Benchmark,
    options: &BenchmarkOptions,
    ours: Option<&dyn Channel>,
    theirs: Option<&dyn Channel>,
) {
    let describe = |channel: Option<&dyn Channel>| channel.map_or(String::new(), Channel::describe);
    let (size, launcher) = (job.group.size(), job.group.launcher());
    println!("# {}, {size} ranks, launcher {launcher}", benchmark.name);
    println!("# Fabricast: {}, waiting {:?}", describe(ours), job.wait_strategy());
    let mut head = format!("{:<10}", "# Size");
    for figure in benchmark.figures {
        head += &format!("{figure:>18}");
    }
    if theirs.is_some() {
        println!("# MPI: {}", describe(theirs));
        head += &format!("{:>18}{:>10}", format!("MPI {}", benchmark.figures[0]), "Ratio");
    }
    if options.validation {
        head += &format!("{:>12}", "Validation");
    }
    if benchmark.is_time {
        head += &format!("{:>12}{:>12}", "p50", "p99");
    }
    println!("{head}");
}

fn row(
    benchmark: &Benchmark,
    options: &BenchmarkOptions,
    bytes: usize,
    ours: &[Outcome],
    theirs: &[Outcome],
) -> String {
    let figure = |found: &[Outcome], at: usize| {
        median(found.iter().filter_map(|outcome| outcome.figures.get(at).copied()))
    };
    let mut row = format!("{bytes:<10}");
    for at in 0..benchmark.figures.len() {
        row += &format!("{:>18.2}", figure(ours, at));
    }
    if !theirs.is_empty() {
        // Above 1, Fabricast is better.
        let ratio = |(ours, theirs): (&Outcome, &Outcome)| match benchmark.is_time {
            true => theirs.figures[0] / ours.figures[0],
            false => ours.figures[0] / theirs.figures[0],
        };
        let ratio = median(ours.iter().zip(theirs).map(ratio));
        row += &format!("{:>18.2}{ratio:>10.3}", figure(theirs, 0));
    }
    if options.validation {
        let is_right = ours.iter().chain(theirs).all(|outcome| outcome.mistakes == 0);
        row += &format!("{:>12}", if is_right { "Pass" } else { "FAIL" });
    }
    if benchmark.is_time {
        let mut samples = Samples::default();
        ours.iter().for_each(|outcome| samples.append(&outcome.samples));
        row += &format!("{:>12.2}{:>12.2}", samples.median(), samples.quantile(0.99));
    }
    row
}

/// The channel of a rank without a partner, which does not use it.
struct Absent;

impl Channel for Absent {
    fn describe(&self) -> String {
        String::new()
    }

    fn fill(&mut self, _: &[u8]) -> Result<()> {
        Err("this rank has no partner".into())
    }

    fn send(&mut self, _: &mut Job, _: usize) -> Result<()> {
        Err("this rank has no partner".into())
    }

    fn flush(&mut self, _: &mut Job) -> Result<()> {
        Ok(())
    }

    fn receive(&mut self, _: &mut Job, _: usize, _: usize) -> Result<()> {
        Err("this rank has no partner".into())
    }

    fn read(&mut self, _: u64, _: &mut [u8]) -> Result<()> {
        Err("this rank has no partner".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_doubled() {
        let all = |text: &str| text.parse::<Sizes>().unwrap().all().collect::<Vec<_>>();
        assert_eq!(all("8:64"), [8, 16, 32, 64]);
        assert_eq!(all("3"), [1, 2]);
        assert_eq!(all("3K:3K"), [3072]);
        for text in ["", "0:4", "8:4", "1:2G", "x"] {
            assert!(text.parse::<Sizes>().is_err(), "{text}");
        }
    }

    #[test]
    fn partners_are_mutual() {
        for size in 2..9 {
            for of in [first_pair, partner_in_halves] {
                let pairs = (0..size).filter_map(|rank| Some((rank, of(rank, size)?)));
                for (rank, partner) in pairs {
                    assert!(partner != rank && partner < size);
                    assert_eq!(of(partner, size), Some(rank));
                }
            }
        }
    }
}

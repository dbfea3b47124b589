//! Measures the exchange by puts, in turn with another one.

use std::time::Instant;

use clap::Args;
use mpi_examples::samples::{Samples, interleaved, median};
use mpi_examples::{Job, Result};

use crate::exchange::Exchange;

/// What is measured.
#[derive(Debug, Clone, Args)]
pub(crate) struct Timing {
    /// Interleaved measurements of both ways; 0: none
    #[arg(long, value_name = "N", default_value = "1")]
    pairs: u32,
    /// Exchanges of a measurement
    #[arg(long, value_name = "N", default_value = "50")]
    exchanges: u32,
}

/// The times of a way.
#[derive(Debug, Default)]
struct Measured {
    all: Samples,
    /// The median of each measurement.
    medians: Vec<f64>,
}

impl Measured {
    fn print(&self, name: &str, bytes: u64) {
        let median = median(self.medians.iter().copied());
        let [p50, p99] = [0.5, 0.99].map(|part| self.all.quantile(part));
        let rate = bytes as f64 / median / 1e3;
        println!("{name:<24}{median:>12.2}{p50:>12.2}{p99:>12.2}{rate:>10.2}");
    }
}

/// Measures, and prints the times of rank 0. All ranks call it. `bytes` are those that a rank sends.
pub(crate) fn compare(
    job: &mut Job,
    timing: &Timing,
    bytes: u64,
    puts: &mut dyn Exchange,
    mut other: Option<&mut dyn Exchange>,
) -> Result<()> {
    if timing.pairs == 0 {
        return Ok(());
    }
    let (mut ours, mut theirs) = (Measured::default(), Measured::default());
    for (_, is_ours) in interleaved(timing.pairs) {
        match &mut other {
            _ if is_ours => measure(job, timing.exchanges, puts, &mut ours)?,
            Some(other) => measure(job, timing.exchanges, &mut **other, &mut theirs)?,
            None => {}
        }
    }
    if !job.is_root() {
        return Ok(());
    }
    println!(
        "# {} x {} exchanges of {bytes} bytes to the neighbours",
        timing.pairs, timing.exchanges
    );
    println!(
        "{:<24}{:>12}{:>12}{:>12}{:>10}",
        "# exchange", "median us", "p50 us", "p99 us", "GB/s"
    );
    ours.print(&puts.name(), bytes);
    if let Some(other) = other {
        theirs.print(&other.name(), bytes);
        let pairs = ours.medians.iter().zip(&theirs.medians);
        let ratio = median(pairs.map(|(ours, theirs)| theirs / ours));
        println!("ratio {ratio:.3} (time of MPI by that of Fabricast in the same pair, median)");
    }
    Ok(())
}

fn measure(
    job: &mut Job,
    exchanges: u32,
    halos: &mut dyn Exchange,
    measured: &mut Measured,
) -> Result<()> {
    let timeout = job.timeout();
    job.group.barrier(timeout)?;
    let mut samples = Samples::with_capacity(exchanges as usize);
    for _ in 0..exchanges / 10 + 2 {
        halos.exchange(job)?;
    }
    for _ in 0..exchanges {
        let before = Instant::now();
        halos.exchange(job)?;
        samples.add(before.elapsed());
    }
    measured.medians.push(samples.median());
    measured.all.append(&samples);
    Ok(())
}

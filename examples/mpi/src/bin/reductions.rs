//! Two programs that wait for reductions: a solver, whose iterations have two dot products each, and
//! training by data-parallel steps, which average the gradients of all ranks.
//!
//! ```text
//! mpirun -n 4 reductions --rows 4096 --parameters 1000000
//! ```
//!
//! Both are compared with one process. With the feature `mpi` each reduction is measured against MPI's.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use fabricast::collective::{CommDomain, DomainOptions, ReduceOp};
use mpi_examples::samples::Samples;
use mpi_examples::{CommonOptions, Job, Result, conclude};

/// Solves a system of equations by conjugate gradients, and fits a model by data-parallel steps.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonOptions,
    /// Rows of the system
    #[arg(long, default_value = "2048")]
    rows: usize,
    /// Parameters of the model
    #[arg(long, default_value = "100000")]
    parameters: usize,
    /// Steps of training, and measured reductions of each kind
    #[arg(long, default_value = "20")]
    steps: u32,
}

/// A vector of which each rank has some rows.
struct Rows {
    counts: Vec<usize>,
    begin: usize,
    own: usize,
}

impl Rows {
    fn new(rows: usize, rank: u32, ranks: u32) -> Self {
        let ranks = ranks as usize;
        let count = |rank: usize| rows / ranks + usize::from(rank < rows % ranks);
        let counts: Vec<usize> = (0..ranks).map(count).collect();
        let begin = counts[..rank as usize].iter().sum();
        let own = counts[rank as usize];
        Self { counts, begin, own }
    }
}

/// Row `row` of a tridiagonal matrix, times a vector.
fn row_times(row: usize, vector: &[f64]) -> f64 {
    let neighbour = |at: Option<usize>| at.and_then(|at| vector.get(at)).copied().unwrap_or(0.0);
    2.5 * vector[row] - neighbour(row.checked_sub(1)) - neighbour(Some(row + 1))
}

fn right_side(row: usize) -> f64 {
    (row % 17) as f64 - 8.0
}

fn dot(one: &[f64], other: &[f64]) -> f64 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

/// Solves the system by conjugate gradients. Returns the solution, and the iterations.
fn solve(domain: &mut CommDomain, rows: usize, timeout: Duration) -> Result<(Vec<f64>, u32)> {
    let part = Rows::new(rows, domain.rank(), domain.size());
    let range = part.begin..part.begin + part.own;
    let sum = |domain: &mut CommDomain, own: f64| -> Result<f64> {
        let mut total = [own];
        domain.all_reduce(&mut total, ReduceOp::Sum, timeout)?;
        Ok(total[0])
    };
    let mut solution = vec![0.0; part.own];
    let mut residual: Vec<f64> = range.clone().map(right_side).collect();
    let mut direction = residual.clone();
    let mut square = sum(domain, dot(&residual, &residual))?;
    let first = square;
    let mut whole = vec![0.0; rows];
    let mut iterations = 0;
    while square > 1e-20 * first && iterations < 500 {
        // All ranks need the neighbours of their rows; here each gets all.
        domain.all_gather_unequal(&direction, &mut whole, &part.counts, timeout)?;
        let image: Vec<f64> = range.clone().map(|row| row_times(row, &whole)).collect();
        let step = square / sum(domain, dot(&direction, &image))?;
        for at in 0..part.own {
            solution[at] += step * direction[at];
            residual[at] -= step * image[at];
        }
        let next = sum(domain, dot(&residual, &residual))?;
        let turn = next / square;
        direction.iter_mut().zip(&residual).for_each(|(to, it)| *to = it + turn * *to);
        square = next;
        iterations += 1;
    }
    domain.all_gather_unequal(&solution, &mut whole, &part.counts, timeout)?;
    Ok((whole, iterations))
}

/// The gradient of a rank for its samples, of which each rank has others.
fn gradient(model: &[f32], rank: u32, step: u32) -> Vec<f32> {
    let target = |at: usize| ((at * 7 + rank as usize * 3 + step as usize) % 11) as f32;
    model.iter().enumerate().map(|(at, weight)| weight - target(at)).collect()
}

/// Steps of training: each averages the gradients of all ranks.
fn train(
    domain: &mut CommDomain,
    parameters: usize,
    steps: u32,
    timeout: Duration,
) -> Result<Vec<f32>> {
    let mut model = vec![0.0_f32; parameters];
    for step in 0..steps {
        let mut mean = gradient(&model, domain.rank(), step);
        domain.all_reduce(&mut mean, ReduceOp::Mean, timeout)?;
        model.iter_mut().zip(&mean).for_each(|(weight, slope)| *weight -= 0.25 * slope);
    }
    Ok(model)
}

/// The same by one process.
fn train_serially(parameters: usize, steps: u32, ranks: u32) -> Vec<f32> {
    let mut model = vec![0.0_f32; parameters];
    for step in 0..steps {
        let all: Vec<Vec<f32>> = (0..ranks).map(|rank| gradient(&model, rank, step)).collect();
        for (at, weight) in model.iter_mut().enumerate() {
            let mean = all.iter().map(|slopes| slopes[at]).sum::<f32>() / ranks as f32;
            *weight -= 0.25 * mean;
        }
    }
    model
}

/// Times of the reduction of so many numbers.
fn measure(
    domain: &mut CommDomain,
    count: usize,
    repeat: u32,
    timeout: Duration,
) -> Result<Samples> {
    let mut numbers = vec![1.0_f32; count];
    let mut samples = Samples::default();
    for turn in 0..repeat + 3 {
        domain.barrier(timeout)?;
        let start = Instant::now();
        domain.all_reduce(&mut numbers, ReduceOp::Max, timeout)?;
        if turn >= 3 {
            samples.add(start.elapsed());
        }
    }
    Ok(samples)
}

#[cfg(feature = "mpi")]
fn measure_mpi(count: usize, repeat: u32) -> Samples {
    use mpi::collective::{CommunicatorCollectives, SystemOperation};
    use mpi::topology::SimpleCommunicator;
    let world = SimpleCommunicator::world();
    let (numbers, mut result) = (vec![1.0_f32; count], vec![0.0_f32; count]);
    let mut samples = Samples::default();
    for turn in 0..repeat + 3 {
        world.barrier();
        let start = Instant::now();
        world.all_reduce_into(&numbers[..], &mut result[..], SystemOperation::max());
        if turn >= 3 {
            samples.add(start.elapsed());
        }
    }
    samples
}

fn run(arguments: &Arguments) -> Result<()> {
    let mut job = Job::start("reductions", &arguments.common)?;
    let (ranks, timeout) = (job.group.size(), job.timeout());
    let options = DomainOptions::new().wait_strategy(job.wait_strategy());
    let mut domain = CommDomain::of_group(&mut job.group, &options)?;

    let start = Instant::now();
    let (solution, iterations) = solve(&mut domain, arguments.rows, timeout)?;
    let took = start.elapsed();
    let error = |row: usize| (row_times(row, &solution) - right_side(row)).abs();
    let largest = (0..arguments.rows).map(error).fold(0.0, f64::max);
    let mut mistakes = u64::from(largest.is_nan() || largest > 1e-6);
    if job.is_root() {
        println!(
            "solver: {} rows on {ranks} ranks, {iterations} iterations in {took:?}, largest error {largest:.1e}",
            arguments.rows
        );
    }

    let model = train(&mut domain, arguments.parameters, arguments.steps, timeout)?;
    let expected = train_serially(arguments.parameters, arguments.steps, ranks);
    let differs = |(one, other): &(&f32, &f32)| (**one - **other).abs() > 1e-4;
    mistakes += model.iter().zip(&expected).filter(differs).count() as u64;
    if job.is_root() {
        println!("training: {} parameters, {} steps", arguments.parameters, arguments.steps);
    }
    for count in [1, arguments.parameters] {
        let ours = measure(&mut domain, count, arguments.steps, timeout)?;
        if job.is_root() {
            println!("all-reduce of {count} f32: {:.1} us", ours.median());
        }
        #[cfg(feature = "mpi")]
        {
            let theirs = measure_mpi(count, arguments.steps);
            if job.is_root() {
                println!("MPI_Allreduce of {count} f32: {:.1} us", theirs.median());
            }
        }
    }
    domain.close(timeout)?;
    job.finish("reductions", mistakes)
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_among_all_ranks() {
        let parts: Vec<_> = (0..3).map(|rank| Rows::new(8, rank, 3)).collect();
        assert_eq!(parts[0].counts, [3, 3, 2]);
        assert_eq!((parts[2].begin, parts[2].own), (6, 2));
    }
}

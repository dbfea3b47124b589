//! Halo exchange of a field in three dimensions, by strided puts into the neighbours' ghost cells.
//!
//! Each rank has a box of cells; all boxes together are periodic. A step computes each cell from its
//! neighbours, and then exchanges the faces of the boxes. The result is compared, bit by bit, with
//! that of one process and, with the feature `mpi`, with that of an exchange by derived datatypes.
//! Then both exchanges are measured in turn.

mod exchange;
mod faces;
mod grid;
#[cfg(feature = "mpi")]
mod mpi_halo;
mod puts;
mod shape;
mod stencil;
mod timing;

use std::process::ExitCode;

use clap::Parser;
use mpi_examples::memory::Location;
use mpi_examples::{CommonOptions, Job, Result, conclude};

use crate::exchange::{Exchange, compute};
use crate::grid::Grid;
use crate::puts::PutExchange;
use crate::shape::Shape;
use crate::timing::Timing;

/// Cells that one process computes for comparison.
const MAX_SERIAL: u64 = 1 << 21;

/// Exchanges halos of a field in three dimensions, checks the result, and measures.
#[derive(Debug, Parser)]
struct Arguments {
    /// Cells of each rank in z, y and x
    #[arg(long, value_name = "Z,Y,X", value_delimiter = ',', default_value = "32,32,32")]
    cells: Vec<u64>,
    /// Ranks in z, y and x [default: as equal as possible]
    #[arg(long, value_name = "Z,Y,X", value_delimiter = ',')]
    grid: Option<Vec<u32>>,
    /// Steps to compute and check
    #[arg(long, value_name = "N", default_value = "10")]
    steps: u32,
    /// Where the field is
    #[arg(long, value_enum, default_value_t)]
    device: Location,
    /// Instead of a field: two contiguous faces of this many bytes between neighbours in a ring
    #[arg(long, value_name = "BYTES", value_parser = mpi_examples::options::size)]
    face: Option<u64>,
    #[command(flatten)]
    timing: Timing,
    #[command(flatten)]
    common: CommonOptions,
}

fn three<T: Copy>(list: &[T], name: &str) -> Result<[T; 3]> {
    list.try_into().map_err(|_| format!("--{name} needs three numbers, z,y,x").into())
}

fn run(arguments: &Arguments) -> Result<()> {
    if let Some(bytes) = arguments.face {
        return faces::run(bytes, arguments.device, &arguments.timing, &arguments.common);
    }
    let cells = three(&arguments.cells, "cells")?;
    if cells.iter().any(|count| !(1..=1 << 20).contains(count)) {
        return Err("--cells needs numbers from 1 to 2^20".into());
    }
    let mut job = Job::start("halo", &arguments.common)?;
    let size = job.group.size();
    let ranks = match &arguments.grid {
        Some(ranks) => three(ranks, "grid")?,
        None => Grid::balanced(size),
    };
    if ranks.iter().map(|count| u64::from(*count)).product::<u64>() != u64::from(size) {
        return Err(format!("--grid {ranks:?} does not have {size} ranks").into());
    }
    let (shape, grid) = (Shape { cells }, Grid::new(ranks, job.group.rank()));
    let mut puts = PutExchange::new(&mut job, &grid, shape, arguments.device)?;
    if job.is_root() {
        let path = puts.path().map_or("none", |path| path.name());
        println!("# {size} ranks as {ranks:?}, each {cells:?} cells (z, y, x), path {path}");
    }
    let found = compute(&mut job, &mut puts, (shape, &grid), arguments.steps)?;
    let mut mistakes = 0;
    let whole = Shape { cells: [0, 1, 2].map(|it| cells[it] * u64::from(ranks[it])) };
    let (count, steps) = (whole.cells.iter().product::<u64>(), arguments.steps);
    if count <= MAX_SERIAL {
        let expected = stencil::serial(whole, steps);
        mistakes += stencil::differences(shape, &grid, &found, &expected);
    }
    if job.is_root() {
        match count <= MAX_SERIAL {
            true => println!("# {steps} steps of {count} cells compared with one process"),
            false => println!("# {count} cells are too many to compare with one process"),
        }
    }
    #[cfg(not(feature = "mpi"))]
    let other: Option<&mut dyn Exchange> = None;
    #[cfg(feature = "mpi")]
    let mut halos = mpi_halo::new(&job, &grid, shape, arguments.device)?;
    #[cfg(feature = "mpi")]
    let other = {
        let other = compute(&mut job, &mut *halos, (shape, &grid), steps)?;
        let bits = |(a, b): (&f64, &f64)| a.to_bits() != b.to_bits();
        let differs = |start: usize| {
            let row = start..start + cells[2] as usize;
            found[row.clone()].iter().zip(&other[row]).filter(|pair| bits(*pair)).count() as u64
        };
        mistakes += shape.rows().map(differs).sum::<u64>();
        Some(&mut *halos as &mut dyn Exchange)
    };
    timing::compare(&mut job, &arguments.timing, shape.bytes_of_faces(), &mut puts, other)?;
    job.finish("halo", mistakes)
}

fn main() -> ExitCode {
    conclude(run(&Arguments::parse()))
}

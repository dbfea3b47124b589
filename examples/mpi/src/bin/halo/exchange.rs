//! What both ways of exchanging halos have in common.

use mpi_examples::{Job, Result};

use crate::grid::Grid;
use crate::shape::Shape;
use crate::stencil;

/// A way of exchanging with the neighbours.
pub(crate) trait Exchange {
    /// For reports.
    fn name(&self) -> String;

    /// Sends to all neighbours what is next, and receives theirs.
    fn exchange(&mut self, job: &mut Job) -> Result<()>;
}

/// Arrays with ghost cells that are exchanged among ranks.
pub(crate) trait HaloExchange: Exchange {
    /// Reads the array that was exchanged last, with its ghost cells.
    fn load(&mut self, cells: &mut [f64]) -> Result<()>;

    /// Writes the cells of the next array, without ghost cells.
    fn store(&mut self, cells: &[f64]) -> Result<()>;
}

/// Computes some steps, and returns the cells.
pub(crate) fn compute(
    job: &mut Job,
    halos: &mut dyn HaloExchange,
    (shape, grid): (Shape, &Grid),
    steps: u32,
) -> Result<Vec<f64>> {
    let mut current = stencil::initial(shape, grid);
    let mut next = current.clone();
    for _ in 0..steps {
        halos.store(&current)?;
        halos.exchange(job)?;
        halos.load(&mut current)?;
        stencil::step(shape, &current, &mut next);
        std::mem::swap(&mut current, &mut next);
    }
    Ok(current)
}

//! The cores of two processes.

use command::exit::{Exit, Failure};

/// None for both without --cores.
pub(crate) fn core_pair(cores: Option<&[usize]>) -> Result<[Option<usize>; 2], Failure> {
    match cores {
        None => Ok([None; 2]),
        Some([first, second]) => Ok([Some(*first), Some(*second)]),
        Some(_) => Err(Failure::new(Exit::Usage, "--cores needs two cores, one per side")),
    }
}

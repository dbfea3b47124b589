//! The computation: a weighted mean of each cell and its six neighbours.

use crate::grid::Grid;
use crate::shape::{Direction, Shape};

/// Computes all cells of `next` from `current`, whose ghost cells are filled.
pub(crate) fn step(shape: Shape, current: &[f64], next: &mut [f64]) {
    let [_, lines, row] = shape.extents();
    let (line, plane) = (row as usize, (lines * row) as usize);
    let count = shape.cells[2] as usize;
    for start in shape.rows() {
        let part = |from: usize| &current[from..from + count];
        let centre = part(start);
        let neighbours = [
            (part(start - 1), part(start + 1)),
            (part(start - line), part(start + line)),
            (part(start - plane), part(start + plane)),
        ];
        for (at, cell) in next[start..start + count].iter_mut().enumerate() {
            // The order of the additions is the same everywhere, so that results are equal.
            let [x, y, z] = neighbours.map(|(lower, upper)| lower[at] + upper[at]);
            *cell = 0.4 * centre[at] + 0.1 * ((x + y) + z);
        }
    }
}

/// The cells that a rank starts with.
pub(crate) fn initial(shape: Shape, grid: &Grid) -> Vec<f64> {
    let mut cells = vec![0.0; shape.length()];
    let whole = [0, 1, 2].map(|it| shape.cells[it] * u64::from(grid.ranks()[it]));
    let first = [0, 1, 2].map(|it| shape.cells[it] * u64::from(grid.place()[it]));
    for start in shape.rows() {
        let [_, lines, row] = shape.extents();
        let (z, y) = (start as u64 / (lines * row) - 1, start as u64 / row % lines - 1);
        for x in 0..shape.cells[2] {
            let number = ((first[0] + z) * whole[1] + first[1] + y) * whole[2] + first[2] + x;
            let mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            cells[start + x as usize] = (mixed >> 11) as f64 / (1_u64 << 53) as f64;
        }
    }
    cells
}

/// The cells of the whole box after some steps, computed by one process.
pub(crate) fn serial(whole: Shape, steps: u32) -> Vec<f64> {
    let mut current = initial(whole, &Grid::new([1; 3], 0));
    let mut next = current.clone();
    for _ in 0..steps {
        wrap_around(whole, &mut current);
        step(whole, &current, &mut next);
        std::mem::swap(&mut current, &mut next);
    }
    current
}

/// Fills the ghost cells of a box that one process has as a whole.
fn wrap_around(shape: Shape, cells: &mut [f64]) {
    for direction in Direction::ALL {
        let (from, to) = (shape.start(direction), shape.ghost_start(direction.opposite()));
        let [size_z, size_y, size_x] = shape.face(direction);
        for z in 0..size_z {
            for y in 0..size_y {
                let row = |[z_0, y_0, x_0]: [u64; 3]| shape.index([z_0 + z, y_0 + y, x_0]);
                let (from, to) = (row(from), row(to));
                cells.copy_within(from..from + size_x as usize, to);
            }
        }
    }
}

/// The number of cells of a rank that differ, in any bit, from those of the whole box.
pub(crate) fn differences(shape: Shape, grid: &Grid, cells: &[f64], whole: &[f64]) -> u64 {
    let whole_shape =
        Shape { cells: [0, 1, 2].map(|it| shape.cells[it] * u64::from(grid.ranks()[it])) };
    let first = [0, 1, 2].map(|it| shape.cells[it] * u64::from(grid.place()[it]));
    let [count_z, count_y, count_x] = shape.cells;
    let mut wrong = 0;
    for z in 1..=count_z {
        for y in 1..=count_y {
            let own = shape.index([z, y, 1]);
            let other = whole_shape.index([first[0] + z, first[1] + y, first[2] + 1]);
            let own = &cells[own..own + count_x as usize];
            let other = &whole[other..other + count_x as usize];
            let pairs = own.iter().zip(other);
            wrong += pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        }
    }
    wrong as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serial_box_keeps_its_sum() {
        let shape = Shape { cells: [3, 4, 5] };
        let sum = |cells: &[f64]| {
            shape.rows().map(|start| cells[start..start + 5].iter().sum::<f64>()).sum::<f64>()
        };
        let (before, after) = (serial(shape, 0), serial(shape, 7));
        assert!((sum(&before) - sum(&after)).abs() < 1e-9);
        assert!(differences(shape, &Grid::new([1; 3], 0), &before, &after) > 50);
    }

    #[test]
    fn parts_of_ranks_are_found_in_the_whole_box() {
        let (shape, ranks) = (Shape { cells: [2, 3, 4] }, [2, 1, 3]);
        let whole = serial(Shape { cells: [4, 3, 12] }, 0);
        for rank in 0..6 {
            let grid = Grid::new(ranks, rank);
            assert_eq!(differences(shape, &grid, &initial(shape, &grid), &whole), 0);
        }
    }
}

//! The heat equation on a square grid, as explicit steps of a part of its rows.

use std::ops::Range;

/// Part of the heat that flows to each neighbour in a step.
const FLOW: f64 = 0.2;

/// Some rows of the grid, with a ghost row above and below. Beyond the grid it is cold.
#[derive(Debug, Clone)]
pub struct Slab {
    columns: usize,
    /// Rows with the ghost rows.
    cells: Vec<f64>,
    /// Where the next step is computed.
    next: Vec<f64>,
}

/// The rows of part `index` of `parts`.
#[must_use]
pub fn rows_of(index: usize, parts: usize, rows: usize) -> Range<usize> {
    rows * index / parts..rows * (index + 1) / parts
}

impl Slab {
    /// These rows of a grid of `size` rows and columns, before the first step: two hot squares.
    #[must_use]
    pub fn new(size: usize, rows: Range<usize>) -> Self {
        let is_hot = |row: usize, column: usize| {
            let of = |place: usize| place * 16 / size;
            matches!((of(row), of(column)), (3..6, 4..7) | (9..13, 8..14))
        };
        let columns = size;
        let mut cells = vec![0.0; (rows.len() + 2) * columns];
        for (line, row) in cells[columns..].chunks_mut(columns).zip(rows) {
            for (column, cell) in line.iter_mut().enumerate() {
                *cell = if is_hot(row, column) { 1.0 + column as f64 / size as f64 } else { 0.0 };
            }
        }
        Self { columns, next: cells.clone(), cells }
    }

    /// The rows without the ghost rows.
    #[must_use]
    pub fn rows(&self) -> &[f64] {
        &self.cells[self.columns..self.cells.len() - self.columns]
    }

    /// The first and the last row.
    #[must_use]
    pub fn edges(&self) -> [&[f64]; 2] {
        let rows = self.rows();
        [&rows[..self.columns], &rows[rows.len() - self.columns..]]
    }

    /// The ghost rows above and below.
    pub fn ghosts_mut(&mut self) -> [&mut [f64]; 2] {
        let (first, rest) = self.cells.split_at_mut(self.columns);
        let end = rest.len() - self.columns;
        [first, &mut rest[end..]]
    }

    /// Advances the rows by one step.
    pub fn advance(&mut self) {
        let (columns, cells) = (self.columns, &self.cells);
        for row in 1..cells.len() / columns - 1 {
            let line = |row: usize| &cells[row * columns..(row + 1) * columns];
            let (above, own, below) = (line(row - 1), line(row), line(row + 1));
            for column in 0..columns {
                let west = if column > 0 { own[column - 1] } else { 0.0 };
                let east = own.get(column + 1).copied().unwrap_or(0.0);
                let around = above[column] + below[column] + west + east;
                self.next[row * columns + column] =
                    own[column] + FLOW * (around - 4.0 * own[column]);
            }
        }
        std::mem::swap(&mut self.cells, &mut self.next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_with_ghost_rows_advance_as_the_whole() {
        let size = 24;
        let mut whole = Slab::new(size, 0..size);
        let mut parts: Vec<_> =
            (0..5).map(|index| Slab::new(size, rows_of(index, 5, size))).collect();
        for _ in 0..50 {
            whole.advance();
            let edges: Vec<_> =
                parts.iter().map(|part| part.edges().map(<[f64]>::to_vec)).collect();
            for (index, part) in parts.iter_mut().enumerate() {
                let [above, below] = part.ghosts_mut();
                if index > 0 {
                    above.copy_from_slice(&edges[index - 1][1]);
                }
                if index < 4 {
                    below.copy_from_slice(&edges[index + 1][0]);
                }
                part.advance();
            }
        }
        let joined: Vec<_> = parts.iter().flat_map(|part| part.rows()).copied().collect();
        assert!(joined == whole.rows());
        assert!(whole.rows().iter().sum::<f64>() > 0.0);
    }
}

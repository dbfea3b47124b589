//! The array of a rank: its cells with one layer of ghost cells around them, and its faces.

use fabricast::transfer::{self, Strided, Subarray};

/// The number of faces.
pub(crate) const DIRECTIONS: usize = 6;
/// Bytes of a cell.
pub(crate) const CELL: u64 = 8;

/// The side of a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Direction {
    /// z, y or x.
    pub(crate) dimension: usize,
    pub(crate) is_upper: bool,
}

impl Direction {
    pub(crate) const ALL: [Self; DIRECTIONS] = [
        Self { dimension: 0, is_upper: false },
        Self { dimension: 0, is_upper: true },
        Self { dimension: 1, is_upper: false },
        Self { dimension: 1, is_upper: true },
        Self { dimension: 2, is_upper: false },
        Self { dimension: 2, is_upper: true },
    ];

    /// The direction's place in [`Self::ALL`].
    #[cfg(any(test, feature = "mpi"))]
    pub(crate) fn index(self) -> usize {
        2 * self.dimension + usize::from(self.is_upper)
    }

    pub(crate) fn opposite(self) -> Self {
        Self { is_upper: !self.is_upper, ..self }
    }
}

/// The numbers of cells in each dimension, without ghost cells; z first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) cells: [u64; 3],
}

impl Shape {
    /// The size of the array, with ghost cells.
    pub(crate) fn extents(&self) -> [u64; 3] {
        self.cells.map(|count| count + 2)
    }

    /// Doubles of the array.
    pub(crate) fn length(&self) -> usize {
        self.extents().iter().product::<u64>() as usize
    }

    /// Index of a cell of the array, counted with ghost cells.
    pub(crate) fn index(&self, [z, y, x]: [u64; 3]) -> usize {
        let [_, lines, row] = self.extents();
        ((z * lines + y) * row + x) as usize
    }

    /// Indices of the first cells of all rows, without ghost cells.
    pub(crate) fn rows(&self) -> impl Iterator<Item = usize> + use<'_> {
        let [z, y, _] = self.cells;
        (1..=z).flat_map(move |z| (1..=y).map(move |y| self.index([z, y, 1])))
    }

    /// The cells of a face.
    pub(crate) fn face(&self, direction: Direction) -> [u64; 3] {
        let mut size = self.cells;
        size[direction.dimension] = 1;
        size
    }

    /// The bytes of all faces.
    pub(crate) fn bytes_of_faces(&self) -> u64 {
        let cells = |direction| self.face(direction).iter().product::<u64>();
        Direction::ALL.map(cells).iter().sum::<u64>() * CELL
    }

    /// Where a face begins in the array.
    pub(crate) fn start(&self, direction: Direction) -> [u64; 3] {
        self.layer(direction, self.cells[direction.dimension], 1)
    }

    /// Where the ghost cells behind a face begin in the array.
    pub(crate) fn ghost_start(&self, direction: Direction) -> [u64; 3] {
        self.layer(direction, self.cells[direction.dimension] + 1, 0)
    }

    fn layer(&self, direction: Direction, upper: u64, lower: u64) -> [u64; 3] {
        let mut start = [1; 3];
        start[direction.dimension] = if direction.is_upper { upper } else { lower };
        start
    }

    /// The rows of a face, from the array to the ghost cells of the neighbour behind it. Both
    /// have arrays of this shape, at this byte offset.
    pub(crate) fn halo(&self, direction: Direction, at: u64) -> transfer::Result<Strided> {
        let extents = &self.extents();
        let (from, to) = (self.start(direction), self.ghost_start(direction.opposite()));
        let from = Subarray { extents, origin: &from };
        let to = Subarray { extents, origin: &to };
        Strided::tile(CELL, &self.face(direction), from, to)?.shifted(at, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halos_fill_the_ghost_cells_of_all_faces_once() {
        let shape = Shape { cells: [2, 3, 4] };
        let mut filled = vec![0; shape.length()];
        for direction in Direction::ALL {
            assert_eq!(Direction::ALL[direction.index()], direction);
            for block in &shape.halo(direction, 0).unwrap() {
                for cell in block.to / CELL..(block.to + block.length) / CELL {
                    filled[cell as usize] += 1;
                }
            }
        }
        for z in 0..4 {
            for y in 0..5 {
                for x in 0..6 {
                    let outside = [z == 0 || z == 3, y == 0 || y == 4, x == 0 || x == 5];
                    let is_ghost_of_face = outside.iter().filter(|it| **it).count() == 1;
                    assert_eq!(filled[shape.index([z, y, x])], u32::from(is_ghost_of_face));
                }
            }
        }
        assert_eq!(shape.bytes_of_faces(), 2 * (12 + 8 + 6) * CELL);
    }
}

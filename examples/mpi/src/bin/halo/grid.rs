//! Ranks in a periodic grid of three dimensions, the slowest one (z) first.

use crate::shape::{DIRECTIONS, Direction};

/// The ranks of a job as a grid, and the place of one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    ranks: [u32; 3],
    place: [u32; 3],
}

impl Grid {
    /// The grid with these numbers of ranks in each dimension.
    pub(crate) fn new(ranks: [u32; 3], rank: u32) -> Self {
        let [_, y, x] = ranks;
        Self { ranks, place: [rank / (y * x), rank / x % y, rank % x] }
    }

    /// Numbers of ranks in each dimension that are as equal as possible.
    pub(crate) fn balanced(size: u32) -> [u32; 3] {
        let mut ranks = [1; 3];
        let (mut rest, mut factor, mut factors) = (size, 2, Vec::new());
        while rest > 1 {
            if rest % factor == 0 {
                factors.push(factor);
                rest /= factor;
            } else {
                factor += 1;
            }
        }
        for factor in factors.into_iter().rev() {
            ranks.sort_unstable();
            ranks[0] *= factor;
        }
        // Faces of the slowest dimension have the longest rows.
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        ranks
    }

    pub(crate) fn ranks(&self) -> [u32; 3] {
        self.ranks
    }

    /// The index of this rank in each dimension.
    pub(crate) fn place(&self) -> [u32; 3] {
        self.place
    }

    /// The ranks behind each face.
    pub(crate) fn neighbours(&self) -> [u32; DIRECTIONS] {
        Direction::ALL.map(|direction| {
            let mut place = self.place;
            let count = self.ranks[direction.dimension];
            let step = if direction.is_upper { 1 } else { count - 1 };
            place[direction.dimension] = (place[direction.dimension] + step) % count;
            (place[0] * self.ranks[1] + place[1]) * self.ranks[2] + place[2]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_ranks_has_a_grid() {
        for (size, ranks) in [
            (1, [1, 1, 1]),
            (2, [2, 1, 1]),
            (4, [2, 2, 1]),
            (7, [7, 1, 1]),
            (8, [2, 2, 2]),
            (12, [3, 2, 2]),
            (64, [4, 4, 4]),
        ] {
            assert_eq!(Grid::balanced(size), ranks);
        }
    }

    #[test]
    fn neighbours_are_mutual() {
        for size in 1..=30 {
            let grid = |rank| Grid::new(Grid::balanced(size), rank);
            for rank in 0..size {
                for (direction, neighbour) in
                    Direction::ALL.into_iter().zip(grid(rank).neighbours())
                {
                    let back = grid(neighbour).neighbours()[direction.opposite().index()];
                    assert_eq!(back, rank);
                }
            }
        }
    }
}

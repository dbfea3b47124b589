//! Strided rows: planes and halos of arrays.

use std::iter::FusedIterator;
use std::ops::Range;

use gpu::Block;

use crate::error::{Error, ErrorKind, Result};

/// Maximum number of strides, without the row itself.
pub const MAX_STRIDES: usize = 3;

const OPERATION: &str = "describe strided rows";

/// Rows of the same length at regular strides: a compact form of a long list of blocks.
///
/// Constructors validate: nothing is empty, ends stay below 2⁶⁴, and no two rows overlap at the
/// target. There, each stride spans all rows of the shorter strides. Rows that are contiguous at
/// both ends are merged into a longer row, and strides that continue each other into one. So the
/// order of the construction does not matter.
///
/// [`put`](crate::Agent::put) and [`get`](crate::Agent::get) accept it like a list of blocks, and
/// allocate nothing for it.
///
/// ```
/// use std::time::Duration;
/// use transfer::path::Policy;
/// use transfer::{Agent, AgentOptions, HostBuffer, Subarray, Rights, Strided};
/// let second = Duration::from_secs(1);
/// let mut west = Agent::start(AgentOptions::new("west"))?;
/// let east = Agent::start(AgentOptions::new("east"))?;
/// // Each has a field of 16 × 16 cells of 8 bytes, with a halo of one cell.
/// let (n, cell) = (16, 8);
/// let with_halo = [n + 2, n + 2];
/// let length = cell * (n + 2) * (n + 2);
/// let (west_buffer, east_buffer) = (HostBuffer::new(length)?, HostBuffer::new(length)?);
/// let field = west.register(&west_buffer, Rights::ALL)?;
/// let target = east.register(&east_buffer, Rights::ALL)?;
/// let peer = west.connect(&east.card().encode()?, second)?;
/// let descriptor = target.descriptor().encode()?;
/// let route = west.join(peer, &field, &descriptor, &Policy::default(), second)?;
///
/// // The last column of west goes to the left halo of east.
/// let halo = Strided::tile(
///     cell,
///     &[n, 1],
///     Subarray { extents: &with_halo, origin: &[1, n] },
///     Subarray { extents: &with_halo, origin: &[1, 0] },
/// )?;
/// west_buffer.write(cell * ((n + 2) + n), &[7; 8])?;
/// let token = west.put(&route, &halo, None)?;
/// west.wait(token, second)?;
/// let mut received = [0; 8];
/// east_buffer.read(cell * (n + 2), &mut received)?;
/// assert_eq!(received, [7; 8]);
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Strided {
    to: u64,
    from: u64,
    /// Bytes of one row.
    pub(crate) row: u64,
    /// In the order of target strides, shortest first; unused ones have count 1.
    strides: [Stride; MAX_STRIDES],
    count: u64,
    /// Where the last row ends.
    to_end: u64,
    from_end: u64,
}

/// A repetition: count, and the strides at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Stride {
    count: u64,
    to: u64,
    from: u64,
}

impl Stride {
    const NONE: Self = Self { count: 1, to: 0, from: 0 };

    /// Does it continue the other one at both ends?
    fn continues(&self, other: &Self) -> bool {
        let is_contiguous =
            |distance: u64, before: u64| Some(distance) == before.checked_mul(other.count);
        is_contiguous(self.to, other.to) && is_contiguous(self.from, other.from)
    }
}

/// The position of a tile in an array. The last index runs fastest, as in C; for Fortran arrays
/// reverse all lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subarray<'a> {
    /// Number of elements of the array in each dimension.
    pub extents: &'a [u64],
    /// The first element of the tile.
    pub origin: &'a [u64],
}

fn malformed(detail: String) -> Error {
    Error::new(OPERATION, ErrorKind::Malformed, detail)
}

fn overflow_error(what: &str) -> Error {
    Error::new(OPERATION, ErrorKind::OutOfBounds, format!("{what} exceeds 2^64"))
}

impl Strided {
    /// One row, from the start of one region to the start of the other.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) for 0 bytes: a notice would report data that was never
    /// sent.
    pub fn row(bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(malformed("a row has 0 bytes".to_owned()));
        }
        let strides = [Stride::NONE; MAX_STRIDES];
        Ok(Self { to: 0, from: 0, row: bytes, strides, count: 1, to_end: bytes, from_end: bytes })
    }

    /// Rows at one stride per end: a rectangle of a matrix.
    ///
    /// ```
    /// use transfer::Strided;
    /// // 100 rows of 64 bytes out of lines of 4096, packed.
    /// let packed = Strided::rows(100, 64, 4096, 64)?;
    /// assert_eq!((packed.bytes(), packed.from_end()), (6400, 99 * 4096 + 64));
    /// // Rows that are contiguous at both ends are merged.
    /// assert_eq!(Strided::rows(100, 64, 64, 64)?, Strided::row(6400)?);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`row`](Self::row) and [`repeat`](Self::repeat).
    pub fn rows(count: u64, bytes: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        Self::row(bytes)?.repeat(count, from_stride, to_stride)
    }

    /// Repeats all rows at a stride per end. The stride at the source may be 0: the same bytes go
    /// to several targets.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) for a count of 0, or if a stride at the target is
    /// shorter than the rows it repeats, so that rows could overlap;
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) beyond 2⁶⁴; [`TooMany`](ErrorKind::TooMany) strides.
    pub fn repeat(self, count: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        let new = match count {
            0 => return Err(malformed("rows are repeated 0 times".to_owned())),
            1 => return Ok(self),
            _ => Stride { count, to: to_stride, from: from_stride },
        };
        let mut all = [new; MAX_STRIDES + 1];
        all[1..].copy_from_slice(&self.strides);
        // Unused strides last.
        all.sort_unstable_by_key(|stride| (stride.count == 1, stride.to, stride.from));
        let (row, all) = merge(self.row, all)?;
        let [strides @ .., last] = all;
        if last != Stride::NONE {
            let detail = format!("more than {MAX_STRIDES} strides");
            return Err(Error::new(OPERATION, ErrorKind::TooMany, detail));
        }
        check_no_overlap(row, &strides)?;
        Self { row, strides, ..self }.checked()
    }

    /// Moves all rows by an offset at either end.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) beyond 2⁶⁴.
    pub fn shifted(self, from: u64, to: u64) -> Result<Self> {
        let (from, to) = (self.from.checked_add(from), self.to.checked_add(to));
        let (Some(from), Some(to)) = (from, to) else {
            return Err(overflow_error("the start of a row"));
        };
        Self { from, to, ..self }.checked()
    }

    /// A tile with a size per dimension, out of one array and into another: a halo, or any other
    /// subarray.
    ///
    /// The number of dimensions is unlimited. After merging dimensions that the tile spans
    /// completely, at most [`MAX_STRIDES`] may be left.
    ///
    /// ```
    /// use transfer::{Subarray, Strided};
    /// // The upper face of a cube of 32³ doubles, in an array of its own.
    /// let cube = Subarray { extents: &[32, 32, 32], origin: &[31, 0, 0] };
    /// let face = Subarray { extents: &[1, 32, 32], origin: &[0, 0, 0] };
    /// assert_eq!(Strided::tile(8, &[1, 32, 32], cube, face)?.count(), 1);
    /// // The left one: a row for each double.
    /// let cube = Subarray { origin: &[0, 0, 0], ..cube };
    /// let face = Subarray { extents: &[32, 32, 1], origin: &[0, 0, 0] };
    /// assert_eq!(Strided::tile(8, &[32, 32, 1], cube, face)?.count(), 1024);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) if the numbers of dimensions differ, or a size is 0;
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the tile exceeds an array;
    /// [`TooMany`](ErrorKind::TooMany) strides.
    pub fn tile(
        element_bytes: u64,
        size: &[u64],
        from: Subarray<'_>,
        to: Subarray<'_>,
    ) -> Result<Self> {
        let lists = [from.extents, from.origin, to.extents, to.origin];
        if lists.iter().any(|list| list.len() != size.len()) {
            let counts = lists.map(<[u64]>::len);
            let detail = format!(
                "the tile has {} dimensions, the lists of the arrays have {counts:?}",
                size.len()
            );
            return Err(malformed(detail));
        }
        let mut tile = Self::row(element_bytes)?;
        let (mut strides, mut starts) = ([element_bytes; 2], [0_u64; 2]);
        for dimension in (0..size.len()).rev() {
            let count = size[dimension];
            tile = tile.repeat(count, strides[0], strides[1])?;
            for (side, array) in [from, to].iter().enumerate() {
                let (extent, origin) = (array.extents[dimension], array.origin[dimension]);
                if origin.checked_add(count).is_none_or(|end| end > extent) {
                    let detail = format!(
                        "dimension {dimension}: {count} elements from {origin} exceed {extent}"
                    );
                    return Err(Error::new(OPERATION, ErrorKind::OutOfBounds, detail));
                }
                let stride = strides[side];
                let start =
                    origin.checked_mul(stride).and_then(|more| starts[side].checked_add(more));
                let (Some(start), Some(end)) = (start, stride.checked_mul(extent)) else {
                    return Err(overflow_error("the end of an array"));
                };
                (starts[side], strides[side]) = (start, end);
            }
        }
        tile.shifted(starts[0], starts[1])
    }

    /// Iterates over the rows.
    #[must_use]
    pub fn iter(&self) -> Rows {
        Rows { of: *self, at: [0; MAX_STRIDES], to: self.to, from: self.from, left: self.count }
    }

    /// Iterates over a range of rows.
    pub(crate) fn rows_in(&self, numbers: Range<u64>) -> Rows {
        let end = numbers.end.min(self.count);
        let mut rows = Rows { left: end.saturating_sub(numbers.start), ..self.iter() };
        let mut number = numbers.start;
        for (at, stride) in rows.at.iter_mut().zip(&self.strides) {
            *at = number % stride.count;
            number /= stride.count;
            rows.to += *at * stride.to;
            rows.from += *at * stride.from;
        }
        rows
    }

    /// The first row.
    #[must_use]
    pub fn first(&self) -> Block {
        Block { to: self.to, from: self.from, length: self.row }
    }

    /// The repetitions of the first row, shortest stride first: count, stride at the source, stride
    /// at the target. Unused ones have count 1.
    ///
    /// ```
    /// use transfer::Strided;
    /// let rows = Strided::rows(100, 64, 4096, 64)?.repeat(3, 1 << 20, 6400)?.shifted(8, 16)?;
    /// let (first, [one, two, three]) = (rows.first(), rows.repetitions());
    /// assert_eq!((first.from, first.to, first.length), (8, 16, 64));
    /// assert_eq!((one, two, three), ((100, 4096, 64), (3, 1 << 20, 6400), (1, 0, 0)));
    /// # Ok::<(), transfer::Error>(())
    /// ```
    #[must_use]
    pub fn repetitions(&self) -> [(u64, u64, u64); MAX_STRIDES] {
        self.strides.map(|stride| (stride.count, stride.from, stride.to))
    }

    /// Number of rows.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // Checked by the constructor.
        self.count * self.row
    }

    /// End of the last byte that is read.
    #[must_use]
    pub fn from_end(&self) -> u64 {
        self.from_end
    }

    /// End of the last byte that is written.
    #[must_use]
    pub fn to_end(&self) -> u64 {
        self.to_end
    }

    /// Computes and validates the derived fields.
    fn checked(self) -> Result<Self> {
        let count = self.strides.iter().try_fold(1_u64, |all, s| all.checked_mul(s.count));
        let end = |start: u64, distance: fn(&Stride) -> u64| {
            self.strides.iter().try_fold(start.checked_add(self.row)?, |end, stride| {
                end.checked_add(distance(stride).checked_mul(stride.count - 1)?)
            })
        };
        let count = count.filter(|count| count.checked_mul(self.row).is_some());
        let ends = (end(self.to, |stride| stride.to), end(self.from, |stride| stride.from));
        match (count, ends) {
            (Some(count), (Some(to_end), Some(from_end))) => {
                Ok(Self { count, to_end, from_end, ..self })
            }
            (None, _) => Err(overflow_error("the total length")),
            _ => Err(overflow_error("the end of a row")),
        }
    }
}

/// Merges contiguous rows and strides that continue each other.
fn merge<const N: usize>(mut row: u64, all: [Stride; N]) -> Result<(u64, [Stride; N])> {
    let mut merged = [Stride::NONE; N];
    let mut count = 0;
    for stride in all.into_iter().filter(|stride| stride.count > 1) {
        if count == 0 && (stride.to, stride.from) == (row, row) {
            let longer = row.checked_mul(stride.count);
            row = longer.ok_or_else(|| overflow_error("the total length"))?;
        } else if let Some(last) = merged[..count].last_mut().filter(|last| stride.continues(last))
        {
            let more = last.count.checked_mul(stride.count);
            last.count = more.ok_or_else(|| overflow_error("the total length"))?;
        } else {
            merged[count] = stride;
            count += 1;
        }
    }
    Ok((row, merged))
}

/// Fails if a stride at the target is shorter than the rows it repeats. The strides are sorted by
/// length there.
fn check_no_overlap(row: u64, strides: &[Stride]) -> Result<()> {
    let mut extent = row;
    for stride in strides.iter().filter(|stride| stride.count > 1) {
        if stride.to < extent {
            let Stride { count, to, .. } = stride;
            let detail = format!(
                "{count} repetitions of {extent} bytes at a stride of {to}: rows may overlap"
            );
            return Err(malformed(detail));
        }
        let more = stride.to.checked_mul(stride.count - 1);
        let longer = more.and_then(|more| extent.checked_add(more));
        extent = longer.ok_or_else(|| overflow_error("the end of a row"))?;
    }
    Ok(())
}

impl IntoIterator for &Strided {
    type Item = Block;
    type IntoIter = Rows;

    fn into_iter(self) -> Rows {
        self.iter()
    }
}

/// Iterates over [strided rows](Strided).
#[derive(Debug, Clone)]
pub struct Rows {
    pub(super) of: Strided,
    at: [u64; MAX_STRIDES],
    to: u64,
    from: u64,
    left: u64,
}

/// Rows at one stride per end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: Block,
    pub(crate) count: u64,
    pub(crate) to_stride: u64,
    pub(crate) from_stride: u64,
}

impl From<Block> for Run {
    fn from(first: Block) -> Self {
        Self { first, count: 1, to_stride: 0, from_stride: 0 }
    }
}

impl Rows {
    /// Takes as many of the next rows as have a common stride, but at most `most`, and at least
    /// one.
    pub(crate) fn next_run(&mut self, most: u64) -> Option<Run> {
        let stride = self.of.strides[0];
        let rows = (stride.count - self.at[0]).min(self.left).min(most.max(1));
        let first = self.next()?;
        // The last row of a stride advances the others: `next` does that.
        let more = rows.saturating_sub(2);
        self.at[0] += more;
        self.to += stride.to * more;
        self.from += stride.from * more;
        self.left -= more;
        if rows >= 2 {
            self.next();
        }
        Some(Run { first, count: rows, to_stride: stride.to, from_stride: stride.from })
    }
}

impl Iterator for Rows {
    type Item = Block;

    #[inline]
    fn next(&mut self) -> Option<Block> {
        self.left = self.left.checked_sub(1)?;
        let block = Block { to: self.to, from: self.from, length: self.of.row };
        for (at, stride) in self.at.iter_mut().zip(&self.of.strides) {
            *at += 1;
            if *at < stride.count {
                self.to += stride.to;
                self.from += stride.from;
                break;
            }
            // Back to the start of this stride; the next one advances.
            *at = 0;
            self.to -= stride.to * (stride.count - 1);
            self.from -= stride.from * (stride.count - 1);
        }
        Some(block)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        match usize::try_from(self.left) {
            Ok(left) => (left, Some(left)),
            Err(_) => (usize::MAX, None),
        }
    }
}

impl FusedIterator for Rows {}

#[cfg(test)]
#[path = "strided_tests.rs"]
mod tests;

//! Rows at regular distances, at either end at its own: planes and halos of arrays.

use std::iter::FusedIterator;
use std::ops::Range;

use gpu::Block;

use crate::error::{Error, ErrorKind, Result};

/// Regular distances that a description has at most, beside the row itself.
pub const MAX_STRIDES: usize = 3;

const OPERATION: &str = "describe rows";

/// Rows of the same length at regular distances: what a list would say of many blocks, in
/// a few numbers.
///
/// A description is sound from the beginning: nothing of it is empty, it stays below 2⁶⁴ at
/// both ends, and no two rows go to the same place, since each distance at the target spans all
/// that is repeated at shorter ones. Rows that lie one behind the other at both ends are one longer row, and
/// distances that continue each other are one, so what is described in many steps is as
/// good as what is described in few.
///
/// [`put`](crate::Agent::put) and [`get`](crate::Agent::get) take it as they take a list of
/// blocks, and nothing is allocated for it.
///
/// ```
/// use std::time::Duration;
/// use transfer::path::Policy;
/// use transfer::{Agent, AgentOptions, HostBuffer, Subarray, Rights, Strided};
/// let second = Duration::from_secs(1);
/// let mut west = Agent::start(AgentOptions::new("west"))?;
/// let east = Agent::start(AgentOptions::new("east"))?;
/// // Each has a field of 16 × 16 cells of 8 bytes, and one more cell all around it.
/// let (n, cell) = (16, 8);
/// let with_halo = [n + 2, n + 2];
/// let length = cell * (n + 2) * (n + 2);
/// let (mine, theirs) = (HostBuffer::new(length)?, HostBuffer::new(length)?);
/// let field = west.register(&mine, Rights::ALL)?;
/// let target = east.register(&theirs, Rights::ALL)?;
/// let peer = west.connect(&east.card().encode()?, second)?;
/// let descriptor = target.descriptor().encode()?;
/// let route = west.join(peer, &field, &descriptor, &Policy::default(), second)?;
///
/// // My last column of cells goes to its halo, left of its first one.
/// let halo = Strided::tile(
///     cell,
///     &[n, 1],
///     Subarray { extents: &with_halo, origin: &[1, n] },
///     Subarray { extents: &with_halo, origin: &[1, 0] },
/// )?;
/// mine.write(cell * ((n + 2) + n), &[7; 8])?;
/// let token = west.put(&route, &halo, None)?;
/// west.wait(token, second)?;
/// let mut came = [0; 8];
/// theirs.read(cell * (n + 2), &mut came)?;
/// assert_eq!(came, [7; 8]);
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Strided {
    to: u64,
    from: u64,
    /// Bytes of one row.
    pub(crate) row: u64,
    /// The shortest distance at the target first; those that are not needed count 1.
    strides: [Stride; MAX_STRIDES],
    /// Of all rows.
    count: u64,
    /// Where the last of them end.
    to_end: u64,
    from_end: u64,
}

/// So many times, at these distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Stride {
    count: u64,
    to: u64,
    from: u64,
}

impl Stride {
    const NONE: Self = Self { count: 1, to: 0, from: 0 };

    /// Does it go on where the other one ends, at both ends?
    fn continues(&self, other: &Self) -> bool {
        let goes_on =
            |distance: u64, before: u64| Some(distance) == before.checked_mul(other.count);
        goes_on(self.to, other.to) && goes_on(self.from, other.from)
    }
}

/// Where a tile begins in an array. The last index runs fastest, as in C; for arrays of
/// Fortran all lists are turned round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subarray<'a> {
    /// How many elements the array has in each dimension.
    pub extents: &'a [u64],
    /// The first element of the tile.
    pub origin: &'a [u64],
}

fn malformed(detail: String) -> Error {
    Error::new(OPERATION, ErrorKind::Malformed, detail)
}

fn overflow_error(what: &str) -> Error {
    Error::new(OPERATION, ErrorKind::OutOfBounds, format!("{what} 2^64 or beyond"))
}

impl Strided {
    /// One row of so many bytes, from the beginning of one region to the beginning of the other.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) if it has no byte: a notice would tell of data that
    /// nobody sent.
    pub fn row(bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(malformed("a row of no bytes".to_owned()));
        }
        let strides = [Stride::NONE; MAX_STRIDES];
        Ok(Self { to: 0, from: 0, row: bytes, strides, count: 1, to_end: bytes, from_end: bytes })
    }

    /// So many rows, each so many bytes behind the one before: a rectangle of a matrix.
    ///
    /// ```
    /// use transfer::Strided;
    /// // 100 rows of 64 bytes out of lines of 4096, one behind the other.
    /// let packed = Strided::rows(100, 64, 4096, 64)?;
    /// assert_eq!((packed.bytes(), packed.from_end()), (6400, 99 * 4096 + 64));
    /// // What lies one behind the other at both ends is one row.
    /// assert_eq!(Strided::rows(100, 64, 64, 64)?, Strided::row(6400)?);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`row`](Self::row) and [`repeat`](Self::repeat).
    pub fn rows(count: u64, bytes: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        Self::row(bytes)?.repeat(count, from_stride, to_stride)
    }

    /// All of it so many times, each so many bytes behind the one before. At the source the
    /// distance may be 0: the same bytes go to many places.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) for no times at all, or where a distance at the target
    /// is shorter than what it repeats, so that rows could go to the same place; [`OutOfBounds`](ErrorKind::OutOfBounds) beyond 2⁶⁴;
    /// [`TooMany`](ErrorKind::TooMany) distances.
    pub fn repeat(self, count: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        let new = match count {
            0 => return Err(malformed("rows that are repeated no times".to_owned())),
            1 => return Ok(self),
            _ => Stride { count, to: to_stride, from: from_stride },
        };
        let mut all = [new; MAX_STRIDES + 1];
        all[1..].copy_from_slice(&self.strides);
        // Those that are not needed last.
        all.sort_unstable_by_key(|stride| (stride.count == 1, stride.to, stride.from));
        let (row, all) = joined(self.row, all)?;
        let [strides @ .., last] = all;
        if last != Stride::NONE {
            let detail = format!("distances; {MAX_STRIDES} are the most, with those that are one");
            return Err(Error::new(OPERATION, ErrorKind::TooMany, detail));
        }
        check_no_overlap(row, &strides)?;
        Self { row, strides, ..self }.checked()
    }

    /// Everything so many bytes further behind, at either end.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) beyond 2⁶⁴.
    pub fn shifted(self, from: u64, to: u64) -> Result<Self> {
        let (from, to) = (self.from.checked_add(from), self.to.checked_add(to));
        let (Some(from), Some(to)) = (from, to) else {
            return Err(overflow_error("a row begins at"));
        };
        Self { from, to, ..self }.checked()
    }

    /// A tile of so many elements in each dimension, out of one array and into another: a halo,
    /// or any other part that has corners.
    ///
    /// There may be any number of dimensions; only so many as [`MAX_STRIDES`] may be left when
    /// those were joined in which the tile is as long as both arrays are.
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
    /// [`Malformed`](ErrorKind::Malformed) if not all have the same number of dimensions, or
    /// something is empty; [`OutOfBounds`](ErrorKind::OutOfBounds) if the tile reaches beyond an
    /// array; [`TooMany`](ErrorKind::TooMany) distances.
    pub fn tile(
        element_bytes: u64,
        size: &[u64],
        from: Subarray<'_>,
        to: Subarray<'_>,
    ) -> Result<Self> {
        let lists = [from.extents, from.origin, to.extents, to.origin];
        if lists.iter().any(|list| list.len() != size.len()) {
            let counts = lists.map(<[u64]>::len);
            let detail =
                format!("a tile of {} dimensions in arrays with lists of {counts:?}", size.len());
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
                        "dimension {dimension}: {count} from {origin} on, of {extent} elements"
                    );
                    return Err(Error::new(OPERATION, ErrorKind::OutOfBounds, detail));
                }
                let stride = strides[side];
                let start =
                    origin.checked_mul(stride).and_then(|more| starts[side].checked_add(more));
                let (Some(start), Some(end)) = (start, stride.checked_mul(extent)) else {
                    return Err(overflow_error("an array ends at"));
                };
                (starts[side], strides[side]) = (start, end);
            }
        }
        tile.shifted(starts[0], starts[1])
    }

    /// Its rows.
    #[must_use]
    pub fn iter(&self) -> Rows {
        Rows { of: *self, at: [0; MAX_STRIDES], to: self.to, from: self.from, left: self.count }
    }

    /// Some of its rows, by their numbers.
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

    /// How many rows it has.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // Checked when it was made.
        self.count * self.row
    }

    /// Where the last byte that is read ends.
    #[must_use]
    pub fn from_end(&self) -> u64 {
        self.from_end
    }

    /// Where the last byte that is written ends.
    #[must_use]
    pub fn to_end(&self) -> u64 {
        self.to_end
    }

    /// With what is told from the rest, if it stays below 2⁶⁴.
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
            (None, _) => Err(overflow_error("all rows together have")),
            _ => Err(overflow_error("a row ends at")),
        }
    }
}

/// Joins what continues: a longer row, and fewer distances.
fn joined<const N: usize>(mut row: u64, all: [Stride; N]) -> Result<(u64, [Stride; N])> {
    let mut kept = [Stride::NONE; N];
    let mut count = 0;
    for stride in all.into_iter().filter(|stride| stride.count > 1) {
        if count == 0 && (stride.to, stride.from) == (row, row) {
            let longer = row.checked_mul(stride.count);
            row = longer.ok_or_else(|| overflow_error("all rows together have"))?;
        } else if let Some(last) = kept[..count].last_mut().filter(|last| stride.continues(last)) {
            let more = last.count.checked_mul(stride.count);
            last.count = more.ok_or_else(|| overflow_error("all rows together have"))?;
        } else {
            kept[count] = stride;
            count += 1;
        }
    }
    Ok((row, kept))
}

/// Refuses a distance at the target that is shorter than what it repeats. They are in the order of
/// their length there.
fn check_no_overlap(row: u64, strides: &[Stride]) -> Result<()> {
    let mut extent = row;
    for stride in strides.iter().filter(|stride| stride.count > 1) {
        if stride.to < extent {
            let Stride { count, to, .. } = stride;
            let detail = format!(
                "{count} times what goes to {extent} bytes, {to} bytes apart: they may meet"
            );
            return Err(malformed(detail));
        }
        let more = stride.to.checked_mul(stride.count - 1);
        let longer = more.and_then(|more| extent.checked_add(more));
        extent = longer.ok_or_else(|| overflow_error("a row ends at"))?;
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

/// The rows of a [description](Strided), one after the other.
#[derive(Debug, Clone)]
pub struct Rows {
    pub(super) of: Strided,
    at: [u64; MAX_STRIDES],
    to: u64,
    from: u64,
    left: u64,
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
            // Back to its beginning, and the next one goes on.
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

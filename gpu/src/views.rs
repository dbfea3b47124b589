//! Many ranges of memory of another library, grouped by the allocations that they are in.
//!
//! A framework's tensors are views of a few allocations. To register each of them costs a query of
//! the driver and a handle; registered by allocation, thousands cost what a few do.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Memory;

/// A range of addresses: its start and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// The first address.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
}

/// A part of an adopted memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct View {
    /// The index of the memory.
    pub memory: usize,
    /// Offset in that memory.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Adopted memories, and the views of them in the order in which their ranges were given.
#[derive(Debug)]
pub struct Views {
    memories: Vec<Memory>,
    views: Vec<View>,
}

impl Views {
    /// The memories: from the first to the last view in each group of allocations.
    #[must_use]
    pub fn memories(&self) -> &[Memory] {
        &self.memories
    }

    /// The views, in the order of the ranges.
    #[must_use]
    pub fn views(&self) -> &[View] {
        &self.views
    }
}

impl Device {
    /// Adopts many ranges of memory of another library, such as tensors: as one memory for each group
    /// of ranges that share allocations, from the first to the last of them.
    ///
    /// ```
    /// # use gpu::{Device, Range};
    /// # let device = Device::open("emulated:0".parse()?)?;
    /// # let cache = device.allocate(1 << 20)?;
    /// // The pages of a cache.
    /// let pages: Vec<_> = (0..16)
    ///     .map(|n| Range { address: cache.address() + n * 65536, length: 4096 })
    ///     .collect();
    /// // SAFETY: the pages belong to `cache`, which is moved along.
    /// let views = unsafe { device.adopt_views(&pages, cache.clone()) }?;
    /// assert_eq!((views.memories().len(), views.views()[15].offset), (1, 15 * 65536));
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`adopt`](Self::adopt).
    ///
    /// # Safety
    /// The ranges belong to this device, or are mapped for it, until `owner` is dropped; so does all
    /// of each allocation that a range is in.
    pub unsafe fn adopt_views(
        &self,
        ranges: &[Range],
        owner: impl fmt::Debug + Send + Sync + 'static,
    ) -> Result<Views> {
        let (spans, views) = self.group_views(ranges)?;
        let owner = Arc::new(owner);
        let adopt = |span: Range| {
            // SAFETY: each allocation between the first and the last view has one of them, and
            // belongs to the owner by the caller's promise.
            unsafe { self.adopt(span.address, span.length, Arc::clone(&owner)) }
        };
        let memories = spans.into_iter().map(adopt).collect::<Result<_>>()?;
        Ok(Views { memories, views })
    }

    /// Groups ranges that share allocations: the range of each group, from the first to the last of
    /// its members, and where each range is in these. For callers that adopt the groups themselves.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for an empty range; the driver's for an address
    /// that it does not know.
    pub fn group_views(&self, ranges: &[Range]) -> Result<(Vec<Range>, Vec<View>)> {
        let (spans, views) = group(ranges, |address| {
            let found = self.attributes(address)?;
            Ok(Range { address: found.base, length: found.length })
        })?;
        let range = |span: Span| Range { address: span.start, length: span.end - span.start };
        Ok((spans.into_iter().map(range).collect(), views))
    }
}

/// Ranges that share allocations, from the first to the last of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    start: u64,
    end: u64,
}

/// Groups ranges that share an allocation. `allocation_of` returns the allocation of an address, and
/// is called once for each allocation.
fn group(
    ranges: &[Range],
    mut allocation_of: impl FnMut(u64) -> Result<Range>,
) -> Result<(Vec<Span>, Vec<View>)> {
    let mut order: Vec<_> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|index| ranges[*index].address);
    let mut spans: Vec<Span> = Vec::new();
    let mut views = vec![View { memory: 0, offset: 0, length: 0 }; ranges.len()];
    // The end of the last allocation of the last span.
    let mut known_until = 0;
    for index in order {
        let Range { address, length } = ranges[index];
        let Some(end) = address.checked_add(length).filter(|end| *end > address) else {
            let detail = format!("view {index}: {length} bytes at {address:#x}");
            return Err(Error::new("adopt views", ErrorKind::InvalidArgument, detail));
        };
        match spans.last_mut() {
            Some(span) if address < known_until => span.end = span.end.max(end),
            _ => {
                spans.push(Span { start: address, end });
                known_until = address;
            }
        }
        while known_until < end {
            let found = allocation_of(known_until)?;
            // A driver that does not know the length reports 0.
            let behind = found.address.saturating_add(found.length);
            known_until = if behind > known_until { behind } else { end };
        }
        let memory = spans.len() - 1;
        views[index] = View { memory, offset: address - spans[memory].start, length };
    }
    Ok((spans, views))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Allocations of 1000 bytes at each multiple of 1000 but those of 5000.
    fn allocation_of(address: u64) -> Result<Range> {
        match address / 1000 {
            n if n % 5 == 0 => Err(Error::new("query", ErrorKind::InvalidArgument, "none")),
            n => Ok(Range { address: n * 1000, length: 1000 }),
        }
    }

    fn range(address: u64, length: u64) -> Range {
        Range { address, length }
    }

    #[test]
    fn views_of_one_allocation_share_a_span() {
        let ranges =
            [range(1900, 50), range(1100, 10), range(3100, 5), range(1200, 900), range(3050, 1)];
        let mut queries = 0;
        let (spans, views) = group(&ranges, |address| {
            queries += 1;
            allocation_of(address)
        })
        .unwrap();
        assert_eq!(spans, [Span { start: 1100, end: 2100 }, Span { start: 3050, end: 3105 }]);
        let places: Vec<_> = views.iter().map(|view| (view.memory, view.offset)).collect();
        assert_eq!(places, [(0, 800), (0, 0), (1, 50), (0, 100), (1, 0)]);
        assert_eq!(queries, 3);
        assert!(group(&[range(4500, 600)], allocation_of).is_err(), "it ends outside");
        for wrong in [range(1100, 0), range(u64::MAX, 2)] {
            assert!(group(&[range(1100, 1), wrong], allocation_of).is_err());
        }
        assert_eq!(group(&[], allocation_of).unwrap(), (vec![], vec![]));
    }

    proptest! {
        #[test]
        fn each_view_lies_in_its_span_and_spans_share_no_allocation(
            ranges in proptest::collection::vec((0_u64..40, 0_u64..999, 1_u64..1500), 0..50),
        ) {
            let ranges: Vec<_> = ranges
                .into_iter()
                .map(|(n, at, length)| range((n / 4 * 5 + n % 4 + 1) * 1000 + at, length))
                .filter(|it| (it.address / 1000..=(it.address + it.length - 1) / 1000).all(|n| n % 5 != 0))
                .collect();
            let (spans, views) = group(&ranges, allocation_of).unwrap();
            for (range, view) in ranges.iter().zip(&views) {
                let span = spans[view.memory];
                prop_assert_eq!(span.start + view.offset, range.address);
                prop_assert!(range.address + range.length <= span.end);
                prop_assert_eq!(view.length, range.length);
            }
            for pair in spans.windows(2) {
                prop_assert!((pair[0].end - 1) / 1000 < pair[1].start / 1000);
            }
        }
    }
}

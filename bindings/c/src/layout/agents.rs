//! The structures of agents.

use std::ffi::c_void;
use std::path::Path;
use std::time::Duration;

use gpu::Block;
use pubsub::NodeOptions;
use transfer::{
    AgentCard, AgentOptions, Event, MAX_LABEL_LENGTH, MAX_STRIDES, Notice, Strided, Subarray,
};

use super::values::{flag, nanoseconds, time, unknown, wait_strategy};
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Array, Text, WithDefaults};
use crate::handle::{Handle, Kind};

/// Bytes of a label, with at least one zero.
const LABEL: usize = 72;
const _: () = assert!(LABEL > MAX_LABEL_LENGTH);
/// Bytes of a reason, which may be cut.
const REASON: usize = 256;
/// The most rails that a card can name.
const MAX_RAILS: u32 = 8;
const MAX_LOST_AFTER: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Defaults of the registration cache of a rail.
const CACHED_BYTES: u64 = 64 << 30;
const CACHED_COUNT: u32 = 1024;
/// The most dimensions of a tile: as many as a Fortran array has.
const MAX_DIMENSIONS: usize = 15;

/// Zero-terminated text of a fixed size; a longer one is cut between characters.
fn fixed_text<const N: usize>(text: &str) -> [u8; N] {
    let text = text.split('\0').next().unwrap_or_default();
    let end = (0..=text.len().min(N - 1)).rev().find(|end| text.is_char_boundary(*end));
    let mut all = [0; N];
    for (to, byte) in all.iter_mut().zip(text.bytes().take(end.unwrap_or(0))) {
        *to = byte;
    }
    all
}

/// `fabricast_agent_options`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawAgentOptions {
    size: usize,
    label: Text<'static>,
    directory: Text<'static>,
    fabric: Text<'static>,
    source: Text<'static>,
    lost_after: i64,
    cached_bytes: u64,
    cached_count: u32,
    rails: u32,
    waiting: u32,
    force_remote: u32,
}

impl WithDefaults for RawAgentOptions {
    fn defaults(size: usize) -> Self {
        Self {
            size,
            lost_after: nanoseconds(Duration::from_secs(5)),
            cached_bytes: CACHED_BYTES,
            cached_count: CACHED_COUNT,
            rails: 1,
            ..Self::default()
        }
    }
}

impl RawAgentOptions {
    /// Without its fabric.
    pub(crate) fn to_options(self, operation: Operation) -> Result<AgentOptions> {
        let program;
        let label = match self.label.get(operation, "label")? {
            Some(label) => label,
            None => {
                program = NodeOptions::default().label;
                &program
            }
        };
        if label.len() > MAX_LABEL_LENGTH {
            let detail =
                format!("\"label\" has {} bytes, {MAX_LABEL_LENGTH} is the maximum", label.len());
            return Err(Failure::invalid(operation, detail));
        }
        let lost_after = time(operation, "lost_after", self.lost_after)?;
        if lost_after.is_zero() || lost_after > MAX_LOST_AFTER {
            let detail = "\"lost_after\" is zero, or more than a year";
            return Err(Failure::invalid(operation, detail));
        }
        let mut options = AgentOptions::new(label)
            .wait_strategy(wait_strategy(operation, self.waiting)?)
            .lost_after(lost_after)
            .registration_cache_limits(self.cached_bytes, self.cached_count as usize);
        if let Some(directory) = self.directory.get(operation, "directory")? {
            options = options.directory(Path::new(directory));
        }
        if flag(operation, "force_remote", self.force_remote)? {
            options = options.force_remote();
        }
        Ok(options)
    }

    /// The policy of providers and the local address; None without a fabric.
    pub(crate) fn fabric(
        &self,
        operation: Operation,
    ) -> Result<Option<(&'static str, Option<&'static str>)>> {
        let source = self.source.get(operation, "source")?;
        let fabric = self.fabric.get(operation, "fabric")?;
        if fabric.is_none() && source.is_some() {
            return Err(Failure::invalid(operation, "\"source\" is set, but \"fabric\" is NULL"));
        }
        Ok(fabric.map(|policy| (policy, source)))
    }

    pub(crate) fn rails(&self, operation: Operation) -> Result<u32> {
        if !(1..=MAX_RAILS).contains(&self.rails) {
            let detail = format!("\"rails\" is {}: 1 to {MAX_RAILS} are possible", self.rails);
            return Err(Failure::invalid(operation, detail));
        }
        Ok(self.rails)
    }
}

/// `fabricast_notice`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawNotice<'a> {
    size: usize,
    tag: u64,
    data: Array<'a, u8>,
    length: usize,
}

impl WithDefaults for RawNotice<'_> {
    fn defaults(size: usize) -> Self {
        Self { size, ..Self::default() }
    }
}

impl RawNotice<'_> {
    pub(crate) fn to_notice(self, operation: Operation) -> Result<Notice> {
        // Not longer than a notice is: nothing else of it is read.
        if self.length > transfer::MAX_NOTICE_LENGTH {
            let detail = format!(
                "a notice of {} bytes, {} is the maximum",
                self.length,
                transfer::MAX_NOTICE_LENGTH
            );
            return Err(Failure::invalid(operation, detail));
        }
        Ok(Notice::new(self.tag, self.data.get(operation, "data", self.length)?)?)
    }
}

/// `fabricast_part`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawPart<'a> {
    route: *mut c_void,
    blocks: Array<'a, Block>,
    count: usize,
}

impl<'a> RawPart<'a> {
    /// The route's handle.
    pub(crate) fn route<K: Kind>(&self, operation: Operation) -> Result<Handle<K>> {
        Handle::of_pointer(operation, self.route.cast())
    }

    pub(crate) fn blocks(&self, operation: Operation) -> Result<&'a [Block]> {
        self.blocks.get(operation, "blocks", self.count)
    }
}

/// `fabricast_strided`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawStrided {
    size: usize,
    from: u64,
    to: u64,
    length: u64,
    count: [u64; MAX_STRIDES],
    from_stride: [u64; MAX_STRIDES],
    to_stride: [u64; MAX_STRIDES],
}

impl WithDefaults for RawStrided {
    fn defaults(size: usize) -> Self {
        let unused = [0; MAX_STRIDES];
        Self {
            size,
            from: 0,
            to: 0,
            length: 0,
            count: [1; MAX_STRIDES],
            from_stride: unused,
            to_stride: unused,
        }
    }
}

/// All that these errors say is in the arguments.
fn invalid(operation: Operation, error: &transfer::Error) -> Failure {
    Failure::invalid(operation, error)
}

impl RawStrided {
    fn of(size: usize, strided: &Strided) -> Self {
        let (first, repetitions) = (strided.first(), strided.repetitions());
        Self {
            size,
            from: first.from,
            to: first.to,
            length: first.length,
            count: repetitions.map(|(count, ..)| count),
            from_stride: repetitions.map(|(_, from, _)| from),
            to_stride: repetitions.map(|(.., to)| to),
        }
    }

    /// A tile out of one array and into another, by lists of a number for each dimension.
    pub(crate) fn tile(
        operation: Operation,
        size: usize,
        order: u32,
        element: u64,
        dimensions: usize,
        lists: [(&str, Array<'_, u64>); 5],
    ) -> Result<Self> {
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            let detail = format!("{dimensions} dimensions: 1 to {MAX_DIMENSIONS} are possible");
            return Err(Failure::invalid(operation, detail));
        }
        let mut all = [[0; MAX_DIMENSIONS]; 5];
        for (to, (name, list)) in all.iter_mut().zip(lists) {
            to[..dimensions].copy_from_slice(list.get(operation, name, dimensions)?);
        }
        match order {
            0 => {}
            1 => all.iter_mut().for_each(|list| list[..dimensions].reverse()),
            other => return Err(unknown(operation, "order", other)),
        }
        let [tile, from_extents, from_origin, to_extents, to_origin] =
            all.each_ref().map(|list| &list[..dimensions]);
        let from = Subarray { extents: from_extents, origin: from_origin };
        let to = Subarray { extents: to_extents, origin: to_origin };
        let strided = Strided::tile(element, tile, from, to);
        Ok(Self::of(size, &strided.map_err(|error| invalid(operation, &error))?))
    }

    pub(crate) fn to_strided(self, operation: Operation) -> Result<Strided> {
        let mut rows = Strided::row(self.length);
        for at in 0..MAX_STRIDES {
            let (count, from, to) = (self.count[at], self.from_stride[at], self.to_stride[at]);
            rows = rows.and_then(|rows| rows.repeat(count, from, to));
        }
        let rows = rows.and_then(|rows| rows.shifted(self.from, self.to));
        rows.map_err(|error| invalid(operation, &error))
    }
}

/// `fabricast_card_info`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawCardInfo {
    identity: [u8; 16],
    label: [u8; LABEL],
    is_same_machine: u64,
    fabrics: u64,
    regions: u64,
}

impl RawCardInfo {
    pub(crate) fn of(card: &AgentCard) -> Self {
        Self {
            identity: card.identity,
            label: fixed_text(&card.label),
            is_same_machine: u64::from(card.is_of_this_machine()),
            fabrics: card.fabrics.len() as u64,
            regions: card.regions.len() as u64,
        }
    }
}

/// `fabricast_agent_event`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawAgentEvent {
    kind: u64,
    tag: u64,
    length: u64,
    rail: u64,
    is_dead: u64,
    from: [u8; 16],
    data: [u8; transfer::MAX_NOTICE_LENGTH],
    label: [u8; LABEL],
    reason: [u8; REASON],
}

impl RawAgentEvent {
    const EMPTY: Self = Self {
        kind: 0,
        tag: 0,
        length: 0,
        rail: 0,
        is_dead: 0,
        from: [0; 16],
        data: [0; transfer::MAX_NOTICE_LENGTH],
        label: [0; LABEL],
        reason: [0; REASON],
    };

    pub(crate) fn of(event: &Event) -> Self {
        let of_peer = |kind, from: &[u8; 16], label: &str| Self {
            kind,
            from: *from,
            label: fixed_text(label),
            ..Self::EMPTY
        };
        match event {
            Event::Joined { from, label } => of_peer(1, from, label),
            Event::Notice { from, notice } => {
                let mut data = Self::EMPTY.data;
                data[..notice.data().len()].copy_from_slice(notice.data());
                let (tag, length) = (notice.tag, notice.data().len() as u64);
                Self { tag, length, data, ..of_peer(2, from, "") }
            }
            Event::Left { from, label, is_dead } => {
                Self { is_dead: u64::from(*is_dead), ..of_peer(3, from, label) }
            }
            Event::RailLost { with, label, rail, reason } => {
                let (rail, reason) = (*rail as u64, fixed_text(reason));
                Self { rail, reason, ..of_peer(4, with, label) }
            }
            Event::RailRestored { with, label, rail } => {
                Self { rail: *rail as u64, ..of_peer(5, with, label) }
            }
            // Kinds of later versions have no number yet.
            _ => Self { kind: u64::MAX, ..Self::EMPTY },
        }
    }
}

#[cfg(test)]
#[path = "agents_tests.rs"]
mod tests;

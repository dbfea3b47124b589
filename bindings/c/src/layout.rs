//! The structures of the interface in C layout, and their conversion.
//!
//! They grow at the end, and have no gaps. A caller passes the size that it knows; fields after it
//! have their default, or are not filled.
#![allow(unsafe_code)]

mod agents;
mod collectives;
mod tensor;
mod values;

use std::ffi::{CStr, c_char, c_void};

use pubsub::NodeId;
use pubsub::{
    Budgets, Event, NetworkOptions, NodeOptions, PublisherCounters, PublisherEvent, PublisherId,
    Reliability, Sample, Sent, ServiceMode, TopicPublisher, TopicSettings,
};

use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Layout, Plain, Text, WithDefaults};
use crate::network::{address, local_address};

pub(crate) use self::agents::{
    RawAgentEvent, RawAgentOptions, RawCardInfo, RawNotice, RawPart, RawStrided,
};
pub(crate) use self::collectives::{
    RawDomainOptions, RawExecStat, RawParamEntry, RawParameters, data_type, op_key, reduce_op,
};
pub(crate) use self::tensor::RawTensor;
pub(crate) use self::values::flag;
use self::values::{nanoseconds, time, unknown, wait_strategy};

macro_rules! layouts {
    ($($type:ty: $min_size:literal),* $(,)?) => {$(
        // SAFETY: as declared, of numbers and addresses, without gaps.
        unsafe impl Layout for $type {
            const MIN_SIZE: usize = $min_size;
        }
    )*};
}

layouts! {
    RawNodeOptions: 120,
    RawTopicSettings<'_>: 40,
    RawSent: 24,
    RawCounters: 24,
    RawEvent: 32,
    RawSampleInfo: 128,
    RawAgentOptions: 72,
    RawAgentEvent: 4480,
    RawCardInfo: 112,
    RawNotice<'_>: 32,
    RawStrided: 104,
    RawTensor<'_>: 40,
    RawDomainOptions: 128,
}

// SAFETY: addresses and a number, which are valid for any bytes.
unsafe impl Plain for RawPart<'_> {}
// SAFETY: numbers and bytes without gaps, which are valid for any bytes.
unsafe impl Plain for RawTopicPublisher {}

// SAFETY: four numbers.
unsafe impl Plain for RawParameters {}
// SAFETY: numbers without gaps.
unsafe impl Plain for RawParamEntry {}
// SAFETY: as above.
unsafe impl Plain for RawExecStat {}

/// `fabricast_node_options`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RawNodeOptions {
    size: usize,
    directory: Text<'static>,
    label: Text<'static>,
    service_timeout: i64,
    host_budget: u64,
    device_budget: u64,
    service: u32,
    waiting: u32,
    listen: Text<'static>,
    peers: Text<'static>,
    rendezvous: Text<'static>,
    name: Text<'static>,
    provider: Text<'static>,
    source: Text<'static>,
    lost_after: i64,
    insecure: u32,
    workers: u32,
}

impl WithDefaults for RawNodeOptions {
    fn defaults(size: usize) -> Self {
        Self {
            size,
            service_timeout: nanoseconds(NodeOptions::default().service_timeout),
            lost_after: nanoseconds(NetworkOptions::default().lost_after),
            ..Self::default()
        }
    }
}

impl RawNodeOptions {
    pub(crate) fn to_options(self, operation: Operation) -> Result<NodeOptions> {
        let mut options = NodeOptions::default();
        if let Some(directory) = self.directory.get(operation, "directory")? {
            options.directory = directory.into();
        }
        if let Some(label) = self.label.get(operation, "label")? {
            options.label = label.into();
        }
        options.service_timeout = time(operation, "service_timeout", self.service_timeout)?;
        let budget = |bytes| (bytes != 0).then_some(bytes);
        options.budgets =
            Budgets { host: budget(self.host_budget), device: budget(self.device_budget) };
        options.service = match self.service {
            0 => ServiceMode::Embedded,
            1 => ServiceMode::External,
            other => return Err(unknown(operation, "service", other)),
        };
        options.waiting = wait_strategy(operation, self.waiting)?;
        options.network = self.network(operation)?;
        options.interruptible = true;
        Ok(options)
    }

    /// None without any address of peers or of this node.
    fn network(&self, operation: Operation) -> Result<Option<NetworkOptions>> {
        let insecure = flag(operation, "insecure", self.insecure)?;
        let lost_after = time(operation, "lost_after", self.lost_after)?;
        let listen = self.listen.get(operation, "listen")?;
        let peers = self.peers.get(operation, "peers")?;
        let rendezvous = self.rendezvous.get(operation, "rendezvous")?;
        let name = self.name.get(operation, "name")?;
        let provider = self.provider.get(operation, "provider")?;
        let source = self.source.get(operation, "source")?;
        if listen.is_none() && peers.is_none() && rendezvous.is_none() {
            let without_effect = [("provider", provider), ("source", source)];
            return match without_effect.into_iter().find(|(_, value)| value.is_some()) {
                None => Ok(None),
                Some((name, _)) => {
                    let cause = format!("{name} has no effect without listen, peers or rendezvous");
                    Err(Failure::invalid(operation, cause))
                }
            };
        }
        let peers = peers.unwrap_or_default().split(',').map(str::trim);
        Ok(Some(NetworkOptions {
            listen: address(operation, "listen", listen, str::parse)?,
            peers: peers.filter(|peer| !peer.is_empty()).map(str::to_owned).collect(),
            rendezvous: rendezvous.map(str::to_owned),
            insecure,
            name: name.unwrap_or_default().to_owned(),
            provider: provider.map(str::to_owned),
            source: address(operation, "source", source, local_address)?,
            lost_after,
            workers: self.workers as usize,
            ..NetworkOptions::default()
        }))
    }
}

/// `fabricast_topic_settings`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawTopicSettings<'a> {
    size: usize,
    memory: Text<'a>,
    largest: u64,
    release_deadline: i64,
    depth: u32,
    reliability: u32,
    loans: u64,
    type_name: Text<'a>,
    max_held: u64,
}

impl WithDefaults for RawTopicSettings<'_> {
    fn defaults(size: usize) -> Self {
        Self::of(size, &TopicSettings::default(), (Text::of(c"host"), Text::default()))
    }
}

impl<'a> RawTopicSettings<'a> {
    /// The texts for memory and type name are the caller's.
    pub(crate) fn of(
        size: usize,
        settings: &TopicSettings,
        (memory, type_name): (Text<'a>, Text<'a>),
    ) -> Self {
        Self {
            size,
            memory,
            largest: settings.largest,
            release_deadline: nanoseconds(settings.release_deadline),
            depth: settings.depth,
            reliability: match settings.reliability {
                Reliability::Reliable => 0,
                Reliability::DropOldest => 1,
                Reliability::DropNewest => 2,
            },
            loans: u64::from(settings.loans),
            type_name,
            max_held: u64::from(settings.max_held),
        }
    }

    pub(crate) fn to_options(self, operation: Operation) -> Result<TopicSettings> {
        let memory = self.memory.get(operation, "memory")?.unwrap_or("host");
        Ok(TopicSettings {
            memory: memory.parse().map_err(Failure::from)?,
            reliability: match self.reliability {
                0 => Reliability::Reliable,
                1 => Reliability::DropOldest,
                2 => Reliability::DropNewest,
                other => return Err(unknown(operation, "reliability", other)),
            },
            depth: self.depth,
            largest: self.largest,
            // A larger number is out of range as well.
            loans: u32::try_from(self.loans).unwrap_or(u32::MAX),
            max_held: u32::try_from(self.max_held).unwrap_or(u32::MAX),
            release_deadline: match self.release_deadline {
                i64::MAX => TopicSettings::NEVER,
                deadline => time(operation, "release_deadline", deadline)?,
            },
            type_name: match self.type_name.get(operation, "type_name")? {
                Some(name) => Some(name.parse().map_err(Failure::from)?),
                None => None,
            },
        })
    }
}

/// `fabricast_sent`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawSent {
    position: u64,
    subscribers: u64,
    dropped: u64,
}

impl RawSent {
    pub(crate) fn of(sent: &Sent) -> Self {
        Self {
            position: sent.position.unwrap_or(u64::MAX),
            subscribers: u64::from(sent.subscribers),
            dropped: u64::from(sent.is_dropped),
        }
    }
}

/// `fabricast_publisher_counters`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawCounters {
    messages: u64,
    bytes: u64,
    dropped: u64,
    missed_by_nodes: u64,
    evicted: u64,
}

impl RawCounters {
    pub(crate) fn of(counters: &PublisherCounters) -> Self {
        let PublisherCounters { messages, bytes, dropped, missed_by_nodes, evicted, .. } =
            *counters;
        Self { messages, bytes, dropped, missed_by_nodes, evicted }
    }
}

/// A node's identity as zero-terminated text.
fn identity(node: [u8; 16]) -> [u8; 40] {
    let mut all = [0; 40];
    let text = NodeId(node).to_string();
    // At least one zero remains.
    all[..39].iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
    all
}

/// `fabricast_event`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawEvent {
    kind: u64,
    missed: u64,
    publisher: u64,
    held_for: u64,
    node: [u8; 40],
}

impl RawEvent {
    const EMPTY: Self = Self { kind: 0, missed: 0, publisher: 0, held_for: 0, node: [0; 40] };

    pub(crate) fn of(event: Option<Event>) -> Self {
        match event {
            None => Self::EMPTY,
            Some(Event::Gap { missed }) => Self { kind: 1, missed, ..Self::EMPTY },
            Some(Event::PublisherLost { publisher }) => {
                Self { kind: 2, publisher: publisher.as_u64(), ..Self::EMPTY }
            }
            Some(Event::Evicted { held_for }) => Self {
                kind: 3,
                held_for: held_for.map_or(0, nanoseconds).unsigned_abs(),
                ..Self::EMPTY
            },
            Some(Event::RemotePublisherLost { node, publisher }) => {
                let (publisher, node) = (publisher.as_u64(), identity(node));
                Self { kind: 4, publisher, node, ..Self::EMPTY }
            }
            Some(Event::NoPublishers) => Self { kind: 5, ..Self::EMPTY },
            // Kinds of later versions have no number yet.
            Some(_) => Self { kind: u64::MAX, ..Self::EMPTY },
        }
    }
}

/// The number of an event of a publisher.
pub(crate) fn publisher_event(event: Option<PublisherEvent>) -> u64 {
    match event {
        None => 0,
        Some(PublisherEvent::NoSubscribers) => 1,
        // Kinds of later versions have no number yet.
        Some(_) => u64::MAX,
    }
}

/// `fabricast_topic_publisher`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawTopicPublisher {
    publisher: u64,
    process: u32,
    is_alive: u32,
    node: [u8; 40],
    label: [u8; 72],
}

impl RawTopicPublisher {
    pub(crate) fn of(found: &TopicPublisher) -> Self {
        let mut label = [0; 72];
        // The library's labels have 64 bytes at most, so zeros remain.
        label[..71].iter_mut().zip(found.label.bytes()).for_each(|(to, byte)| *to = byte);
        Self {
            publisher: found.publisher.map_or(0, PublisherId::as_u64),
            process: found.process.unwrap_or(0),
            is_alive: found.is_alive.into(),
            node: found.node.map_or([0; 40], identity),
            label,
        }
    }
}

/// `fabricast_sample_info`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct RawSampleInfo {
    address: *const c_void,
    length: u64,
    metadata: *const c_void,
    metadata_length: u64,
    memory: *const c_char,
    origin: *const c_char,
    path: *const c_char,
    publisher: u64,
    sequence: u64,
    position: u64,
    published_at: u64,
    allocated_at: u64,
    filled_at: u64,
    wire_at: u64,
    copied_at: u64,
    delivered_at: u64,
}

impl RawSampleInfo {
    /// The metadata and the texts for memory, origin and path live as long as the sample.
    pub(crate) fn of(
        sample: &Sample,
        address: *const c_void,
        metadata: &[u8],
        [memory, origin, path]: [&CStr; 3],
    ) -> Self {
        let times = sample.times();
        Self {
            address,
            length: sample.length(),
            metadata: metadata.as_ptr().cast(),
            metadata_length: metadata.len() as u64,
            memory: memory.as_ptr(),
            origin: origin.as_ptr(),
            path: path.as_ptr(),
            publisher: sample.publisher().as_u64(),
            sequence: sample.sequence(),
            position: sample.position(),
            published_at: sample.published_at(),
            allocated_at: times.allocated,
            filled_at: times.filled,
            wire_at: times.wire,
            copied_at: times.copied,
            delivered_at: times.published,
        }
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;

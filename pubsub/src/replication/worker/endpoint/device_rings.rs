//! Decides whether rings may lie in device memory, by facts and by the verdicts of their probes.

use std::collections::{HashMap, VecDeque};

use fabric::MemoryRegion;
use gpu::Device;
use transfer::device_memory::{Allocation, DeviceFacts, FabricFacts, MemoryEnd, obstacle};
use transfer::path::{DeviceFabric, Registration};

use crate::replication::NodeId;
use crate::replication::connection_messages::DirectWriter;

/// Rings in device memory that may end, one after the other, before a message arrived by them.
const MAX_BROKEN: u32 = 3;
/// How long the memory of a ring whose probe failed is kept, in nanoseconds: late bytes may still
/// arrive.
const QUARANTINE: u64 = 60_000_000_000;
/// Rings whose memory is kept at the same time. With that many, no ring is in device memory.
const MAX_QUARANTINED: usize = 8;
/// Kinds of memory of a node as a writer. An honest one has few.
const MAX_ENDS_OF_NODE: usize = 64;

/// The memory at both ends of a ring: the node that writes it, its memory, and the reader's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RingEnds {
    node: NodeId,
    writer: MemoryEnd,
    reader: MemoryEnd,
}

/// The size of a ring, on which the lengths of its messages and chunks depend, and its lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingExtent {
    capacity: u64,
    lanes: usize,
}

impl RingExtent {
    pub(super) fn new(capacity: u64, lanes: usize) -> Self {
        Self { capacity, lanes }
    }

    /// Does a probe of this ring say what one of the other would?
    fn includes(self, other: Self) -> bool {
        self.capacity >= other.capacity && self.lanes >= other.lanes
    }
}

/// What happened to rings with the same ends.
#[derive(Debug, Clone, Default)]
struct RingHistory {
    /// The largest ring whose probe has passed.
    passed: Option<RingExtent>,
    /// Why a probe failed, which is final.
    failed: Option<String>,
    /// Rings that ended, one after the other, before a message arrived.
    broken: u32,
}

/// How a ring in device memory begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    Probe,
    Messages,
}

/// Which rings may lie in device memory.
#[derive(Debug)]
pub(crate) struct DeviceRings {
    facts: FabricFacts,
    histories: HashMap<RingEnds, RingHistory>,
    /// Memory of rings whose probes failed, and until when it is kept.
    quarantined: VecDeque<(u64, Vec<MemoryRegion>)>,
}

fn text_of(registration: &Registration) -> String {
    match registration {
        Registration::Refused { cause } => cause.clone(),
        Registration::Off => format!("{} is off", DeviceFabric::VARIABLE),
        _ => "the provider has no device memory (FI_HMEM)".to_owned(),
    }
}

impl DeviceRings {
    pub(super) fn new(facts: FabricFacts) -> Self {
        Self { facts, histories: HashMap::new(), quarantined: VecDeque::new() }
    }

    pub(super) fn setting(&self) -> DeviceFabric {
        self.facts.setting()
    }

    /// What is against memory of a device that topics allocate.
    fn obstacle_at(&self, device: &Device) -> Option<String> {
        let assumed = DeviceFacts::assumed(device, Some(Allocation::Mapped));
        obstacle(&self.facts, &assumed).as_ref().map(text_of)
    }

    fn end_of(device: Option<&Device>) -> MemoryEnd {
        device.map_or(MemoryEnd::Host, |device| {
            MemoryEnd::Device(device.properties().uuid, Allocation::Mapped)
        })
    }

    /// What this node, as a writer from memory of this device or of the host, says about itself.
    pub(crate) fn as_writer(&self, device: Option<&Device>) -> Option<DirectWriter> {
        let setting = self.facts.setting();
        let is_refused = match device {
            Some(device) => self.obstacle_at(device).is_some(),
            None => setting == DeviceFabric::Off,
        };
        let writer = DirectWriter::new(Self::end_of(device), setting == DeviceFabric::Probe);
        (!is_refused).then_some(writer)
    }

    /// How a ring in memory of this device begins, written by a node, or why there is none.
    pub(super) fn beginning(
        &self,
        node: NodeId,
        writer: Option<&DirectWriter>,
        (device, extent): (&Device, RingExtent),
    ) -> Result<(RingEnds, Beginning), String> {
        if let Some(cause) = self.obstacle_at(device) {
            return Err(cause);
        }
        let Some(writer) = writer else {
            return Err("the writer cannot write to device memory".to_owned());
        };
        let ends = RingEnds { node, writer: writer.memory(), reader: Self::end_of(Some(device)) };
        let is_probed = self.facts.setting() == DeviceFabric::Probe || writer.probes();
        let history = match self.histories.get(&ends) {
            Some(history) => history.clone(),
            None if self.histories.keys().filter(|it| it.node == node).count()
                >= MAX_ENDS_OF_NODE =>
            {
                return Err("the node has too many kinds of memory".to_owned());
            }
            None => RingHistory::default(),
        };
        if let Some(cause) = history.failed {
            return Err(cause);
        }
        if history.broken >= MAX_BROKEN {
            let count = history.broken;
            return Err(format!("{count} rings in device memory ended before a message arrived"));
        }
        if is_probed && self.quarantined.len() >= MAX_QUARANTINED {
            return Err("too many probes failed within a minute".to_owned());
        }
        let is_known = history.passed.is_some_and(|passed| passed.includes(extent));
        let beginning = if is_probed && !is_known { Beginning::Probe } else { Beginning::Messages };
        Ok((ends, beginning))
    }

    /// The probe of a ring has passed. False if another one with the same ends has failed meanwhile.
    pub(crate) fn probe_passed(&mut self, ends: RingEnds, extent: RingExtent) -> bool {
        let history = self.histories.entry(ends).or_default();
        if history.passed.is_none_or(|passed| extent.includes(passed)) {
            history.passed = Some(extent);
        }
        history.failed.is_none()
    }

    /// The bytes of a probe were not there.
    pub(super) fn probe_failed(&mut self, ends: RingEnds, cause: String) {
        self.histories.entry(ends).or_default().failed.get_or_insert(cause);
    }

    /// A ring ended by itself, after a message had arrived by it or not.
    pub(crate) fn ring_ended(&mut self, ends: RingEnds, has_messages: bool) {
        let history = self.histories.entry(ends).or_default();
        history.broken = if has_messages { 0 } else { history.broken.saturating_add(1) };
    }

    /// Keeps the memory of a ring whose probe failed.
    pub(crate) fn quarantine(&mut self, regions: Vec<MemoryRegion>, now: u64) {
        self.quarantined.push_back((now + QUARANTINE, regions));
    }

    pub(crate) fn release_quarantined(&mut self, now: u64) {
        while self.quarantined.front().is_some_and(|(until, _)| *until <= now) {
            self.quarantined.pop_front();
        }
    }

    /// A node disconnected: the next one with its name may use another card or provider.
    pub(super) fn node_lost(&mut self, node: NodeId) {
        self.histories.retain(|ends, _| ends.node != node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId([1; 16]);

    fn device() -> Device {
        Device::open("emulated:1".parse().unwrap()).unwrap()
    }

    fn rings(setting: DeviceFabric) -> DeviceRings {
        DeviceRings::new(FabricFacts::new(setting, true, None))
    }

    const SMALL: RingExtent = RingExtent { capacity: 64 << 10, lanes: 1 };
    const LARGE: RingExtent = RingExtent { capacity: 8 << 20, lanes: 3 };

    #[test]
    fn probe_decides_for_the_ends_of_a_node() {
        let mut rings = rings(DeviceFabric::Probe);
        let writer = rings.as_writer(Some(&device())).unwrap();
        let beginning = |rings: &DeviceRings, node, extent| {
            rings.beginning(node, Some(&writer), (&device(), extent)).map(|(_, it)| it)
        };
        let (probe, messages) = (Ok(Beginning::Probe), Ok(Beginning::Messages));
        let (ends, first) = rings.beginning(NODE, Some(&writer), (&device(), SMALL)).unwrap();
        assert_eq!(first, Beginning::Probe);
        assert!(rings.probe_passed(ends, SMALL));
        assert_eq!(beginning(&rings, NODE, SMALL), messages);
        assert_eq!(beginning(&rings, NODE, LARGE), probe, "longer messages, and further lanes");
        assert_eq!(beginning(&rings, NodeId([2; 16]), SMALL), probe, "of another node");
        assert!(rings.probe_passed(ends, LARGE) && rings.probe_passed(ends, SMALL));
        assert_eq!(beginning(&rings, NODE, LARGE), messages);
        let host = rings.as_writer(None).unwrap();
        let (_, of_host) = rings.beginning(NODE, Some(&host), (&device(), SMALL)).unwrap();
        assert_eq!(of_host, Beginning::Probe, "from other memory");
        // A failure is final, also for rings that pass.
        rings.probe_failed(ends, "late bytes".to_owned());
        assert!(!rings.probe_passed(ends, LARGE));
        rings.probe_failed(ends, "other bytes".to_owned());
        assert_eq!(beginning(&rings, NODE, SMALL), Err("late bytes".to_owned()));
        rings.node_lost(NODE);
        assert_eq!(beginning(&rings, NODE, SMALL), probe);
    }

    #[test]
    fn rings_that_end_without_messages_are_given_up() {
        let mut rings = rings(DeviceFabric::On);
        let writer = rings.as_writer(None).map(|it| DirectWriter::new(it.memory(), false)).unwrap();
        let find = |rings: &DeviceRings| rings.beginning(NODE, Some(&writer), (&device(), SMALL));
        let (ends, _) = find(&rings).unwrap();
        for has_messages in [false, false, true, false, false] {
            rings.ring_ended(ends, has_messages);
            assert_eq!(find(&rings), Ok((ends, Beginning::Messages)));
        }
        rings.ring_ended(ends, false);
        let cause = "3 rings in device memory ended before a message arrived";
        assert_eq!(find(&rings), Err(cause.to_owned()));
    }

    #[test]
    fn failed_probes_of_a_node_hold_little_memory() {
        let mut rings = rings(DeviceFabric::Probe);
        for number in 0..100_u8 {
            let writer = DirectWriter::new(
                MemoryEnd::Device(gpu::Uuid([number; 16]), Allocation::Mapped),
                true,
            );
            let Ok((ends, _)) = rings.beginning(NODE, Some(&writer), (&device(), SMALL)) else {
                continue;
            };
            rings.probe_failed(ends, "late bytes".to_owned());
            rings.quarantine(Vec::new(), 5);
        }
        assert_eq!(rings.quarantined.len(), MAX_QUARANTINED);
        let host = rings.as_writer(None).unwrap();
        let found = rings.beginning(NODE, Some(&host), (&device(), SMALL));
        assert_eq!(found, Err("too many probes failed within a minute".to_owned()));
        rings.release_quarantined(5 + QUARANTINE);
        assert!(rings.beginning(NODE, Some(&host), (&device(), SMALL)).is_ok());
    }

    #[test]
    fn settings_of_both_sides_count() {
        let (off, probe, on) = (DeviceFabric::Off, DeviceFabric::Probe, DeviceFabric::On);
        for (here, there, expected) in [
            (probe, probe, Some(Beginning::Probe)),
            (probe, on, Some(Beginning::Probe)),
            (on, probe, Some(Beginning::Probe)),
            (on, on, Some(Beginning::Messages)),
            (off, on, None),
            (on, off, None),
        ] {
            for device_of_writer in [None, Some(device())] {
                let writer = rings(there).as_writer(device_of_writer.as_ref());
                let found = rings(here).beginning(NODE, writer.as_ref(), (&device(), SMALL));
                assert_eq!(found.ok().map(|(_, it)| it), expected, "{here} {there}");
            }
        }
        let without = DeviceRings::new(FabricFacts::new(on, false, None));
        assert_eq!(without.as_writer(Some(&device())), None);
        let cause = without.beginning(NODE, None, (&device(), SMALL)).unwrap_err();
        assert_eq!(cause, "the provider has no device memory (FI_HMEM)");
    }
}

//! Whether rings may lie in device memory: facts, and the verdicts of their probes.

use std::collections::{HashMap, VecDeque};

use fabric::MemoryRegion;
use gpu::Device;
use transfer::device_memory::{Allocation, DeviceFacts, FabricFacts, MemoryEnd, obstacle};
use transfer::path::{DeviceFabric, Registration};

use crate::replication::NodeId;
use crate::replication::connection_messages::DirectWriter;

/// How often a probe that was not finished is begun again.
const MAX_ATTEMPTS: u32 = 3;
/// How long the memory of a ring whose probe failed is kept, in nanoseconds: late bytes may still
/// arrive.
const QUARANTINE: u64 = 60_000_000_000;

/// The memory at both ends of a ring: the node that writes it, its memory, and the reader's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RingEnds {
    node: NodeId,
    writer: MemoryEnd,
    reader: MemoryEnd,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    /// All bytes were there.
    Passed,
    /// So many probes were begun.
    Begun(u32),
    Failed(String),
}

/// How a ring in device memory begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beginning {
    Probe,
    Messages,
}

/// Which rings may lie in device memory.
#[derive(Debug)]
pub(super) struct DeviceRings {
    facts: FabricFacts,
    verdicts: HashMap<RingEnds, Verdict>,
    /// Memory of rings whose probes failed, and until when it is kept.
    quarantined: VecDeque<(u64, Vec<MemoryRegion>)>,
}

fn text_of(registration: &Registration) -> String {
    match registration {
        Registration::Refused { cause } => cause.clone(),
        Registration::Off => format!("{} is off", DeviceFabric::VARIABLE),
        _ => "the provider was opened without device memory".to_owned(),
    }
}

impl DeviceRings {
    pub(super) fn new(facts: FabricFacts) -> Self {
        Self { facts, verdicts: HashMap::new(), quarantined: VecDeque::new() }
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
    pub(super) fn as_writer(&self, device: Option<&Device>) -> Option<DirectWriter> {
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
        device: &Device,
    ) -> Result<(RingEnds, Beginning), String> {
        if let Some(cause) = self.obstacle_at(device) {
            return Err(cause);
        }
        let Some(writer) = writer else {
            return Err("the writer cannot write to device memory".to_owned());
        };
        let ends = RingEnds { node, writer: writer.memory(), reader: Self::end_of(Some(device)) };
        let is_probed = self.facts.setting() == DeviceFabric::Probe || writer.probes();
        match self.verdicts.get(&ends) {
            _ if !is_probed => Ok((ends, Beginning::Messages)),
            Some(Verdict::Passed) => Ok((ends, Beginning::Messages)),
            Some(Verdict::Failed(cause)) => Err(cause.clone()),
            Some(Verdict::Begun(count)) if *count >= MAX_ATTEMPTS => {
                Err(format!("the probe was begun {count} times, and never finished"))
            }
            Some(Verdict::Begun(_)) | None => Ok((ends, Beginning::Probe)),
        }
    }

    pub(super) fn probe_begun(&mut self, ends: RingEnds) {
        let verdict = self.verdicts.entry(ends).or_insert(Verdict::Begun(0));
        if let Verdict::Begun(count) = verdict {
            *count += 1;
        }
    }

    pub(super) fn probe_passed(&mut self, ends: RingEnds) {
        self.verdicts.insert(ends, Verdict::Passed);
    }

    /// A ring does not work: its bytes arrived late, or it could not be made.
    pub(super) fn failed(&mut self, ends: RingEnds, cause: String) {
        self.verdicts.insert(ends, Verdict::Failed(cause));
    }

    /// Keeps the memory of a ring whose probe failed.
    pub(super) fn quarantine(&mut self, regions: Vec<MemoryRegion>, now: u64) {
        self.quarantined.push_back((now + QUARANTINE, regions));
    }

    pub(super) fn release_quarantined(&mut self, now: u64) {
        while self.quarantined.front().is_some_and(|(until, _)| *until <= now) {
            self.quarantined.pop_front();
        }
    }

    /// A node disconnected: the next one with its name may use another card or provider.
    pub(super) fn node_lost(&mut self, node: NodeId) {
        self.verdicts.retain(|ends, _| ends.node != node);
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

    #[test]
    fn probe_decides_for_the_ends_of_a_node() {
        let mut rings = rings(DeviceFabric::Probe);
        let writer = rings.as_writer(Some(&device())).unwrap();
        let beginning = |rings: &DeviceRings, node| {
            rings.beginning(node, Some(&writer), &device()).map(|(_, it)| it)
        };
        let (ends, first) = rings.beginning(NODE, Some(&writer), &device()).unwrap();
        assert_eq!(first, Beginning::Probe);
        rings.probe_begun(ends);
        assert_eq!(beginning(&rings, NODE), Ok(Beginning::Probe), "it may be begun again");
        rings.probe_passed(ends);
        rings.probe_begun(ends);
        assert_eq!(beginning(&rings, NODE), Ok(Beginning::Messages));
        assert_eq!(beginning(&rings, NodeId([2; 16])), Ok(Beginning::Probe), "of another node");
        let host = rings.as_writer(None).unwrap();
        let (_, of_host) = rings.beginning(NODE, Some(&host), &device()).unwrap();
        assert_eq!(of_host, Beginning::Probe, "from other memory");
        rings.failed(ends, "late bytes".to_owned());
        assert_eq!(beginning(&rings, NODE), Err("late bytes".to_owned()));
        rings.node_lost(NODE);
        for _ in 0..MAX_ATTEMPTS {
            assert_eq!(beginning(&rings, NODE), Ok(Beginning::Probe));
            rings.probe_begun(ends);
        }
        let cause = beginning(&rings, NODE).unwrap_err();
        assert_eq!(cause, "the probe was begun 3 times, and never finished");
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
                let found = rings(here).beginning(NODE, writer.as_ref(), &device());
                assert_eq!(found.ok().map(|(_, it)| it), expected, "{here} {there}");
            }
        }
        let without = DeviceRings::new(FabricFacts::new(on, false, None));
        assert_eq!(without.as_writer(Some(&device())), None);
        let cause = without.beginning(NODE, None, &device()).unwrap_err();
        assert_eq!(cause, "the provider was opened without device memory");
    }
}

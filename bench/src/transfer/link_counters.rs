//! Which links moved the bytes: counters of the device and of the network interfaces.

use command::text;
use gpu::{Device, DeviceName, LinkBytes, LinkCounters};
use serde::Serialize;

/// Bytes by link during the measurement, and the bytes that were moved.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct LinkTraffic {
    moved: u64,
    nvlink_sent: Option<u64>,
    nvlink_received: Option<u64>,
    pcie_sent: Option<u64>,
    pcie_received: Option<u64>,
    /// Of all network interfaces of this network namespace.
    interfaces_sent: Option<u64>,
    unavailable_reason: Option<String>,
}

impl LinkTraffic {
    pub(super) fn to_text(&self) -> String {
        let number =
            |bytes: Option<u64>| bytes.map_or("not counted".to_owned(), |bytes| bytes.to_string());
        let mut text = format!(
            "moved {}; NVLink sent {}, received {}; PCIe sent {}, received {}; interfaces sent {}\n",
            text::count_of(self.moved, "byte"),
            number(self.nvlink_sent),
            number(self.nvlink_received),
            number(self.pcie_sent),
            number(self.pcie_received),
            number(self.interfaces_sent),
        );
        if let Some(why) = &self.unavailable_reason {
            text += &format!("links are not counted: {why}\n");
        }
        text
    }
}

/// Counters at the start.
pub(super) struct LinkCounterSample {
    counters: Result<(LinkCounters, LinkBytes), String>,
    interfaces: Option<u64>,
}

impl LinkCounterSample {
    pub(super) fn begin(from: &Device, to: DeviceName) -> Self {
        let counters = if from.name() == to {
            Err("one device: no link is used".to_owned())
        } else {
            LinkCounters::of(from)
                .and_then(|counters| counters.read().map(|bytes| (counters, bytes)))
                .map_err(|error| error.to_string())
        };
        Self { counters, interfaces: interfaces_sent() }
    }

    pub(super) fn end(self, moved: u64) -> LinkTraffic {
        let interfaces_sent =
            self.interfaces.and_then(|before| Some(interfaces_sent()?.wrapping_sub(before)));
        let after = self.counters.and_then(|(counters, before)| {
            let after = counters.read().map_err(|error| error.to_string())?;
            Ok(after.since(&before))
        });
        let traffic = LinkTraffic { moved, interfaces_sent, ..LinkTraffic::default() };
        match after {
            Ok(bytes) => LinkTraffic {
                nvlink_sent: bytes.nvlink_sent,
                nvlink_received: bytes.nvlink_received,
                pcie_sent: bytes.pcie_sent,
                pcie_received: bytes.pcie_received,
                ..traffic
            },
            Err(why) => LinkTraffic { unavailable_reason: Some(why), ..traffic },
        }
    }
}

/// Bytes sent by all network interfaces of this network namespace.
fn interfaces_sent() -> Option<u64> {
    const SENT: usize = 8;
    let text = std::fs::read_to_string("/proc/net/dev").ok()?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.map(|(_, numbers)| numbers.split_whitespace().nth(SENT)?.parse::<u64>().ok()).sum()
}

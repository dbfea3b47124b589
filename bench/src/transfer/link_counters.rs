//! Which links moved the bytes: counters of the device and of the network interfaces.

use gpu::{Device, DeviceName, LinkBytes, LinkCounters};
use serde::Serialize;

/// Bytes by link during the measurement, and the bytes that were moved.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct LinkTraffic {
    pub(super) moved: u64,
    pub(super) nvlink_sent: Option<u64>,
    pub(super) nvlink_received: Option<u64>,
    pub(super) pcie_sent: Option<u64>,
    pub(super) pcie_received: Option<u64>,
    /// Of all network interfaces of this network namespace.
    pub(super) interfaces_sent: Option<u64>,
    pub(super) unavailable_reason: Option<String>,
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
        match after {
            Ok(bytes) => LinkTraffic {
                moved,
                nvlink_sent: bytes.nvlink_sent,
                nvlink_received: bytes.nvlink_received,
                pcie_sent: bytes.pcie_sent,
                pcie_received: bytes.pcie_received,
                interfaces_sent,
                unavailable_reason: None,
            },
            Err(why) => LinkTraffic {
                moved,
                interfaces_sent,
                unavailable_reason: Some(why),
                ..LinkTraffic::default()
            },
        }
    }
}

/// Bytes sent by all network interfaces of this network namespace.
pub(super) fn interfaces_sent() -> Option<u64> {
    const SENT: usize = 8;
    let text = std::fs::read_to_string("/proc/net/dev").ok()?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.map(|(_, numbers)| numbers.split_whitespace().nth(SENT)?.parse::<u64>().ok()).sum()
}

//! The devices of this machine, and which device libraries are missing.

use gpu::{Device, Implementation, LinkCounters, PeerAccess};
use serde::Serialize;

use crate::cli::text;

/// The devices, and the missing libraries with the reason.
#[derive(Debug, Serialize)]
pub(super) struct Devices {
    found: Vec<DeviceInfo>,
    unavailable: Vec<UnavailableImplementation>,
}

#[derive(Debug, Serialize)]
struct DeviceInfo {
    name: String,
    #[serde(skip)]
    is_cuda: bool,
    product: String,
    uuid: String,
    pci: Option<String>,
    numa_node: Option<u32>,
    total_memory: u64,
    free_memory: Option<u64>,
    driver: String,
    /// Supported types of exported memory and event handles.
    handle_types: Vec<&'static str>,
    /// Devices whose memory it can access directly.
    peers: Vec<String>,
    /// Why the link counters cannot be read, if so.
    counters_error: Option<String>,
}

#[derive(Debug, Serialize)]
struct UnavailableImplementation {
    implementation: String,
    reason: String,
}

impl Devices {
    pub(super) fn query() -> Self {
        let survey = Device::survey();
        let open = &survey.devices;
        let found = open.iter().map(|device| {
            let properties = device.properties();
            let reaches = |other: &&Device| {
                matches!(device.peer_access(other.name()), Ok(PeerAccess::Direct))
            };
            let types = properties.handle_types;
            let handle_types = [
                (types.file_descriptor, "file descriptor"),
                (types.legacy, "legacy"),
                (types.fabric, "fabric"),
                (types.dma_buf, "dma-buf"),
            ];
            let counters = LinkCounters::of(device);
            DeviceInfo {
                name: device.name().to_string(),
                is_cuda: device.name().implementation == Implementation::Cuda,
                product: properties.product.clone(),
                uuid: properties.uuid.to_string(),
                pci: properties.pci.map(|pci| pci.to_string()),
                numa_node: properties.numa_node,
                total_memory: properties.total_memory,
                free_memory: device.free_memory().ok(),
                driver: properties.driver.clone(),
                handle_types: handle_types
                    .into_iter()
                    .filter_map(|(has, name)| has.then_some(name))
                    .collect(),
                peers: open.iter().filter(reaches).map(|other| other.name().to_string()).collect(),
                counters_error: counters.err().map(|error| error.to_string()),
            }
        });
        let unavailable =
            survey.missing.iter().map(|(implementation, error)| UnavailableImplementation {
                implementation: implementation.to_string(),
                reason: error.to_string(),
            });
        Self { found: found.collect(), unavailable: unavailable.collect() }
    }

    pub(super) fn has_cuda(&self) -> bool {
        self.found.iter().any(|found| found.is_cuda)
    }

    pub(super) fn to_text(&self) -> String {
        let head = ["device", "product", "memory", "free", "handle types", "peer access"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for found in &self.found {
            rows.push(vec![
                found.name.clone(),
                found.product.clone(),
                gibibytes(found.total_memory),
                found.free_memory.map_or_else(|| "?".to_owned(), gibibytes),
                found.handle_types.join(", "),
                found.peers.join(", "),
            ]);
        }
        let mut out = text::table(&rows);
        for missing in &self.unavailable {
            out.push_str(&format!("{}: {}\n", missing.implementation, missing.reason));
        }
        out
    }
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

//! The devices of this machine, and what is missing.

use gpu::{Device, LinkCounters, PeerAccess};
use serde::Serialize;

use crate::cli::text;

/// What there is, and what is not, with the reason.
#[derive(Debug, Serialize)]
pub(super) struct Devices {
    found: Vec<Found>,
    missing: Vec<Missing>,
}

#[derive(Debug, Serialize)]
struct Found {
    name: String,
    product: String,
    uuid: String,
    pci: Option<String>,
    numa_node: Option<u32>,
    total_memory: u64,
    free_memory: Option<u64>,
    driver: String,
    /// How memory and events leave the process.
    handles: Vec<&'static str>,
    /// Others whose memory it reaches directly.
    peers: Vec<String>,
    /// Whether the links' counters can be read; else why not.
    counters: Result<(), String>,
}

#[derive(Debug, Serialize)]
struct Missing {
    implementation: String,
    reason: String,
}

impl Devices {
    pub(super) fn look() -> Self {
        let survey = Device::survey();
        let names: Vec<_> = survey.devices.iter().map(|(name, _)| *name).collect();
        let found = survey.devices.iter().map(|(name, properties)| {
            let device = Device::open(*name);
            let reaches = |other: &&gpu::DeviceName| {
                let (Ok(device), Ok(other)) = (&device, Device::open(**other)) else {
                    return false;
                };
                matches!(device.peer_access(&other), Ok(PeerAccess::Direct { .. }))
            };
            let types = properties.handle_types;
            let handles = [
                (types.file_descriptor, "file descriptor"),
                (types.legacy, "legacy"),
                (types.fabric, "fabric"),
                (types.dma_buf, "dma-buf"),
                (types.events, "events"),
            ];
            let counters = match &device {
                Ok(device) => LinkCounters::of(device).map(drop),
                Err(error) => Err(error.clone()),
            };
            Found {
                name: name.to_string(),
                product: properties.product.clone(),
                uuid: properties.uuid.to_string(),
                pci: properties.pci.map(|pci| pci.to_string()),
                numa_node: properties.numa_node,
                total_memory: properties.total_memory,
                free_memory: device.as_ref().ok().and_then(|device| device.free_memory().ok()),
                driver: properties.driver.clone(),
                handles: handles.iter().filter(|(has, _)| *has).map(|(_, name)| *name).collect(),
                peers: names.iter().filter(reaches).map(ToString::to_string).collect(),
                counters: counters.map_err(|error| error.to_string()),
            }
        });
        let found = found.collect();
        let missing = survey.missing.iter().map(|(implementation, error)| Missing {
            implementation: implementation.to_string(),
            reason: error.to_string(),
        });
        Self { found, missing: missing.collect() }
    }

    pub(super) fn for_people(&self) -> String {
        let head = ["device", "product", "memory", "free", "leaves by", "reaches"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for found in &self.found {
            rows.push(vec![
                found.name.clone(),
                found.product.clone(),
                gibibytes(found.total_memory),
                found.free_memory.map_or_else(|| "?".to_owned(), gibibytes),
                found.handles.join(", "),
                found.peers.join(", "),
            ]);
        }
        let mut out = text::table(&rows);
        for missing in &self.missing {
            out.push_str(&format!("{}: {}\n", missing.implementation, missing.reason));
        }
        out
    }
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

//! What this machine offers: devices, providers, and paths.

use fabric::{EndpointKind, Query};
use gpu::Device;
use pubsub::NodeOptions;
use pyo3::prelude::*;
use serde_json::{Value, json};
use transfer::path::{self, Policy};

use crate::failure::{Failure, Result};
use crate::waits::interruptibly;

/// Devices that are open, or can be opened, and those that cannot, with the reason.
fn devices() -> (Vec<Value>, Vec<String>) {
    let survey = Device::survey();
    let described = |device: &Device| {
        let properties = device.properties();
        json!({
            "name": device.name().to_string(),
            "product": properties.product,
            "uuid": properties.uuid.to_string(),
            "total_memory": properties.total_memory,
            "driver": properties.driver,
            "descriptors": properties.handle_types.file_descriptor,
            "legacy_handles": properties.handle_types.legacy,
            "fabric_handles": properties.handle_types.fabric,
            "gpu_direct": properties.gpu_direct.rdma,
        })
    };
    let missing = survey.missing.iter().map(|(_, error)| error.to_string());
    (survey.devices.iter().map(described).collect(), missing.collect())
}

/// Providers of libfabric, or why there are none.
fn providers() -> std::result::Result<Vec<Value>, String> {
    let offers = Query::new(EndpointKind::Rdm).offers().map_err(|error| error.to_string())?;
    let mut all: Vec<Value> = Vec::new();
    for offer in &offers {
        let found = offer.capabilities();
        let entry = json!({
            "provider": found.provider,
            "fabric": found.fabric,
            "domain": found.domain,
            "source": found.source,
        });
        if !all.contains(&entry) {
            all.push(entry);
        }
    }
    Ok(all)
}

/// Devices and providers, as JSON; opens devices, which takes time.
#[pyfunction]
pub(crate) fn _info(py: Python<'_>) -> Result<String> {
    let found = interruptibly(py, "survey machine", || {
        let (devices, missing) = devices();
        let (providers, no_provider) = match providers() {
            Ok(providers) => (providers, None),
            Err(cause) => (Vec::new(), Some(cause)),
        };
        Ok::<_, Failure>(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "directory": NodeOptions::default_directory(),
            "devices": devices,
            "missing_devices": missing,
            "providers": providers,
            "no_provider": no_provider,
        }))
    })?;
    Ok(found.to_string())
}

/// The path of each typical situation, and why it is not a better one, as JSON.
#[pyfunction]
#[pyo3(signature = (policy=""))]
pub(crate) fn _paths(policy: &str) -> Result<String> {
    let policy: Policy = policy.parse()?;
    let row = |situation: path::Situation| {
        let choice = path::choose(&situation.facts, &policy);
        json!({
            "situation": situation.name,
            "path": choice.taken().map(path::Path::name),
            "explanation": choice.to_string(),
        })
    };
    Ok(Value::from(path::situations().into_iter().map(row).collect::<Vec<_>>()).to_string())
}

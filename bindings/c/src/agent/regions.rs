//! Regions of agents.

use transfer::{MAX_LABEL_LENGTH, Region, Rights};

use super::OpenAgent;
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Out, Text, export, put_bytes};
use crate::handle::{Handle, kind};
use crate::memory::OpenMemory;
use crate::registry::{self, export_close};
use crate::timeout::Timeout;

kind!(Region, 11, "region");
export_close!(Region, fabricast_region_close, c"close region");

/// The rights of a number from C; None for a local-only region.
fn rights(operation: Operation, number: u64) -> Result<Option<Rights>> {
    match number {
        0 => Ok(None),
        1 => Ok(Some(Rights::READ)),
        2 => Ok(Some(Rights::WRITE)),
        3 => Ok(Some(Rights::ALL)),
        other => Err(Failure::invalid(operation, format_args!("{other} are no rights"))),
    }
}

export! {
    fn fabricast_region_register(
        agent: Handle<OpenAgent>,
        memory: Handle<OpenMemory>,
        rights: u64,
        region: Out<'_, *mut Region>,
    ) -> i32, c"register region" {
        let agent = agent.find(OPERATION)?;
        let (buffer, rights) = (memory.find(OPERATION)?.buffer(OPERATION)?, self::rights(OPERATION, rights)?);
        let registered = agent.with(OPERATION, |agent| match rights {
            Some(rights) => agent.register(buffer, rights),
            None => agent.register_local(buffer),
        })?;
        region.put(registry::open(OPERATION, registered)?)
    }

    fn fabricast_region_descriptor(
        region: Handle<Region>,
        buffer: &mut [u8] [capacity],
        length: Out<'_, usize>,
    ) -> i32, c"get descriptor of region" {
        let descriptor = region.find(OPERATION)?.descriptor().encode()?;
        length.put(put_bytes(OPERATION, &descriptor, buffer)?)
    }

    /// Publishes a region on the card of its agent.
    fn fabricast_agent_publish(
        agent: Handle<OpenAgent>,
        name: Text<'_>,
        region: Handle<Region>,
    ) -> i32, c"publish region" {
        let (agent, region) = (agent.find(OPERATION)?, region.find(OPERATION)?);
        let name = name.required(OPERATION, "name")?;
        if name.is_empty() || name.len() > MAX_LABEL_LENGTH {
            let detail = format!("the name of a region has 1 to {MAX_LABEL_LENGTH} bytes");
            return Err(Failure::invalid(OPERATION, detail));
        }
        agent.with(OPERATION, |agent| agent.publish(name, &region))
    }

    /// Withdraws a region, and waits until peers have completed their operations with it.
    fn fabricast_agent_withdraw(
        agent: Handle<OpenAgent>,
        region: Handle<Region>,
        timeout: Timeout,
    ) -> i32, c"withdraw region" {
        let (agent, region) = (agent.find(OPERATION)?, region.find(OPERATION)?);
        agent.with_timeout(OPERATION, timeout, |agent, left| agent.withdraw(&region, left))
    }
}

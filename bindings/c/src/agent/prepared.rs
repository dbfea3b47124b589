//! Transfers that are made several times.

use gpu::Block;
use transfer::PreparedTransfer;
use transfer::path;

use super::OpenAgent;
use super::routes::OpenRoute;
use super::transfers::start;
use crate::failure::{Operation, Result};
use crate::ffi::{Array, Out, export};
use crate::handle::{Handle, kind};
use crate::layout::RawNotice;
use crate::registry::{self, export_close};

kind!(PreparedTransfer, 15, "prepared transfer");
export_close!(PreparedTransfer, fabricast_prepared_close, c"close prepared transfer");

fn prepare(
    operation: Operation,
    agent: Handle<OpenAgent>,
    direction: path::Operation,
    route: Handle<OpenRoute>,
    blocks: &[Block],
    prepared: Out<'_, *mut PreparedTransfer>,
) -> Result<()> {
    let (agent, route) = (agent.find(operation)?, route.find(operation)?);
    let list = blocks.to_vec();
    let made = agent.with(operation, |agent| agent.prepare(direction, &route.route, list))?;
    prepared.put(registry::open(operation, made)?)
}

/// `FABRICAST_ALL`. An empty list of C++ may be NULL, and must not mean all blocks.
const ALL: usize = usize::MAX;

/// The selected blocks; None for all.
pub(super) fn selection(
    operation: Operation,
    indices: Array<'_, u32>,
    count: usize,
) -> Result<Option<&[u32]>> {
    match count {
        ALL if indices.is_null() => Ok(None),
        _ => indices.get(operation, "indices", count).map(Some),
    }
}

export! {
    /// Prepares blocks for puts.
    fn fabricast_agent_prepare_put(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        blocks: Array<'_, Block>,
        count: usize,
        prepared: Out<'_, *mut PreparedTransfer>,
    ) -> i32, c"prepare transfer" {
        let blocks = blocks.get(OPERATION, "blocks", count)?;
        prepare(OPERATION, agent, path::Operation::Put, route, blocks, prepared)
    }

    /// Prepares blocks for gets.
    fn fabricast_agent_prepare_get(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        blocks: Array<'_, Block>,
        count: usize,
        prepared: Out<'_, *mut PreparedTransfer>,
    ) -> i32, c"prepare transfer" {
        let blocks = blocks.get(OPERATION, "blocks", count)?;
        prepare(OPERATION, agent, path::Operation::Get, route, blocks, prepared)
    }

    fn fabricast_prepared_bytes(
        prepared: Handle<PreparedTransfer>,
        bytes: Out<'_, u64>,
    ) -> i32, c"get bytes of prepared transfer" {
        bytes.put(prepared.find(OPERATION)?.bytes())
    }

    /// Starts a prepared transfer, whole or by the indices of its blocks.
    fn fabricast_agent_submit(
        agent: Handle<OpenAgent>,
        prepared: Handle<PreparedTransfer>,
        indices: Array<'_, u32>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"submit transfer" {
        let (agent, prepared) = (agent.find(OPERATION)?, prepared.find(OPERATION)?);
        let indices = selection(OPERATION, indices, count)?;
        let notice = notice.map(|notice| notice.to_notice(OPERATION)).transpose()?;
        start(OPERATION, &agent, token, |agent| Ok(agent.submit(&prepared, indices, notice)?))
    }
}

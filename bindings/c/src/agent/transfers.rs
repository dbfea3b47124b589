//! Transfers of agents, their notices, order and outcomes.

use gpu::Block;
use transfer::{Agent, Notice, Route, Token};

use super::OpenAgent;
use super::routes::OpenRoute;
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Array, Out, OutStruct, export};
use crate::handle::Handle;
use crate::layout::{RawNotice, RawStrided};
use crate::timeout::Timeout;

// The elements of lists have the layout of `fabricast_block`.
const _: () = assert!(
    size_of::<Block>() == 24
        && std::mem::offset_of!(Block, to) == 0
        && std::mem::offset_of!(Block, from) == 8
        && std::mem::offset_of!(Block, length) == 16
);

/// Starts a transfer. Without room for its number, its outcome is not collected.
pub(super) fn transfer(
    operation: Operation,
    agent: Handle<OpenAgent>,
    route: Handle<OpenRoute>,
    notice: Option<RawNotice<'_>>,
    token: Option<Out<'_, u64>>,
    begin: impl FnOnce(&mut Agent, &Route, Option<Notice>) -> transfer::Result<Token>,
) -> Result<()> {
    let (agent, route) = (agent.find(operation)?, route.find(operation)?);
    let notice = notice.map(|notice| notice.to_notice(operation)).transpose()?;
    start(operation, &agent, token, |agent| Ok(begin(agent, &route.route, notice)?))
}

pub(super) fn start(
    operation: Operation,
    agent: &OpenAgent,
    token: Option<Out<'_, u64>>,
    begin: impl FnOnce(&mut Agent) -> Result<Token>,
) -> Result<()> {
    let is_forgotten = token.is_none();
    let started = agent.agent.with(operation, Timeout::Forever, |agent| {
        let started = begin(agent)?;
        if is_forgotten {
            agent.forget(started);
        }
        Ok(started)
    })?;
    token.map_or(Ok(()), |token| token.put(agent.number.of_token(started)))
}

/// Sends a notice without data.
fn notify(
    operation: Operation,
    agent: Handle<OpenAgent>,
    peer: u64,
    notice: Option<RawNotice<'_>>,
    token: Option<Out<'_, u64>>,
    send: fn(&mut Agent, transfer::PeerId, Notice) -> transfer::Result<Token>,
) -> Result<()> {
    let agent = agent.find(operation)?;
    let peer = agent.number.peer(operation, peer)?;
    let Some(notice) = notice else {
        return Err(Failure::invalid(operation, "the argument \"notice\" is NULL"));
    };
    let notice = notice.to_notice(operation)?;
    start(operation, &agent, token, |agent| Ok(send(agent, peer, notice)?))
}

fn strided(operation: Operation, rows: Option<RawStrided>) -> Result<transfer::Strided> {
    match rows {
        Some(rows) => rows.to_strided(operation),
        None => Err(Failure::invalid(operation, "the argument \"rows\" is NULL")),
    }
}

export! {
    /// Fills in a single row of no length.
    fn fabricast_strided_init(
        strided: OutStruct<'_, RawStrided>[size],
    ) -> i32, c"initialize strided rows" {
        strided.put_defaults()
    }

    fn fabricast_strided_tile(
        strided: OutStruct<'_, RawStrided>[size],
        order: u32,
        element: u64,
        dimensions: usize,
        tile: Array<'_, u64>,
        from_extents: Array<'_, u64>,
        from_origin: Array<'_, u64>,
        to_extents: Array<'_, u64>,
        to_origin: Array<'_, u64>,
    ) -> i32, c"describe tile" {
        let lists = [
            ("tile", tile),
            ("from_extents", from_extents),
            ("from_origin", from_origin),
            ("to_extents", to_extents),
            ("to_origin", to_origin),
        ];
        let size = strided.size();
        strided.put(RawStrided::tile(OPERATION, size, order, element, dimensions, lists)?)
    }

    fn fabricast_agent_put(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        blocks: Array<'_, Block>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"put" {
        let blocks = blocks.get(OPERATION, "blocks", count)?;
        transfer(OPERATION, agent, route, notice, token, |agent, route, notice| {
            agent.put(route, blocks, notice)
        })
    }

    fn fabricast_agent_get(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        blocks: Array<'_, Block>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"get" {
        let blocks = blocks.get(OPERATION, "blocks", count)?;
        transfer(OPERATION, agent, route, notice, token, |agent, route, notice| {
            agent.get(route, blocks, notice)
        })
    }

    fn fabricast_agent_put_strided(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        rows: Option<RawStrided>,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"put" {
        let rows = strided(OPERATION, rows)?;
        transfer(OPERATION, agent, route, notice, token, |agent, route, notice| {
            agent.put(route, &rows, notice)
        })
    }

    fn fabricast_agent_get_strided(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        rows: Option<RawStrided>,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"get" {
        let rows = strided(OPERATION, rows)?;
        transfer(OPERATION, agent, route, notice, token, |agent, route, notice| {
            agent.get(route, &rows, notice)
        })
    }

    /// Puts the whole local region.
    fn fabricast_agent_put_all(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"put" {
        transfer(OPERATION, agent, route, notice, token, Agent::put_all)
    }

    /// Gets the whole remote region.
    fn fabricast_agent_get_all(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"get" {
        transfer(OPERATION, agent, route, notice, token, Agent::get_all)
    }

    fn fabricast_agent_notify(
        agent: Handle<OpenAgent>,
        peer: u64,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"notify" {
        notify(OPERATION, agent, peer, notice, token, Agent::notify)
    }

    /// Sends a notice after all earlier operations with the peer.
    fn fabricast_agent_notify_ordered(
        agent: Handle<OpenAgent>,
        peer: u64,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"notify ordered" {
        notify(OPERATION, agent, peer, notice, token, Agent::notify_ordered)
    }

    /// Later operations with the peer start after all earlier ones.
    fn fabricast_agent_fence(agent: Handle<OpenAgent>, peer: u64) -> i32, c"fence" {
        let agent = agent.find(OPERATION)?;
        let peer = agent.number.peer(OPERATION, peer)?;
        agent.with(OPERATION, |agent| agent.fence(peer))
    }

    /// Waits for all operations with the peer.
    fn fabricast_agent_flush(
        agent: Handle<OpenAgent>,
        peer: u64,
        timeout: Timeout,
    ) -> i32, c"flush" {
        let agent = agent.find(OPERATION)?;
        let peer = agent.number.peer(OPERATION, peer)?;
        agent.flush(OPERATION, peer, timeout)
    }

    fn fabricast_agent_test(
        agent: Handle<OpenAgent>,
        token: u64,
        is_over: Out<'_, u64>,
        bytes: Option<Out<'_, u64>>,
    ) -> i32, c"test operation" {
        let agent = agent.find(OPERATION)?;
        let token = agent.number.token(OPERATION, token)?;
        let Some(done) = agent.test(OPERATION, token, Timeout::Forever)? else { return Ok(()) };
        is_over.put(1)?;
        bytes.map_or(Ok(()), |bytes| bytes.put(done.bytes))
    }

    fn fabricast_agent_wait(
        agent: Handle<OpenAgent>,
        token: u64,
        timeout: Timeout,
        bytes: Option<Out<'_, u64>>,
    ) -> i32, c"wait for operation" {
        let agent = agent.find(OPERATION)?;
        let token = agent.number.token(OPERATION, token)?;
        let done = agent.wait(OPERATION, token, timeout)?;
        bytes.map_or(Ok(()), |bytes| bytes.put(done.bytes))
    }

    /// The outcome of an operation is not collected.
    fn fabricast_agent_forget(agent: Handle<OpenAgent>, token: u64) -> i32, c"forget operation" {
        let agent = agent.find(OPERATION)?;
        let token = agent.number.token(OPERATION, token)?;
        agent.with(OPERATION, |agent| {
            agent.forget(token);
            Ok(())
        })
    }

    /// Ends an operation, as far as it has not begun.
    fn fabricast_agent_cancel(
        agent: Handle<OpenAgent>,
        token: u64,
        is_cancelled: Option<Out<'_, u64>>,
    ) -> i32, c"cancel operation" {
        let agent = agent.find(OPERATION)?;
        let token = agent.number.token(OPERATION, token)?;
        let ended = agent.with(OPERATION, |agent| agent.cancel(token))?;
        is_cancelled.map_or(Ok(()), |is_cancelled| is_cancelled.put(u64::from(ended)))
    }

    fn fabricast_agent_in_flight(
        agent: Handle<OpenAgent>,
        count: Out<'_, u64>,
    ) -> i32, c"count operations in flight" {
        let agent = agent.find(OPERATION)?;
        count.put(agent.with(OPERATION, |agent| Ok(agent.in_flight() as u64))?)
    }
}

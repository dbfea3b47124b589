//! Transfers in the order of the caller's streams.

use gpu::{Block, Stream};
use transfer::PreparedTransfer;

use super::OpenAgent;
use super::prepared::selection;
use super::routes::OpenRoute;
use super::transfers::{start, transfer};
use crate::ffi::{Array, Out, export};
use crate::handle::Handle;
use crate::layout::RawNotice;
use crate::timeout::Timeout;

export! {
    /// Puts after the work of a stream.
    fn fabricast_agent_put_after(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        blocks: Array<'_, Block>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        stream: Handle<Stream>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"put" {
        let blocks = blocks.get(OPERATION, "blocks", count)?;
        let stream = stream.find(OPERATION)?;
        transfer(OPERATION, agent, route, notice, token, |agent, route, notice| {
            agent.put_after(route, blocks, notice, &stream)
        })
    }

    /// Gets after the work of a stream.
    fn fabricast_agent_get_after(
        agent: Handle<OpenAgent>,
        route: Handle<OpenRoute>,
        blocks: Array<'_, Block>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        stream: Handle<Stream>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"get" {
        let blocks = blocks.get(OPERATION, "blocks", count)?;
        let stream = stream.find(OPERATION)?;
        transfer(OPERATION, agent, route, notice, token, |agent, route, notice| {
            agent.get_after(route, blocks, notice, &stream)
        })
    }

    /// Starts a prepared transfer after the work of a stream.
    fn fabricast_agent_submit_after(
        agent: Handle<OpenAgent>,
        prepared: Handle<PreparedTransfer>,
        indices: Array<'_, u32>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        stream: Handle<Stream>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"submit transfer" {
        let (agent, prepared) = (agent.find(OPERATION)?, prepared.find(OPERATION)?);
        let indices = selection(OPERATION, indices, count)?;
        let stream = stream.find(OPERATION)?;
        let notice = notice.map(|notice| notice.to_notice(OPERATION)).transpose()?;
        start(OPERATION, &agent, token, |agent| {
            Ok(agent.submit_after(&prepared, indices, notice, &stream)?)
        })
    }

    /// Later work on a stream waits for an operation.
    fn fabricast_agent_delay_stream(
        agent: Handle<OpenAgent>,
        token: u64,
        stream: Handle<Stream>,
        timeout: Timeout,
    ) -> i32, c"delay stream" {
        let agent = agent.find(OPERATION)?;
        let token = agent.number.token(OPERATION, token)?;
        let stream = stream.find(OPERATION)?;
        agent.delay_stream(OPERATION, token, &stream, timeout)
    }
}

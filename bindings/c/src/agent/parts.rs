//! Transfers over several regions of a peer.

use transfer::{Agent, Blocks, ErrorKind, Notice, Route, Token};

use super::OpenAgent;
use super::routes::OpenRoute;
use super::transfers::start;
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Array, Out, export};
use crate::handle::Handle;
use crate::layout::{RawNotice, RawPart};
use crate::status::Status;

type Begin = fn(&mut Agent, &[(&Route, Blocks<'_>)], Option<Notice>) -> transfer::Result<Token>;

fn transfer_parts(
    operation: Operation,
    agent: Handle<OpenAgent>,
    parts: &[RawPart<'_>],
    notice: Option<RawNotice<'_>>,
    token: Option<Out<'_, u64>>,
    begin: Begin,
) -> Result<()> {
    let agent = agent.find(operation)?;
    let found = parts.iter().map(|part| {
        let route = part.route::<OpenRoute>(operation)?.find(operation)?;
        Ok((route, part.blocks(operation)?))
    });
    let found = found.collect::<Result<Vec<_>>>()?;
    let parts: Vec<_> = found.iter().map(|(open, list)| (&open.route, (*list).into())).collect();
    let notice = notice.map(|notice| notice.to_notice(operation)).transpose()?;
    let begin = |agent: &mut Agent| match begin(agent, &parts, notice) {
        // No routes, or to different peers.
        Err(error) if error.kind() == ErrorKind::Malformed => {
            Err(Failure::from_text(Status::InvalidArgument, error.operation(), error.to_string()))
        }
        begun => Ok(begun?),
    };
    start(operation, &agent, token, begin)
}

export! {
    /// Puts by several routes as one operation.
    fn fabricast_agent_put_parts(
        agent: Handle<OpenAgent>,
        parts: Array<'_, RawPart<'_>>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"put" {
        let parts = parts.get(OPERATION, "parts", count)?;
        transfer_parts(OPERATION, agent, parts, notice, token, Agent::put_parts)
    }

    /// Gets by several routes as one operation.
    fn fabricast_agent_get_parts(
        agent: Handle<OpenAgent>,
        parts: Array<'_, RawPart<'_>>,
        count: usize,
        notice: Option<RawNotice<'_>>,
        token: Option<Out<'_, u64>>,
    ) -> i32, c"get" {
        let parts = parts.get(OPERATION, "parts", count)?;
        transfer_parts(OPERATION, agent, parts, notice, token, Agent::get_parts)
    }
}

//! Agents: their start and end, cards and events.

mod fabric;
mod numbers;
mod parts;
mod prepared;
mod regions;
mod routes;
mod stream_order;
mod transfers;
mod waits;

use std::time::{Duration, Instant};

use transfer::{Agent, AgentCard, EventWatch};

#[cfg(test)]
pub(crate) use self::routes::OpenRoute;

use self::numbers::AgentNumber;
use crate::exclusive::Exclusive;
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Out, OutStruct, WithDefaults, export, put_bytes};
use crate::handle::{Handle, Kind as _, kind};
use crate::layout::{RawAgentEvent, RawAgentOptions, RawCardInfo};
use crate::registry;
use crate::timeout::Timeout;
use crate::variables;

#[derive(Debug)]
pub(crate) struct OpenAgent {
    agent: Exclusive<Agent>,
    watch: EventWatch,
    number: AgentNumber,
}

kind!(OpenAgent, 10, "agent", |open: &Self| {
    open.agent.end();
    open.watch.wake();
});

impl OpenAgent {
    fn start(operation: Operation, raw: RawAgentOptions) -> Result<Self> {
        let (mut options, rails) = (raw.to_options(operation)?, raw.rails(operation)?);
        if let Some((policy, source)) = raw.fabric(operation)? {
            let offer = fabric::choose(operation, policy, source)?;
            options = (0..rails).fold(options, |options, _| options.fabric(&offer));
        }
        let agent = Agent::start(options)?;
        let (watch, number) = (agent.event_watch(), AgentNumber::next());
        Ok(Self { agent: Exclusive::new(agent), watch, number })
    }

    /// Runs a function with the agent, as soon as no other thread uses it.
    fn with<R>(
        &self,
        operation: Operation,
        act: impl FnOnce(&mut Agent) -> transfer::Result<R>,
    ) -> Result<R> {
        self.agent.with(operation, Timeout::Forever, |agent| Ok(act(agent)?))
    }

    /// Runs a function that waits, and keeps the agent meanwhile.
    fn with_timeout<R>(
        &self,
        operation: Operation,
        timeout: Timeout,
        act: impl FnOnce(&mut Agent, Duration) -> transfer::Result<R>,
    ) -> Result<R> {
        let end = timeout.end();
        self.agent.with(operation, timeout, |agent| {
            let left = end.saturating_duration_since(Instant::now());
            act(agent, left).map_err(|error| Failure::of_wait(timeout, Some(left), error))
        })
    }
}

export! {
    fn fabricast_agent_options_init(
        options: OutStruct<'_, RawAgentOptions>[size],
    ) -> i32, c"initialize agent options" {
        options.put_defaults()
    }

    fn fabricast_agent_start(
        options: Option<RawAgentOptions>,
        agent: Out<'_, *mut OpenAgent>,
    ) -> i32, c"start agent" {
        variables::apply(OPERATION)?;
        let options = options.unwrap_or_else(|| RawAgentOptions::defaults(size_of::<RawAgentOptions>()));
        agent.put(registry::open(OPERATION, OpenAgent::start(OPERATION, options)?)?)
    }

    fn fabricast_agent_close(
        agent: Option<Handle<OpenAgent>>,
        timeout: Timeout,
    ) -> i32, c"close agent" {
        let Some(agent) = agent else { return Ok(()) };
        let (end, open) = (timeout.end(), agent.close(OPERATION)?);
        // Threads that wait for an event give up.
        open.end();
        let ended = open.agent.end_and_remove(OPERATION, timeout)?;
        let left = end.saturating_duration_since(Instant::now());
        ended.close(left).map_err(|error| Failure::of_wait(timeout, Some(left), error))
    }

    fn fabricast_agent_card(
        agent: Handle<OpenAgent>,
        buffer: &mut [u8] [capacity],
        length: Out<'_, usize>,
    ) -> i32, c"get card of agent" {
        let card = agent.find(OPERATION)?.with(OPERATION, |agent| agent.card().encode())?;
        length.put(put_bytes(OPERATION, &card, buffer)?)
    }

    fn fabricast_card_info_of(
        card: &[u8] [length],
        info: OutStruct<'_, RawCardInfo>[size],
    ) -> i32, c"get information of card" {
        info.put(RawCardInfo::of(&AgentCard::decode(card)?))
    }

    fn fabricast_agent_progress(
        agent: Handle<OpenAgent>,
        moved: Option<Out<'_, u64>>,
    ) -> i32, c"make progress" {
        let has_moved = agent.find(OPERATION)?.with(OPERATION, |agent| Ok(agent.progress()))?;
        moved.map_or(Ok(()), |moved| moved.put(u64::from(has_moved)))
    }

    fn fabricast_agent_next_event(
        agent: Handle<OpenAgent>,
        timeout: Timeout,
        event: OutStruct<'_, RawAgentEvent>[size],
    ) -> i32, c"wait for event" {
        event.put(RawAgentEvent::of(&agent.find(OPERATION)?.next_event(OPERATION, timeout)?))
    }
}

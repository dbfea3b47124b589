//! Peers of agents, and routes to their regions.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;
use std::time::Instant;

use transfer::path::Policy;
use transfer::{Region, Route};

use super::OpenAgent;
use crate::failure::{Failure, c_text};
use crate::ffi::{Out, Text, export};
use crate::handle::{Handle, kind};
use crate::registry::{self, export_close};
use crate::status::Status;
use crate::timeout::Timeout;

#[derive(Debug)]
pub(crate) struct OpenRoute {
    pub(super) route: Route,
    texts: OnceLock<Texts>,
}

kind!(OpenRoute, 12, "route");
export_close!(OpenRoute, fabricast_route_close, c"close route");

/// Created when first requested; valid as long as the route.
#[derive(Debug)]
struct Texts {
    path: CString,
    fallback: CString,
    explanation: CString,
}

impl OpenRoute {
    fn new(route: Route) -> Self {
        Self { route, texts: OnceLock::new() }
    }

    fn texts(&self) -> &Texts {
        self.texts.get_or_init(|| Texts {
            path: c_text(self.route.path().name()),
            fallback: c_text(self.route.fallback().unwrap_or_default()),
            explanation: c_text(self.route.choice().to_string()),
        })
    }
}

export! {
    fn fabricast_agent_connect(
        agent: Handle<OpenAgent>,
        card: &[u8] [length],
        timeout: Timeout,
        peer: Out<'_, u64>,
    ) -> i32, c"connect to agent" {
        let agent = agent.find(OPERATION)?;
        let connected = agent.with_timeout(OPERATION, timeout, |agent, left| agent.connect(card, left))?;
        peer.put(agent.number.of_peer(connected))
    }

    fn fabricast_agent_disconnect(
        agent: Handle<OpenAgent>,
        peer: u64,
        timeout: Timeout,
    ) -> i32, c"disconnect from agent" {
        let agent = agent.find(OPERATION)?;
        let peer = agent.number.peer(OPERATION, peer)?;
        let end = timeout.end();
        agent.agent.with(OPERATION, timeout, |agent| {
            if agent.locality(peer).is_none() {
                let detail = "the peer was disconnected already";
                return Err(Failure::new(Status::NotFound, OPERATION, detail));
            }
            let left = end.saturating_duration_since(Instant::now());
            let done = agent.disconnect(peer, left);
            done.map_err(|error| Failure::of_wait(timeout, Some(left), error))
        })
    }

    /// Joins a region of the agent with one of a peer.
    fn fabricast_agent_join(
        agent: Handle<OpenAgent>,
        peer: u64,
        local: Handle<Region>,
        descriptor: &[u8] [length],
        policy: Text<'_>,
        timeout: Timeout,
        route: Out<'_, *mut OpenRoute>,
    ) -> i32, c"join two regions" {
        let (agent, local) = (agent.find(OPERATION)?, local.find(OPERATION)?);
        let peer = agent.number.peer(OPERATION, peer)?;
        let policy = policy.get(OPERATION, "policy")?.unwrap_or_default().parse::<Policy>();
        let policy = policy.map_err(|error| Failure::invalid(OPERATION, error))?;
        let joined = agent.with_timeout(OPERATION, timeout, |agent, left| {
            agent.join(peer, &local, descriptor, &policy, left)
        })?;
        route.put(registry::open(OPERATION, OpenRoute::new(joined))?)
    }

    /// Joins a region of the agent with one that a peer has published.
    fn fabricast_agent_route_to(
        agent: Handle<OpenAgent>,
        peer: u64,
        name: Text<'_>,
        local: Handle<Region>,
        timeout: Timeout,
        route: Out<'_, *mut OpenRoute>,
    ) -> i32, c"join two regions" {
        let (agent, local) = (agent.find(OPERATION)?, local.find(OPERATION)?);
        let peer = agent.number.peer(OPERATION, peer)?;
        let name = name.required(OPERATION, "name")?;
        let joined = agent.with_timeout(OPERATION, timeout, |agent, left| {
            agent.route_to(peer, name, &local, left)
        })?;
        route.put(registry::open(OPERATION, OpenRoute::new(joined))?)
    }

    fn fabricast_route_path(
        route: Handle<OpenRoute>,
        path: Out<'_, *const c_char>,
    ) -> i32, c"get path of route" {
        path.put(route.find(OPERATION)?.texts().path.as_ptr())
    }

    /// Why it is not a better path.
    fn fabricast_route_fallback(
        route: Handle<OpenRoute>,
        reason: Out<'_, *const c_char>,
    ) -> i32, c"get fallback of route" {
        reason.put(route.find(OPERATION)?.texts().fallback.as_ptr())
    }

    /// The verdict on every path.
    fn fabricast_route_explain(
        route: Handle<OpenRoute>,
        text: Out<'_, *const c_char>,
    ) -> i32, c"explain route" {
        text.put(route.find(OPERATION)?.texts().explanation.as_ptr())
    }
}

//! The agent of this process that connects to the agent to explain.

use fabric::{Caps, EndpointKind, ErrorKind, Offer, Query};
use transfer::{Agent, AgentCard, AgentOptions};

use crate::cli::exit::{Failure, Result};

/// Starts the agent. With `provider` it has a fabric: of this provider, or, if empty, of one that
/// the other agent has.
pub(super) fn start(card: &AgentCard, fabric: Option<&str>) -> Result<Agent> {
    let mut options = AgentOptions::new("fabricast paths");
    if let Some(provider) = fabric {
        let offer = match provider {
            "" => common_offer(card)?,
            named => offer(card, Some(named))?,
        };
        options = options.fabric(&offer);
    }
    Agent::start(options).map_err(Failure::of)
}

/// The first provider of the other agent that is available here. Without one, any offer: then the
/// report says that there is no common provider, and lists both sides.
fn common_offer(card: &AgentCard) -> fabric::Result<Offer> {
    for remote in &card.fabrics {
        match offer(card, Some(&remote.provider)) {
            Err(error) if error.kind() == ErrorKind::NoProvider => {}
            found => return found,
        }
    }
    offer(card, None)
}

fn offer(card: &AgentCard, provider: Option<&str>) -> fabric::Result<Offer> {
    // The requirements of rails.
    let mut query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
    if let Some(provider) = provider {
        query = query.provider(provider);
    }
    // With device memory, if any provider has it: a peer with it is asked about it.
    let with_devices = || query.clone().caps(Caps::MESSAGE | Caps::RMA | Caps::DEVICE_MEMORY);
    let query = match with_devices().first() {
        Ok(_) if provider.is_some() => with_devices(),
        _ => query,
    };
    let first = query.first()?;
    if !card.is_of_this_machine() || !first.capabilities().reaches_other_machines {
        return Ok(first);
    }
    // Every machine has this address.
    query.source("127.0.0.1").first().or(Ok(first))
}

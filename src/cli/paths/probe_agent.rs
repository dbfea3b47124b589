//! The agent that asks.

use fabric::{Caps, EndpointKind, ErrorKind, Offer, Query};
use transfer::{Agent, AgentCard, AgentOptions};

use crate::cli::exit::Failure;

/// Starts an agent that asks this one, with a fabric if one is wanted: of a provider, or, without
/// a name, of one that the other agent has.
pub(super) fn start(card: &AgentCard, fabric: Option<&str>) -> Result<Agent, Failure> {
    let mut options = AgentOptions::new("fabricast paths");
    if let Some(provider) = fabric {
        let offer = match provider {
            "" => common_offer(card)?,
            named => offer(card, Some(named))?,
        };
        options = options.fabric(&offer);
    }
    Agent::start(options).map_err(|error| Failure::failed(error.to_string()))
}

/// The first provider of its that is here, too. If there is none, any: then it is said that they
/// have none in common, and what each has.
fn common_offer(card: &AgentCard) -> fabric::Result<Offer> {
    for theirs in &card.fabrics {
        match offer(card, Some(&theirs.provider)) {
            Err(error) if error.kind() == ErrorKind::NoProvider => {}
            found => return found,
        }
    }
    offer(card, None)
}

fn offer(card: &AgentCard, provider: Option<&str>) -> fabric::Result<Offer> {
    // What rails ask for.
    let mut query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
    if let Some(provider) = provider {
        query = query.provider(provider);
    }
    let first = query.first()?;
    if !card.is_of_this_machine() || !first.capabilities().reaches_other_machines {
        return Ok(first);
    }
    // Every machine has this address.
    query.source("127.0.0.1").first().or(Ok(first))
}

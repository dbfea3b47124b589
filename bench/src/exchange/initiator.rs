//! The first process: it starts the second one, and never leaves it behind.

use std::process::Stdio;

use crate::process::pin;
use crate::worker::Worker;
use command::exit::Failure;
use command::process::this_program;
use nix::sys::signal::Signal;

use super::frame::Frame;
use super::link::Link;
use super::plan::Plan;
use super::station::Station;
use super::vigil::Role;

/// Starts the target and opens this side of the exchange.
pub(crate) fn start(plan: &Plan, core: Option<usize>) -> Result<Station, Failure> {
    // What cannot be found here is not worth a second process.
    let (offer, ordered) = plan.offer()?;
    warn_of_order(&offer, ordered);
    let (target, mut link) = start_target()?;
    if !link.send(&Frame::Plan(plan.clone()))? {
        return Err(target.explain_end());
    }
    if let Some(core) = core {
        pin(core)?;
    }
    Station::open(plan, &offer, link, Role::Initiator(target))
}

/// Says so if an offer is not what was asked for.
pub(super) fn warn_of_order(offer: &fabric::Offer, ordered: bool) {
    if !ordered {
        let provider = &offer.capabilities().provider;
        eprintln!("fabricast: {provider} does not promise the order that was asked for");
    }
}

fn start_target() -> Result<(Worker, Link), Failure> {
    let mut command = this_program("fabricast-bench");
    command.arg("exchange-target").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut target = Worker::start(command, "the target process", Signal::SIGTERM)?;
    let pipes = target.pipes();
    let (writer, reader) =
        pipes.ok_or_else(|| Failure::failed("the target process has no pipes"))?;
    Ok((target, Link::new(reader, writer)?))
}

//! The initiator: starts the target, and ends it.

use std::process::Stdio;

use crate::process::pin;
use crate::worker::Worker;
use command::exit::Failure;
use command::process::this_program;
use nix::sys::signal::Signal;

use super::ExchangeSide;
use super::frame::Frame;
use super::frame_channel::FrameChannel;
use super::peer_watchdog::Role;
use super::plan::Plan;

/// Starts the target and opens the initiator's side of the exchange.
pub(crate) fn start(plan: &Plan, core: Option<usize>) -> Result<ExchangeSide, Failure> {
    // An unknown provider must fail before a process is started.
    let (offer, ordered) = plan.offer()?;
    warn_of_order(&offer, ordered);
    let (target, mut frame_channel) = start_target()?;
    if !frame_channel.send(&Frame::Plan(plan.clone()))? {
        return Err(target.exit_failure());
    }
    if let Some(core) = core {
        pin(core)?;
    }
    ExchangeSide::open(plan, &offer, frame_channel, Role::Initiator(target))
}

/// Warns if an offer lacks the requested order.
pub(super) fn warn_of_order(offer: &fabric::Offer, ordered: bool) {
    if !ordered {
        let provider = &offer.capabilities().provider;
        eprintln!("fabricast: {provider} does not guarantee the requested order");
    }
}

fn start_target() -> Result<(Worker, FrameChannel), Failure> {
    let mut command = this_program("fabricast-bench");
    command.arg("exchange-target").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut target = Worker::start(command, "the target process", Signal::SIGTERM)?;
    let pipes = target.pipes();
    let (writer, reader) =
        pipes.ok_or_else(|| Failure::failed("the target process has no pipes"))?;
    Ok((target, FrameChannel::new(reader, writer)?))
}

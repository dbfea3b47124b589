//! The target: follows the plan of the initiator, and exits with it.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use super::frame_channel::FrameChannel;
use super::peer_watchdog::Role;
use super::plan::{Exchange, Plan};
use super::{ExchangeSide, measurement, polled_exchange, ring_exchange};
use crate::process::{cancel_stall_alarm, pin, start_stall_alarm};
use command::exit::{Exit, Failure};

/// Runs until the end of the exchange.
pub(crate) fn run() -> Result<(), Failure> {
    let (input, output) = (std::io::stdin(), std::io::stdout());
    if input.is_terminal() || output.is_terminal() {
        return Err(Failure::new(
            Exit::Usage,
            "this subcommand is internal: fabricast-bench starts it itself",
        ));
    }
    let clone = |fd: std::os::fd::BorrowedFd<'_>| {
        fd.try_clone_to_owned()
            .map_err(|e| Failure::failed(format!("duplicate a pipe failed: {e}")))
    };
    let mut frame_channel = FrameChannel::new(clone(input.as_fd())?, clone(output.as_fd())?)?;
    let plan = frame_channel.plan()?;
    start_stall_alarm()?;
    let mut reporter = frame_channel.try_clone()?;
    let result = run_plan(&plan, frame_channel, Role::Target);
    cancel_stall_alarm();
    // The initiator reports the failure to the user; without it there is no output.
    result.map_err(|failure| match reporter.report(&failure) {
        true => Failure::silent(failure.exit()),
        false => failure.with_operation("target"),
    })
}

/// Opens and runs the target's side.
pub(super) fn run_plan(
    plan: &Plan,
    frame_channel: FrameChannel,
    role: Role,
) -> Result<(), Failure> {
    if let Some(core) = plan.core {
        pin(core)?;
    }
    let (offer, _) = plan.offer()?;
    let side = ExchangeSide::open(plan, &offer, frame_channel, role)?;
    match &plan.exchange {
        Exchange::Fabric(measure) => measurement::serve(side, measure),
        Exchange::Ring(ring_exchange) => ring_exchange::serve(side, ring_exchange),
        Exchange::Polled(exchange) => polled_exchange::serve(side, exchange),
    }
}

//! The second process: it does as it is told by the first, and ends with it.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use super::link::Link;
use super::plan::{Exchange, Mode, Plan};
use super::station::Station;
use super::vigil::Role;
use super::{flow, pingpong, stream};
use crate::process::{pin, stop_watching, watch_over};
use command::exit::{Exit, Failure};

/// Runs until the initiator has had enough.
pub(crate) fn run() -> Result<(), Failure> {
    let (input, output) = (std::io::stdin(), std::io::stdout());
    if input.is_terminal() || output.is_terminal() {
        return Err(Failure::new(Exit::Usage, "this subcommand is for the program's own use"));
    }
    let clone = |fd: std::os::fd::BorrowedFd<'_>| {
        fd.try_clone_to_owned().map_err(|e| Failure::failed(format!("duplicating a pipe: {e}")))
    };
    let mut link = Link::new(clone(input.as_fd())?, clone(output.as_fd())?)?;
    let plan = link.plan()?;
    watch_over()?;
    let mut reporter = link.try_clone()?;
    let result = follow(&plan, link, Role::Target);
    stop_watching();
    // The initiator tells the user; who lost it has nobody to tell.
    result.map_err(|failure| match reporter.report(&failure) {
        true => Failure::silent(failure.exit()),
        false => failure.while_doing("target"),
    })
}

/// One side of an exchange, as it was told.
pub(super) fn follow(plan: &Plan, link: Link, role: Role) -> Result<(), Failure> {
    if let Some(core) = plan.core {
        pin(core)?;
    }
    let (offer, _) = plan.offer()?;
    let station = Station::open(plan, &offer, link, role)?;
    match &plan.exchange {
        Exchange::Measure(measure) => match measure.mode {
            Mode::Lat => pingpong::serve(station, measure),
            Mode::Bw => stream::serve(station, measure),
        },
        Exchange::Flow(flow) => flow::serve(station, flow),
    }
}

//! The second process: it does as it is told by the first, and ends with it.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use super::frame::Frame;
use super::link::{Link, Look};
use super::plan::{Exchange, Plan, STALL};
use super::station::Station;
use super::vigil::Role;
use super::{flow, pingpong, stream};
use command::exit::{Exit, Failure};
use command::process::{end_with_parent, pin, stop_watching, watch_over};

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
    let plan = match link.wait_for("the plan", STALL)? {
        Look::Frame(Frame::Plan(plan)) => plan,
        Look::Frame(_) => return Err(Failure::failed("the first frame is not a plan")),
        Look::Closed | Look::Nothing => return Err(Failure::silent(Exit::Failed)),
    };
    end_with_parent(plan.parent)?;
    watch_over()?;
    // The initiator tells the user; who lost it has nobody to tell.
    let mut outcome = Reporter { link: link.try_clone()? };
    let result = follow(&plan, link, Role::Target);
    stop_watching();
    result.map_err(|failure| outcome.report(&failure))
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
            super::plan::Mode::Lat => pingpong::serve(station, measure),
            super::plan::Mode::Bw => stream::serve(station, measure),
        },
        Exchange::Flow(flow) => flow::serve(station, flow),
    }
}

struct Reporter {
    link: Link,
}

impl Reporter {
    fn report(&mut self, failure: &Failure) -> Failure {
        let frame = Frame::Failed {
            exit: failure.exit() as i32,
            message: failure.to_string().chars().take(4000).collect(),
        };
        let told = !failure.is_silent() && self.link.send(&frame).unwrap_or(false);
        if told {
            Failure::silent(failure.exit())
        } else {
            Failure::new(failure.exit(), format!("target: {failure}"))
        }
    }
}

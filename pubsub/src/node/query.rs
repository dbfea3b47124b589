//! Reports of a node without joining it.

use std::path::Path;
use std::time::Instant;

use super::connector::connect;
use super::link::send_request;
use super::membership::{REPORT_TIMEOUT, unexpected_answer};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::report::Row;
use crate::service::election::{self, LeaderLock};
use crate::service::protocol::{self, Notice, Request};
use crate::service::{ServiceProcess, describe_process};

/// Reports on the node of a directory without joining it: see
/// [`Node::report`](crate::Node::report).
///
/// # Errors
/// [`NotFound`](ErrorKind::NotFound) if the node has no service; [`Denied`](ErrorKind::Denied) if
/// the directory belongs to another user, or others may write to it; [`DeadlineExceeded`] if the
/// service does not answer, with its process.
///
/// [`DeadlineExceeded`]: ErrorKind::DeadlineExceeded
pub fn report(directory: &Path) -> Result<Vec<Row>> {
    let operation = "report on node";
    election::check(operation, directory)?;
    let end = Instant::now() + REPORT_TIMEOUT;
    loop {
        match call(operation, directory, end) {
            // A service that has just taken over, or is about to end.
            Err(error)
                if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Failed)
                    && Instant::now() < end => {}
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {
                let silent = unresponsive_service_error(operation, directory).unwrap_or(error);
                return Err(silent.at(directory.display()));
            }
            done => return done.at(directory.display()),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn unresponsive_service_error(operation: &'static str, directory: &Path) -> Option<Error> {
    let process = ServiceProcess::of(directory).ok()??;
    let detail = format!(
        "{process} serves the node, and did not answer within {REPORT_TIMEOUT:?}: {}",
        process.state()
    );
    Some(Error::new(operation, ErrorKind::DeadlineExceeded, detail))
}

fn call(operation: &'static str, directory: &Path, end: Instant) -> Result<Vec<Row>> {
    let Some(channel) = connect(operation, directory)? else {
        return Err(match LeaderLock::holder(operation, directory)? {
            // It has just started, or its backlog is full.
            Some(process) => {
                let detail =
                    format!("{} serves the node, and does not listen", describe_process(process));
                Error::new(operation, ErrorKind::Closed, detail)
            }
            None => Error::new(operation, ErrorKind::NotFound, "no process serves the node"),
        });
    };
    send_request(operation, &channel, &Request::Report { request: 1 }, &[])?;
    let mut all = Vec::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let message = channel.receive(left).during(operation)?;
        match protocol::decode(operation, &message.bytes)? {
            Notice::Rows { rows, is_last, .. } => {
                all.extend(rows);
                if is_last {
                    return Ok(all);
                }
            }
            Notice::Refused { reason, .. } | Notice::Rejected { reason } => {
                return Err(reason.into_error(operation));
            }
            _ => return Err(unexpected_answer(operation)),
        }
    }
}

//! Asking a node who is there, without joining it.

use std::path::Path;
use std::time::Instant;

use super::attendance::ASKING;
use super::line::connect;
use super::link::{of_channel, say};
use crate::error::{Error, ErrorKind, Result};
use crate::report::Row;
use crate::service::protocol::{self, Notice, Request};

/// Asks the node of a directory who is there and what goes on, without joining it.
///
/// # Errors
/// [`Unknown`](ErrorKind::Unknown) if no service is there.
pub fn report(directory: &Path) -> Result<Vec<Row>> {
    let operation = "report on a node";
    let end = Instant::now() + ASKING;
    loop {
        match ask(operation, directory, end) {
            // A service that has just taken over, or is about to end.
            Err(error)
                if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Failed)
                    && Instant::now() < end => {}
            done => return done.map_err(|error| error.on(directory.display())),
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn ask(operation: &'static str, directory: &Path, end: Instant) -> Result<Vec<Row>> {
    let Some(channel) = connect(operation, directory)? else {
        let detail = "no service listens there";
        return Err(Error::new(operation, ErrorKind::Unknown, detail));
    };
    say(operation, &channel, &Request::Report { request: 1 }, &[])?;
    let mut all = Vec::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let message = channel.receive(left).map_err(|error| of_channel(operation, error))?;
        match protocol::decode(operation, &message.bytes)? {
            Notice::Rows { rows, is_last, .. } => {
                all.extend(rows);
                if is_last {
                    return Ok(all);
                }
            }
            Notice::Refused { why, .. } | Notice::SeenOff { why } => {
                return Err(why.into_error(operation));
            }
            _ => return Err(Error::new(operation, ErrorKind::Malformed, "another answer")),
        }
    }
}

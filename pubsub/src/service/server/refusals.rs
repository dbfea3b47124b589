//! Those that are refused: they are told why, and so is the log.

use std::time::Instant;

use ipc::DescriptorLimit;

use crate::error::{Error, ErrorKind};
use crate::log_limit::LogLimit;
use crate::service::connection::Connection;
use crate::service::protocol::{Notice, Refusal};

/// This process, which serves, as it is called for the process that it answers.
fn service_for(connection: &Connection) -> String {
    let own = std::process::id();
    let is_own = connection.channel().credentials().is_ok_and(|it| it.process == Some(own));
    match is_own {
        true => "this process, which serves the node, too".to_owned(),
        false => format!("the node's service, process {own}"),
    }
}

/// Refuses, and logs what may be logged of that.
#[derive(Debug)]
pub(super) struct Refusals {
    began: Instant,
    limit: LogLimit,
}

impl Refusals {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), limit: LogLimit::short() }
    }

    fn allows(&mut self) -> bool {
        self.limit.allows(self.began.elapsed())
    }

    /// Tells one that comes why it is not let in.
    pub(super) fn reject(
        &mut self,
        connection: &mut Connection,
        kind: ErrorKind,
        reason: impl Into<String>,
    ) {
        let reason = Refusal::new(kind, reason);
        if self.allows() {
            let process = connection.channel().credentials().ok().and_then(|it| it.process);
            tracing::info!(process, reason = reason.detail(), "a connection was rejected");
        }
        connection.send(&Notice::Rejected { reason }, Vec::new());
    }

    /// The same, by an error.
    pub(super) fn reject_with_error(&mut self, connection: &mut Connection, error: &Error) {
        let reason = Refusal::of(error);
        self.reject(connection, error.kind(), reason.detail());
    }

    /// The service has no descriptors left for one more process.
    pub(super) fn reject_out_of_descriptors(
        &mut self,
        connection: &mut Connection,
        limit: DescriptorLimit,
    ) {
        let reason = format!("{}: {limit}", service_for(connection));
        self.reject(connection, ErrorKind::TooMany, reason);
    }

    /// Why a member does not get what it asked for. A limit that was reached is the service's.
    pub(super) fn refusal(&mut self, connection: &Connection, error: &Error) -> Refusal {
        let Some(limit) = error.limit_reached() else { return Refusal::of(error) };
        if self.allows() {
            tracing::warn!(%limit, "a request was rejected: a limit of the service's process");
        }
        Refusal::new(error.kind(), limit.of_process(&service_for(connection)))
    }
}

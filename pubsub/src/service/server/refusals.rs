//! Rejected connections and refused requests: reasons for clients and the log.

use std::time::Instant;

use ipc::DescriptorLimit;

use crate::error::{Error, ErrorKind};
use crate::log_limit::LogLimit;
use crate::service::connection::Connection;
use crate::service::protocol::{Notice, Refusal};

/// Names this process for the process at the other end.
fn service_for(connection: &Connection) -> String {
    let own = std::process::id();
    let is_own = connection.channel().credentials().is_ok_and(|it| it.process == Some(own));
    match is_own {
        true => "this process, which also serves the node".to_owned(),
        false => format!("the node's service, process {own}"),
    }
}

/// Rejects connections; limits its log messages.
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

    /// Rejects a connection with a reason.
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

    /// As [`reject`](Self::reject), with the reason of an error.
    pub(super) fn reject_with_error(&mut self, connection: &mut Connection, error: &Error) {
        let reason = Refusal::of(error);
        self.reject(connection, error.kind(), reason.detail());
    }

    /// The service has no descriptors left for another process.
    pub(super) fn reject_out_of_descriptors(
        &mut self,
        connection: &mut Connection,
        limit: DescriptorLimit,
    ) {
        let reason = format!("{}: {limit}", service_for(connection));
        self.reject(connection, ErrorKind::TooMany, reason);
    }

    /// The reason of a failed request. A limit that was reached is the service's.
    pub(super) fn refusal(&mut self, connection: &Connection, error: &Error) -> Refusal {
        let Some(limit) = error.limit_reached() else { return Refusal::of(error) };
        if self.allows() {
            tracing::warn!(%limit, "a request was rejected: a limit of the service's process");
        }
        Refusal::new(error.kind(), limit.of_process(&service_for(connection)))
    }
}

//! Reaching the service of a node, and becoming it where there is none.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError};

use super::options::{NodeOptions, ServiceMode};
use crate::error::{Error, ErrorKind, Result};
use crate::peers::NodeIdentity;
use crate::service::election::socket_in;
use crate::service::{Service, ServiceOptions};

/// Between two looks for a service.
const PAUSE: Duration = Duration::from_millis(5);

/// The service that this process runs, if it does.
#[derive(Debug, Default)]
pub(super) struct OwnService(Mutex<Option<Service>>);

impl OwnService {
    /// Serves the node, if nobody does.
    fn offer(&self, options: &NodeOptions) -> Result<()> {
        let mut service = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if service.as_ref().is_some_and(|service| !service.is_over()) {
            return Ok(());
        }
        // One that could not go on gives up the office first.
        drop(service.take());
        *service = Service::start(ServiceOptions {
            directory: options.directory.clone(),
            label: options.label.clone(),
            budgets: options.budgets,
            network: options.network.clone(),
            identity: NodeIdentity::random()?,
        })?;
        Ok(())
    }

    /// Does it run?
    pub(super) fn is_running(&self) -> bool {
        let service = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        service.as_ref().is_some_and(|service| !service.is_over())
    }

    /// Ends it, if there is one.
    pub(super) fn end(&self) {
        let service = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(service);
    }
}

/// Connects to the service of the node, as soon as there is one.
pub(super) fn reach(
    operation: &'static str,
    options: &NodeOptions,
    own: &OwnService,
    end: impl Fn() -> Instant,
) -> Result<Channel> {
    loop {
        if let Some(channel) = connect(operation, &options.directory)? {
            return Ok(channel);
        }
        if options.service == ServiceMode::Embedded {
            own.offer(options)?;
        }
        if Instant::now() >= end() {
            let detail = match options.service {
                ServiceMode::Embedded => "the process that has the office does not answer",
                ServiceMode::Outside => "no service was started there",
            };
            let error = Error::new(operation, ErrorKind::DeadlineExceeded, detail);
            return Err(error.on(options.directory.display()));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Connects, if anybody listens.
pub(super) fn connect(operation: &'static str, directory: &Path) -> Result<Option<Channel>> {
    use std::io::ErrorKind as Io;
    let path = socket_in(directory);
    match Channel::connect(&path, Duration::from_secs(1)) {
        Ok(channel) => Ok(Some(channel)),
        Err(ChannelError::System { ref cause, .. })
            if matches!(cause.kind(), Io::NotFound | Io::ConnectionRefused) =>
        {
            Ok(None)
        }
        // Its backlog is full: it is busy, or about to end.
        Err(ChannelError::DeadlineExceeded { .. } | ChannelError::Closed) => Ok(None),
        Err(error) => {
            let kind = match &error {
                ChannelError::InvalidPath(_) => ErrorKind::InvalidArgument,
                ChannelError::System { cause, .. } if cause.kind() == Io::PermissionDenied => {
                    ErrorKind::Denied
                }
                _ => ErrorKind::Failed,
            };
            Err(Error::because(operation, kind, error).on(path.display()))
        }
    }
}

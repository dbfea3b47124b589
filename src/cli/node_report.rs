//! Reports of a node for subcommands that do not join it.

use pubsub::{ErrorKind, Row, Settings};

use super::exit::{Exit, Failure, Result};
use super::remedy::check_not_a_file;
use super::service_wait::ServiceWait;

/// Requests a report of the node of a directory, without joining it.
pub(crate) fn report(settings: &Settings) -> Result<Vec<Row>> {
    check_not_a_file(settings)?;
    let directory = settings.node.directory.clone();
    let service = ServiceWait::of(&directory);
    let reported = service.ask(None, move || pubsub::report(&directory))?;
    reported.map_err(|error| match error.kind() {
        ErrorKind::NotFound => Failure::new(
            Exit::NotFound,
            format!(
                "{error}. Start \"fabricast node\", or a publisher or subscriber, or name the directory of a node \
                 that runs: --directory (by default it depends on XDG_RUNTIME_DIR)"
            ),
        ),
        _ => service.explain(error),
    })
}

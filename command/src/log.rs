//! The log, written to standard error.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use tracing_subscriber::filter::LevelFilter;

use crate::exit::{Exit, Failure, Result};

/// Starts the log, at the level of the command line, of `FABRICAST_LOG`, or the default.
///
/// # Errors
/// `FABRICAST_LOG` is not a level.
pub fn start(requested: Option<LevelFilter>, default_level: LevelFilter) -> Result<()> {
    // Empty counts as not set, as with the settings.
    let named = std::env::var_os("FABRICAST_LOG").filter(|value| !value.is_empty());
    let level = match (requested, named) {
        (Some(level), _) => level,
        (None, None) => default_level,
        (None, Some(named)) => {
            let named = named.to_string_lossy();
            named.parse().map_err(|_| {
                let levels = "off, error, warn, info, debug or trace";
                let named = named.escape_debug();
                let why = format!("environment FABRICAST_LOG is \"{named}\". Use one of {levels}");
                Failure::new(Exit::Usage, why)
            })?
        }
    };
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
    match is_journal() {
        // The journal adds the time itself.
        true => log.without_time().init(),
        false => log.init(),
    }
    Ok(())
}

/// Is standard error connected to the systemd journal, as `JOURNAL_STREAM` says?
fn is_journal() -> bool {
    let Ok(journal) = std::env::var("JOURNAL_STREAM") else { return false };
    let error = std::io::stderr().as_fd().try_clone_to_owned();
    let found = error.and_then(|error| std::fs::File::from(error).metadata());
    found.is_ok_and(|found| format!("{}:{}", found.dev(), found.ino()) == journal)
}

//! Environment variables for the whole library: its log, and warnings about names similar to
//! settings.

use std::sync::Once;

use pubsub::UnknownVariable;

use crate::failure::{Operation, Result};
use crate::log;

/// Starts the log of the environment, and warns of misspelt variables.
pub(crate) fn apply(operation: Operation) -> Result<()> {
    log::start_from_environment(operation)?;
    warn_misspelt();
    Ok(())
}

/// Logs a warning for each misspelt variable: once, when a log exists that shows it.
fn warn_misspelt() {
    static WARNED: Once = Once::new();
    if !tracing::event_enabled!(tracing::Level::WARN) {
        return;
    }
    WARNED.call_once(|| {
        let unknown = UnknownVariable::all_of_this_process();
        for misspelt in unknown.iter().filter(|unknown| unknown.is_misspelt()) {
            tracing::warn!("{misspelt}");
        }
    });
}

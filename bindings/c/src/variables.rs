//! Warnings about environment variables similar to settings.

use std::sync::Once;

use pubsub::UnknownVariable;

/// Logs a warning for each misspelt variable: once, when a log exists that shows it.
pub(crate) fn warn_misspelt() {
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

//! Warnings about environment variables similar to settings.

use std::sync::Once;

use pubsub::KNOWN_VARIABLES;

const PREFIX: &str = "FABRICAST_";

/// Logs a warning for each misspelt variable: once, when a log exists that shows it.
pub(crate) fn warn_misspelt() {
    static WARNED: Once = Once::new();
    if !tracing::event_enabled!(tracing::Level::WARN) {
        return;
    }
    WARNED.call_once(|| {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        for warning in warnings(names) {
            tracing::warn!("{warning}");
        }
    });
}

/// Sorted by name.
fn warnings(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut warnings: Vec<_> = names
        .filter_map(|name| {
            let is_unknown = name.starts_with(PREFIX) && !KNOWN_VARIABLES.contains(&&*name);
            let near = is_unknown.then(|| pubsub::nearest_variable(&name, KNOWN_VARIABLES)).flatten()?;
            Some(format!(
                "environment variable {} is ignored: unknown setting. The nearest setting is {near}",
                name.escape_debug()
            ))
        })
        .collect();
    warnings.sort();
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_variable_is_reported_with_the_nearest_setting() {
        let names = [
            "FABRICAST_TOPIC_DEPHT",
            "FABRICAST_DEPTH",
            "FABRICAST_LABLE",
            "FABRICAST_TOPIC_SERVICE_TIMEOUT",
            "FABRICAST_LABEL",
            "FABRICAST_UNRELATED",
            "HOME",
        ];
        let found = warnings(names.into_iter().map(str::to_owned));
        let of = |name: &str, near: &str| {
            format!(
                "environment variable {name} is ignored: unknown setting. The nearest setting is \
                 {near}"
            )
        };
        let expected = [
            of("FABRICAST_DEPTH", "FABRICAST_TOPIC_DEPTH"),
            of("FABRICAST_LABLE", "FABRICAST_LABEL"),
            of("FABRICAST_TOPIC_DEPHT", "FABRICAST_TOPIC_DEPTH"),
            of("FABRICAST_TOPIC_SERVICE_TIMEOUT", "FABRICAST_SERVICE_TIMEOUT"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn all_settings_of_the_command_are_known() {
        let manual = include_str!("../../../docs/reference/settings.md");
        let mut count = 0;
        for row in manual.lines().filter(|line| line.starts_with("| `")) {
            for name in row.split('`').filter(|word| word.starts_with(PREFIX)) {
                assert!(KNOWN_VARIABLES.contains(&name), "{name}");
                count += 1;
            }
        }
        assert!(count >= 22, "{count} settings");
    }
}

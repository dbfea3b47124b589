//! Variables of the environment that look like settings and are none.

use std::sync::Once;

const PREFIX: &str = "FABRICAST_";

/// Those that this library or the command `fabricast` reads, without the prefix.
const KNOWN: [&str; 25] = [
    "BUDGET_DEVICE",
    "BUDGET_HOST",
    "CONFIG",
    "DEVICE",
    "DIRECTORY",
    "INSECURE",
    "LABEL",
    "LANES",
    "LISTEN",
    "LOG",
    "LOST_AFTER",
    "NODE_NAME",
    "PATIENCE",
    "PEERS",
    "PROVIDER",
    "RENDEZVOUS",
    "SERVICE",
    "SOURCE",
    "TOPIC_DEPTH",
    "TOPIC_LARGEST",
    "TOPIC_LOANS",
    "TOPIC_MEMORY",
    "TOPIC_RELEASE_DEADLINE",
    "TOPIC_RELIABILITY",
    "WORKERS",
];

/// Logs a warning for each variable that is misspelt: once, when a log is there that shows it.
pub(crate) fn warn_of_misspelt() {
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

/// In the order of their names.
fn warnings(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut warnings: Vec<_> = names
        .filter_map(|name| {
            let near = nearest(name.strip_prefix(PREFIX)?)?;
            Some(format!(
                "environment variable {} is ignored: no such setting. The nearest setting is \
                 {PREFIX}{near}",
                name.escape_debug()
            ))
        })
        .collect();
    warnings.sort();
    warnings
}

/// The known name that differs in the fewest letters, if these are few. The name of the group
/// counts for nothing: a setting of topics is often looked for among the others.
fn nearest(name: &str) -> Option<&'static str> {
    if KNOWN.contains(&name) {
        return None;
    }
    let setting = |name: &'static str| name.strip_prefix("TOPIC_").unwrap_or(name);
    let written = name.strip_prefix("TOPIC_").unwrap_or(name);
    let distance = |near: &&'static str| strsim::osa_distance(written, setting(near));
    let near = KNOWN.into_iter().min_by_key(distance)?;
    (distance(&near) <= setting(near).len() / 3).then_some(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_variables_are_told_with_the_nearest_setting() {
        let names = [
            "FABRICAST_TOPIC_DEPHT",
            "FABRICAST_DEPTH",
            "FABRICAST_LABLE",
            "FABRICAST_TOPIC_PATIENCE",
            "FABRICAST_LABEL",
            "FABRICAST_UNRELATED",
            "HOME",
        ];
        let found = warnings(names.into_iter().map(str::to_owned));
        let of = |name: &str, near: &str| {
            format!(
                "environment variable {name} is ignored: no such setting. The nearest setting is \
                 {near}"
            )
        };
        let expected = [
            of("FABRICAST_DEPTH", "FABRICAST_TOPIC_DEPTH"),
            of("FABRICAST_LABLE", "FABRICAST_LABEL"),
            of("FABRICAST_TOPIC_DEPHT", "FABRICAST_TOPIC_DEPTH"),
            of("FABRICAST_TOPIC_PATIENCE", "FABRICAST_PATIENCE"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn all_settings_of_the_command_are_known() {
        let manual = include_str!("../../../docs/operating.md");
        let mut count = 0;
        for row in manual.lines().filter(|line| line.starts_with("| `")) {
            for name in row.split('`').filter_map(|word| word.strip_prefix(PREFIX)) {
                assert!(KNOWN.contains(&name), "{name}");
                count += 1;
            }
        }
        assert!(count >= 22, "{count} settings");
    }
}

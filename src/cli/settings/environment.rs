//! Warnings about environment variables similar to settings.

use transfer::path::DeviceFabric;

use super::{FILE_VARIABLE, TABLE};

const PREFIX: &str = "FABRICAST_";
/// Known variables that are no settings: of the log, of the C library, of agents and of launchers.
const OTHERS: [&str; 5] = [
    "FABRICAST_LOG",
    "FABRICAST_DEVICE",
    DeviceFabric::VARIABLE,
    "FABRICAST_LAUNCHER",
    "FABRICAST_PMIX_LIBRARY",
];

/// The variables of all settings, and that of the file.
pub(crate) fn variables() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|one| one.variable.as_str()).chain([FILE_VARIABLE])
}

/// A warning for each variable with the prefix of settings that is not read by any program.
pub(super) fn warnings(variables: impl Iterator<Item = String>) -> Vec<String> {
    let known = || self::variables().chain(OTHERS);
    let is_unknown = |name: &String| name.starts_with(PREFIX) && known().all(|one| one != name);
    let mut unknown: Vec<_> = variables.filter(is_unknown).collect();
    unknown.sort();
    let warning = |name: &String| {
        let remedy = match pubsub::nearest_variable(name, known()) {
            Some(near) => format!("The nearest setting is {near}"),
            None => "\"fabricast config --help\" lists the settings".to_owned(),
        };
        let name = name.escape_debug();
        format!("environment variable {name} is ignored: unknown setting. {remedy}")
    };
    unknown.iter().map(warning).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_variable_is_reported_with_the_nearest_setting() {
        let names = [
            "FABRICAST_LABEL",
            "HOME",
            "FABRICAST_LOG",
            "FABRICAST_DEVICE",
            "FABRICAST_TOPIC_DEPHT",
            "FABRICAST_TOPIC_DEPT",
            "FABRICAST_DEPTH",
            "FABRICAST_TOPIC_TIMEOUT",
            "FABRICAST_LABLE",
            "FABRICAST_UNRELATED",
        ];
        let found = warnings(names.into_iter().map(str::to_owned));
        let of = |name: &str, remedy: &str| {
            format!("environment variable {name} is ignored: unknown setting. {remedy}")
        };
        let expected = [
            of("FABRICAST_DEPTH", "The nearest setting is FABRICAST_TOPIC_DEPTH"),
            of("FABRICAST_LABLE", "The nearest setting is FABRICAST_LABEL"),
            of("FABRICAST_TOPIC_DEPHT", "The nearest setting is FABRICAST_TOPIC_DEPTH"),
            of("FABRICAST_TOPIC_DEPT", "The nearest setting is FABRICAST_TOPIC_DEPTH"),
            of("FABRICAST_TOPIC_TIMEOUT", "\"fabricast config --help\" lists the settings"),
            of("FABRICAST_UNRELATED", "\"fabricast config --help\" lists the settings"),
        ];
        assert_eq!(found, expected);
    }
}

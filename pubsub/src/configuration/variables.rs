//! Variables of the environment that are similar to those of settings.

use std::fmt;

use transfer::path::DeviceFabric;

use super::OPERATION;
use super::setting::{PREFIX, Setting};
use crate::error::{Error, ErrorKind, Result};

/// Known variables that set no value of [`Settings`](super::Settings): of the command, of the C
/// library, of agents, of the preloaded library and of launchers.
const OTHERS: [&str; 9] = [
    "FABRICAST_CONFIG",
    "FABRICAST_LOG",
    "FABRICAST_DEVICE",
    DeviceFabric::VARIABLE,
    "FABRICAST_HOOK_DESCRIPTORS",
    "FABRICAST_HOOK_LOG",
    "FABRICAST_HOOK_MIN_BYTES",
    "FABRICAST_LAUNCHER",
    "FABRICAST_PMIX_LIBRARY",
];

fn known() -> impl Iterator<Item = &'static str> {
    Setting::all().iter().map(|setting| &*setting.variable).chain(OTHERS)
}

/// A variable that begins with `FABRICAST_` and that nothing reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownVariable {
    name: String,
    nearest: Option<&'static str>,
}

impl UnknownVariable {
    /// All unknown variables of this process, sorted by name.
    #[must_use]
    pub fn all_of_this_process() -> Vec<Self> {
        Self::among(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))
    }

    /// Fails if a variable of this process is misspelt, with the nearest known one.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument).
    pub fn refuse_misspelt() -> Result<()> {
        Self::all_of_this_process().iter().find_map(Self::misspelt).map_or(Ok(()), Err)
    }

    fn among(names: impl Iterator<Item = String>) -> Vec<Self> {
        let names = names.filter(|name| name.starts_with(PREFIX) && known().all(|is| is != name));
        let mut unknown: Vec<_> =
            names.map(|name| Self { nearest: nearest(&name), name }).collect();
        unknown.sort_by(|one, other| one.name.cmp(&other.name));
        unknown
    }

    /// Does its name resemble a known one? Others belong to other programs, for instance to a
    /// Kubernetes service.
    #[must_use]
    pub fn is_misspelt(&self) -> bool {
        self.nearest.is_some()
    }

    fn misspelt(&self) -> Option<Error> {
        let (name, near) = (self.name.escape_debug().to_string(), self.nearest?);
        let detail = format!(
            "{name} is unknown; the nearest variable is {near}. Correct its name, or unset it"
        );
        Some(Error::new(OPERATION, ErrorKind::InvalidArgument, detail).at(name))
    }
}

/// The warning that it is ignored.
impl fmt::Display for UnknownVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.escape_debug();
        write!(f, "environment variable {name} is ignored: unknown setting. ")?;
        match self.nearest {
            Some(near) => write!(f, "The nearest setting is {near}"),
            None => f.write_str("\"fabricast config --help\" lists the settings"),
        }
    }
}

/// The variable that a misspelt name most likely stands for: the known one with the fewest
/// different letters, if these are few. The table's name is ignored, since a setting of topics is
/// often sought among the others.
fn nearest(name: &str) -> Option<&'static str> {
    /// Beyond it a long name is another one: Kubernetes sets `FABRICAST_SERVICE_HOST` for a service
    /// that is called so.
    const MAX_DISTANCE: usize = 4;
    fn setting(name: &str) -> &str {
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        name.strip_prefix("TOPIC_").unwrap_or(name)
    }
    let distance = |near: &str| strsim::osa_distance(setting(name), setting(near));
    let near = known().min_by_key(|near| distance(near))?;
    (distance(near) <= (setting(near).len() / 3).min(MAX_DISTANCE)).then_some(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among(names: &[&str]) -> Vec<UnknownVariable> {
        UnknownVariable::among(names.iter().map(|name| (*name).to_owned()))
    }

    #[test]
    fn unknown_variable_is_reported_with_the_nearest_setting() {
        let found = among(&[
            "FABRICAST_LABEL",
            "HOME",
            "FABRICAST_LOG",
            "FABRICAST_DEVICE",
            "FABRICAST_HOOK_LOG",
            "FABRICAST_TOPIC_DEPHT",
            "FABRICAST_TOPIC_DEPT",
            "FABRICAST_DEPTH",
            "FABRICAST_DEPHT",
            "FABRICAST_TOPIC_TIMEOUT",
            "FABRICAST_TOPIC_SERVICE_TIMEOUT",
            "FABRICAST_LABLE",
            "FABRICAST_UNRELATED",
        ]);
        let of = |name: &str, remedy: &str| {
            format!("environment variable {name} is ignored: unknown setting. {remedy}")
        };
        let near = |name: &str, near: &str| of(name, &format!("The nearest setting is {near}"));
        let list = "\"fabricast config --help\" lists the settings";
        let expected = [
            near("FABRICAST_DEPHT", "FABRICAST_TOPIC_DEPTH"),
            near("FABRICAST_DEPTH", "FABRICAST_TOPIC_DEPTH"),
            near("FABRICAST_LABLE", "FABRICAST_LABEL"),
            near("FABRICAST_TOPIC_DEPHT", "FABRICAST_TOPIC_DEPTH"),
            near("FABRICAST_TOPIC_DEPT", "FABRICAST_TOPIC_DEPTH"),
            near("FABRICAST_TOPIC_SERVICE_TIMEOUT", "FABRICAST_SERVICE_TIMEOUT"),
            of("FABRICAST_TOPIC_TIMEOUT", list),
            of("FABRICAST_UNRELATED", list),
        ];
        let found_lines: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found_lines, expected);
        let misspelt = found.iter().map(UnknownVariable::is_misspelt);
        assert!(misspelt.eq([true, true, true, true, true, true, false, false]));
    }

    #[test]
    fn misspelt_variable_is_rejected_with_the_nearest_known() {
        let check = |names: &[&str]| {
            among(names).iter().find_map(UnknownVariable::misspelt).map_or(Ok(()), Err)
        };
        let unlike = [
            "FABRICAST_SERVICE_HOST",
            "FABRICAST_SERVICE_PORT",
            "FABRICAST_PORT_7700_TCP_ADDR",
            "FABRICAST_GIT_COMMIT",
            "FABRICAST_TEST_DEVICE",
        ];
        let known: Vec<_> = known().collect();
        check(&[&known[..], &unlike, &["HOME", "MY_FABRICAST_DIRECTRY"]].concat()).unwrap();

        let error = check(&["FABRICAST_LABLE", "HOME", "FABRICAST_DIRECTRY"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            error.to_string(),
            "read environment variable FABRICAST_DIRECTRY failed: invalid argument: \
             FABRICAST_DIRECTRY is unknown; the nearest variable is \
             FABRICAST_DIRECTORY. Correct its name, or unset it"
        );
    }

    #[test]
    fn known_variables_are_documented() {
        let page = include_str!("../../../docs/reference/settings.md");
        for name in known() {
            assert!(page.contains(&format!("`{name}`")), "{name} in docs/reference/settings.md");
        }
    }
}

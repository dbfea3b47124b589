//! Environment variables: those of this process, or recorded ones.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use super::error::{Error, ErrorKind, READ, Result};

/// Environment variables that a launcher sets.
///
/// ```
/// use control::launcher::Environment;
/// let environment = Environment::from_pairs([("PMI_RANK", "1"), ("PMI_SIZE", "4")]);
/// assert_eq!(environment.number::<u32>("PMI_RANK")?, Some(1));
/// assert_eq!(environment.text("PMI_FD"), None);
/// # Ok::<(), control::launcher::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The variables of this process. Names and values that are not UTF-8 do not count.
    #[must_use]
    pub fn of_this_process() -> Self {
        let texts = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(texts).collect())
    }

    /// These variables, for tests.
    #[must_use]
    pub fn from_pairs<K: Into<String>, V: Into<String>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }

    /// The value of a variable, unless it is empty.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Does any variable begin with this prefix?
    #[must_use]
    pub fn has_prefix(&self, prefix: &str) -> bool {
        self.0.range(prefix.to_owned()..).next().is_some_and(|(name, _)| name.starts_with(prefix))
    }

    /// The value of a variable as a number.
    ///
    /// # Errors
    /// [`InvalidEnvironment`](ErrorKind::InvalidEnvironment) if it is none.
    pub fn number<T: FromStr<Err: Display>>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|error| {
            let detail = format!("{name}={} is no valid number: {error}", text.escape_debug());
            Error::new(READ, ErrorKind::InvalidEnvironment, detail)
        })
    }

    /// Has Slurm started this process itself, and not an `mpirun` within its job?
    pub(super) fn is_started_by_slurm(&self) -> bool {
        self.text("SLURM_STEP_ID").is_some() && self.text("MPI_LOCALRANKID").is_none()
    }
}

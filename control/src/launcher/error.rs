//! The error type of launchers and their exchange.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// Operations of all launchers.
pub(super) const READ: &str = "read launch environment";
pub(super) const CONNECT: &str = "connect to launcher";
pub(super) const GATHER: &str = "exchange among ranks";

errors::define! {
    /// The kinds of failure that a program can act on.
    pub enum ErrorKind {
        /// The environment describes no job, half of one, or several; the detail names the variables.
        InvalidEnvironment = "invalid environment",
        /// The launcher's library or function is not available.
        Unavailable = "not available",
        /// A rank did not take part before the deadline; the detail names it if it is known.
        DeadlineExceeded = "deadline exceeded",
        /// A rank could not start; the detail is its error.
        RankFailed = "a rank failed",
        /// A rank uses another version.
        VersionMismatch = "version mismatch",
        /// The launcher or a rank sent something that is not allowed.
        Malformed = "malformed",
        /// The launcher closed the connection: the job is ending.
        Closed = "closed",
        /// An argument that is never valid.
        InvalidArgument = "invalid argument",
        /// A lower layer failed; the detail or the cause says how.
        Failed = "failed",
    }

    /// An error: the operation, the launcher, the ranks that caused it, and the cause.
    pub struct Error {
        launcher: Option<String>,
        ranks: Vec<u32>,
        detail: String,
        cause: Option<Arc<dyn StdError + Send + Sync>>,
    }
}

impl Error {
    /// An error of an exchange: for implementations of [`Exchange`](super::Exchange) by others.
    #[must_use]
    pub fn new(operation: &'static str, kind: ErrorKind, detail: impl Into<String>) -> Self {
        let mut error = Self::bare(operation, kind);
        error.0.detail = detail.into();
        error
    }

    /// An error of a lower layer.
    #[must_use]
    pub fn caused_by(
        operation: &'static str,
        kind: ErrorKind,
        cause: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        let mut error = Self::bare(operation, kind);
        error.0.cause = Some(Arc::from(cause.into()));
        error
    }

    /// Names the launcher or its protocol.
    #[must_use]
    pub fn by(mut self, launcher: &str) -> Self {
        self.0.launcher = Some(launcher.to_owned());
        self
    }

    /// Names the ranks that caused it.
    #[must_use]
    pub fn of_ranks(mut self, ranks: impl IntoIterator<Item = u32>) -> Self {
        self.0.ranks = ranks.into_iter().collect();
        self
    }

    /// The ranks that caused it, ascending; empty if they are not known.
    #[must_use]
    pub fn ranks(&self) -> &[u32] {
        &self.0.ranks
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        let subject = inner.launcher.as_ref().map(|launcher| format!("({launcher})"));
        let subject = subject.as_deref();
        errors::write(f, inner.operation, subject, inner.kind.label(), &inner.detail, self.source())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}

/// Ranks in a text: "rank 3", "ranks 1, 4-6 and 9". Long lists are shortened.
pub(super) fn list(ranks: &[u32]) -> String {
    const MOST: usize = 8;
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &rank in ranks {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => parts.push((rank, rank)),
        }
    }
    let omitted = parts.len().saturating_sub(MOST);
    parts.truncate(MOST);
    let mut texts: Vec<_> = parts
        .into_iter()
        .map(|(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}-{last}"),
        })
        .collect();
    if omitted > 0 {
        texts.push("others".to_owned());
    }
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    match texts.split_last() {
        Some((last, [])) => format!("{word} {last}"),
        Some((last, rest)) => format!("{word} {} and {last}", rest.join(", ")),
        None => "no rank".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_in_ranges() {
        assert_eq!(list(&[3]), "rank 3");
        assert_eq!(list(&[1, 2]), "ranks 1, 2");
        assert_eq!(list(&[1, 4, 5, 6, 9]), "ranks 1, 4-6 and 9");
        let many: Vec<_> = (0..100).map(|rank| rank * 2).collect();
        assert_eq!(list(&many), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and others");
    }

    #[test]
    fn error_names_operation_launcher_ranks_and_cause() {
        let error =
            Error::new("exchange among ranks", ErrorKind::DeadlineExceeded, "rank 3 did not come")
                .by("PMI-1")
                .of_ranks([3]);
        let text = "exchange among ranks (PMI-1) failed: deadline exceeded: rank 3 did not come";
        assert_eq!(error.to_string(), text);
        assert_eq!(error.ranks(), [3]);
    }
}

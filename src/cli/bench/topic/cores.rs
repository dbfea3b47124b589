//! Which process runs where.

use crate::cli::exit::{Exit, Failure};
use crate::cli::process::Affinity;

/// Cores that were named: the first is the publisher's, the next ones the readers'. Where there are
/// fewer, readers take turns with those that there are; a single one is everybody's. What is left
/// is for the services of nodes, which carry messages: all of them together. None at all: nobody
/// is confined.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cores<'a> {
    named: &'a [usize],
    readers: usize,
}

impl<'a> Cores<'a> {
    pub(super) fn new(named: Option<&'a Vec<usize>>, readers: u64) -> Self {
        Self { named: named.map_or(&[], Vec::as_slice), readers: readers as usize }
    }

    pub(super) fn publisher(self) -> Option<usize> {
        self.named.first().copied()
    }

    pub(super) fn reader(self, which: u64) -> Option<usize> {
        let own = self.named.get(1..).unwrap_or_default();
        match own.len() {
            0 => self.publisher(),
            count => own.get(which as usize % count).copied(),
        }
    }

    pub(super) fn services(self) -> &'a [usize] {
        self.named.get(1 + self.readers..).unwrap_or_default()
    }

    /// Of the two ends of something that is measured alone; nowhere in particular if they would
    /// have to share one.
    pub(super) fn of_two(self) -> [Option<usize>; 2] {
        match (self.publisher(), self.reader(0)) {
            (Some(one), Some(other)) if one != other => [Some(one), Some(other)],
            _ => [None, None],
        }
    }

    /// Do they exist, and may this process use them?
    pub(super) fn check(self) -> Result<(), Failure> {
        let allowed = Affinity::now()?;
        match self.named.iter().find(|core| !allowed.has(**core)) {
            None => Ok(()),
            Some(core) => {
                let why = format!("--cores: cannot run on core {core}");
                Err(Failure::new(Exit::Usage, why))
            }
        }
    }

    /// What has to be known of it to understand the figures.
    pub(super) fn note(self) -> Option<String> {
        let services = self.services();
        match self.named.len() {
            0 => None,
            1 => Some("publisher and readers share one core".to_owned()),
            count if count < 1 + self.readers => {
                Some(format!("{} readers share {} cores", self.readers, count - 1))
            }
            _ if !services.is_empty() => Some(format!("services have the cores {services:?}")),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_are_shared_and_more_are_the_services() {
        let all = |named: &[usize], readers| {
            let named = named.to_vec();
            let cores = Cores::new(Some(&named), readers);
            let readers: Vec<_> = (0..readers).map(|which| cores.reader(which)).collect();
            (cores.publisher(), readers, cores.services().to_vec(), cores.of_two(), cores.note())
        };
        let (publisher, readers, services, two, note) = all(&[4, 5, 6], 2);
        assert_eq!((publisher, readers), (Some(4), vec![Some(5), Some(6)]));
        assert_eq!((services, two, note), (vec![], [Some(4), Some(5)], None));
        let (publisher, readers, services, two, note) = all(&[4, 5, 6], 5);
        assert_eq!((publisher, two), (Some(4), [Some(4), Some(5)]));
        assert_eq!(readers, [5, 6, 5, 6, 5].map(Some));
        assert_eq!((services, note.as_deref()), (vec![], Some("5 readers share 2 cores")));
        let (publisher, readers, services, two, note) = all(&[4], 2);
        assert_eq!((publisher, readers), (Some(4), vec![Some(4), Some(4)]));
        assert_eq!((services, two), (vec![], [None, None]), "no two ends on one core");
        assert_eq!(note.as_deref(), Some("publisher and readers share one core"));
        let (_, readers, services, _, note) = all(&[4, 5, 6, 7], 1);
        assert_eq!((readers, services), (vec![Some(5)], vec![6, 7]));
        assert_eq!(note.as_deref(), Some("services have the cores [6, 7]"));
        let none = Cores::new(None, 3);
        assert_eq!((none.publisher(), none.reader(2), none.of_two()), (None, None, [None, None]));
        assert!(none.services().is_empty() && none.note().is_none());
    }

    #[test]
    fn a_core_that_there_is_not_is_refused() {
        let named = vec![1_000_000];
        assert!(Cores::new(Some(&named), 1).check().is_err());
        assert!(Cores::new(None, 1).check().is_ok());
    }
}

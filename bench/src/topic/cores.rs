//! Assignment of processes to cores.

use std::str::FromStr;

use crate::exchange::plan::Wait;
use crate::process::Affinity;
use command::exit::{Exit, Failure};
use command::text;

/// With fewer cores none are assigned.
const LEAST: usize = 4;
/// Cores left to the system, where there are at least as many as the second number.
const SYSTEM: (usize, usize) = (2, 16);

/// The cores to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CoreChoice {
    Named(Vec<usize>),
    Automatic,
}

impl FromStr for CoreChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Automatic);
        }
        let of =
            |core: &str| core.parse().map_err(|_| format!("{core:?} is not the number of a core"));
        text.split(',').map(of).collect::<Result<_, _>>().map(Self::Named)
    }
}

/// Load of the nodes' services during the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Services {
    /// They replicate messages to another node.
    Replicate,
    /// Messages bypass them.
    Rest,
}

/// Cores in use: the first for the publisher, the next for readers. With fewer, readers share them;
/// a single one is shared by all. The remaining ones are for the threads of the nodes' services.
/// Without cores no process is pinned.
#[derive(Debug, Clone)]
pub(super) struct Cores {
    named: Vec<usize>,
    readers: usize,
    /// Number of cores of readers.
    own: usize,
    is_automatic: bool,
}

impl Cores {
    /// For a number of readers, and a load of the services.
    ///
    /// # Errors
    /// Cores that do not exist, or that are not allowed for this process.
    pub(super) fn new(
        choice: Option<&CoreChoice>,
        readers: u64,
        services: Services,
    ) -> Result<Self, Failure> {
        let allowed = Affinity::now()?;
        let cores = match choice {
            None => Self::named(&[], readers as usize),
            Some(CoreChoice::Named(named)) => Self::named(named, readers as usize),
            Some(CoreChoice::Automatic) => {
                Self::chosen(&allowed.cores(), readers as usize, services)
            }
        };
        match cores.named.iter().find(|core| !allowed.has(**core)) {
            None => Ok(cores),
            Some(core) => {
                let why = format!("--cores: cannot run on core {core}");
                Err(Failure::new(Exit::Usage, why))
            }
        }
    }

    fn named(named: &[usize], readers: usize) -> Self {
        let own = readers.min(named.len().saturating_sub(1));
        Self { named: named.to_vec(), readers, own, is_automatic: false }
    }

    /// Of the allowed cores at least two thirds are for the services where they replicate messages:
    /// a service has one lane for each four cores. Otherwise one is. Readers share the rest.
    fn chosen(allowed: &[usize], readers: usize, services: Services) -> Self {
        let (left, from) = SYSTEM;
        let usable = if allowed.len() < from { allowed } else { &allowed[left..] };
        let usable = if usable.len() < LEAST { &[] } else { usable };
        let most = match services {
            Services::Replicate => usable.len().saturating_sub(1) / 3,
            Services::Rest => usable.len().saturating_sub(2),
        };
        let own = readers.min(most);
        Self { named: usable.to_vec(), readers, own, is_automatic: true }
    }

    /// All cores.
    pub(super) fn all(&self) -> Option<Vec<usize>> {
        (!self.named.is_empty()).then(|| self.named.clone())
    }

    pub(super) fn publisher(&self) -> Option<usize> {
        self.named.first().copied()
    }

    pub(super) fn reader(&self, which: u64) -> Option<usize> {
        match self.own {
            0 => self.publisher(),
            own => self.named.get(1 + which as usize % own).copied(),
        }
    }

    /// The waiting mode of readers: readers that share automatically assigned cores must block at
    /// some time, since busy-polling delays the other.
    pub(super) fn waiting(&self, requested: Wait) -> Wait {
        let is_shared = self.is_automatic && self.own < self.readers;
        if is_shared && requested == Wait::Poll { Wait::Default } else { requested }
    }

    /// Do all busy-polling processes have their own core? Without pinning, `allowed` cores count.
    pub(super) fn has_core_for_each(&self, everywhere: usize) -> bool {
        match self.named.len() {
            0 => !self.is_automatic && self.readers < everywhere,
            _ => self.own == self.readers,
        }
    }

    pub(super) fn services(&self) -> &[usize] {
        self.named.get(1 + self.own..).unwrap_or_default()
    }

    /// The cores of the two ends of a baseline; not pinned if they would share one.
    pub(super) fn core_pair(&self) -> [Option<usize>; 2] {
        match (self.publisher(), self.reader(0)) {
            (Some(one), Some(other)) if one != other => [Some(one), Some(other)],
            _ => [None, None],
        }
    }

    /// A note that is needed to understand the results.
    pub(super) fn note(&self) -> Option<String> {
        let services = self.services();
        let own = text::count_of(self.own as u64, "core");
        let shared = format!("{} share {own}", text::count_of(self.readers as u64, "reader"));
        let served = format!("services have the cores {services:?}");
        match self.named.len() {
            0 if self.is_automatic => Some("too few cores to assign them".to_owned()),
            0 => None,
            1 => Some("publisher and readers share one core".to_owned()),
            _ if self.own < self.readers && services.is_empty() => Some(shared),
            _ if self.own < self.readers => Some(format!("{shared}; {served}")),
            _ if !services.is_empty() => Some(served),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_cores_are_shared_and_more_are_for_the_services() {
        let all = |named: &[usize], readers: u64| {
            let cores = Cores::named(named, readers as usize);
            let readers: Vec<_> = (0..readers).map(|which| cores.reader(which)).collect();
            (cores.publisher(), readers, cores.services().to_vec(), cores.core_pair(), cores.note())
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
        assert_eq!((services, two), (vec![], [None, None]), "never two ends on one core");
        assert_eq!(note.as_deref(), Some("publisher and readers share one core"));
        let (_, readers, services, _, note) = all(&[4, 5, 6, 7], 1);
        assert_eq!((readers, services), (vec![Some(5)], vec![6, 7]));
        assert_eq!(note.as_deref(), Some("services have the cores [6, 7]"));
        let none = Cores::named(&[], 3);
        assert_eq!(
            (none.publisher(), none.reader(2), none.core_pair()),
            (None, None, [None, None])
        );
        assert!(none.services().is_empty() && none.note().is_none());
    }

    #[test]
    fn services_have_cores_for_lanes_with_many_readers() {
        // For so many cores and readers: the cores of publisher, readers and services, and lanes of
        // these.
        for (count, readers, expected) in [
            (32, 1, (2, 1, 28, 8)),
            (32, 8, (2, 8, 21, 7)),
            (16, 8, (2, 4, 9, 3)),
            (12, 8, (0, 3, 8, 3)),
            (8, 8, (0, 2, 5, 1)),
            (4, 8, (0, 1, 2, 1)),
        ] {
            let all: Vec<_> = (0..count).collect();
            let cores = Cores::chosen(&all, readers, Services::Replicate);
            let mut own: Vec<_> = (0..readers as u64).filter_map(|it| cores.reader(it)).collect();
            own.sort_unstable();
            own.dedup();
            let services = cores.services();
            assert!(own.iter().all(|core| !services.contains(core)), "{count}: {own:?}");
            let lanes = (services.len() * 3 / 8).clamp(1, 8);
            let publisher = cores.publisher().unwrap_or(usize::MAX);
            assert_eq!((publisher, own.len(), services.len(), lanes), expected, "{count} cores");
            let is_shared = own.len() < readers;
            let waiting = if is_shared { Wait::Default } else { Wait::Poll };
            assert_eq!(cores.waiting(Wait::Poll), waiting, "{count} cores");
            assert_eq!(cores.waiting(Wait::Block), Wait::Block);
            assert_eq!(cores.has_core_for_each(1), !is_shared, "{count} cores");
        }
        let few = Cores::chosen(&[3, 4], 8, Services::Replicate);
        assert_eq!(few.waiting(Wait::Poll), Wait::Default);
        assert!(!few.has_core_for_each(9), "no process busy-polls");
        assert_eq!((few.publisher(), few.reader(5), few.all()), (None, None, None));
        assert_eq!(few.note().as_deref(), Some("too few cores to assign them"));
        assert_eq!(Cores::named(&[4, 5], 8).waiting(Wait::Poll), Wait::Poll, "as requested");
    }

    #[test]
    fn readers_have_the_cores_of_idle_services() {
        // For so many cores and readers: the cores of readers and services.
        for (count, readers, expected) in
            [(32, 8, (8, 21)), (32, 32, (28, 1)), (16, 8, (8, 5)), (8, 8, (6, 1)), (4, 1, (1, 2))]
        {
            let all: Vec<_> = (0..count).collect();
            let cores = Cores::chosen(&all, readers, Services::Rest);
            assert_eq!((cores.own, cores.services().len()), expected, "{count}, {readers}");
            assert_eq!(cores.has_core_for_each(1), cores.own == readers, "{count}, {readers}");
        }
        let anywhere = Cores::named(&[], 8);
        assert!(!anywhere.has_core_for_each(8) && anywhere.has_core_for_each(9));
        assert!(Cores::named(&[4, 5, 6], 2).has_core_for_each(1));
        assert!(!Cores::named(&[4, 5], 2).has_core_for_each(32), "among the named cores");
    }

    #[test]
    fn missing_core_is_an_error() {
        let new = |choice: Option<&CoreChoice>| Cores::new(choice, 1, Services::Replicate);
        assert!(new(Some(&CoreChoice::Named(vec![1_000_000]))).is_err());
        assert!(new(Some(&CoreChoice::Automatic)).is_ok() && new(None).is_ok());
        assert_eq!("2,3".parse(), Ok(CoreChoice::Named(vec![2, 3])));
        assert_eq!("auto".parse(), Ok(CoreChoice::Automatic));
        assert!("2,,3".parse::<CoreChoice>().is_err() && "".parse::<CoreChoice>().is_err());
    }
}

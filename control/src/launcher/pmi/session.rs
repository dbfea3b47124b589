//! A rank's place in its job, and its exchanges.

use std::time::{Duration, Instant};

use super::super::environment::Environment;
use super::super::error::{Error, ErrorKind, GATHER, Result, list};
use super::super::exchange::LocalRank;
use super::super::presence::Presence;
use super::client::Client;
use super::failure::Failure;
use super::version::PmiVersion;
use super::{mapping, pieces};

/// Pause between two looks at which ranks have come, while a barrier waits for them.
const LOOK_PAUSE: Duration = Duration::from_millis(100);

/// A connected rank.
#[derive(Debug)]
pub(super) struct Session {
    client: Client,
    local: Option<LocalRank>,
    /// The ranks on this machine, if they are known.
    neighbours: Option<Vec<u32>>,
    /// Number of the next exchange. Keys of the launcher's store are used once.
    sequence: u64,
    /// The mark that this rank has come to the last exchange. It stays after the exchange, so that
    /// ranks with a later deadline see it.
    presence: Option<Presence>,
}

impl Session {
    /// The session of a client that has just been opened.
    pub(super) fn of_client(
        mut client: Client,
        environment: &Environment,
        deadline: Instant,
    ) -> std::result::Result<Self, Failure> {
        let (rank, size) = client.place();
        let mapping = client.mapping(deadline)?;
        let found = mapping.and_then(|mapping| mapping::neighbours(&mapping, rank, size));
        let (local, neighbours) = local_ranks(found, environment, rank, size);
        Ok(Self { client, local, neighbours, sequence: 0, presence: None })
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn local(&self) -> Option<LocalRank> {
        self.local
    }

    pub(super) fn all_gather(
        &mut self,
        own: &[u8],
        timeout: Duration,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let name = self.client.version().name();
        let fail = |failure: Failure| failure.error(GATHER, name, timeout);
        let (rank, size) = self.client.place();
        let sequence = self.sequence;
        self.sequence += 1;
        let key = |rank: u32, piece: usize| format!("fabricast-{sequence}-{rank}-{piece}");
        let mark = format!("{}/{sequence}", self.client.job());
        let presence = self.presence.insert(Presence::mark(&mark, rank));

        for (piece, value) in pieces::split(own, self.client.longest_value()).iter().enumerate() {
            self.client.put(&key(rank, piece), value, deadline).map_err(fail)?;
        }
        let mut wait = Wait::new(self.neighbours.as_deref(), rank, size);
        self.client.enter_barrier(deadline).map_err(fail)?;
        wait.until(deadline, presence, |until| self.client.leave_barrier(until))
            .map_err(|failure| wait.error(failure, name, timeout))?;

        let mut gathered = Vec::new();
        for other in 0..size {
            if other == rank {
                gathered.push(own.to_vec());
                continue;
            }
            // hydra ends the barrier of PMI-2 at once, and waits here for the other ranks.
            let get = |piece| {
                let key = key(other, piece);
                self.client.ask_value(&key, deadline)?;
                wait.until(deadline, presence, |until| self.client.receive_value(&key, until))
            };
            match pieces::join(get) {
                Ok(Some(bytes)) => gathered.push(bytes),
                Ok(None) => {
                    let detail = format!("the launcher sent something else for rank {other}");
                    let error = Error::new(GATHER, ErrorKind::Malformed, detail).by(name);
                    return Err(error.of_ranks([other]));
                }
                Err(failure @ Failure::Refused(_)) => return Err(fail(failure).of_ranks([other])),
                Err(failure) if self.client.version() == PmiVersion::Two => {
                    return Err(wait.error(failure, name, timeout));
                }
                Err(failure) => return Err(fail(failure)),
            }
        }
        Ok(gathered)
    }
}

/// The ranks that are waited for.
#[derive(Debug)]
struct Wait {
    /// Ranks that were not seen on this machine.
    absent: Vec<u32>,
    /// Ranks on other machines.
    remote: Vec<u32>,
    /// Are the machines of the ranks known?
    is_mapped: bool,
}

impl Wait {
    fn new(neighbours: Option<&[u32]>, rank: u32, size: u32) -> Self {
        let others = (0..size).filter(|other| *other != rank);
        match neighbours {
            Some(neighbours) => {
                let (absent, remote) =
                    others.partition(|other| neighbours.binary_search(other).is_ok());
                Self { absent, remote, is_mapped: true }
            }
            None => Self { absent: others.collect(), remote: Vec::new(), is_mapped: false },
        }
    }

    /// Receives, and looks meanwhile which ranks have come. A rank that was seen once has come: it
    /// may miss its own deadline, and end, before this one does.
    fn until<T>(
        &mut self,
        deadline: Instant,
        presence: &Presence,
        mut receive: impl FnMut(Instant) -> std::result::Result<T, Failure>,
    ) -> std::result::Result<T, Failure> {
        loop {
            let now = Instant::now();
            match receive(deadline.min(now + LOOK_PAUSE)) {
                Err(Failure::Deadline) => {
                    self.absent = presence.absent(std::mem::take(&mut self.absent));
                    if Instant::now() >= deadline {
                        return Err(Failure::Deadline);
                    }
                }
                result => return result,
            }
        }
    }

    fn error(&self, failure: Failure, name: &str, timeout: Duration) -> Error {
        match failure {
            Failure::Deadline => self.late(timeout).by(name),
            failure => failure.error(GATHER, name, timeout),
        }
    }

    fn late(&self, timeout: Duration) -> Error {
        const REMEDY: &str = "Check that all ranks call it";
        let late = |detail: String| {
            Error::new(GATHER, ErrorKind::DeadlineExceeded, format!("{detail}. {REMEDY}"))
        };
        let absent = list(&self.absent);
        match (&self.absent[..], &self.remote[..]) {
            ([], []) => {
                late(format!("all ranks came, but one of them did not finish within {timeout:?}"))
            }
            ([], [only]) => late(format!(
                "all ranks of this machine came within {timeout:?}, but rank {only} on another \
                 machine did not"
            ))
            .of_ranks([*only]),
            ([], remote) => late(format!(
                "all ranks of this machine came within {timeout:?}, but one of {} on other \
                 machines did not",
                list(remote)
            )),
            (ranks, _) if self.is_mapped || ranks.len() == 1 => {
                late(format!("{absent} did not come within {timeout:?}")).of_ranks(ranks.to_vec())
            }
            _ => late(format!("one of {absent} did not come within {timeout:?}")),
        }
    }
}

/// The place among the ranks of this machine, and these ranks: by the launcher's mapping if it
/// agrees with the environment. Slurm's is wrong for arbitrary distributions.
fn local_ranks(
    mapping: Option<Vec<u32>>,
    environment: &Environment,
    rank: u32,
    size: u32,
) -> (Option<LocalRank>, Option<Vec<u32>>) {
    let number = |name| environment.number::<u32>(name).ok().flatten();
    let variable =
        if environment.is_started_by_slurm() { "SLURM_LOCALID" } else { "MPI_LOCALRANKID" };
    let (local_rank, local_size) = (number(variable), number("MPI_LOCALNRANKS"));
    if let Some(ranks) = mapping {
        let at = ranks.binary_search(&rank).unwrap_or_default() as u32;
        let local = LocalRank { rank: at, size: ranks.len() as u32 };
        let agrees = local_rank.is_none_or(|it| it == local.rank)
            && local_size.is_none_or(|it| it == local.size);
        if agrees {
            return (Some(local), Some(ranks));
        }
    }
    let local = match (local_rank, local_size) {
        (Some(rank), Some(size)) if rank < size => Some(LocalRank { rank, size }),
        _ => None,
    };
    let ranks = match local {
        Some(local) if local.size == size => Some((0..size).collect()),
        Some(LocalRank { size: 1, .. }) => Some(vec![rank]),
        _ => None,
    };
    (local, ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn late(neighbours: Option<&[u32]>, seen: &[u32]) -> Error {
        let mut wait = Wait::new(neighbours, 0, 8);
        wait.absent.retain(|rank| !seen.contains(rank));
        wait.error(Failure::Deadline, "PMI-1", Duration::from_secs(30))
    }

    /// The ranks of this machine, those that were seen, the error, and its ranks.
    type Case<'a> = (Option<&'a [u32]>, &'a [u32], &'a str, &'a [u32]);

    #[test]
    fn error_of_a_missed_barrier_names_the_ranks() {
        let all: Vec<u32> = (0..8).collect();
        let half = Some(&[0, 1, 2, 3][..]);
        let remedy = ". Check that all ranks call it";
        let cases: [Case<'_>; 7] = [
            (half, &[1, 2], "rank 3 did not come within 30s", &[3]),
            (half, &[2], "ranks 1 and 3 did not come within 30s", &[1, 3]),
            (
                half,
                &[1, 2, 3],
                "all ranks of this machine came within 30s, but one of ranks 4-7 on other \
                 machines did not",
                &[],
            ),
            (
                Some(&all[..7]),
                &all,
                "all ranks of this machine came within 30s, but rank 7 on another machine did not",
                &[7],
            ),
            (Some(&all), &all, "all ranks came, but one of them did not finish within 30s", &[]),
            (None, &[1, 2, 3], "one of ranks 4-7 did not come within 30s", &[]),
            (None, &all[..7], "rank 7 did not come within 30s", &[7]),
        ];
        for (neighbours, seen, expected, ranks) in cases {
            let error = late(neighbours, seen);
            let text = "exchange among ranks (PMI-1) failed: deadline exceeded: ";
            assert_eq!(error.to_string(), format!("{text}{expected}{remedy}"));
            assert_eq!(error.ranks(), ranks);
        }
    }

    #[test]
    fn mapping_counts_if_it_agrees_with_the_environment() {
        let hydra = |rank: &str, size: &str| {
            Environment::from_pairs([("MPI_LOCALRANKID", rank), ("MPI_LOCALNRANKS", size)])
        };
        let local = |rank, size| Some(LocalRank { rank, size });
        let nothing = Environment::default();
        let mapped = Some(vec![2, 3]);
        let agreed = (local(1, 2), mapped.clone());
        assert_eq!(local_ranks(mapped.clone(), &nothing, 3, 4), agreed);
        assert_eq!(local_ranks(mapped.clone(), &hydra("1", "2"), 3, 4), agreed);
        assert_eq!(local_ranks(mapped.clone(), &hydra("1", "3"), 3, 4), (local(1, 3), None));
        let all = Some(vec![0, 1, 2, 3]);
        assert_eq!(local_ranks(mapped.clone(), &hydra("3", "4"), 3, 4), (local(3, 4), all));
        assert_eq!(local_ranks(mapped, &hydra("0", "1"), 3, 4), (local(0, 1), Some(vec![3])));
        assert_eq!(local_ranks(None, &nothing, 3, 4), (None, None));
        assert_eq!(local_ranks(None, &hydra("2", "2"), 3, 4), (None, None));
        // Slurm with an arbitrary distribution: it maps each rank to a machine of its own.
        let slurm = Environment::from_pairs([("SLURM_STEP_ID", "0"), ("SLURM_LOCALID", "1")]);
        assert_eq!(local_ranks(Some(vec![3]), &slurm, 3, 4), (None, None));
    }
}

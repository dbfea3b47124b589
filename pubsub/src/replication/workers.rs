//! The workers of a service: their number, and which one serves which topic.

use std::collections::HashSet;
use std::net::IpAddr;

use super::worker::{TopicKey, Worker, WorkerOptions};
use crate::error::Result;

/// Several workers, not more than there are cores; each topic belongs to one of them. The first one
/// has all lanes, and so the topics with large messages, which do not delay the others.
#[derive(Debug)]
pub struct Workers {
    all: Vec<Worker>,
    /// Topics of the first worker, since their messages may use several lanes.
    large: HashSet<TopicKey>,
}

impl Workers {
    /// Default number of workers for a number of cores: one sends more than half a million small
    /// messages a second, and costs nothing while it sleeps.
    pub fn default_count(cores: usize) -> usize {
        (cores / 8).clamp(1, 4)
    }

    /// Starts workers, limited by the number of cores; 0: the [default](Self::default_count).
    pub fn start(count: usize, options: &WorkerOptions, local: IpAddr) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = match count {
            0 => Self::default_count(cores),
            count => count.min(cores),
        };
        let start = |number| {
            let lanes = if number == 0 { options.lanes } else { 1 };
            Worker::start_among(WorkerOptions { lanes, ..options.clone() }, local, count)
        };
        let all = (0..count).map(start).collect::<Result<_>>()?;
        Ok(Self { all, large: HashSet::new() })
    }

    /// Assigns a new topic to a worker, by the length of its longest message.
    pub fn assign(&mut self, key: TopicKey, largest: u64) {
        match largest >= super::transport::MIN_STRIPED_LENGTH {
            true => self.large.insert(key),
            false => self.large.remove(&key),
        };
    }

    /// The worker of a topic.
    pub fn of(&self, key: TopicKey) -> &Worker {
        let index = if self.large.contains(&key) { 0 } else { key.0 % self.all.len() as u64 };
        &self.all[index as usize]
    }

    /// All workers.
    pub fn all(&self) -> impl Iterator<Item = &Worker> {
        self.all.iter()
    }
}

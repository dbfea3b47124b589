//! Which ranks have not called an exchange: the fence itself does not say that.
//!
//! Each rank's key is asked for. Of ranks on this machine the server knows at once whether they
//! have committed it. For the others it asks the servers there, which answer when the key is
//! committed, so no answer means that it is not.

use std::ffi::CStr;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use super::abi::{self, Info};
use super::library::Event;
use super::process::Job;
use crate::launcher::bounded_call;

/// Larger jobs ask for the ranks of their machine only.
const MAX_ASKED: u32 = 1024;
/// How often ranks are asked for again that had not committed their key.
const ROUNDS: u32 = 4;
/// A key that no rank commits: its answer shows that the server answers.
const NO_KEY: &CStr = c"fabricast.none";

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The fence ended with this status.
    Fence(i32),
    /// These ranks have not called; empty if it is not known which.
    Absent(Vec<u32>),
    /// The server does not answer.
    Unanswered,
}

/// What is known about a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Nothing, and it is not asked for.
    Nothing,
    Asked,
    /// The rank has not committed its key.
    No,
    /// The rank has committed its key.
    Yes,
}

/// Questions for the keys of all ranks.
pub(super) struct Survey<'a> {
    job: &'a Job,
    key: &'a CStr,
    events: &'a Sender<Event>,
    /// By rank. That of this rank tells whether the server answers.
    known: Vec<Known>,
}

impl<'a> Survey<'a> {
    pub(super) fn new(job: &'a Job, key: &'a CStr, events: &'a Sender<Event>) -> Self {
        let is_small = job.size <= MAX_ASKED;
        let initial = |rank| match is_small || job.local_ranks.binary_search(&rank).is_ok() {
            true => Known::No,
            false => Known::Nothing,
        };
        let mut known: Vec<_> = (0..job.size).map(initial).collect();
        known[job.own.rank as usize] = Known::No;
        Self { job, key, events, known }
    }

    /// Asks until the fence ends, or until the deadline.
    pub(super) fn until_fence(&mut self, events: &Receiver<Event>, deadline: Instant) -> Outcome {
        let round = bounded_call::left(deadline) / ROUNDS;
        loop {
            self.ask(bounded_call::left(deadline));
            let end = deadline.min(Instant::now() + round);
            // The rest of time may be too short for another answer.
            let is_last = bounded_call::left(deadline) <= round + round / 2;
            let end = if is_last { deadline } else { end };
            while let Ok(event) = events.recv_timeout(bounded_call::left(end)) {
                if let Some(status) = self.note(event) {
                    return Outcome::Fence(status);
                }
            }
            if is_last {
                return self.outcome();
            }
        }
    }

    /// Asks once, after the end of the fence.
    pub(super) fn now(&mut self, events: &Receiver<Event>, deadline: Instant) -> Outcome {
        self.known.iter_mut().filter(|it| **it == Known::Asked).for_each(|it| *it = Known::No);
        self.ask(bounded_call::left(deadline));
        while self.known.contains(&Known::Asked) {
            match events.recv_timeout(bounded_call::left(deadline)) {
                Ok(event) => drop(self.note(event)),
                Err(_) => break,
            }
        }
        self.outcome()
    }

    /// Asks for the ranks that are not known to have called.
    fn ask(&mut self, time: Duration) {
        let seconds = time.as_secs().saturating_add(1).try_into().unwrap_or(i32::MAX);
        let own = self.job.own.rank;
        for rank in 0..self.job.size {
            let known = &mut self.known[rank as usize];
            if *known != Known::No {
                continue;
            }
            let is_local = self.job.local_ranks.binary_search(&rank).is_ok() || rank == own;
            let option = match is_local {
                true => Info::flag(abi::IMMEDIATE),
                // With the other option the server would answer without asking.
                false => Info::number(abi::TIMEOUT_SECONDS, seconds),
            };
            let key = if rank == own { NO_KEY } else { self.key };
            let process = self.job.own.with_rank(rank);
            if self.job.library.ask(&process, key, option, self.events).is_ok() {
                *known = Known::Asked;
            }
        }
    }

    /// Takes an answer; returns the status of the fence if that is what ended.
    fn note(&mut self, event: Event) -> Option<i32> {
        match event {
            Event::Fence(status) => return Some(status),
            Event::Answer { rank, status } => {
                let is_own = rank == self.job.own.rank;
                let known = if is_own || status == abi::SUCCESS { Known::Yes } else { Known::No };
                if let Some(entry) = self.known.get_mut(rank as usize) {
                    *entry = known;
                }
            }
        }
        None
    }

    fn outcome(&self) -> Outcome {
        if self.known[self.job.own.rank as usize] != Known::Yes {
            return Outcome::Unanswered;
        }
        let is_absent = |rank: &u32| matches!(self.known[*rank as usize], Known::No | Known::Asked);
        Outcome::Absent((0..self.job.size).filter(is_absent).collect())
    }
}

//! The result of a phase, and its check against the bounds.

use std::time::Duration;

use crate::logs::Logged;
use crate::outcome::Outcome;
use crate::phases::{Cause, DocumentedEffect, Phase};
use crate::topics::RELIABLE;
use crate::window::Counts;

/// Share of the messages of the first phase that a reader must get.
const MIN_RATE: f64 = 0.95;
const MAX_PAUSE: Duration = Duration::from_millis(2500);
/// A second is starved if it has less than this share of the usual messages.
const STARVED: f64 = 0.1;
/// Starved seconds in a row: single messages do not end a pause.
const MAX_STARVED: usize = MAX_PAUSE.as_secs() as usize;
/// Lines about actions of the node's own user, which are not limited: one for each action.
const CHANGES: [&str; 4] =
    ["a process joined", "a process left", "a topic was created", "a topic was removed"];
/// Lines with one message that a process may always log in a phase. Longer phases allow one a second.
const MIN_LOG_BOUND: u64 = 5;

/// The result of a phase.
#[derive(Debug, Clone)]
pub struct PhaseResult {
    pub phase: Phase,
    /// Counts of each reader and topic during the attack.
    pub during: Vec<Vec<Counts>>,
    /// Counts during the recovery after it.
    pub after: Vec<Vec<Counts>>,
    /// Log of each process, including the recovery.
    pub logged: Vec<(String, Logged)>,
    pub outcome: Outcome,
    /// Descriptors of the service of node 1: before, maximum, and after.
    pub descriptors: [usize; 3],
    /// Duration of attack and recovery.
    pub elapsed: Duration,
}

/// Messages of a reader and a topic, relative to the first phase.
#[derive(Debug, Clone)]
pub struct Flow {
    pub node: usize,
    pub topic: String,
    pub rate: f64,
    pub pause: Duration,
    pub min_per_second: u64,
    /// Starved seconds in a row.
    pub starved: usize,
    pub missed: u64,
    pub evictions: u64,
    /// Duration of the attack, without the recovery.
    pub time: Duration,
}

impl PhaseResult {
    /// The flow of each reader and topic.
    pub fn flows(&self, baseline: &Self) -> Vec<Flow> {
        let mut flows = Vec::new();
        for (reader, topics) in self.during.iter().enumerate() {
            for (topic, during) in topics.iter().enumerate() {
                let after = &self.after[reader][topic];
                let usual = baseline.during[reader][topic].rate();
                flows.push(Flow {
                    node: reader + 1,
                    topic: during.topic.clone(),
                    rate: during.rate() / usual,
                    pause: during.longest.max(after.longest),
                    min_per_second: during.min_per_second(),
                    starved: during.seconds_below((STARVED * usual) as u64),
                    missed: during.missed + after.missed,
                    evictions: during.evictions + after.evictions,
                    time: during.elapsed,
                });
            }
        }
        flows
    }

    /// Lines of the services.
    pub fn of_services(&self) -> Logged {
        self.logged_by(|name| name.starts_with("service"))
    }

    /// Lines of all other processes.
    pub fn of_others(&self) -> Logged {
        self.logged_by(|name| !name.starts_with("service"))
    }

    fn logged_by(&self, filter: impl Fn(&str) -> bool) -> Logged {
        let mut all = Logged::default();
        for (_, logged) in self.logged.iter().filter(|(name, _)| filter(name)) {
            all.merge(logged);
        }
        all
    }

    /// The message that one process logged most often.
    pub fn most_frequent(&self) -> (u64, &str, &str) {
        let messages = self.logged.iter().map(|(name, logged)| {
            let (count, message) = logged.most_frequent();
            (count, name.as_str(), message)
        });
        messages.max_by_key(|(count, ..)| *count).unwrap_or((0, "", ""))
    }

    /// Lines with one message that a process may log in the phase.
    pub fn max_allowed(&self) -> u64 {
        self.elapsed.as_secs().max(MIN_LOG_BOUND)
    }

    /// All violated bounds.
    pub fn faults(&self, baseline: &Self) -> Vec<String> {
        let mut faults: Vec<String> =
            self.flows(baseline).iter().flat_map(|flow| self.faults_of(flow)).collect();
        for (name, logged) in &self.logged {
            for (message, count) in logged.messages() {
                let is_change = CHANGES.iter().any(|change| message.contains(change));
                if count > self.max_allowed() && !is_change {
                    let bound = self.max_allowed();
                    faults.push(format!("{name} logged {count} times, limit {bound}: {message}"));
                }
            }
        }
        faults.extend(self.outcome.fault.clone());
        if let Cause::Logged(words) = self.phase.cause
            && self.outcome.refused > 0
            && !self.of_services().has_one_of(words)
        {
            let refused = self.outcome.refused;
            faults.push(format!("no service logged a cause of {refused} refusals: {words:?}"));
        }
        faults
    }

    fn faults_of(&self, flow: &Flow) -> Vec<String> {
        let (name, mut faults) = (format!("{} on node {}", flow.topic, flow.node), Vec::new());
        // The publisher is on node 1, too: only node 2 needs the session.
        if self.phase.documented == DocumentedEffect::Takeover && flow.node == 2 {
            return faults;
        }
        // The other topic drops the messages of a pause.
        let min_rate = match self.phase.documented {
            DocumentedEffect::OnePause => {
                let share = MAX_PAUSE.as_secs_f64() / flow.time.as_secs_f64();
                MIN_RATE * (1.0 - share.min(1.0))
            }
            _ => MIN_RATE,
        };
        if flow.rate < min_rate {
            let (percent, bound) = (100.0 * flow.rate, 100.0 * min_rate);
            faults.push(format!("{name}: {percent:.1} % of the messages, minimum {bound:.0} %"));
        }
        if flow.pause > MAX_PAUSE {
            faults.push(format!("{name}: no message for {:?}, limit {MAX_PAUSE:?}", flow.pause));
        }
        if flow.starved > MAX_STARVED {
            let (seconds, percent) = (flow.starved, 100.0 * STARVED);
            faults.push(format!(
                "{name}: {seconds} s in a row with less than {percent} % of the messages, limit \
                 {MAX_STARVED} s"
            ));
        }
        if flow.topic == RELIABLE && flow.missed > 0 {
            faults.push(format!("{name}: {} messages missed", flow.missed));
        }
        if flow.evictions > 0 {
            faults.push(format!("{name}: evicted {} times", flow.evictions));
        }
        faults
    }
}

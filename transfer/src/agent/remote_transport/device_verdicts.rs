//! Direct access of a fabric to device memory: what is known about it, and the requests for it.
//!
//! A verdict is about two kinds of memory and one link, and is kept as long as the link: another
//! agent may use another network card, another libfabric, or other settings.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use fabric::RemoteMemory;

use super::{Link, LinkCounts, RemoteTransport};
use crate::device_memory::{LocalEnd, MemoryEnd};
use crate::error::ErrorKind;
use crate::path::{DeviceFabric, Fabric, Probe, Registration};
use crate::rail::{DirectOutcome, DirectRequest, PROBE_TIMEOUT};
use crate::region::RegionDescriptor;
use crate::remaining;

/// The longest wait for a probe, which may come after those of other initiators.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A rail reports a late probe within this time.
const RAIL_GRACE: Duration = Duration::from_millis(500);
/// A probe that could not be finished, on a busy machine or without memory, is made again after
/// this time, so that not every join waits for it.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Two kinds of memory: local and remote.
type Ends = (MemoryEnd, MemoryEnd);

/// The outcome of a probe of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Passed,
    /// Neither side asked for a probe.
    Skipped,
    Failed(String),
    /// The probe could not be finished. After this time it is made again.
    Inconclusive(String, Instant),
}

/// What is known about device memory of a link.
#[derive(Debug, Default)]
pub(super) struct Verdicts(HashMap<Ends, Verdict>);

impl Verdicts {
    fn of(&self, ends: Ends, now: Instant) -> Option<&Verdict> {
        self.0
            .get(&ends)
            .filter(|verdict| !matches!(verdict, Verdict::Inconclusive(_, until) if now >= *until))
    }

    fn has_passed(&self, ends: Ends) -> bool {
        self.0.get(&ends) == Some(&Verdict::Passed)
    }
}

/// The keys of a peer's device memory by link; None for host memory, whose keys are in the
/// descriptor. Links without an entry stage device memory.
#[derive(Debug, Default)]
pub(in crate::agent) struct DirectKeys(HashMap<u32, Option<RemoteMemory>>);

impl DirectKeys {
    pub(super) fn of(&self, link: u32) -> Option<&Option<RemoteMemory>> {
        self.0.get(&link)
    }
}

/// The answer to a request for direct access between two regions.
#[derive(Debug)]
pub(in crate::agent) enum DirectAccess {
    Granted(DirectKeys, Probe),
    /// The peer does not register its memory.
    Refused(String),
    /// The probe failed.
    Failed(String),
}

/// Requests that a caller waits for.
#[derive(Debug, Default)]
pub(super) struct AwaitedRequests {
    region: u64,
    outcomes: BTreeMap<u32, Option<DirectOutcome>>,
}

impl AwaitedRequests {
    pub(super) fn answered(&mut self, link: u32, region: u64, outcome: DirectOutcome) {
        // No caller may be waiting for it any more.
        if region == self.region
            && let Some(answer) = self.outcomes.get_mut(&link)
        {
            answer.get_or_insert(outcome);
        }
    }

    /// The rail of these links has ended.
    pub(super) fn lost(&mut self, links: &[u32], cause: &str) {
        for (_, answer) in self.outcomes.iter_mut().filter(|(link, _)| links.contains(link)) {
            answer.get_or_insert_with(|| DirectOutcome::Lost { cause: cause.to_owned() });
        }
    }

    /// Is an answer of one of these links missing?
    pub(super) fn waits_for(&self, is_one: impl Fn(u32) -> bool) -> bool {
        self.outcomes.iter().any(|(link, answer)| answer.is_none() && is_one(*link))
    }
}

/// Requests for direct access in flight.
#[derive(Debug)]
pub(in crate::agent) struct Requesting {
    peer: u32,
    ends: Ends,
    region: u64,
    /// Does a probe have all of its time, so that one that is late counts for a while?
    has_full_time: bool,
    until: Instant,
}

impl Requesting {
    /// All answers are there by then, unless a rail hangs.
    pub(in crate::agent) fn until(&self) -> Instant {
        self.until
    }
}

impl RemoteTransport {
    /// Adds what is known about transfers between two ends to the facts of a fabric.
    pub(in crate::agent) fn with_verdicts(
        &self,
        mut fabric: Fabric,
        peer: u32,
        ends: (Option<MemoryEnd>, Option<MemoryEnd>),
        region: Option<u64>,
    ) -> Fabric {
        let Fabric::Connected { remote, probe, .. } = &mut fabric else { return fabric };
        let is_of_host = ends == (Some(MemoryEnd::Host), Some(MemoryEnd::Host));
        let refused = self.peers.get(&peer).map(|peer| &peer.refused_regions);
        let refused = refused.filter(|_| !is_of_host);
        let cause = refused.zip(region).and_then(|(refused, region)| refused.get(&region));
        if let (Some(cause), Registration::Works) = (cause, &remote) {
            *remote = Registration::Refused { cause: cause.clone() };
        }
        *probe = match ends {
            (Some(MemoryEnd::Host), Some(MemoryEnd::Host)) => Probe::NotNeeded,
            (Some(local), Some(remote)) => self.verdict(peer, (local, remote)),
            _ => Probe::NotMade,
        };
        fabric
    }

    /// The verdict of all links to a peer that are up.
    fn verdict(&self, peer: u32, ends: Ends) -> Probe {
        let links = self.links_to(peer).iter().filter_map(|link| self.links.get(link));
        let (mut found, now) = (Probe::NotMade, Instant::now());
        for link in links.filter(|link| link.is_up()) {
            match link.verdicts.of(ends, now) {
                Some(Verdict::Failed(cause) | Verdict::Inconclusive(cause, _)) => {
                    return Probe::Failed { cause: cause.clone() };
                }
                Some(Verdict::Passed) if found != Probe::Skipped => found = Probe::Passed,
                Some(_) => found = Probe::Skipped,
                None => return Probe::NotMade,
            }
        }
        found
    }

    /// Requests direct access to a region, which is open, by all links that are up.
    pub(in crate::agent) fn request_direct(
        &mut self,
        peer: u32,
        local: &LocalEnd,
        remote: &RegionDescriptor,
        remote_end: MemoryEnd,
        end: Instant,
    ) -> Requesting {
        let (region, ends) = ((remote.number, remote.ticket), (local.end(), remote_end));
        let now = Instant::now();
        // Staging the regions needs time, too.
        let most = remaining(end) / 2;
        let until = now + ANSWER_TIMEOUT.min(most);
        self.direct_requests = AwaitedRequests { region: region.0, outcomes: BTreeMap::new() };
        for number in self.links_to(peer).to_vec() {
            let is_open = |link: &&Link| link.is_up() && link.regions.get(&region.0) == Some(&true);
            let Some(link) = self.links.get(&number).filter(is_open) else { continue };
            let is_forced =
                self.rails[link.rail].handle.device_facts().setting() == DeviceFabric::On;
            let probes = !is_forced && !link.verdicts.has_passed(ends);
            self.direct_requests.outcomes.insert(number, None);
            let wanted = DirectRequest::new(region, local.clone(), probes, until);
            self.send_command(number, move |driver| driver.request_direct(number, wanted));
        }
        let has_full_time = most >= PROBE_TIMEOUT;
        let until = end.min(until + RAIL_GRACE);
        Requesting { peer, ends, region: region.0, has_full_time, until }
    }

    /// Links that have not answered. None counts as up, so that the wait is for all of them.
    pub(in crate::agent) fn direct_counts(&self) -> LinkCounts {
        (self.direct_requests.outcomes.values().filter(|outcome| outcome.is_none()).count(), 0)
    }

    /// Ends the wait for the answers. All links have to be granted access: bytes of a transfer are
    /// split among them.
    pub(in crate::agent) fn finish_direct(&mut self, requesting: Requesting) -> DirectAccess {
        let Requesting { peer, ends, region, has_full_time, .. } = requesting;
        let mut keys = DirectKeys::default();
        let (mut failure, mut refusal, mut lost) = (None, None, None);
        for (number, outcome) in std::mem::take(&mut self.direct_requests.outcomes) {
            let Some(link) = self.links.get_mut(&number) else { continue };
            let rail = &self.rails[link.rail];
            let late =
                || DirectOutcome::Lost { cause: "the peer did not answer in time".to_owned() };
            let verdict = match outcome.unwrap_or_else(late) {
                DirectOutcome::Granted { memory, is_probed } => {
                    keys.0.insert(number, memory);
                    let is_passed = is_probed || link.verdicts.has_passed(ends);
                    let early = rail.domain().capabilities().completes_device_copies_early();
                    match is_passed {
                        true if early => Verdict::Failed(format!(
                            "it passed now, but {} is known to complete copies of devices before \
                             they are done",
                            rail.provider()
                        )),
                        true => Verdict::Passed,
                        false => Verdict::Skipped,
                    }
                }
                DirectOutcome::Failed { cause, is_final: true } => Verdict::Failed(cause),
                DirectOutcome::Refused { kind: ErrorKind::NoPath, cause } => {
                    if let Some(peer) = self.peers.get_mut(&peer) {
                        peer.refused_regions.insert(region, cause.clone());
                    }
                    refusal.get_or_insert(cause);
                    continue;
                }
                // They say nothing about the next request.
                DirectOutcome::Refused {
                    kind: ErrorKind::Stale | ErrorKind::Denied | ErrorKind::TooMany,
                    cause,
                }
                | DirectOutcome::Lost { cause } => {
                    lost.get_or_insert(cause);
                    continue;
                }
                DirectOutcome::Failed { cause, .. } if !has_full_time => {
                    lost.get_or_insert(cause);
                    continue;
                }
                DirectOutcome::Failed { cause, .. } | DirectOutcome::Refused { cause, .. } => {
                    Verdict::Inconclusive(cause, Instant::now() + RETRY_AFTER)
                }
            };
            if let Verdict::Failed(cause) | Verdict::Inconclusive(cause, _) = &verdict {
                tracing::info!(
                    peer = link.label,
                    provider = rail.provider(),
                    cause,
                    "probe failed"
                );
                failure.get_or_insert_with(|| cause.clone());
            }
            link.verdicts.0.insert(ends, verdict);
        }
        if let Some(cause) = failure {
            return DirectAccess::Failed(cause);
        }
        if let Some(cause) = refusal {
            return DirectAccess::Refused(cause);
        }
        if let Some(cause) = lost {
            return DirectAccess::Failed(cause);
        }
        match self.verdict(peer, ends) {
            Probe::Failed { cause } => DirectAccess::Failed(cause),
            Probe::NotMade | Probe::NotNeeded => {
                DirectAccess::Failed("a link to the peer was lost meanwhile".to_owned())
            }
            probe @ (Probe::Passed | Probe::Skipped) => DirectAccess::Granted(keys, probe),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inconclusive_probes_are_made_again_and_others_are_not() {
        let (ends, now) = ((MemoryEnd::Host, MemoryEnd::Host), Instant::now());
        let mut verdicts = Verdicts::default();
        assert_eq!(verdicts.of(ends, now), None);
        let late = Verdict::Inconclusive("late".to_owned(), now + RETRY_AFTER);
        for (verdict, is_kept) in [
            (late, false),
            (Verdict::Failed("8 bytes arrived late".to_owned()), true),
            (Verdict::Passed, true),
            (Verdict::Skipped, true),
        ] {
            verdicts.0.insert(ends, verdict.clone());
            assert_eq!(verdicts.of(ends, now), Some(&verdict));
            let later = verdicts.of(ends, now + RETRY_AFTER);
            assert_eq!(later.is_some(), is_kept, "{verdict:?}");
            assert_eq!(verdicts.has_passed(ends), verdict == Verdict::Passed);
        }
    }
}

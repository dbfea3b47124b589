//! Connecting to peers by rails, and opening their regions: each begins, the agent waits and polls
//! meanwhile, and then it is finished.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::device_verdicts::{DirectKeys, Verdicts};
use super::remote_sessions::LostHalf;
use super::route_lane::RouteLane;
use super::{CONNECT, JOIN, Link, LinkCounts, LinkState, RemoteTransport};
use crate::agent::AgentCard;
use crate::agent::event_queue::EventQueue;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::rail::{LinkTarget, RemoteSide};
use crate::region::{RegionDescriptor, RegisteredRegion};
use crate::remaining;
use crate::share::random;

const NO_ANSWER: &str = "it does not answer over the fabric";

#[derive(Debug)]
pub(in crate::agent) struct Connecting {
    peer: u32,
    links: Vec<u32>,
    is_first: bool,
}

/// A region that is being opened by the lanes of a route.
#[derive(Debug)]
pub(in crate::agent) struct Opening {
    lanes: Vec<RouteLane>,
    region: (u64, u64),
    /// Links that did not know the region.
    new: Vec<u32>,
    may_stage: bool,
}

impl RemoteTransport {
    /// Starts to connect to a peer by its rails, unless one is up already. Rails that fail now are
    /// retried by their threads, if any rail is up.
    pub(in crate::agent) fn begin_connect(
        &mut self,
        peer: u32,
        card: &AgentCard,
        end: Instant,
    ) -> Result<Option<Connecting>> {
        if self.is_connected(peer) {
            return Ok(None);
        }
        let is_first = self.links_to(peer).is_empty();
        if is_first {
            self.make_links(peer, card)?;
        }
        let links = self.links_to(peer).to_vec();
        let timeout = remaining(end);
        for number in links.iter().copied() {
            let Some(link) = self.links.get_mut(&number) else { continue };
            (link.state, link.has_waiter) = (LinkState::Connecting, true);
            let target = link.target.clone();
            self.send_command(number, move |driver| driver.connect(number, target, timeout));
        }
        Ok(Some(Connecting { peer, links, is_first }))
    }

    pub(in crate::agent) fn connect_counts(&self, connecting: &Connecting) -> LinkCounts {
        let links = &connecting.links;
        let states = || links.iter().filter_map(|link| Some(&self.links.get(link)?.state));
        let open = states().filter(|state| matches!(state, LinkState::Connecting)).count();
        (open, states().filter(|state| matches!(state, LinkState::Up)).count())
    }

    fn make_links(&mut self, peer: u32, card: &AgentCard) -> Result<()> {
        let connection_id = u64::from_le_bytes(random(CONNECT)?);
        let mut links = Vec::new();
        for (rail, remote_fabric) in self.matching_fabrics(card) {
            let target = LinkTarget {
                identity: card.identity,
                address: card.fabrics[remote_fabric].address.clone(),
                connection_id,
            };
            let link = Link {
                rail,
                remote_fabric,
                target,
                label: card.label.clone(),
                state: LinkState::Connecting,
                has_waiter: true,
                regions: HashMap::new(),
                verdicts: Verdicts::default(),
            };
            let number = self.next_link;
            self.next_link += 1;
            self.links.insert(number, link);
            links.push(number);
        }
        self.peers.entry(peer).or_default().links = links;
        Ok(())
    }

    /// Ends the wait for links. If one of them is up, the others are reported as lost.
    pub(in crate::agent) fn finish_connect(
        &mut self,
        Connecting { peer, links, is_first }: Connecting,
        (open, good): LinkCounts,
        events: &mut EventQueue,
    ) -> Result<()> {
        let mut failure = None;
        for number in &links {
            let Some(link) = self.links.get_mut(number) else { continue };
            link.has_waiter = false;
            let LinkState::Down(error, departure) = &link.state else { continue };
            let (error, departure) = (Arc::clone(error), *departure);
            if good > 0 {
                let (half, peer) = (LostHalf::Link(*number), link.identity_and_label());
                self.remote_sessions.half_lost(link.rail, half, peer, departure, error.reason());
            }
            failure.get_or_insert(error);
        }
        self.report_session_events(events);
        if good > 0 {
            return Ok(());
        }
        if is_first {
            self.drop_links(peer);
        }
        Err(match failure.filter(|_| open == 0) {
            Some(error) => Error::new(CONNECT, error.kind(), error.reason()),
            None => Error::new(CONNECT, ErrorKind::DeadlineExceeded, NO_ANSWER),
        })
    }

    /// The lanes of a route by all links to the peer. Device memory is accessed directly by links
    /// that have its keys.
    fn route_lanes(
        &self,
        peer: u32,
        local: Option<&RegisteredRegion>,
        remote: &RegionDescriptor,
        keys: Option<&DirectKeys>,
    ) -> Result<Vec<RouteLane>> {
        let mut lanes = Vec::new();
        for number in self.links_to(peer).iter().copied() {
            let Some(&Link { rail, remote_fabric, .. }) = self.links.get(&number) else { continue };
            let direct = keys.and_then(|keys| keys.of(number));
            let key = remote.keys.iter().find(|key| key.domain as usize == remote_fabric);
            let memory = match key {
                _ if remote.memory_type.is_device() => direct.cloned().flatten(),
                Some(key) => {
                    let region = fabric::RemoteRegion::decode(&key.bytes).during(JOIN)?;
                    Some(self.rails[rail].domain().attach(&region).during(JOIN)?)
                }
                None => None,
            };
            if memory.as_ref().is_some_and(|memory| memory.len() < remote.length) {
                let detail = "the fabric key covers less than the region";
                return Err(Error::new(JOIN, ErrorKind::Malformed, detail));
            }
            let remote = RemoteSide { region: remote.number, ticket: remote.ticket, memory };
            let lane = RouteLane::new(number, rail, remote, direct.is_some());
            local.map_or(Ok(()), |local| lane.local(local).map(drop))?;
            lanes.push(lane);
        }
        Ok(lanes)
    }

    /// Requests the peer's region by all links, and staging memory if necessary. One answer is
    /// enough: lost links request it when they reconnect. Before direct access is requested, there is
    /// no local memory yet, and nothing is staged.
    pub(in crate::agent) fn begin_open(
        &mut self,
        peer: u32,
        local: Option<&RegisteredRegion>,
        remote: &RegionDescriptor,
        keys: Option<&DirectKeys>,
    ) -> Result<Opening> {
        let lanes = self.route_lanes(peer, local, remote, keys)?;
        let may_stage = local.is_some();
        let region = (remote.number, remote.ticket);
        (self.opening_region, self.open_results) = (region, BTreeMap::new());
        let mut new = Vec::new();
        for lane in &lanes {
            if let Some(known) = self.links.get_mut(&lane.link())
                && let Entry::Vacant(slot) = known.regions.entry(remote.number)
            {
                slot.insert(false);
                new.push(lane.link());
            }
            let (link, stages) = (lane.link(), may_stage && lane.remote().memory.is_none());
            self.open_results.insert(link, None);
            self.send_command(link, move |driver| driver.open(link, region, stages));
        }
        Ok(Opening { lanes, region, new, may_stage })
    }

    pub(in crate::agent) fn open_counts(&self) -> LinkCounts {
        let open_results = || self.open_results.values();
        let open = open_results().filter(|open_result| open_result.is_none()).count();
        (open, open_results().flatten().filter(|open_result| open_result.is_ok()).count())
    }

    /// Ends the wait for the answers. Returns the lanes if the region is open.
    pub(in crate::agent) fn finish_open(
        &mut self,
        Opening { lanes, region, new, may_stage }: Opening,
    ) -> Result<Vec<RouteLane>> {
        let (mut is_open, mut failure) = (false, None);
        for open_result in std::mem::take(&mut self.open_results).into_values() {
            match open_result {
                Some(Ok(())) => is_open = true,
                Some(Err(error)) if error.kind() == ErrorKind::Stale => {
                    (is_open, failure) = (false, Some(error));
                    break;
                }
                Some(Err(error)) => drop(failure.get_or_insert(error)),
                None => {}
            }
        }
        if is_open {
            // The region exists: links without an answer request it when they can.
            for lane in &lanes {
                let (link, stages) = (lane.link(), may_stage && lane.remote().memory.is_none());
                self.send_command(link, move |driver| driver.want_region(link, region, stages));
            }
            return Ok(lanes);
        }
        // No route will use it.
        for link in new {
            if let Some(known) = self.links.get_mut(&link)
                && known.regions.get(&region.0) == Some(&false)
            {
                known.regions.remove(&region.0);
            }
        }
        Err(failure.unwrap_or_else(|| Error::new(JOIN, ErrorKind::DeadlineExceeded, NO_ANSWER)))
    }
}

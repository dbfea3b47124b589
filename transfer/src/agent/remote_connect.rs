//! Connecting to peers by rails, and opening their regions.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::Agent;
use super::peer::CONNECT;
use super::remote_sessions::LostHalf;
use super::remote_transport::{Link, LinkState, OTHER_LINKS_TIMEOUT, RegionState, RemoteTransport};
use super::route::{DataMover, JOIN};
use super::route_lane::RouteLane;
use crate::error::{Error, ErrorKind, Result};
use crate::path::{Fabric, Locality, Registration};
use crate::rail::{LinkTarget, RemoteSide};
use crate::region::{RegionDescriptor, RegisteredRegion};
use crate::share::random;

/// Links that have not answered yet, and links that are up.
type LinkCounts = (usize, usize);

impl Agent {
    /// Connects to a peer by its rails, unless one is up already. Rails that fail now are retried
    /// by their threads, if any rail is up.
    pub(super) fn connect_remote(&mut self, peer: u32, end: Instant) -> Result<()> {
        self.poll_rails();
        let own = self.local_target.identity;
        let other = self.peer(peer, CONNECT)?;
        if other.card.identity == own {
            let detail =
                "the card is of this agent itself: an agent cannot connect to itself over a fabric";
            return Err(Error::new(CONNECT, ErrorKind::Closed, detail));
        }
        let mut links = other.links.clone();
        if links.iter().any(|link| self.remote_transport.is_up(*link)) {
            return Ok(());
        }
        let is_first = links.is_empty();
        if is_first {
            links = self.make_links(peer)?;
        }
        let timeout = end.saturating_duration_since(Instant::now());
        for number in links.iter().copied() {
            let Some(link) = self.remote_transport.links.get_mut(&number) else { continue };
            (link.state, link.has_waiter) = (LinkState::Connecting, true);
            let target = link.target.clone();
            self.remote_transport
                .send_command(number, move |driver| driver.connect(number, target, timeout));
        }
        let open_results = self.wait_for_links(end, |remote_transport| {
            let states =
                || links.iter().filter_map(|link| Some(&remote_transport.links.get(link)?.state));
            let open = states().filter(|state| matches!(state, LinkState::Connecting)).count();
            (open, states().filter(|state| matches!(state, LinkState::Up)).count())
        });
        let connected = self.finish_connect(&links, open_results);
        if connected.is_err() && is_first {
            self.remote_transport.disconnect(&links);
            self.peer(peer, CONNECT)?.links.clear();
        }
        connected
    }

    /// As [`connect_remote`](Self::connect_remote), but a peer that does not answer is no error:
    /// the cause is recorded for `explain`.
    pub(super) fn connect_fabric(&mut self, peer: u32, end: Instant) -> Result<()> {
        if !self.peers.get(&peer).is_some_and(|peer| self.remote_transport.reaches(&peer.card)) {
            return Ok(());
        }
        match self.connect_remote(peer, end) {
            Ok(()) => self.peer(peer, CONNECT)?.fabric_error = None,
            Err(error)
                if matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded) =>
            {
                self.peer(peer, CONNECT)?.fabric_error = Some(error);
            }
            Err(error) => return Err(error.with(self.label(peer))),
        }
        Ok(())
    }

    /// Why a peer is reachable neither by memory nor by a fabric, if so.
    pub(super) fn unreachable_error(&self, number: u32) -> Option<Error> {
        let peer = self.peers.get(&number)?;
        if peer.local_session.is_some()
            || peer.links.iter().any(|link| self.remote_transport.is_up(*link))
        {
            return None;
        }
        let socket = match &peer.locality {
            Locality::NoDescriptorPassing { cause } => Some(cause.clone()),
            _ => None,
        };
        let (kind, fabric) = match &peer.fabric_error {
            Some(error) => (error.kind(), Some(error.reason())),
            None => match self.remote_transport.facts(
                peer,
                |_| Registration::Works,
                |_| Registration::Works,
            ) {
                Fabric::None { cause } => {
                    (ErrorKind::NoPath, Some(format!("no fabric reaches it: {cause}")))
                }
                // It was connected before.
                Fabric::Connected { .. } => {
                    (ErrorKind::Closed, Some("it was lost right after connecting".to_owned()))
                }
            },
        };
        let detail = socket.into_iter().chain(fabric).collect::<Vec<_>>().join("; ");
        Some(Error::new(CONNECT, kind, detail).with(&peer.card.label))
    }

    fn make_links(&mut self, peer: u32) -> Result<Vec<u32>> {
        let unknown = || Error::new(CONNECT, ErrorKind::Unknown, "no such peer");
        let peer = self.peers.get_mut(&peer).ok_or_else(unknown)?;
        let connection_id: [u8; 16] = random(CONNECT)?;
        let connection_id = u64::from_le_bytes(std::array::from_fn(|at| connection_id[at]));
        let mut links = Vec::new();
        for (rail, remote_fabric) in self.remote_transport.matching_fabrics(&peer.card) {
            let target = LinkTarget {
                identity: peer.card.identity,
                address: peer.card.fabrics[remote_fabric].address.clone(),
                connection_id,
            };
            let link = Link {
                rail,
                remote_fabric,
                target,
                label: peer.card.label.clone(),
                state: LinkState::Connecting,
                has_waiter: true,
                regions: HashMap::new(),
            };
            let number = self.remote_transport.next_link;
            self.remote_transport.next_link += 1;
            self.remote_transport.links.insert(number, link);
            links.push(number);
        }
        peer.links = links.clone();
        Ok(links)
    }

    /// Ends the wait for these links. If one of them is up, the others are reported as lost.
    fn finish_connect(&mut self, links: &[u32], (open, good): LinkCounts) -> Result<()> {
        let mut failure = None;
        for number in links {
            let Some(link) = self.remote_transport.links.get_mut(number) else { continue };
            link.has_waiter = false;
            let LinkState::Down(error) = &link.state else { continue };
            let error = Arc::clone(error);
            if good > 0 {
                let (identity_and_label, reason) = (link.identity_and_label(), error.reason());
                self.remote_transport.remote_sessions.half_lost(
                    link.rail,
                    LostHalf::Link(*number),
                    identity_and_label,
                    reason,
                );
            }
            failure.get_or_insert(error);
        }
        self.take_session_events();
        if good > 0 {
            return Ok(());
        }
        match failure.filter(|_| open == 0) {
            Some(error) => Err(Error::new(CONNECT, error.kind(), error.reason())),
            None => {
                let detail = "it does not answer over the fabric";
                Err(Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail))
            }
        }
    }

    /// Waits until all have answered; or one is up, and the others had their timeout.
    fn wait_for_links(
        &mut self,
        end: Instant,
        count: impl Fn(&RemoteTransport) -> LinkCounts,
    ) -> LinkCounts {
        let mut end = end;
        loop {
            let max_wait = self.progress_while_waiting();
            let (open, good) = count(&self.remote_transport);
            let now = Instant::now();
            if good > 0 {
                end = end.min(now + OTHER_LINKS_TIMEOUT);
            }
            if open == 0 || now >= end {
                return (open, good);
            }
            self.wait_for_rail_events(end.min(now + max_wait));
        }
    }

    /// Prepares a fabric path: requests the peer's region, and staging memory if necessary.
    pub(super) fn open_route_lanes(
        &mut self,
        peer: u32,
        local: &RegisteredRegion,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<DataMover> {
        if let Err(error) = self.connect_remote(peer, end) {
            self.peer(peer, JOIN)?.fabric_error = Some(error.clone());
            return Err(error);
        }
        let of_fabric = |error| Error::of_fabric(JOIN, error);
        let (mut route_lanes, mut requests) = (Vec::new(), Vec::new());
        for link in self.peer(peer, JOIN)?.links.clone() {
            let known = self
                .remote_transport
                .links
                .get(&link)
                .map(|known| (known.rail, known.remote_fabric));
            let Some((rail, remote_fabric)) = known else { continue };
            let key = remote.keys.iter().find(|key| key.domain as usize == remote_fabric);
            let memory = match key {
                Some(key) => {
                    let region = fabric::RemoteRegion::decode(&key.bytes).map_err(of_fabric)?;
                    let memory = self.remote_transport.rails[rail]
                        .domain()
                        .attach(&region)
                        .map_err(of_fabric)?;
                    if memory.len() < remote.length {
                        let detail = "the fabric key covers less than the region";
                        return Err(Error::new(JOIN, ErrorKind::Malformed, detail));
                    }
                    Some(memory)
                }
                None => None,
            };
            let stages = memory.is_none();
            let remote = RemoteSide { region: remote.number, ticket: remote.ticket, memory };
            let route_lane = RouteLane { link, rail, remote };
            route_lane.local(local)?;
            route_lanes.push(route_lane);
            requests.push((link, stages));
        }
        self.open_remote_region(&requests, remote, end)?;
        Ok(DataMover::Rails(route_lanes))
    }

    /// Requests the region by all links. One answer is enough: lost links request it when they
    /// reconnect.
    fn open_remote_region(
        &mut self,
        links: &[(u32, bool)],
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<()> {
        let region = (remote.number, remote.ticket);
        (self.remote_transport.opening_region, self.remote_transport.open_results) =
            (region, BTreeMap::new());
        let mut new = Vec::new();
        for (link, stages) in links {
            if let Some(known) = self.remote_transport.links.get_mut(link)
                && let Entry::Vacant(slot) = known.regions.entry(remote.number)
            {
                slot.insert(RegionState::Requested);
                new.push(*link);
            }
            let (link, stages) = (*link, *stages);
            self.remote_transport.open_results.insert(link, None);
            self.remote_transport
                .send_command(link, move |driver| driver.open(link, region, stages));
        }
        self.wait_for_links(end, |remote_transport| {
            let open_results = || remote_transport.open_results.values();
            let open = open_results().filter(|open_result| open_result.is_none()).count();
            (open, open_results().flatten().filter(|open_result| open_result.is_ok()).count())
        });
        let (mut is_open, mut failure) = (false, None);
        for open_result in std::mem::take(&mut self.remote_transport.open_results).into_values() {
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
            for (link, stages) in links.iter().copied() {
                self.remote_transport
                    .send_command(link, move |driver| driver.want_region(link, region, stages));
            }
            return Ok(());
        }
        // No route will use it.
        for link in new {
            if let Some(known) = self.remote_transport.links.get_mut(&link)
                && known.regions.get(&remote.number) == Some(&RegionState::Requested)
            {
                known.regions.remove(&remote.number);
            }
        }
        let detail = "it does not answer over the fabric";
        Err(failure.unwrap_or_else(|| Error::new(JOIN, ErrorKind::DeadlineExceeded, detail)))
    }
}

//! Peers that are reached by rails: requests to the rails, and their events.

mod connect;
mod device_verdicts;
mod remote_sessions;
mod route_lane;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use fabric::{Caps, Offer};

use self::device_verdicts::{AwaitedRequests, Verdicts};
use self::remote_sessions::{LostHalf, RemoteSessions};
use self::route_lane::stripe_blocks;
use super::card::{AgentCard, FabricAddress};
use super::event::{Departure, Event};
use super::event_queue::EventQueue;
use super::local_target::LocalTarget;
use super::route::{DataMover, RouteInner};
use super::{CONNECT, JOIN, OperationContext};
use crate::blocks::{BlockQueue, Blocks};
use crate::device_memory::FabricFacts;
use crate::error::{Error, ErrorKind, Result};
use crate::notice::Notice;
use crate::operations::Token;
use crate::path::{Fabric, Operation, Probe, Registration};
use crate::rail::{Driver, LinkTarget, Rail, RailEvent, RailOptions, RailRequest, RailTransfer};

pub(super) use device_verdicts::{DirectAccess, DirectKeys};
pub(super) use route_lane::RouteLane;

#[cfg(test)]
mod tests;

/// Notices taken from a peer before its rail returns the credit.
const NOTICES_PER_CREDIT: u64 = 16;

/// How often the chunks of a transfer are rerouted after lost rails. More reroutes mean that no
/// rail can carry them.
const MAX_REROUTES: u32 = 64;

/// Links that have not answered yet, and links that are up.
pub(super) type LinkCounts = (usize, usize);

#[derive(Debug)]
enum LinkState {
    /// The peer has not answered yet.
    Connecting,
    Up,
    /// The cause, and how the peer departed.
    Down(Arc<Error>, Departure),
}

/// A peer as reached by one rail.
#[derive(Debug)]
struct Link {
    rail: usize,
    /// Index of the peer's fabric.
    remote_fabric: usize,
    target: LinkTarget,
    label: String,
    state: LinkState,
    /// A caller waits until it is up, and reports its loss itself.
    has_waiter: bool,
    /// Requested regions, and whether they are open now. Withdrawn ones are removed.
    regions: HashMap<u64, bool>,
    verdicts: Verdicts,
}

impl Link {
    fn is_up(&self) -> bool {
        matches!(self.state, LinkState::Up)
    }

    fn identity_and_label(&self) -> ([u8; 16], String) {
        (self.target.identity, self.label.clone())
    }
}

/// An operation that is split among rails.
#[derive(Debug)]
struct RemoteOperation {
    context: OperationContext,
    /// For rerouting.
    route: Option<Arc<RouteInner>>,
    /// Stripes that have not completed.
    left: usize,
    failure: Option<Error>,
    /// Sent after all data has arrived.
    notice: Option<Notice>,
}

/// What is known about rails to a peer.
#[derive(Debug, Default)]
struct PeerLinks {
    links: Vec<u32>,
    /// The link that carries notices.
    notice_link: Option<u32>,
    /// Why connecting by a fabric failed, if it did.
    error: Option<Error>,
    /// Regions of device memory to which the peer grants no direct access, with the reason.
    refused_regions: HashMap<u64, String>,
}

#[derive(Debug, Default)]
pub(super) struct RemoteTransport {
    rails: Vec<Rail>,
    links: HashMap<u32, Link>,
    next_link: u32,
    /// By the numbers of peers.
    peers: HashMap<u32, PeerLinks>,
    /// The region that is being requested, and its ticket.
    opening_region: (u64, u64),
    /// The answers by link, while a caller waits for them.
    open_results: BTreeMap<u32, Option<Result<()>>>,
    direct_requests: AwaitedRequests,
    in_flight: HashMap<Token, RemoteOperation>,
    /// Completed operations that the agent has not taken.
    done: VecDeque<(OperationContext, Result<()>)>,
    /// Number of stripes per rail and operation: if a rail's thread panics, these must fail. After
    /// a reroute a rail may have several of one operation.
    stripes_by_rail: Vec<HashMap<Token, usize>>,
    notices_taken: HashMap<(usize, u64), u64>,
    /// The lane for the next rerouted request.
    next_route_lane: usize,
    remote_sessions: RemoteSessions,
    rail_events: VecDeque<RailEvent>,
}

impl RemoteTransport {
    /// Starts a rail for each fabric.
    pub(super) fn start(
        fabrics: &[Offer],
        local_target: &Arc<LocalTarget>,
        options: RailOptions,
    ) -> Result<Self> {
        let mut remote_transport = Self::default();
        for (number, offer) in fabrics.iter().enumerate() {
            remote_transport.rails.push(Rail::start(offer, local_target.clone(), number, options)?);
            remote_transport.stripes_by_rail.push(HashMap::new());
        }
        let handles = remote_transport.rails.iter().map(|rail| rail.handle.clone());
        local_target.set_rail_handles(handles.collect());
        Ok(remote_transport)
    }

    /// Ends all rails, at most until `end`. Returns the fabrics that did not release memory in time.
    pub(super) fn close(&mut self, end: Instant) -> Vec<String> {
        Rail::close_all(&mut self.rails, end)
    }

    /// The threads of the rails belong to the parent process.
    pub(super) fn forget(&mut self) {
        self.rails.drain(..).for_each(Rail::forget);
    }

    pub(super) fn has_rails(&self) -> bool {
        !self.rails.is_empty()
    }

    pub(super) fn has_events(&self) -> bool {
        self.rails.iter().any(Rail::has_events)
    }

    /// The addresses of this agent at its fabrics.
    pub(super) fn addresses(&self) -> Vec<FabricAddress> {
        let address = |rail: &Rail| FabricAddress {
            provider: rail.provider().to_owned(),
            address: rail.address().to_vec(),
        };
        self.rails.iter().map(address).collect()
    }

    pub(super) fn providers(&self) -> Vec<&str> {
        self.rails.iter().map(Rail::provider).collect()
    }

    /// The label of a peer that may still access a withdrawn region.
    pub(super) fn region_user(&self, number: u64) -> Option<String> {
        self.rails.iter().find_map(|rail| rail.handle.region_user(number))
    }

    /// Pairs of this agent's rails and the peer's fabrics: all of the first common provider,
    /// because stripes are as fast as the slowest rail.
    fn matching_fabrics(&self, card: &AgentCard) -> Vec<(usize, usize)> {
        let is_common = |provider: &&str| card.fabrics.iter().any(|it| it.provider == *provider);
        let Some(provider) = self.providers().into_iter().find(is_common) else {
            return Vec::new();
        };
        let rails = (0..self.rails.len()).filter(|rail| self.rails[*rail].provider() == provider);
        let fabrics = card.fabrics.iter().enumerate();
        let fabrics = fabrics.filter(|(_, fabric)| fabric.provider == provider);
        rails.zip(fabrics.map(|(number, _)| number)).collect()
    }

    /// Do the two have a provider in common?
    pub(super) fn reaches(&self, card: &AgentCard) -> bool {
        !self.matching_fabrics(card).is_empty()
    }

    /// What the fabric between the two can do, as far as known without a request, with the given
    /// registrations of local and remote memory by a domain. Without the [verdicts of
    /// probes](Self::with_verdicts).
    pub(super) fn facts(
        &self,
        peer: u32,
        card: &AgentCard,
        local: impl Fn(usize, &FabricFacts) -> Registration,
        remote: impl Fn(usize, &FabricFacts) -> Registration,
    ) -> Fabric {
        if let Some(error) = self.error(peer) {
            return Fabric::None { cause: error.to_string() };
        }
        if self.rails.is_empty() {
            return Fabric::None { cause: "no provider was opened at this side".to_owned() };
        }
        let matching_fabrics = self.matching_fabrics(card);
        let Some((rail, remote_fabric)) = matching_fabrics.first() else {
            let mut theirs: Vec<_> = card.fabrics.iter().map(|f| f.provider.as_str()).collect();
            if theirs.is_empty() {
                theirs.push("none");
            }
            let (ours, theirs) = (self.providers().join(", "), theirs.join(", "));
            let cause = format!("no common provider: this agent has {ours}, the peer {theirs}");
            return Fabric::None { cause };
        };
        let facts = self.rails[*rail].handle.device_facts();
        Fabric::Connected {
            provider: self.rails[*rail].provider().to_owned(),
            remote_access: self.rails[*rail].domain().capabilities().caps.contains(Caps::RMA),
            local: local(*rail, &facts),
            remote: remote(*remote_fabric, &facts),
            probe: Probe::NotMade,
        }
    }

    /// Does anything depend on a rail: a link, a stripe, an answer, or a session?
    fn depends_on(&self, rail: usize) -> bool {
        let is_on_rail = |link: u32| self.links.get(&link).is_some_and(|link| link.rail == rail);
        let is_live = |link: &Link| link.rail == rail && !matches!(link.state, LinkState::Down(..));
        !self.stripes_by_rail[rail].is_empty()
            || self.links.values().any(is_live)
            || self.open_results.iter().any(|(link, it)| it.is_none() && is_on_rail(*link))
            || self.direct_requests.waits_for(is_on_rail)
            || self.remote_sessions.sessions_on(rail).next().is_some()
    }

    fn is_up(&self, link: u32) -> bool {
        self.links.get(&link).is_some_and(Link::is_up)
    }

    fn links_to(&self, peer: u32) -> &[u32] {
        self.peers.get(&peer).map_or(&[], |peer| peer.links.as_slice())
    }

    /// Does a rail reach this peer now?
    pub(super) fn is_connected(&self, peer: u32) -> bool {
        self.links_to(peer).iter().any(|link| self.is_up(*link))
    }

    /// Why connecting to a peer by a fabric failed, if it did.
    pub(super) fn error(&self, peer: u32) -> Option<&Error> {
        self.peers.get(&peer)?.error.as_ref()
    }

    pub(super) fn set_error(&mut self, peer: u32, error: Option<Error>) {
        self.peers.entry(peer).or_default().error = error;
    }

    /// Can it carry bytes now?
    fn is_open(&self, route_lane: &RouteLane) -> bool {
        self.links.get(&route_lane.link()).is_some_and(|link| {
            link.is_up() && link.regions.get(&route_lane.remote().region) == Some(&true)
        })
    }

    /// Why no operation can start with a peer, or with its region, if so.
    pub(super) fn obstacle(&self, peer: u32, region: Option<u64>) -> Option<(ErrorKind, String)> {
        let links = self.links_to(peer);
        if links.is_empty() {
            let cause = "it is not on this machine, and no fabric reaches it";
            return Some((ErrorKind::NoPath, cause.to_owned()));
        }
        let (mut has_any, mut cause) = (false, None);
        for link in links {
            let Some(link) = self.links.get(link) else { continue };
            if region.is_some_and(|region| !link.regions.contains_key(&region)) {
                return Some((ErrorKind::Stale, "the region was withdrawn".to_owned()));
            }
            match &link.state {
                LinkState::Up => has_any = true,
                LinkState::Down(error, _) => drop(cause.get_or_insert_with(|| error.reason())),
                LinkState::Connecting => {}
            }
        }
        let cause = || cause.unwrap_or_else(|| "the peer was disconnected".to_owned());
        (!has_any).then(|| (ErrorKind::Closed, cause()))
    }

    /// How a peer departed, if no link to it is left: it closed its agent if any of them says so.
    pub(super) fn departure(&self, peer: u32) -> Option<Departure> {
        let links = self.links_to(peer).iter().filter_map(|link| self.links.get(link));
        let mut known = None;
        for link in links {
            match link.state {
                LinkState::Down(_, departure) if known != Some(Departure::Closed) => {
                    known = Some(departure);
                }
                LinkState::Down(..) => {}
                LinkState::Up | LinkState::Connecting => return None,
            }
        }
        known
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.in_flight.values().any(|operation| operation.context.peer == peer)
    }

    fn send_command(&self, link: u32, command: impl FnOnce(&mut Driver) + Send + 'static) {
        if let Some(link) = self.links.get(&link) {
            self.rails[link.rail].handle.send_command(command);
        }
    }

    /// Disconnects from a peer at all rails. Its operations end by later events.
    pub(super) fn disconnect(&mut self, peer: u32) {
        self.drop_links(peer);
        self.peers.remove(&peer);
    }

    fn drop_links(&mut self, peer: u32) {
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        for link in std::mem::take(&mut peer.links) {
            self.send_command(link, move |driver| driver.disconnect(link));
            self.links.remove(&link);
            self.remote_sessions.link_closed(link);
        }
    }

    /// The agent took a notice that a rail received.
    pub(super) fn notice_taken(&mut self, rail: usize, session: u64) {
        if !self.remote_sessions.has_session(rail, session) {
            // The session has ended: no credit needed.
            return;
        }
        let notices_taken = self.notices_taken.entry((rail, session)).or_default();
        *notices_taken += 1;
        if *notices_taken >= NOTICES_PER_CREDIT {
            let notices = std::mem::take(notices_taken);
            self.notices_taken.remove(&(rail, session));
            self.rails[rail]
                .handle
                .send_command(move |driver| driver.notices_taken(session, notices));
        }
    }

    /// Submits a transfer to the connected rails. Peers with a local session get the notice there.
    pub(super) fn submit_stripes(
        &mut self,
        operation: Operation,
        route: &Arc<RouteInner>,
        route_lanes: &[RouteLane],
        blocks: Blocks<'_>,
        mut context: OperationContext,
        sends_notice: bool,
    ) {
        let mut notice = context.notice.take_if(|_| sends_notice);
        let open = || route_lanes.iter().filter(|route_lane| self.is_open(route_lane));
        let stripes = stripe_blocks(blocks, open().count());
        let busy: Vec<_> = open().zip(stripes).filter(|(_, blocks)| !blocks.is_empty()).collect();
        if busy.is_empty() {
            let detail = "no rail of this route is connected to the peer";
            let lost = Error::new("transfer", ErrorKind::Closed, detail);
            return self.done.push_back((context, Err(lost)));
        }
        let (token, left) = (context.token, busy.len());
        let last = notice.take_if(|_| left > 1);
        let rerouted = Some(Arc::clone(route));
        let remote_operation =
            RemoteOperation { context, route: rerouted, left, failure: None, notice: last };
        self.in_flight.insert(token, remote_operation);
        for (route_lane, blocks) in busy {
            self.submit_stripe(route_lane, operation, route, (blocks, 0), (token, notice.take()));
        }
    }

    fn submit_stripe(
        &mut self,
        route_lane: &RouteLane,
        operation: Operation,
        route: &Arc<RouteInner>,
        (blocks, reroutes): (BlockQueue, u32),
        (token, notice): (Token, Option<Notice>),
    ) {
        let local = match route_lane.local(route.local()) {
            Ok(local) => local,
            Err(error) => return self.stripe_done(token, Err(error)),
        };
        let (link, remote) = (route_lane.link(), route_lane.remote().clone());
        let region = Arc::clone(route.local());
        let bytes = Some(RailTransfer { operation, local, remote, blocks, reroutes, region });
        self.submit(RailRequest { link, token, notice, bytes });
    }

    fn submit(&mut self, request: RailRequest) {
        let Some(link) = self.links.get(&request.link) else {
            let left = Error::new("transfer", ErrorKind::Closed, "the peer was disconnected");
            return self.stripe_done(request.token, Err(left));
        };
        let rail = link.rail;
        *self.stripes_by_rail[rail].entry(request.token).or_default() += 1;
        self.rails[rail].handle.begin_request(request);
    }

    /// Submits what a lost rail did not start to another rail.
    fn reroute(&mut self, request: RailRequest, cause: &str) {
        let RailRequest { link: lost, token, notice, bytes } = request;
        let closed = || Error::new("transfer", ErrorKind::Closed, cause);
        let in_flight = self.in_flight.get(&token);
        let Some(RailTransfer { operation, blocks, reroutes, .. }) = bytes else {
            let peer = in_flight.map(|operation| operation.context.peer);
            return match (peer.and_then(|peer| self.notice_link(peer)), notice) {
                (Some(link), Some(notice)) if link != lost => {
                    self.submit(RailRequest { link, token, notice: Some(notice), bytes: None });
                }
                _ => self.stripe_done(token, Err(closed())),
            };
        };
        let Some(route) = in_flight.and_then(|operation| operation.route.clone()) else { return };
        let route_lanes = match route.mover() {
            DataMover::Rails(route_lanes) if reroutes < MAX_REROUTES => route_lanes,
            _ => return self.stripe_done(token, Err(closed())),
        };
        let open = || {
            let others = route_lanes.iter().filter(|route_lane| route_lane.link() != lost);
            others.filter(|route_lane| self.is_open(route_lane))
        };
        let next_route_lane = self.next_route_lane;
        let Some(route_lane) = open().nth(next_route_lane % open().count().max(1)) else {
            return self.stripe_done(token, Err(closed()));
        };
        self.next_route_lane = next_route_lane.wrapping_add(1);
        self.submit_stripe(route_lane, operation, &route, (blocks, reroutes + 1), (token, notice));
    }

    /// The link for notices to a peer: the same as before as long as it is up, so that they arrive
    /// in order. After its loss, unsent notices may arrive after those of the next link.
    fn notice_link(&mut self, peer: u32) -> Option<u32> {
        let PeerLinks { links, notice_link, .. } = self.peers.get_mut(&peer)?;
        let is_up = |link: &u32| self.links.get(link).is_some_and(Link::is_up);
        if !notice_link.as_ref().is_some_and(is_up) {
            *notice_link = links.iter().copied().find(is_up);
        }
        *notice_link
    }

    pub(super) fn send_notice(&mut self, mut context: OperationContext) {
        let (token, notice) = (context.token, context.notice.take());
        let Some(link) = self.notice_link(context.peer) else {
            let lost = Error::new("notify", ErrorKind::Closed, "no rail is connected to the peer");
            return self.done.push_back((context, Err(lost)));
        };
        let operation =
            RemoteOperation { context, route: None, left: 1, failure: None, notice: None };
        self.in_flight.insert(token, operation);
        self.submit(RailRequest { link, token, notice, bytes: None });
    }

    pub(super) fn take_done(&mut self) -> Option<(OperationContext, Result<()>)> {
        self.done.pop_front()
    }

    /// Handles the events of the rails. True if there were any.
    pub(super) fn poll(&mut self, events: &mut EventQueue) -> bool {
        let (mut has_any, mut session_closed) = (false, Vec::new());
        for rail in 0..self.rails.len() {
            let has_ended = self.rails[rail].has_ended();
            let mut rail_events = std::mem::take(&mut self.rail_events);
            self.rails[rail].rail_events(&mut rail_events);
            for event in rail_events.drain(..) {
                has_any = true;
                match event {
                    // It may have reconnected by another rail meanwhile; then it did not leave.
                    RailEvent::SessionClosed { .. } => session_closed.push((rail, event)),
                    _ => self.handle_rail_event(rail, event, events),
                }
            }
            self.rail_events = rail_events;
            if has_ended && self.depends_on(rail) {
                session_closed.extend(self.lose_rail(rail, events).map(|event| (rail, event)));
            }
        }
        for (rail, event) in session_closed {
            self.handle_rail_event(rail, event, events);
        }
        has_any
    }

    /// A rail's thread has ended, after reporting its events. Its remaining requests fail, and its
    /// sessions are lost.
    fn lose_rail(
        &mut self,
        rail: usize,
        events: &mut EventQueue,
    ) -> impl Iterator<Item = RailEvent> + use<> {
        let cause = || Error::new(CONNECT, ErrorKind::Closed, "the rail's thread has ended");
        let on_rail = self.links.iter().filter(|(_, link)| link.rail == rail);
        let links: Vec<_> = on_rail.map(|(number, _)| *number).collect();
        for (link, open_result) in &mut self.open_results {
            if links.contains(link) {
                open_result.get_or_insert_with(|| Err(cause()));
            }
        }
        self.direct_requests.lost(&links, &cause().reason());
        for link in links {
            if self.links.get(&link).is_some_and(|link| !matches!(link.state, LinkState::Down(..)))
            {
                self.handle_rail_event(
                    rail,
                    RailEvent::Down { link, error: cause(), is_closed: false },
                    events,
                );
            }
        }
        for (token, count) in std::mem::take(&mut self.stripes_by_rail[rail]) {
            (0..count).for_each(|_| self.stripe_done(token, Err(cause())));
        }
        let sessions: Vec<_> = self.remote_sessions.sessions_on(rail).collect();
        sessions
            .into_iter()
            .map(move |session| RailEvent::SessionClosed { session, lost: Some(cause().reason()) })
    }

    /// A rail completed or returned a stripe.
    fn stripe_returned(&mut self, rail: usize, token: Token) {
        if let Some(count) = self.stripes_by_rail[rail].get_mut(&token) {
            *count -= 1;
            if *count == 0 {
                self.stripes_by_rail[rail].remove(&token);
            }
        }
    }

    fn handle_rail_event(&mut self, rail: usize, event: RailEvent, events: &mut EventQueue) {
        match event {
            RailEvent::Up { link: number } => {
                if let Some(link) = self.links.get_mut(&number) {
                    link.state = LinkState::Up;
                    let (with, label) = link.identity_and_label();
                    self.remote_sessions.half_restored(with, rail, LostHalf::Link(number), label);
                }
            }
            RailEvent::Down { link: number, error, is_closed } => {
                if let Some(link) = self.links.get_mut(&number) {
                    let reason = error.reason();
                    link.regions.values_mut().for_each(|is_open| *is_open = false);
                    let departure = if is_closed { Departure::Closed } else { Departure::Dead };
                    link.state = LinkState::Down(Arc::new(error), departure);
                    if !link.has_waiter {
                        let (half, peer) = (LostHalf::Link(number), link.identity_and_label());
                        self.remote_sessions.half_lost(rail, half, peer, departure, reason);
                    }
                }
            }
            RailEvent::Opened { link: number, region, outcome } => {
                // A refused region that was open is withdrawn, which the rail reports separately. A
                // join that failed has forgotten its region.
                let link = self.links.get_mut(&number).filter(|_| outcome.is_ok());
                if let Some(known) = link.and_then(|link| link.regions.get_mut(&region.0)) {
                    *known = true;
                }
                // No caller may be waiting for it any more.
                if self.opening_region == region
                    && let Some(open_result) = self.open_results.get_mut(&number)
                {
                    *open_result = Some(outcome);
                }
            }
            RailEvent::Direct { link, region, outcome } => {
                self.direct_requests.answered(link, region, outcome);
            }
            RailEvent::Done { token, outcome } => {
                self.stripe_returned(rail, token);
                self.stripe_done(token, outcome);
            }
            RailEvent::Returned { request, cause } => {
                self.stripe_returned(rail, request.token);
                self.reroute(*request, &cause);
            }
            RailEvent::Withdrawn { link, region } => {
                if let Some(link) = self.links.get_mut(&link) {
                    link.regions.remove(&region);
                }
                let is_of_peer = |peer: &&mut PeerLinks| peer.links.contains(&link);
                if let Some(peer) = self.peers.values_mut().find(is_of_peer) {
                    peer.refused_regions.remove(&region);
                }
            }
            RailEvent::SessionOpened { session, from, connection_id, label } => {
                self.remote_sessions.session_opened(rail, session, (from, connection_id), label);
            }
            RailEvent::SessionClosed { session, lost } => {
                self.notices_taken.remove(&(rail, session));
                self.remote_sessions.session_closed(rail, session, lost);
            }
            RailEvent::Notice { session, from, notice } => {
                events.push(Event::Notice { from, notice }, Some((rail, session)));
            }
        }
        self.report_session_events(events);
    }

    fn report_session_events(&mut self, events: &mut EventQueue) {
        self.remote_sessions.take_events().for_each(|event| events.push(event, None));
    }

    /// A stripe of an operation completed; it may have been the last.
    fn stripe_done(&mut self, token: Token, outcome: Result<()>) {
        let Some(operation) = self.in_flight.get_mut(&token) else { return };
        operation.left -= 1;
        if let Err(error) = outcome {
            operation.failure.get_or_insert(error);
        }
        if operation.left > 0 {
            return;
        }
        let Some(operation) = self.in_flight.remove(&token) else { return };
        let RemoteOperation { context, failure, notice, .. } = operation;
        match (failure, notice) {
            (Some(error), _) => self.done.push_back((context, Err(error))),
            (None, None) => self.done.push_back((context, Ok(()))),
            (None, notice) => self.send_notice(OperationContext { notice, ..context }),
        }
    }
}

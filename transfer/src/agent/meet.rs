//! Getting to know peers by rails, and joining with them.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::Agent;
use super::company::Missing;
use super::far::{Far, GRACE, Link, Standing, State};
use super::peer::CONNECT;
use super::route::{JOIN, Means};
use super::track::Track;
use crate::error::{Error, ErrorKind, Result};
use crate::path::{Fabric, Locality, Registration};
use crate::rail::{Target, There};
use crate::region::{RegionDescriptor, Registered};
use crate::share::random;

/// How many have not answered yet, and how many did well.
type Answers = (usize, usize);

impl Agent {
    /// Gets to know a peer by rails, if it is not known by one of them already. Those that do not
    /// lead there now are tried again by themselves, if any does.
    pub(super) fn meet_far(&mut self, peer: u32, end: Instant) -> Result<()> {
        self.hear();
        let own = self.home.identity;
        let other = self.peer(peer, CONNECT)?;
        if other.card.identity == own {
            let detail = "it is this agent itself, which does not visit itself by a fabric";
            return Err(Error::new(CONNECT, ErrorKind::Closed, detail));
        }
        let mut links = other.links.clone();
        if links.iter().any(|link| self.far.is_up(*link)) {
            return Ok(());
        }
        let is_first = links.is_empty();
        if is_first {
            links = self.make_links(peer)?;
        }
        let patience = end.saturating_duration_since(Instant::now());
        for number in links.iter().copied() {
            let Some(link) = self.far.links.get_mut(&number) else { continue };
            (link.state, link.is_awaited) = (State::Meeting, true);
            let target = link.target.clone();
            self.far.tell(number, move |driver| driver.meet(number, target, patience));
        }
        let answers = self.await_answers(end, |far| {
            let states = || links.iter().filter_map(|link| Some(&far.links.get(link)?.state));
            let open = states().filter(|state| matches!(state, State::Meeting)).count();
            (open, states().filter(|state| matches!(state, State::Up)).count())
        });
        let met = self.has_met(&links, answers);
        if met.is_err() && is_first {
            self.far.leave(&links);
            self.peer(peer, CONNECT)?.links.clear();
        }
        met
    }

    /// The same, where it is no error if it does not answer: then that is why it is not to be
    /// reached by a fabric.
    pub(super) fn try_fabric(&mut self, peer: u32, end: Instant) -> Result<()> {
        if !self.peers.get(&peer).is_some_and(|peer| self.far.leads_to(&peer.card)) {
            return Ok(());
        }
        match self.meet_far(peer, end) {
            Ok(()) => self.peer(peer, CONNECT)?.no_fabric = None,
            Err(error)
                if matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeadlineExceeded) =>
            {
                self.peer(peer, CONNECT)?.no_fabric = Some(error);
            }
            Err(error) => return Err(error.with(self.label(peer))),
        }
        Ok(())
    }

    /// Why neither memory nor a fabric leads to a peer, if so.
    pub(super) fn why_out_of_reach(&self, number: u32) -> Option<Error> {
        let peer = self.peers.get(&number)?;
        if peer.visit.is_some() || peer.links.iter().any(|link| self.far.is_up(*link)) {
            return None;
        }
        let socket = match &peer.locality {
            Locality::NoWay { why } => Some(why.clone()),
            _ => None,
        };
        let (kind, fabric) = match &peer.no_fabric {
            Some(error) => (error.kind(), Some(error.reason())),
            None => match self.far.facts(peer, |_| Registration::Works, |_| Registration::Works) {
                Fabric::None { why } => {
                    (ErrorKind::NoPath, Some(format!("no fabric leads there: {why}")))
                }
                // It was met.
                Fabric::Connected { .. } => {
                    (ErrorKind::Closed, Some("it was lost again at once".to_owned()))
                }
            },
        };
        let detail = socket.into_iter().chain(fabric).collect::<Vec<_>>().join("; ");
        Some(Error::new(CONNECT, kind, detail).with(&peer.card.label))
    }

    fn make_links(&mut self, peer: u32) -> Result<Vec<u32>> {
        let unknown = || Error::new(CONNECT, ErrorKind::Unknown, "no such peer");
        let peer = self.peers.get_mut(&peer).ok_or_else(unknown)?;
        let visit: [u8; 16] = random(CONNECT)?;
        let visit = u64::from_le_bytes(std::array::from_fn(|at| visit[at]));
        let mut links = Vec::new();
        for (rail, theirs) in self.far.pairs(&peer.card) {
            let target = Target {
                identity: peer.card.identity,
                address: peer.card.fabrics[theirs].address.clone(),
                visit,
            };
            let link = Link {
                rail,
                theirs,
                target,
                label: peer.card.label.clone(),
                state: State::Meeting,
                is_awaited: true,
                regions: HashMap::new(),
            };
            let number = self.far.next_link;
            self.far.next_link += 1;
            self.far.links.insert(number, link);
            links.push(number);
        }
        peer.links = links.clone();
        Ok(links)
    }

    /// Nobody waits for these links any more. Where one of them leads to the peer, the others are
    /// lost.
    fn has_met(&mut self, links: &[u32], (open, good): Answers) -> Result<()> {
        let mut failure = None;
        for number in links {
            let Some(link) = self.far.links.get_mut(number) else { continue };
            link.is_awaited = false;
            let State::Down(error) = &link.state else { continue };
            let error = Arc::clone(error);
            if good > 0 {
                let (whom, reason) = (link.whom(), error.reason());
                self.far.company.miss(link.rail, Missing::Link(*number), whom, reason);
            }
            failure.get_or_insert(error);
        }
        self.tell_of_company();
        if good > 0 {
            return Ok(());
        }
        match failure.filter(|_| open == 0) {
            Some(error) => Err(Error::new(CONNECT, error.kind(), error.reason())),
            None => {
                let detail = "it does not answer by the fabric";
                Err(Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail))
            }
        }
    }

    /// Waits until all have answered; or one did well, and the others had their time.
    fn await_answers(&mut self, end: Instant, count: impl Fn(&Far) -> Answers) -> Answers {
        let mut end = end;
        loop {
            let longest = self.progress_while_waiting();
            let (open, good) = count(&self.far);
            let now = Instant::now();
            if good > 0 {
                end = end.min(now + GRACE);
            }
            if open == 0 || now >= end {
                return (open, good);
            }
            self.rest_until_told(end.min(now + longest));
        }
    }

    /// Makes what a fabric path needs: asks the peer for its region, and for staging memory.
    pub(super) fn lay_tracks(
        &mut self,
        peer: u32,
        local: &Registered,
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<Means> {
        if let Err(error) = self.meet_far(peer, end) {
            self.peer(peer, JOIN)?.no_fabric = Some(error.clone());
            return Err(error);
        }
        let of_fabric = |error| Error::of_fabric(JOIN, error);
        let (mut tracks, mut requests) = (Vec::new(), Vec::new());
        for link in self.peer(peer, JOIN)?.links.clone() {
            let known = self.far.links.get(&link).map(|known| (known.rail, known.theirs));
            let Some((rail, theirs)) = known else { continue };
            let key = remote.keys.iter().find(|key| key.domain as usize == theirs);
            let memory = match key {
                Some(key) => {
                    let region = fabric::RemoteRegion::decode(&key.bytes).map_err(of_fabric)?;
                    let memory =
                        self.far.rails[rail].domain().attach(&region).map_err(of_fabric)?;
                    if memory.len() < remote.length {
                        let detail = "its fabric key is for less than the region";
                        return Err(Error::new(JOIN, ErrorKind::Malformed, detail));
                    }
                    Some(memory)
                }
                None => None,
            };
            let stages = memory.is_none();
            let there = There { region: remote.number, ticket: remote.ticket, memory };
            let track = Track { link, rail, there };
            track.here(local)?;
            tracks.push(track);
            requests.push((link, stages));
        }
        self.open_far(&requests, remote, end)?;
        Ok(Means::Rails(tracks))
    }

    /// Asks by all links whether the region is there. One is enough: those that are lost ask when
    /// they come back.
    fn open_far(
        &mut self,
        links: &[(u32, bool)],
        remote: &RegionDescriptor,
        end: Instant,
    ) -> Result<()> {
        let region = (remote.number, remote.ticket);
        (self.far.asked, self.far.answers) = (region, BTreeMap::new());
        let mut new = Vec::new();
        for (link, stages) in links {
            if let Some(known) = self.far.links.get_mut(link)
                && let Entry::Vacant(place) = known.regions.entry(remote.number)
            {
                place.insert(Standing::Asked);
                new.push(*link);
            }
            let (link, stages) = (*link, *stages);
            self.far.answers.insert(link, None);
            self.far.tell(link, move |driver| driver.open(link, region, stages));
        }
        self.await_answers(end, |far| {
            let answers = || far.answers.values();
            let open = answers().filter(|answer| answer.is_none()).count();
            (open, answers().flatten().filter(|answer| answer.is_ok()).count())
        });
        let (mut is_open, mut failure) = (false, None);
        for answer in std::mem::take(&mut self.far.answers).into_values() {
            match answer {
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
            // By this ticket it is there: links that did not say so yet ask when they can.
            for (link, stages) in links.iter().copied() {
                self.far.tell(link, move |driver| driver.want(link, region, stages));
            }
            return Ok(());
        }
        // There will be no route that has it.
        for link in new {
            if let Some(known) = self.far.links.get_mut(&link)
                && known.regions.get(&remote.number) == Some(&Standing::Asked)
            {
                known.regions.remove(&remote.number);
            }
        }
        let detail = "it does not answer by the fabric";
        Err(failure.unwrap_or_else(|| Error::new(JOIN, ErrorKind::DeadlineExceeded, detail)))
    }
}

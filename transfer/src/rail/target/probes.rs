//! Direct access of initiators to regions with device memory at one end, and the probes before it.
//!
//! The target looks at written bytes as soon as their notice arrives. It grants the key of its
//! device memory only if all were there, unless its setting says otherwise.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{GONE, QUARANTINE_AFTER_LOSS, TargetRole};
use crate::device_memory::{LocalEnd, MemoryEnd, Pattern};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::path::{DeviceFabric, Operation, Registration};
use crate::rail::io::RailIo;
use crate::rail::message::Message;
use crate::rail::probe::{Arrival, Look, Scratch, Step, steps};
use crate::refusal::Refusal;
use crate::region::{RegisteredRegion, Rights};
use crate::share::random;

const GRANT: &str = "grant direct access";
/// Probes at a time, each with its scratch memory. Others wait.
const MAX_PROBES: usize = 2;
/// An initiator that does not finish its probe within this time loses it, so that others get
/// theirs.
const MAX_PROBE_TIME: Duration = Duration::from_secs(20);
/// Scratch memories of failed probes, which late bytes may still reach: none is freed early. With
/// that many, requests that need a probe are refused, and staged.
const MAX_QUARANTINED: usize = 8;
/// Kinds of memory whose probes passed, for each initiator. An honest one has few.
const MAX_PASSED: usize = 64;

#[derive(Debug, Clone, Copy)]
struct AccessRequest {
    request: u64,
    region: u64,
    ticket: u64,
    from: MemoryEnd,
    /// Does the initiator need a probe?
    probes: bool,
}

struct Probe {
    session: u64,
    wanted: AccessRequest,
    end: LocalEnd,
    scratch: Scratch,
    /// The step that comes next, or that is under way.
    step: usize,
    phase: Phase,
    until: Instant,
}

enum Phase {
    /// The initiator is to continue.
    Waiting,
    /// This side looks at written bytes.
    Looking(Arrival),
    /// This side writes bytes that are read next.
    Filling,
}

/// The probes of a rail, by their numbers, which are the seeds of their bytes.
#[derive(Default)]
pub(super) struct Probes {
    active: HashMap<u64, Probe>,
    /// Sessions whose probes wait for others, and their requests.
    waiting: VecDeque<(u64, AccessRequest)>,
    /// Scratch memories of failed probes, and until when they are kept.
    quarantined: VecDeque<(Instant, Scratch)>,
}

impl Probes {
    pub(super) fn is_active(&self) -> bool {
        !self.active.is_empty()
    }
}

/// The step that an initiator names, if it is the next one, with this operation.
fn expected_step(probe: &Probe, step: u32, operation: Operation) -> Option<&'static Step> {
    let is_next = matches!(probe.phase, Phase::Waiting) && probe.step == step as usize;
    steps().get(probe.step).filter(|step| is_next && step.operation() == operation)
}

fn violation() -> Error {
    Error::new(GRANT, ErrorKind::Malformed, "the initiator did not follow the steps of the probe")
}

impl TargetRole {
    /// Handles the messages about direct access; ignores others.
    pub(super) fn handle_direct(&mut self, io: &mut RailIo, session: u64, message: Message) {
        match message {
            Message::RequestDirect { request, region, ticket, from, probes } => {
                let wanted = AccessRequest { request, region, ticket, from, probes };
                self.request_direct(io, session, wanted);
            }
            Message::ProbeWritten { probe, step } => self.probe_written(io, session, probe, step),
            Message::RequestProbeFill { probe, step } => {
                self.fill_for_probe(io, session, probe, step);
            }
            Message::ProbePassed { probe } => self.probe_passed(io, session, probe),
            Message::ProbeAbandoned { probe } => self.probe_abandoned(io, session, probe),
            _ => {}
        }
    }

    // ------------------------------------------------------------------- requests

    /// An initiator requests direct access to a region that it has opened, and may demand a probe.
    fn request_direct(&mut self, io: &mut RailIo, session: u64, wanted: AccessRequest) {
        match self.needs_probe(io, session, wanted) {
            Ok(false) => self.grant(io, session, wanted),
            Ok(true) => {
                // One request of a session at a time.
                self.probes.waiting.retain(|(of, _)| *of != session);
                self.probes.waiting.push_back((session, wanted));
                self.start_probes(io);
            }
            Err(error) => self.refuse_direct(io, session, wanted, &error),
        }
    }

    fn refuse_direct(
        &mut self,
        io: &mut RailIo,
        session: u64,
        wanted: AccessRequest,
        error: &Error,
    ) {
        let refusal = Refusal::new(error.kind(), error.reason());
        self.send_message(io, session, &Message::Refused { request: wanted.request, refusal });
    }

    /// The region of a request, and its end.
    fn wanted_region(
        &self,
        io: &RailIo,
        session: u64,
        wanted: AccessRequest,
    ) -> Result<(Arc<RegisteredRegion>, LocalEnd)> {
        let refuse = |kind, cause: String| Err(Error::new(GRANT, kind, cause));
        let initiator = self.initiators.get(&session);
        let has_opened = initiator.is_some_and(|it| it.opened.contains(&wanted.region));
        let Some(region) = io.agent().find_region(wanted.region, wanted.ticket) else {
            return refuse(ErrorKind::Stale, GONE.to_owned());
        };
        if !has_opened {
            return refuse(ErrorKind::Denied, "the region was not opened".to_owned());
        }
        let is_off = io.shared().device_facts().setting() == DeviceFabric::Off;
        let cause = match LocalEnd::of(&region.buffer) {
            // The memory of the initiator is on a device.
            Ok(LocalEnd::Host) if is_off => Some(Registration::Off),
            Ok(LocalEnd::Host) => return Ok((region, LocalEnd::Host)),
            Ok(end) if region.memory(io.rail()).is_some() => return Ok((region, end)),
            Ok(_) => region.registrations().get(io.rail()).cloned(),
            Err(obstacle) => Some(obstacle),
        };
        let provider = &io.capabilities().provider;
        refuse(
            ErrorKind::NoPath,
            match cause {
                Some(Registration::Refused { cause }) => cause,
                Some(Registration::Off) => "device_fabric is off at the peer".to_owned(),
                _ => format!("{provider} was opened without device memory at the peer"),
            },
        )
    }

    fn needs_probe(&self, io: &RailIo, session: u64, wanted: AccessRequest) -> Result<bool> {
        let (_, end) = self.wanted_region(io, session, wanted)?;
        let ends = (wanted.from, end.end());
        let is_passed =
            self.initiators.get(&session).is_some_and(|it| it.passed_probes.contains(&ends));
        let insists = io.shared().device_facts().setting() == DeviceFabric::Probe;
        Ok(wanted.probes || insists && !is_passed)
    }

    fn grant(&mut self, io: &mut RailIo, session: u64, wanted: AccessRequest) {
        let granted = self.wanted_region(io, session, wanted).and_then(|(region, end)| {
            let memory = match end {
                LocalEnd::Host => None,
                LocalEnd::Device(..) => region.memory(io.rail()),
            };
            let key = memory.map(|memory| memory.describe().during(GRANT)).transpose()?;
            Ok((key.map_or_else(Vec::new, |key| key.encode()), end))
        });
        match granted {
            Ok((memory, end)) => {
                if let LocalEnd::Device(device, _) = &end {
                    io.agent().written_devices().add(device);
                }
                let message = Message::Direct { request: wanted.request, memory };
                self.send_message(io, session, &message);
            }
            Err(error) => self.refuse_direct(io, session, wanted, &error),
        }
    }

    // ------------------------------------------------------------------- probes

    /// Starts waiting probes, as many as may run.
    fn start_probes(&mut self, io: &mut RailIo) {
        while self.probes.active.len() < MAX_PROBES
            && let Some((session, wanted)) = self.probes.waiting.pop_front()
        {
            if !self.initiators.contains_key(&session) {
                continue;
            }
            if let Err(error) = self.start_probe(io, session, wanted) {
                self.refuse_direct(io, session, wanted, &error);
            }
        }
    }

    fn start_probe(&mut self, io: &mut RailIo, session: u64, wanted: AccessRequest) -> Result<()> {
        let (_, end) = self.wanted_region(io, session, wanted)?;
        if self.probes.quarantined.len() >= MAX_QUARANTINED {
            let detail = "too many probes failed at the peer within a minute";
            return Err(Error::new(GRANT, ErrorKind::TooMany, detail));
        }
        let scratch = Scratch::new(&end, |buffer| io.register_now(buffer, Some(Rights::ALL)))?;
        let memory = scratch.region().describe().during(GRANT)?.encode();
        let number = u64::from_le_bytes(random(GRANT)?);
        let until = Instant::now() + MAX_PROBE_TIME;
        let (step, phase) = (0, Phase::Waiting);
        let probe = Probe { session, wanted, end, scratch, step, phase, until };
        self.probes.active.insert(number, probe);
        let message = Message::ProbeReady { request: wanted.request, probe: number, memory };
        self.send_message(io, session, &message);
        Ok(())
    }

    fn probe(&mut self, session: u64, number: u64) -> Option<&mut Probe> {
        self.probes.active.get_mut(&number).filter(|probe| probe.session == session)
    }

    /// The notice of a step of writes has arrived.
    fn probe_written(&mut self, io: &mut RailIo, session: u64, number: u64, step: u32) {
        let now = Instant::now();
        let Some(probe) = self.probe(session, number) else { return };
        let looked = match expected_step(probe, step, Operation::Put) {
            None => Err(violation()),
            Some(step) => probe.look(number, step, now),
        };
        self.end_if_failed(io, number, looked);
    }

    /// The initiator is going to read the bytes of a step.
    fn fill_for_probe(&mut self, io: &mut RailIo, session: u64, number: u64, step: u32) {
        let Some(probe) = self.probe(session, number) else { return };
        let begun = match expected_step(probe, step, Operation::Get) {
            None => Err(violation()),
            Some(step) => {
                let begun = probe.scratch.begin_fill(step, Pattern::of(number, probe.step));
                begun.map(|()| probe.phase = Phase::Filling)
            }
        };
        self.end_if_failed(io, number, begun);
    }

    /// The initiator has found all bytes right.
    fn probe_passed(&mut self, io: &mut RailIo, session: u64, number: u64) {
        let Some(probe) = self.probe(session, number) else { return };
        if probe.step < steps().len() {
            return self.end_if_failed(io, number, Err(violation()));
        }
        let Some(Probe { wanted, end, scratch, .. }) = self.probes.active.remove(&number) else {
            return;
        };
        self.release_worker.release(scratch);
        if let Some(initiator) = self.initiators.get_mut(&session) {
            if initiator.passed_probes.len() >= MAX_PASSED {
                initiator.passed_probes.clear();
            }
            initiator.passed_probes.insert((wanted.from, end.end()));
        }
        self.grant(io, session, wanted);
        self.start_probes(io);
    }

    fn probe_abandoned(&mut self, io: &mut RailIo, session: u64, number: u64) {
        if self.probe(session, number).is_some() {
            self.quarantine_probe(number);
            self.start_probes(io);
        }
    }

    /// Ends a probe that cannot be continued, with a refusal.
    fn end_if_failed(&mut self, io: &mut RailIo, number: u64, outcome: Result<()>) {
        let Err(error) = outcome else { return };
        if let Some((session, wanted)) = self.quarantine_probe(number) {
            self.refuse_direct(io, session, wanted, &error);
        }
        self.start_probes(io);
    }

    /// Ends a probe whose memory late bytes may still reach.
    fn quarantine_probe(&mut self, number: u64) -> Option<(u64, AccessRequest)> {
        let Probe { session, wanted, scratch, .. } = self.probes.active.remove(&number)?;
        let until = Instant::now() + QUARANTINE_AFTER_LOSS;
        self.probes.quarantined.push_back((until, scratch));
        Some((session, wanted))
    }

    /// The probes of a closed session end.
    pub(super) fn end_probes_of(&mut self, io: &mut RailIo, session: u64) {
        self.probes.waiting.retain(|(of, _)| *of != session);
        let of_session =
            |(number, probe): (&u64, &Probe)| (probe.session == session).then_some(*number);
        for number in self.probes.active.iter().filter_map(of_session).collect::<Vec<_>>() {
            self.quarantine_probe(number);
        }
        self.start_probes(io);
    }

    /// Continues all probes as far as possible now. True if anything happened.
    pub(in crate::rail) fn advance_probes(&mut self, io: &mut RailIo) -> bool {
        let mut has_moved = false;
        for number in self.probes.active.keys().copied().collect::<Vec<_>>() {
            let Some(probe) = self.probes.active.get_mut(&number) else { continue };
            let session = probe.session;
            match probe.advance(number) {
                Ok(None) => {}
                Ok(Some(message)) => {
                    has_moved = true;
                    let has_failed =
                        matches!(message, Message::ProbeChecked { failure: Some(_), .. });
                    self.send_message(io, session, &message);
                    if has_failed {
                        self.quarantine_probe(number);
                        self.start_probes(io);
                    }
                }
                Err(error) => {
                    has_moved = true;
                    self.end_if_failed(io, number, Err(error));
                }
            }
        }
        has_moved
    }

    /// Ends probes that take too long, and releases quarantined memory.
    pub(super) fn check_probes(&mut self, io: &mut RailIo, now: Instant) {
        let is_late = |(number, probe): (&u64, &Probe)| (now >= probe.until).then_some(*number);
        for number in self.probes.active.iter().filter_map(is_late).collect::<Vec<_>>() {
            let detail = "the probe was not finished in time";
            let error = Error::new(GRANT, ErrorKind::DeadlineExceeded, detail);
            self.end_if_failed(io, number, Err(error));
        }
        while self.probes.quarantined.front().is_some_and(|(until, _)| now >= *until) {
            self.release_worker.release(self.probes.quarantined.pop_front());
        }
    }
}

impl Probe {
    /// Looks at the bytes of a step, which were announced now.
    fn look(&mut self, number: u64, step: &'static Step, now: Instant) -> Result<()> {
        self.end.flush().during(GRANT)?;
        self.scratch.begin_look(step)?;
        let known = (step, Pattern::of(number, self.step));
        self.phase = Phase::Looking(Arrival::new(known, now));
        Ok(())
    }

    /// What the initiator is told when a copy is over.
    fn advance(&mut self, number: u64) -> Result<Option<Message>> {
        let step_number = self.step as u32;
        match &mut self.phase {
            Phase::Waiting => Ok(None),
            Phase::Filling => {
                if !self.scratch.poll()? {
                    return Ok(None);
                }
                (self.phase, self.step) = (Phase::Waiting, self.step + 1);
                Ok(Some(Message::ProbeFilled { probe: number, step: step_number }))
            }
            Phase::Looking(arrival) => {
                let failure = match self.scratch.judge(arrival)? {
                    None | Some(Look::Again) => return Ok(None),
                    Some(Look::Right) => None,
                    Some(Look::Failed(cause)) => Some(Refusal::new(ErrorKind::Failed, cause)),
                };
                (self.phase, self.step) = (Phase::Waiting, self.step + 1);
                Ok(Some(Message::ProbeChecked { probe: number, step: step_number, failure }))
            }
        }
    }
}

/// Access for tests.
#[cfg(test)]
mod test_access {
    use super::*;

    impl TargetRole {
        /// Probes that run, that wait, and that have left quarantined memory.
        pub(in crate::rail) fn probe_counts(&self) -> (usize, usize, usize) {
            let Probes { active, waiting, quarantined } = &self.probes;
            (active.len(), waiting.len(), quarantined.len())
        }

        /// The number of the running probe of a session, and the key of its memory.
        pub(in crate::rail) fn probe_of(&self, session: u64) -> Option<(u64, Vec<u8>)> {
            let (number, probe) =
                self.probes.active.iter().find(|(_, probe)| probe.session == session)?;
            Some((*number, probe.scratch.region().describe().unwrap().encode()))
        }
    }
}

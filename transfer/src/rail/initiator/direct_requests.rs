//! Requests for direct access to regions with device memory at one end, and the probes before it.
//!
//! The target decides whether its device memory is accessed directly, and grants the key. Before
//! that, each step of a probe does what a real transfer does: the same operations, and after their
//! completion the same kind of message.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::RemoteMemory;

use super::InitiatorRole;
use crate::device_memory::{LocalEnd, Part, Pattern};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::path::Operation;
use crate::rail::io::RailIo;
use crate::rail::message::Message;
use crate::rail::probe::{
    Arrival, Look, MAX_PART_LENGTH, SCRATCH_LENGTH, Scratch, Step, size_text, steps,
};
use crate::rail::release_worker::ReleaseWorker;
use crate::rail::{DirectOutcome, RailEvent};
use crate::refusal::Refusal;

const PROBE: &str = "probe device memory";
/// A probe takes milliseconds, on a busy machine seconds.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(8);

/// A request to access a peer's region directly, with device memory at one end or both.
#[derive(Debug)]
pub(crate) struct DirectRequest {
    /// Number and ticket.
    region: (u64, u64),
    local: LocalEnd,
    probes: bool,
    until: Instant,
}

impl DirectRequest {
    /// Access to the region with this number and ticket, from memory of this kind. If it `probes`, a
    /// probe is needed, whatever the peer demands. A probe is given up if it is not over by then.
    pub(crate) fn new(region: (u64, u64), local: LocalEnd, probes: bool, until: Instant) -> Self {
        Self { region, local, probes, until }
    }
}

/// A request that is not answered yet.
struct PendingDirect {
    link: u32,
    session: u64,
    region: u64,
    local: LocalEnd,
    until: Instant,
    /// The probe, once the target is ready.
    run: Option<Run>,
}

struct Run {
    /// Number of the probe at the target, and the seed of its bytes.
    probe: u64,
    remote: RemoteMemory,
    scratch: Scratch,
    step: usize,
    phase: Phase,
}

enum Phase {
    /// The local memory gets the bytes that are written next.
    Filling,
    /// The target writes the bytes that are read next.
    AwaitingFill,
    /// Operations are posted, or in flight.
    Moving { unposted: VecDeque<Part>, in_flight: usize },
    /// The target looks at the written bytes.
    AwaitingCheck,
    /// This side looks at the read bytes.
    Looking(Arrival),
    /// All steps are right.
    AwaitingGrant,
}

/// An operation of a probe that the provider has.
struct ProbeChunk {
    request: u64,
    link: u32,
    session: u64,
}

/// The requests of all links.
pub(super) struct DirectRequests {
    pending: HashMap<u64, PendingDirect>,
    chunks: HashMap<u64, ProbeChunk>,
    release_worker: Arc<ReleaseWorker>,
}

/// Why a probe does not pass, in words.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    /// An observation of the provider, or of the peer.
    Wrong(String),
    /// The probe could not be carried out, or is not over in time: a later one may pass.
    Inconclusive(String),
}

impl From<String> for Finding {
    fn from(cause: String) -> Self {
        Self::Wrong(cause)
    }
}

impl From<&str> for Finding {
    fn from(cause: &str) -> Self {
        Self::Wrong(cause.to_owned())
    }
}

impl From<Error> for Finding {
    fn from(error: Error) -> Self {
        Self::Inconclusive(error.to_string())
    }
}

/// The outcome of a part of a probe.
type Found<T> = std::result::Result<T, Finding>;

impl Run {
    fn known(&self) -> (&'static Step, Pattern) {
        (&steps()[self.step], Pattern::of(self.probe, self.step))
    }
}

impl DirectRequests {
    pub(super) fn new(release_worker: Arc<ReleaseWorker>) -> Self {
        Self { pending: HashMap::new(), chunks: HashMap::new(), release_worker }
    }

    /// The session of an operation in flight.
    pub(super) fn session_of(&self, chunk: u64) -> Option<u64> {
        self.chunks.get(&chunk).map(|chunk| chunk.session)
    }

    pub(super) fn has_chunks_of_link(&self, link: u32) -> bool {
        self.chunks.values().any(|chunk| chunk.link == link)
    }

    pub(super) fn has_chunks_of_session(&self, session: u64) -> bool {
        self.chunks.values().any(|chunk| chunk.session == session)
    }

    /// Is this the number of a request in this session?
    pub(super) fn has_request(&self, session: u64, request: u64) -> bool {
        self.pending.get(&request).is_some_and(|pending| pending.session == session)
    }

    pub(super) fn refused(&mut self, io: &RailIo, request: u64, refusal: Refusal) {
        let Refusal { kind, cause } = refusal;
        self.finish(io, request, DirectOutcome::Refused { kind, cause });
    }

    /// The link was closed: nothing of it is answered.
    pub(super) fn close_link(&mut self, io: &RailIo, number: u32, cause: &str) {
        let closed = self.pending.extract_if(|_, pending| pending.link == number);
        for (_, PendingDirect { region, run, .. }) in closed {
            self.release_worker.release(run);
            let outcome = DirectOutcome::Lost { cause: cause.to_owned() };
            io.report(RailEvent::Direct { link: number, region, outcome });
        }
    }

    fn finish(&mut self, io: &RailIo, request: u64, outcome: DirectOutcome) {
        let Some(PendingDirect { link, region, run, .. }) = self.pending.remove(&request) else {
            return;
        };
        tracing::debug!(link, region, ?outcome, "direct access answered");
        io.report(RailEvent::Direct { link, region, outcome });
        // Operations in flight keep the registration and its memory.
        self.release_worker.release(run);
    }

    fn run_of(&mut self, session: u64, probe: u64) -> Option<(u64, &mut Run)> {
        let mut of_session = self.pending.iter_mut().filter(|(_, it)| it.session == session);
        of_session.find_map(|(request, pending)| {
            Some((*request, pending.run.as_mut().filter(|run| run.probe == probe)?))
        })
    }

    fn run(&mut self, request: u64) -> Option<&mut Run> {
        self.pending.get_mut(&request)?.run.as_mut()
    }
}

impl InitiatorRole {
    pub(in crate::rail) fn is_probing(&self) -> bool {
        self.direct.pending.values().any(|pending| pending.run.is_some())
    }

    pub(in crate::rail) fn request_direct(
        &mut self,
        io: &mut RailIo,
        number: u32,
        wanted: DirectRequest,
    ) {
        let DirectRequest { region: (region, ticket), local, probes, until } = wanted;
        let Some(link) = self.links.get_mut(&number).filter(|link| link.is_up()) else {
            let outcome = DirectOutcome::Lost { cause: "the peer is not connected".to_owned() };
            return io.report(RailEvent::Direct { link: number, region, outcome });
        };
        let request = io.next_id();
        let session = link.session.id();
        let from = local.end();
        let pending = PendingDirect { link: number, session, region, local, until, run: None };
        self.direct.pending.insert(request, pending);
        let message = Message::RequestDirect { request, region, ticket, from, probes };
        io.send_message(&mut link.session, &message);
    }

    /// The probe failed: the target ends it, too.
    fn fail_probe(&mut self, io: &mut RailIo, request: u64, finding: Finding) {
        if let Some(PendingDirect { link, session, run: Some(run), .. }) =
            self.direct.pending.get(&request)
        {
            let of = (*link, *session);
            let probe = run.probe;
            self.send(io, of, &Message::ProbeAbandoned { probe });
        }
        let (cause, is_final) = match finding {
            Finding::Wrong(cause) => (cause, true),
            Finding::Inconclusive(cause) => (cause, false),
        };
        self.direct.finish(io, request, DirectOutcome::Failed { cause, is_final });
    }

    /// Sends a message in a session, if it still exists.
    fn send(&mut self, io: &mut RailIo, (link, session): (u32, u64), message: &Message) {
        let link = self.links.get_mut(&link).filter(|link| link.session.id() == session);
        if let Some(link) = link {
            io.send_message(&mut link.session, message);
        }
    }

    /// Handles the messages about direct access; ignores others.
    pub(super) fn handle_direct(&mut self, io: &mut RailIo, session: u64, message: Message) {
        let is_own = |pending: &PendingDirect| pending.session == session;
        match message {
            Message::Direct { request, memory } => {
                let Some(pending) = self.direct.pending.get(&request).filter(|it| is_own(it))
                else {
                    return;
                };
                let is_probed = match &pending.run {
                    None => false,
                    Some(Run { phase: Phase::AwaitingGrant, .. }) => true,
                    // It grants what this side has not seen to be right.
                    Some(_) => {
                        let finding = "the peer ended the probe too early".into();
                        return self.fail_probe(io, request, finding);
                    }
                };
                let key = (!memory.is_empty()).then(|| io.attach(&memory)).transpose();
                let outcome = match key {
                    Ok(memory) => DirectOutcome::Granted { memory, is_probed },
                    Err(error) => {
                        let cause = format!("its key is unusable: {error}");
                        DirectOutcome::Refused { kind: ErrorKind::Malformed, cause }
                    }
                };
                self.direct.finish(io, request, outcome);
            }
            Message::ProbeReady { request, probe, memory } => {
                let Some(pending) = self.direct.pending.get_mut(&request) else { return };
                if !is_own(pending) || pending.run.is_some() {
                    return;
                }
                let begun = start(io, pending, probe, &memory);
                self.continue_probe(io, request, begun);
            }
            Message::ProbeChecked { probe, step, failure } => {
                let Some((request, run)) = self.direct.run_of(session, probe) else { return };
                let is_awaited = matches!(run.phase, Phase::AwaitingCheck);
                let moved = match failure {
                    _ if !is_awaited || run.step != step as usize => {
                        Err("the peer looked at another step".into())
                    }
                    Some(failure) => Err(failure.cause.into()),
                    None => self.next_step(io, request),
                };
                self.continue_probe(io, request, moved);
            }
            Message::ProbeFilled { probe, step } => {
                let Some((request, run)) = self.direct.run_of(session, probe) else { return };
                let is_awaited = matches!(run.phase, Phase::AwaitingFill);
                let moved = match is_awaited && run.step == step as usize {
                    true => self.move_parts(io, request),
                    false => Err("the peer filled another step".into()),
                };
                self.continue_probe(io, request, moved);
            }
            _ => {}
        }
    }

    fn continue_probe(&mut self, io: &mut RailIo, request: u64, moved: Found<()>) {
        if let Err(finding) = moved {
            self.fail_probe(io, request, finding);
        }
    }

    // ------------------------------------------------------------------- steps

    fn next_step(&mut self, io: &mut RailIo, request: u64) -> Found<()> {
        let Some(pending) = self.direct.pending.get_mut(&request) else { return Ok(()) };
        let (of, Some(run)) = ((pending.link, pending.session), &mut pending.run) else {
            return Ok(());
        };
        run.step += 1;
        let probe = run.probe;
        let step = run.step as u32;
        let (phase, message) = match steps().get(run.step) {
            None => (Phase::AwaitingGrant, Message::ProbePassed { probe }),
            Some(next) if next.operation() == Operation::Get => {
                (Phase::AwaitingFill, Message::RequestProbeFill { probe, step })
            }
            Some(_) => return begin_fill(run),
        };
        run.phase = phase;
        self.send(io, of, &message);
        Ok(())
    }

    /// Posts the operations of a step.
    fn move_parts(&mut self, io: &mut RailIo, request: u64) -> Found<()> {
        let Some(run) = self.direct.run(request) else { return Ok(()) };
        let longest = MAX_PART_LENGTH.min(io.capabilities().max_message_size as u64);
        let unposted = steps()[run.step].parts().iter().flat_map(|part| part.pieces(longest));
        let unposted = unposted.collect();
        run.phase = Phase::Moving { unposted, in_flight: 0 };
        self.post_parts(io, request)
    }

    fn post_parts(&mut self, io: &mut RailIo, request: u64) -> Found<()> {
        let DirectRequests { pending, chunks, .. } = &mut self.direct;
        let Some(pending) = pending.get_mut(&request) else { return Ok(()) };
        let PendingDirect { link: number, session, run: Some(run), .. } = pending else {
            return Ok(());
        };
        let link = self.links.get(number).filter(|link| link.session.id() == *session);
        let Some(link) = link else { return Ok(()) };
        let operation = steps()[run.step].operation();
        let Phase::Moving { unposted, in_flight } = &mut run.phase else { return Ok(()) };
        while let Some(part) = unposted.front().copied() {
            let (offset, length) = (part.offset(), part.length());
            let range = offset as usize..(offset + length) as usize;
            let local = run.scratch.region().slice(range);
            let remote = run.remote.slice(offset..offset + length);
            let chunk = io.next_id();
            let posted = local.and_then(|local| {
                io.post_data(operation, chunk, link.session.peer(), &local, &remote?)
            });
            match posted {
                Ok(true) => {
                    unposted.pop_front();
                    *in_flight += 1;
                    let chunk_of = ProbeChunk { request, link: *number, session: *session };
                    chunks.insert(chunk, chunk_of);
                }
                // The provider's queue is full.
                Ok(false) => return Ok(()),
                Err(error) => return Err(failed_text(operation, length, &error).into()),
            }
        }
        Ok(())
    }

    /// An operation is done. Returns its session, or None if it belongs to no probe.
    pub(super) fn probe_chunk_done(
        &mut self,
        io: &mut RailIo,
        chunk: u64,
        outcome: &Result<()>,
    ) -> Option<u64> {
        let ProbeChunk { request, session, .. } = self.direct.chunks.remove(&chunk)?;
        let moved = self.part_done(io, request, outcome);
        self.continue_probe(io, request, moved);
        Some(session)
    }

    fn part_done(&mut self, io: &mut RailIo, request: u64, outcome: &Result<()>) -> Found<()> {
        let Some(pending) = self.direct.pending.get_mut(&request) else { return Ok(()) };
        let (of, Some(run)) = ((pending.link, pending.session), &mut pending.run) else {
            return Ok(());
        };
        let (step, pattern) = run.known();
        let Phase::Moving { unposted, in_flight } = &mut run.phase else { return Ok(()) };
        *in_flight -= 1;
        if let Err(error) = outcome {
            return Err(failed_text(step.operation(), step.length(), error).into());
        }
        if *in_flight > 0 || !unposted.is_empty() {
            return Ok(());
        }
        if step.operation() == Operation::Put {
            run.phase = Phase::AwaitingCheck;
            let message = Message::ProbeWritten { probe: run.probe, step: run.step as u32 };
            self.send(io, of, &message);
            return Ok(());
        }
        let now = Instant::now();
        pending.local.flush().during(PROBE)?;
        run.scratch.begin_look(step)?;
        run.phase = Phase::Looking(Arrival::new((step, pattern), now));
        Ok(())
    }

    /// Continues all probes as far as possible now. True if anything happened.
    pub(super) fn advance_probes(&mut self, io: &mut RailIo) -> bool {
        let mut has_moved = false;
        let now = Instant::now();
        for request in self.direct.pending.keys().copied().collect::<Vec<_>>() {
            let moved = self.advance_probe(io, request, now);
            has_moved |= moved != Ok(false);
            self.continue_probe(io, request, moved.map(drop));
        }
        has_moved
    }

    fn advance_probe(&mut self, io: &mut RailIo, request: u64, now: Instant) -> Found<bool> {
        let Some(pending) = self.direct.pending.get_mut(&request) else { return Ok(false) };
        if now >= pending.until {
            return Err(Finding::Inconclusive(late_text(pending.run.as_ref())));
        }
        let Some(run) = &mut pending.run else { return Ok(false) };
        match &mut run.phase {
            Phase::Moving { unposted, .. } if !unposted.is_empty() => {
                let before = unposted.len();
                self.post_parts(io, request)?;
                let run = self.direct.run(request);
                let Some(Run { phase: Phase::Moving { unposted, .. }, .. }) = run else {
                    return Ok(true);
                };
                Ok(unposted.len() != before)
            }
            Phase::Filling => match run.scratch.poll()? {
                false => Ok(false),
                true => self.move_parts(io, request).map(|()| true),
            },
            Phase::Looking(arrival) => match run.scratch.judge(arrival)? {
                None => Ok(false),
                Some(Look::Right) => self.next_step(io, request).map(|()| true),
                Some(Look::Again) => Ok(true),
                Some(Look::Failed(cause)) => Err(cause.into()),
            },
            _ => Ok(false),
        }
    }
}

/// The target is ready: begins the first step.
fn start(io: &RailIo, pending: &mut PendingDirect, probe: u64, memory: &[u8]) -> Found<()> {
    let remote = io.attach(memory).during(PROBE)?;
    if remote.len() < SCRATCH_LENGTH {
        return Err("the memory of the peer is too short".into());
    }
    let scratch = Scratch::new(&pending.local, |buffer| io.register_now(buffer, None))?;
    // The wait for probes of others does not count.
    pending.until = pending.until.min(Instant::now() + PROBE_TIMEOUT);
    let run = pending.run.insert(Run { probe, remote, scratch, step: 0, phase: Phase::Filling });
    begin_fill(run)
}

fn begin_fill(run: &mut Run) -> Found<()> {
    let (step, pattern) = run.known();
    run.phase = Phase::Filling;
    Ok(run.scratch.begin_fill(step, pattern)?)
}

fn verb(operation: Operation) -> &'static str {
    match operation {
        Operation::Put => "writing",
        Operation::Get => "reading",
    }
}

fn failed_text(operation: Operation, length: u64, error: &dyn std::fmt::Display) -> String {
    format!("{} {} failed: {error}", verb(operation), size_text(length))
}

/// What was not done in time.
fn late_text(run: Option<&Run>) -> String {
    let Some(run) = run else { return "the peer did not answer in time".to_owned() };
    match (&run.phase, steps().get(run.step)) {
        (Phase::Moving { .. }, Some(step)) => {
            let verb = verb(step.operation());
            let size = size_text(step.length());
            format!("{verb} {size} did not complete in time")
        }
        (Phase::Filling | Phase::Looking(_), _) => {
            "a copy of the device did not complete in time".to_owned()
        }
        _ => "the peer did not answer in time".to_owned(),
    }
}

/// Access for tests.
#[cfg(test)]
mod test_access {
    use super::*;

    impl InitiatorRole {
        /// The requests for direct access that are not answered.
        pub(in crate::rail) fn direct_requests(&self) -> Vec<u64> {
            self.direct.pending.keys().copied().collect()
        }
    }
}

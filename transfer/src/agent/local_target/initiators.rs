//! Initiators of this machine that are connected to an agent, and the copies that they have in
//! flight.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ipc::PidFd;
use threads::lock;

use super::LocalTarget;
use crate::agent::Event;
use crate::agent::host_staged::StagingSession;
use crate::agent::local_protocol::Introduction;
use crate::agent::session_segment::TargetSegment;
use crate::region::RegisteredRegion;

#[derive(Debug)]
pub(in crate::agent) struct LocalInitiator {
    introduction: Introduction,
    pidfd: PidFd,
    /// The initiator disconnected or died; its pending notices can still be read.
    has_left: AtomicBool,
    departure_reported: AtomicBool,
    local_session: Mutex<TargetSegment>,
    /// The regions it opened whose memory is not freed yet: numbers and lengths.
    opened: Mutex<HashMap<u64, u64>>,
    kind: InitiatorKind,
    /// Session with the agent's own copies, if it has one.
    staging: OnceLock<Arc<StagingSession>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::agent) enum InitiatorKind {
    /// An agent of this process, which itself keeps the memory of its copies alive.
    InProcess,
    /// An agent of another process.
    OtherProcess,
    /// The copy service of the machine: its sessions are no events for the application.
    CopyService,
}

impl LocalInitiator {
    pub(in crate::agent) fn new(
        introduction: Introduction,
        pidfd: PidFd,
        local_session: TargetSegment,
        kind: InitiatorKind,
    ) -> Self {
        Self {
            introduction,
            pidfd,
            has_left: AtomicBool::new(false),
            departure_reported: AtomicBool::new(false),
            local_session: Mutex::new(local_session),
            opened: Mutex::default(),
            kind,
            staging: OnceLock::new(),
        }
    }

    /// Records that it opens a region. Called before it receives the export.
    pub(in crate::agent) fn record_opened(&self, region: &RegisteredRegion) {
        lock(&self.opened).insert(region.descriptor.number, region.descriptor.length);
    }

    pub(super) fn label(&self) -> &str {
        &self.introduction.label
    }

    pub(super) fn staging(&self) -> Option<&Arc<StagingSession>> {
        self.staging.get()
    }

    /// Sets its session with the agent's own copies, once.
    pub(super) fn set_staging(&self, session: Arc<StagingSession>) {
        self.staging.get_or_init(|| session);
    }

    /// Did it leave, and are the agent's own copies for it over?
    pub(in crate::agent) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
            && self.staging().is_none_or(|session| session.is_over())
    }

    /// The event that it connected; None for the copy service.
    pub(in crate::agent) fn joined(&self) -> Option<Event> {
        let Introduction { identity: from, label } = self.introduction.clone();
        (self.kind != InitiatorKind::CopyService).then_some(Event::Joined { from, label })
    }

    pub(in crate::agent) fn take_notice(&self) -> Option<Event> {
        let notice = lock(&self.local_session).take()?;
        Some(Event::Notice { from: self.introduction.identity, notice })
    }

    /// Reports its remaining notices, and then that it left; nothing of the copy service.
    pub(in crate::agent) fn report_departure(&self, mut report: impl FnMut(Event)) {
        if self.kind == InitiatorKind::CopyService {
            self.departure_reported.store(true, Ordering::Relaxed);
            return;
        }
        let Introduction { identity: from, label } = self.introduction.clone();
        let mut local_session = lock(&self.local_session);
        local_session.take_rest().for_each(|notice| report(Event::Notice { from, notice }));
        // Its process may have exited regularly since it disconnected.
        let is_dead = !local_session.left_cleanly() && self.pidfd.has_exited();
        drop(local_session);
        report(Event::Left { from, label, is_dead });
        self.departure_reported.store(true, Ordering::Relaxed);
    }

    /// Has it opened this region, or any?
    fn has_opened(&self, region: Option<u64>) -> bool {
        let opened = lock(&self.opened);
        region.map_or(!opened.is_empty(), |number| opened.contains_key(&number))
    }

    /// Have all copies completed that were started when `begun` was read?
    fn is_settled(&self, begun: u64) -> bool {
        lock(&self.local_session).is_settled(begun) || self.pidfd.has_exited()
    }

    /// Can it access a region, now or later? A lost connection does not stop its copies with open
    /// regions; only a clean close or the end of its process does.
    fn may_copy(&self) -> bool {
        let local_session = lock(&self.local_session);
        let has_finished =
            local_session.left_cleanly() && local_session.is_settled(local_session.begun());
        drop(local_session);
        self.has_opened(None) && !has_finished && !self.pidfd.has_exited()
    }
}

impl LocalTarget {
    pub(in crate::agent) fn add_initiator(&self, initiator: Arc<LocalInitiator>) {
        lock(&self.initiators).push(initiator);
        self.notify_change();
    }

    /// The connection of an initiator has ended. Of a killed process it does so before the process
    /// has: a thread waits for that, so that its peers are told.
    pub(super) fn initiator_disconnected(self: &Arc<Self>, initiator: Arc<LocalInitiator>) {
        /// Longer than a driver needs to close its files. Afterwards the connection counts as lost.
        const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
        /// If it is unknown whether the process exits.
        const SHORT_EXIT_TIMEOUT: Duration = Duration::from_millis(100);
        let has_left_cleanly = lock(&initiator.local_session).left_cleanly();
        let timeout = match initiator.pidfd.is_exiting() {
            _ if has_left_cleanly || initiator.pidfd.has_exited() => Duration::ZERO,
            Some(false) => Duration::ZERO,
            Some(true) => EXIT_TIMEOUT,
            None => SHORT_EXIT_TIMEOUT,
        };
        if !timeout.is_zero() {
            let (local_target, of_thread) = (Arc::clone(self), Arc::clone(&initiator));
            let wait = move || {
                let _ = of_thread.pidfd.exits_within(timeout);
                local_target.initiator_left(&of_thread);
            };
            if threads::spawn("fabricast-exit", wait).is_ok() {
                return;
            }
        }
        self.initiator_left(&initiator);
    }

    pub(in crate::agent) fn initiator_left(&self, initiator: &LocalInitiator) {
        initiator.has_left.store(true, Ordering::Release);
        if let Some(session) = initiator.staging() {
            session.leave();
            self.staging.wake();
        }
        self.notify_change();
    }

    pub(super) fn notify_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        self.doorbell.ring();
    }

    /// The initiators whose departure was not reported, if any connected or disconnected since
    /// `seen`.
    pub(in crate::agent) fn changed_initiators(
        &self,
        seen: &mut u64,
    ) -> Option<Vec<Arc<LocalInitiator>>> {
        let changes = self.changes.load(Ordering::Acquire);
        if changes == *seen {
            return None;
        }
        *seen = changes;
        let mut all = lock(&self.initiators).clone();
        all.retain(|initiator| !initiator.departure_reported.load(Ordering::Relaxed));
        Some(all)
    }

    /// The memory of a region is freed, so no initiator can use it any more.
    pub(super) fn forget_region(&self, number: u64) {
        for initiator in lock(&self.initiators).iter() {
            lock(&initiator.opened).remove(&number);
        }
    }

    /// Removes disconnected initiators that cannot access any region.
    pub(in crate::agent) fn remove_departed(&self) {
        lock(&self.initiators).retain(|initiator| {
            !initiator.departure_reported.load(Ordering::Relaxed) || initiator.may_copy()
        });
    }
}

/// Initiators with copies in flight at one moment, and the number of copies each had started.
#[derive(Debug)]
pub(in crate::agent) struct OutstandingCopies(Vec<(u64, Arc<LocalInitiator>)>);

impl OutstandingCopies {
    /// The copies of all initiators that opened this region, or any.
    pub(in crate::agent) fn of(local_target: &LocalTarget, region: Option<u64>) -> Self {
        let initiators = lock(&local_target.initiators);
        let users = initiators.iter().filter(|initiator| initiator.has_opened(region));
        let begun = |initiator: &LocalInitiator| lock(&initiator.local_session).begun();
        Self(users.map(|initiator| (begun(initiator), Arc::clone(initiator))).collect())
    }

    /// Those of other processes. Agents of this process keep the memory of their copies alive
    /// themselves.
    pub(in crate::agent) fn of_other_processes(mut self) -> Self {
        self.0.retain(|(_, initiator)| initiator.kind != InitiatorKind::InProcess);
        self
    }

    /// Removes completed ones. True if all have completed.
    pub(in crate::agent) fn are_over(&mut self) -> bool {
        self.0.retain(|(begun, initiator)| !initiator.is_settled(*begun));
        self.0.is_empty()
    }

    /// An initiator with copies in flight at the last check.
    pub(in crate::agent) fn label(&self) -> Option<&str> {
        self.0.first().map(|(_, initiator)| initiator.introduction.label.as_str())
    }

    /// Bytes of the regions that these initiators opened.
    pub(in crate::agent) fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, initiator)| lock(&initiator.opened).values().sum::<u64>()).sum()
    }
}

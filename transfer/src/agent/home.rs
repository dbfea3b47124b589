//! What an agent's thread at the socket and its owner share: who it is, its regions, and
//! those that visit it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use ipc::{Doorbell, Layout, Life, MappedWords, Segment};

use super::board::Board;
use super::pending::{OutstandingCopies, Reclaim};
use super::protocol::Introduction;
use super::visit::Host;
use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::rail::Line;
use crate::region::{Buffer, Registered};
use crate::service::Admission;
use crate::share::random;

const BELL: Layout = Layout::new("agent bell", 1);
/// How long the drop of an agent waits for copies that other processes have begun.
pub(super) const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

/// One that visits this agent.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(crate) identity: [u8; 16],
    pub(crate) label: String,
    pub(super) life: Life,
    /// It left, or is dead; what it had left behind can still be read.
    pub(super) has_left: AtomicBool,
    /// The agent's owner was told that it left.
    pub(super) is_told_of: AtomicBool,
    pub(super) visit: Mutex<Host>,
    /// The regions that it was given and whose memory is not freed yet: their numbers and lengths.
    opened: Mutex<HashMap<u64, u64>>,
    /// It belongs to this process, and has the memory that it copies to and from itself.
    pub(super) is_of_this_process: bool,
}

impl Visitor {
    pub(super) fn new(
        (identity, label): ([u8; 16], String),
        life: Life,
        visit: Host,
        is_of_this_process: bool,
    ) -> Self {
        let (has_left, is_told_of) = (AtomicBool::new(false), AtomicBool::new(false));
        let (visit, opened) = (Mutex::new(visit), Mutex::default());
        Self { identity, label, life, has_left, is_told_of, visit, opened, is_of_this_process }
    }

    /// It is given a region. To be said before it has it.
    pub(super) fn opens(&self, region: &Registered) {
        lock(&self.opened).insert(region.descriptor.number, region.descriptor.length);
    }

    /// Was it given this region, or any?
    pub(super) fn has_opened(&self, region: Option<u64>) -> bool {
        let opened = lock(&self.opened);
        region.map_or(!opened.is_empty(), |number| opened.contains_key(&number))
    }

    /// Bytes of all regions that it was given.
    pub(super) fn bytes_opened(&self) -> u64 {
        lock(&self.opened).values().sum()
    }

    /// How many copies it has begun so far.
    pub(super) fn begun(&self) -> u64 {
        lock(&self.visit).begun()
    }

    /// Is everything over that it had begun when `begun` was that?
    pub(super) fn is_settled(&self, begun: u64) -> bool {
        lock(&self.visit).is_settled(begun) || self.life.is_over()
    }

    /// Can it be at a region, now or later? A lost connection does not keep it from beginning copies
    /// with what it was given; only its goodbye does, or its end.
    fn may_copy(&self) -> bool {
        let visit = lock(&self.visit);
        let has_finished = visit.heard_goodbye() && visit.is_settled(visit.begun());
        drop(visit);
        self.has_opened(None) && !has_finished && !self.life.is_over()
    }
}

#[derive(Debug, Default)]
struct Regions {
    last: u64,
    all: HashMap<u64, Weak<Registered>>,
}

/// What an agent's two threads share.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) identity: [u8; 16],
    pub(crate) label: String,
    pub(super) admission: Admission,
    pub(super) life: Life,
    pub(super) board: Board,
    pub(super) bell: Segment,
    pub(crate) doorbell: Doorbell<MappedWords>,
    pub(super) is_over: AtomicBool,
    regions: Mutex<Regions>,
    pub(super) visitors: Mutex<Vec<Arc<Visitor>>>,
    /// Moves when visitors come or leave.
    pub(super) changes: AtomicU64,
    /// To the rails, once those run.
    pub(super) lines: OnceLock<Vec<Line>>,
    reclaim: Reclaim,
}

impl Home {
    pub(crate) fn new(label: String, admission: Admission) -> Result<Self> {
        let operation = "start an agent";
        let failed = |why: &dyn ToString| Error::new(operation, ErrorKind::Failed, why.to_string());
        let identity = random(operation)?;
        let bell = Segment::create(BELL, Doorbell::<MappedWords>::WORDS * size_of::<u64>())
            .map_err(|error| failed(&error))?;
        bell.mark_ready();
        let doorbell = Doorbell::new(bell.words()).ok_or_else(|| failed(&"a bell too short"))?;
        Ok(Self {
            identity,
            label,
            admission,
            life: Life::of_this_process().map_err(|error| failed(&error))?,
            board: Board::create().map_err(|error| failed(&error))?,
            bell,
            doorbell,
            is_over: AtomicBool::new(false),
            regions: Mutex::default(),
            visitors: Mutex::default(),
            changes: AtomicU64::new(0),
            lines: OnceLock::new(),
            reclaim: Reclaim::default(),
        })
    }

    pub(super) fn introduction(&self) -> Introduction {
        Introduction { identity: self.identity, label: self.label.clone() }
    }

    /// The bell of another agent.
    pub(super) fn open_bell(file: std::os::fd::OwnedFd) -> Result<Doorbell<MappedWords>> {
        let operation = "visit an agent";
        let wrong =
            |why: &dyn ToString| Error::new(operation, ErrorKind::Malformed, why.to_string());
        let segment = Segment::open(file, BELL).map_err(|error| wrong(&error))?;
        Doorbell::new(segment.words()).ok_or_else(|| wrong(&"a bell too short"))
    }

    pub(crate) fn lines(&self) -> &[Line] {
        self.lines.get().map_or(&[], Vec::as_slice)
    }

    /// Gives a region a number and a ticket, and shows it.
    pub(crate) fn enter(
        &self,
        make: impl FnOnce(u64, u64) -> Arc<Registered>,
    ) -> Result<Arc<Registered>> {
        let operation = "register a region";
        let ticket: [u8; 16] = random(operation)?;
        let mut regions = lock(&self.regions);
        let Some(number) = self.board.show_after(regions.last) else {
            let detail = "there is no place for one more region";
            return Err(Error::new(operation, ErrorKind::TooMany, detail));
        };
        regions.last = number;
        let ticket = u64::from_le_bytes(ticket[..8].try_into().unwrap_or_default());
        let region = make(number, ticket);
        regions.all.insert(number, Arc::downgrade(&region));
        Ok(region)
    }

    /// A number for a region that nobody is shown, nor finds.
    pub(crate) fn number(&self) -> u64 {
        let mut regions = lock(&self.regions);
        regions.last += 1;
        regions.last
    }

    /// Nothing more is begun with it.
    pub(crate) fn withdraw(&self, number: u64) {
        self.board.hide(number);
        lock(&self.regions).all.remove(&number);
    }

    /// The agent ends: none of its regions is there any more.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.board.end();
        let all = std::mem::take(&mut lock(&self.regions).all);
        all.into_keys().for_each(|number| self.board.hide(number));
    }

    /// Frees the memory of a region that was withdrawn: at once, or when no other process copies to
    /// or from it any more. It does not wait.
    pub(crate) fn release(self: &Arc<Self>, number: u64, buffer: Buffer) {
        let mut copies = OutstandingCopies::of_other_processes(self, Some(number));
        if copies.are_over() {
            self.forget_region(number);
        } else {
            self.reclaim.retain_until_done(copies, number, buffer, self);
        }
    }

    /// The memory of a region is freed: it is nothing to any visitor.
    pub(super) fn forget_region(&self, number: u64) {
        for visitor in lock(&self.visitors).iter() {
            lock(&visitor.opened).remove(&number);
        }
    }

    /// Forgets visitors that left and cannot be at any region.
    pub(super) fn forget_departed(&self) {
        let is_told_of = |visitor: &Visitor| visitor.is_told_of.load(Ordering::Relaxed);
        lock(&self.visitors).retain(|visitor| !is_told_of(visitor) || visitor.may_copy());
    }

    pub(super) fn reclaim(&self) -> &Reclaim {
        &self.reclaim
    }

    /// A region, for one that has its ticket.
    pub(crate) fn region(&self, number: u64, ticket: u64) -> Option<Arc<Registered>> {
        let found = lock(&self.regions).all.get(&number)?.upgrade()?;
        (self.board.is_there(number) && found.descriptor.ticket == ticket).then_some(found)
    }

    pub(super) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        self.doorbell.ring();
    }
}

/// Agents of this process: those reach each other without a socket.
static HERE: Mutex<Vec<Weak<Home>>> = Mutex::new(Vec::new());

pub(super) fn add_to_process_list(home: &Arc<Home>) {
    let mut here = lock(&HERE);
    here.retain(|other| other.strong_count() > 0);
    here.push(Arc::downgrade(home));
}

/// An agent of this process, if it is one.
pub(super) fn found(identity: [u8; 16]) -> Option<Arc<Home>> {
    let here = lock(&HERE);
    let mut homes = here.iter().filter_map(Weak::upgrade);
    homes.find(|home| home.identity == identity && !home.is_over.load(Ordering::Acquire))
}

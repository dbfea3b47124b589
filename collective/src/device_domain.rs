//! A communication domain whose ranks have devices of one machine.
//!
//! Each rank has a stage: device memory to which the others copy. One kernel carries out an operation: it
//! pushes to the stages of the others, waits for them on the device, reduces, and copies from its own
//! stage. The host neither waits for other ranks nor for the device.
#![allow(unsafe_code)]

use std::sync::Arc;

use gpu::{
    Device, Exchange, ExchangeCopy, ExchangePlace, ExchangeReduction, Memory, Point, Slice, Stream,
    Uuid,
};
use ipc::{Layout, Segment};
use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::domain_key::{CommDomainKey, digest};
use crate::domain_options::{DomainOptions, JOIN, MachineRanks};
use crate::error::{Error, ErrorKind, Result};
use crate::host_call::{CheckedCall, HostCall};
use crate::host_operations::Place;
use crate::members::{Failure, Members};
use crate::operation::Operation;
use crate::peer_watch::PeerWatch;
use crate::rendezvous::Offer;

/// Bytes of a half of a stage: of the spaces for even or for odd chunks.
const HALF_BYTES: u64 = 16 << 20;
/// Up to this size each rank reduces all elements, instead of a share.
const ONE_STEP_BYTES: u64 = 64 << 10;
/// Chunks and shares of ranks begin at multiples of this.
const GRANULE: u64 = 256;
const STATE: Layout = Layout::new("fabricast device domain", 1);
/// Words in the state: set to stop the devices, and the number of an exchange that was given up.
const STOP: u64 = 0;
const FAILED: u64 = 64;

/// What a rank offers: how its stage is imported.
#[derive(Debug, Serialize, Deserialize)]
struct StageOffer {
    uuid: Uuid,
    offset: u64,
    lengths: Vec<u64>,
}

/// The stage of a rank, as this one accesses it.
#[derive(Debug)]
struct Stage {
    words: Slice,
    /// The first half; the second one is behind it.
    half: Slice,
}

impl Stage {
    const BYTES: u64 = Exchange::WORD_BYTES + 2 * HALF_BYTES;

    fn new(memory: &Memory) -> gpu::Result<Self> {
        let words = memory.slice(0, Exchange::WORD_BYTES)?;
        Ok(Self { words, half: memory.slice(Exchange::WORD_BYTES, HALF_BYTES)? })
    }

    /// Space for chunks of so many bytes.
    fn slot(&self, number: u64, bytes: u64) -> gpu::Result<Slice> {
        self.half.slice(number * bytes, bytes)
    }
}

/// The ranks of a machine that carry out collective operations of device memory together, as one of them
/// sees them.
///
/// Operations are started on a stream, in the same order on all ranks. If a rank ends, those that run are
/// given up within milliseconds, and later ones return an error that names it.
#[derive(Debug)]
pub struct DeviceDomain {
    /// Dropped first: it writes to the state.
    _watch: PeerWatch,
    members: Arc<Members>,
    device: Device,
    /// One for each rank; words have an array of their own.
    stages: Vec<Stage>,
    words: Vec<Slice>,
    state: Segment,
    stop: Slice,
    failed: Slice,
    /// The number of the next chunk.
    next: u32,
    /// The last operation: the next one follows it, also on another stream.
    last: Option<Point>,
}

fn of_device(operation: &'static str) -> impl Fn(gpu::Error) -> Error {
    move |error| Error::caused_by(operation, ErrorKind::Failed, error)
}

impl DeviceDomain {
    /// Joins the domain of this key, as its rank of this number, with memory of this device. Waits until
    /// all ranks have come.
    ///
    /// # Errors
    /// As for [`CommDomain::join`](crate::CommDomain::join);
    /// [`Unavailable`](ErrorKind::Unavailable) for more than 16 ranks; errors of the device, for example
    /// without access to that of another rank.
    pub fn join(
        key: &CommDomainKey,
        rank: u32,
        device: &Device,
        options: &DomainOptions,
    ) -> Result<Self> {
        let failed = of_device(JOIN);
        if key.ranks.len() > Exchange::MAX_RANKS {
            let detail = format!("{} ranks, at most {}", key.ranks.len(), Exchange::MAX_RANKS);
            return Err(Error::new(JOIN, ErrorKind::Unavailable, detail));
        }
        let own = device.allocate_shared(Stage::BYTES, &[]).map_err(&failed)?;
        let stream = device.stream().map_err(&failed)?;
        let words = own.slice(0, Exchange::WORD_BYTES).map_err(&failed)?;
        stream.fill(&words, 0).map_err(&failed)?;
        stream.close(options.join_timeout()).map_err(&failed)?;
        let pieces = own.pieces().map_err(&failed)?;
        let export = |number| own.export_piece(number).map(|(descriptor, _)| descriptor);
        let descriptors = (0..pieces.lengths.len()).map(export).collect::<gpu::Result<_>>();
        let uuid = device.properties().uuid;
        let offer = StageOffer { uuid, offset: pieces.offset, lengths: pieces.lengths };
        let bytes = control::codec::encode(0, &offer);
        let offer = Offer { bytes, descriptors: descriptors.map_err(&failed)? };
        let build = digest([HALF_BYTES, ONE_STEP_BYTES, Exchange::WORD_BYTES]);
        let joined = options.join("devices", key, rank, build, |_| 0, offer)?;
        let MachineRanks { members, offers, .. } = joined;
        let mut stages = Vec::with_capacity(offers.len());
        for (other, offer) in offers.iter().enumerate() {
            let stage = match other == rank as usize {
                true => Stage::new(&own),
                false => import(device, offer)?,
            };
            stages.push(stage.map_err(&failed)?);
        }
        let words = stages.iter().map(|stage| stage.words.clone()).collect();
        let state = Segment::create(STATE, 4096)
            .map_err(|error| Error::caused_by(JOIN, ErrorKind::Failed, error))?;
        let pinned = transfer::pin(&state, device)
            .map_err(|error| Error::caused_by(JOIN, ErrorKind::Failed, error))?;
        let word = |offset| pinned.slice(offset, 4).map_err(&failed);
        let (stop, failed_word) = (word(STOP)?, word(FAILED)?);
        let watch = {
            let (members_of_watch, state) = (Arc::clone(&members), state.clone());
            let members = Arc::clone(&members);
            PeerWatch::start(members_of_watch, move |rank| {
                members.fail(Failure::Ended { rank });
                stop_devices(&state);
            })?
        };
        Ok(Self {
            _watch: watch,
            members,
            device: device.clone(),
            stages,
            words,
            state,
            stop,
            failed: failed_word,
            next: 1,
            last: None,
        })
    }

    /// This process' rank in the domain, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.members.rank()
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.members.count()
    }

    /// The device of this rank.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Gives up all operations that run, on this rank; the domain is over for all ranks.
    pub fn abort(&self) {
        self.members.fail(Failure::Left { rank: self.rank() });
        stop_devices(&self.state);
    }

    /// Checks whether operations were given up.
    ///
    /// # Errors
    /// [`RankFailed`](ErrorKind::RankFailed) or [`Closed`](ErrorKind::Closed), with the rank: then
    /// results since the last check are not valid.
    pub fn check(&self, operation: &'static str) -> Result<()> {
        self.members.check_fork(operation)?;
        match self.members.failure() {
            Some(failure) => Err(self.members.error(operation, failure, |_, _| None)),
            None => Ok(()),
        }
    }

    /// Starts an operation on a stream of the device. Its addresses are of the device.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), [`Unavailable`](ErrorKind::Unavailable) for
    /// unequal blocks; [`RankFailed`](ErrorKind::RankFailed) if a rank has ended before; errors of the
    /// device.
    ///
    /// # Safety
    /// Input and output are memory of this device, valid for the blocks of the call until the operation
    /// is done, and apart from each other or placed as the call allows.
    pub unsafe fn start(&mut self, call: &HostCall<'_>, stream: &Stream) -> Result<()> {
        let operation = call.operation.name();
        self.check(operation)?;
        let checked = call.check(self.rank(), self.size())?;
        if checked.longest.is_none() || checked.call.blocks != 0 {
            let detail = "blocks of devices are equal";
            return Err(Error::new(operation, ErrorKind::Unavailable, detail));
        }
        let failed = of_device(operation);
        if let Some(last) = self.last.take() {
            stream.wait_for(&last).map_err(&failed)?;
        }
        // SAFETY: the caller's promise.
        let plan = unsafe { Plan::new(self, &checked) }.map_err(&failed)?;
        let chunks = plan.chunks;
        plan.start(self, stream).map_err(&failed)?;
        self.next = self.next.wrapping_add(chunks);
        self.last = Some(stream.point().map_err(&failed)?);
        Ok(())
    }
}

fn stop_devices(state: &Segment) {
    use ipc::Words;
    state.words().store(STOP as usize / 8, 1, std::sync::atomic::Ordering::Release);
}

/// Imports the stage of another rank.
fn import(device: &Device, offer: &Offer) -> Result<gpu::Result<Stage>> {
    let malformed =
        |why: String| Error::new(JOIN, ErrorKind::Malformed, format!("offer of a stage: {why}"));
    let Offer { bytes, descriptors } = offer;
    let stage: StageOffer =
        control::codec::decode(0, bytes).map_err(|error| malformed(error.to_string()))?;
    if descriptors.len() != stage.lengths.len() {
        return Err(malformed(format!("{} descriptors", descriptors.len())));
    }
    let total = stage.lengths.iter().fold(0_u64, |sum, length| sum.saturating_add(*length));
    let import = || {
        use std::os::fd::AsFd;
        let importer = device.importer_of(stage.uuid, total)?;
        for (descriptor, length) in descriptors.iter().zip(&stage.lengths) {
            importer.add(descriptor.as_fd(), *length)?;
        }
        Stage::new(&importer.finish(stage.offset, Stage::BYTES)?)
    };
    Ok(import())
}

impl Drop for DeviceDomain {
    fn drop(&mut self) {
        if self.members.check_fork("leave communication domain").is_ok() {
            self.members.leave();
        }
    }
}

/// A copy of a plan, with its own slices.
#[derive(Debug)]
struct PlannedCopy {
    to: PlannedPlace,
    from: PlannedPlace,
    bytes: u64,
    chunk: u64,
}

fn copies(planned: &[PlannedCopy]) -> Vec<ExchangeCopy<'_>> {
    let mut copies = Vec::with_capacity(planned.len());
    for PlannedCopy { to, from, bytes, chunk } in planned {
        let (to, from) = (to.place(), from.place());
        copies.push(ExchangeCopy { to, from, bytes: *bytes, chunk: *chunk });
    }
    copies
}

#[derive(Debug, Clone)]
struct PlannedPlace {
    slice: Slice,
    is_stage: bool,
}

impl PlannedPlace {
    fn place(&self) -> ExchangePlace<'_> {
        match self.is_stage {
            true => ExchangePlace::Stage(&self.slice),
            false => ExchangePlace::Buffer(&self.slice),
        }
    }
}

fn stage(slice: Slice) -> PlannedPlace {
    PlannedPlace { slice, is_stage: true }
}

/// What a rank does in an operation.
#[derive(Debug)]
struct Plan {
    chunks: u32,
    pushes: Vec<PlannedCopy>,
    sources: Vec<PlannedPlace>,
    results: Vec<PlannedPlace>,
    reduced: (u64, u64),
    is_gathered: bool,
    copies: Vec<PlannedCopy>,
    blocks: u32,
    call: Call,
}

/// Blocks of the kernel for an operation in which a rank copies so many bytes.
fn blocks(bytes: u64) -> u32 {
    match bytes {
        0..0x1_0000 => 8,
        0x1_0000..0x10_0000 => 32,
        0x10_0000..0x100_0000 => 64,
        _ => 128,
    }
}

impl Plan {
    /// # Safety
    /// As for [`DeviceDomain::start`].
    unsafe fn new(domain: &DeviceDomain, checked: &CheckedCall) -> gpu::Result<Self> {
        use Operation::{
            AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
        };
        let mut plan = Self {
            chunks: 1,
            pushes: Vec::new(),
            sources: Vec::new(),
            results: Vec::new(),
            reduced: (0, 0),
            is_gathered: false,
            copies: Vec::new(),
            blocks: 1,
            call: checked.call,
        };
        // SAFETY: the caller's promise.
        let builder = unsafe { Builder::new(domain, checked) };
        match checked.call.operation {
            Broadcast | Gather | Scatter | AllGather | AllToAll => {
                builder.move_blocks(&mut plan)?
            }
            ReduceScatter => builder.reduce_scatter(&mut plan)?,
            AllReduce | Reduce => builder.reduce(&mut plan)?,
            _ => {}
        }
        Ok(plan)
    }

    fn start(&self, domain: &DeviceDomain, stream: &Stream) -> gpu::Result<()> {
        let sources: Vec<_> = self.sources.iter().map(PlannedPlace::place).collect();
        let results: Vec<_> = self.results.iter().map(PlannedPlace::place).collect();
        let (bytes, chunk) = self.reduced;
        let reduction = self.call.reduce_op.filter(|_| bytes > 0).map(|op| ExchangeReduction {
            data_type: self.call.data_type,
            op,
            sources: &sources,
            results: &results,
            bytes,
            chunk,
        });
        stream.exchange(&Exchange {
            rank: domain.rank(),
            number: domain.next,
            chunks: self.chunks,
            stage_distance: HALF_BYTES,
            words: &domain.words,
            stop: &domain.stop,
            failed: &domain.failed,
            pushes: &copies(&self.pushes),
            reduction,
            is_gathered: self.is_gathered,
            copies: &copies(&self.copies),
            blocks: self.blocks,
        })
    }
}

/// Plans an operation.
struct Builder<'a> {
    domain: &'a DeviceDomain,
    checked: &'a CheckedCall,
    rank: u64,
    ranks: u64,
    root: u64,
}

impl<'a> Builder<'a> {
    /// # Safety
    /// As for [`DeviceDomain::start`].
    unsafe fn new(domain: &'a DeviceDomain, checked: &'a CheckedCall) -> Self {
        let root = checked.call.root.unwrap_or(0).into();
        let (rank, ranks) = (domain.rank().into(), domain.size().into());
        Self { domain, checked, rank, ranks, root }
    }

    /// A part of a buffer of the caller.
    fn buffer(&self, place: Place, offset: u64, bytes: u64) -> gpu::Result<PlannedPlace> {
        let Place { at, bytes: all } = place;
        // SAFETY: valid until the operation is done, by the promise of the caller of `new`.
        let memory = unsafe {
            Memory::foreign(&self.domain.device, at.addr() as u64, (all as u64).max(1), ())
        };
        Ok(PlannedPlace { slice: memory.slice(offset, bytes)?, is_stage: false })
    }

    fn others(&self) -> impl Iterator<Item = u64> + use<> {
        let rank = self.rank;
        (rank + 1..self.ranks).chain(0..rank)
    }

    fn stage_of(&self, rank: u64) -> &Stage {
        &self.domain.stages[rank as usize]
    }

    /// Chunks of slots, of which a half has so many.
    fn chunk(&self, slots: u64, longest: u64) -> (u64, u32) {
        let most = HALF_BYTES / slots / GRANULE * GRANULE;
        let chunk = longest.next_multiple_of(GRANULE).clamp(GRANULE, most);
        (chunk, longest.div_ceil(chunk).max(1) as u32)
    }

    /// Blocks go from rank to rank as they are.
    fn move_blocks(&self, plan: &mut Plan) -> gpu::Result<()> {
        let CheckedCall { from, to, .. } = self.checked;
        let operation = self.checked.call.operation;
        let has_one_giver = matches!(operation, Operation::Broadcast | Operation::Scatter);
        let gives = |rank: u64| !has_one_giver || rank == self.root;
        let gets = |rank: u64| operation != Operation::Gather || rank == self.root;
        let longest = self.checked.longest.unwrap_or(0) as u64;
        let slots = if has_one_giver { 1 } else { self.ranks };
        let (chunk, chunks) = self.chunk(slots, longest);
        plan.chunks = chunks;
        let slot = |at: u64, giver: u64| {
            let number = if has_one_giver { 0 } else { giver };
            Ok(stage(self.stage_of(at).slot(number, chunk)?))
        };
        // The block of a rank: all have the same, or each has its own.
        let block = |places: &[Place], rank: u64| match places {
            [one] => *one,
            all => all[rank as usize],
        };
        if gives(self.rank) {
            for other in self.others().filter(|other| gets(*other)) {
                let place = block(from, other);
                let bytes = place.bytes as u64;
                let (to, from) = (slot(other, self.rank)?, self.buffer(place, 0, bytes)?);
                plan.pushes.push(PlannedCopy { to, from, bytes, chunk });
            }
            if gets(self.rank) {
                let (from, to) = (block(from, self.rank), block(to, self.rank));
                if from.at != to.at {
                    let bytes = from.bytes as u64;
                    let (from, to) = (self.buffer(from, 0, bytes)?, self.buffer(to, 0, bytes)?);
                    plan.pushes.push(PlannedCopy { to, from, bytes, chunk });
                }
            }
        }
        if gets(self.rank) {
            for other in self.others().filter(|other| gives(*other)) {
                let place = block(to, other);
                let bytes = place.bytes as u64;
                let (to, from) = (self.buffer(place, 0, bytes)?, slot(self.rank, other)?);
                plan.copies.push(PlannedCopy { to, from, bytes, chunk });
            }
        }
        plan.blocks = blocks(longest * slots);
        Ok(())
    }

    fn reduce_scatter(&self, plan: &mut Plan) -> gpu::Result<()> {
        let CheckedCall { from, to, .. } = self.checked;
        let longest = self.checked.longest.unwrap_or(0) as u64;
        let (chunk, chunks) = self.chunk(self.ranks, longest);
        plan.chunks = chunks;
        for other in self.others() {
            let place = from[other as usize];
            let bytes = place.bytes as u64;
            let to = stage(self.stage_of(other).slot(self.rank, chunk)?);
            plan.pushes.push(PlannedCopy { to, from: self.buffer(place, 0, bytes)?, bytes, chunk });
        }
        for source in 0..self.ranks {
            plan.sources.push(match source == self.rank {
                true => self.buffer(from[source as usize], 0, longest)?,
                false => stage(self.stage_of(self.rank).slot(source, chunk)?),
            });
        }
        plan.results = vec![self.buffer(to[0], 0, longest)?];
        plan.reduced = (longest, chunk);
        plan.blocks = blocks(longest * self.ranks);
        Ok(())
    }

    /// All-reduce, and reduce to the root.
    fn reduce(&self, plan: &mut Plan) -> gpu::Result<()> {
        let CheckedCall { from, to, .. } = self.checked;
        let (from, to) = (from[0], to.first().copied());
        let bytes = from.bytes as u64;
        let is_to_all = self.checked.call.operation == Operation::AllReduce;
        let gets = |rank: u64| is_to_all || rank == self.root;
        if bytes <= ONE_STEP_BYTES {
            let (chunk, _) = self.chunk(self.ranks, bytes);
            for other in self.others().filter(|other| gets(*other)) {
                let to = stage(self.stage_of(other).slot(self.rank, chunk)?);
                let from = self.buffer(from, 0, bytes)?;
                plan.pushes.push(PlannedCopy { to, from, bytes, chunk });
            }
            if let Some(to) = to.filter(|_| gets(self.rank)) {
                for source in 0..self.ranks {
                    plan.sources.push(match source == self.rank {
                        true => self.buffer(from, 0, bytes)?,
                        false => stage(self.stage_of(self.rank).slot(source, chunk)?),
                    });
                }
                plan.results = vec![self.buffer(to, 0, bytes)?];
                plan.reduced = (bytes, chunk);
            }
            plan.blocks = blocks(bytes * self.ranks);
            return Ok(());
        }
        // Slots for the shares of all ranks, then for their results.
        let share = bytes.div_ceil(self.ranks).next_multiple_of(GRANULE);
        let share_of = |rank: u64| {
            let begin = (share * rank).min(bytes);
            (begin, (begin + share).min(bytes) - begin)
        };
        let (chunk, chunks) = self.chunk(2 * self.ranks, share);
        plan.chunks = chunks;
        for other in self.others() {
            let (begin, bytes) = share_of(other);
            let to = stage(self.stage_of(other).slot(self.rank, chunk)?);
            let from = self.buffer(from, begin, bytes)?;
            plan.pushes.push(PlannedCopy { to, from, bytes, chunk });
        }
        let (begin, length) = share_of(self.rank);
        for source in 0..self.ranks {
            plan.sources.push(match source == self.rank {
                true => self.buffer(from, begin, length)?,
                false => stage(self.stage_of(self.rank).slot(source, chunk)?),
            });
        }
        for other in self.others().filter(|other| gets(*other)) {
            let slot = self.stage_of(other).slot(self.ranks + self.rank, chunk)?;
            plan.results.push(stage(slot));
        }
        if let Some(to) = to.filter(|_| gets(self.rank)) {
            plan.results.push(self.buffer(to, begin, length)?);
            for other in self.others() {
                let (begin, bytes) = share_of(other);
                let from = stage(self.stage_of(self.rank).slot(self.ranks + other, chunk)?);
                let to = self.buffer(to, begin, bytes)?;
                plan.copies.push(PlannedCopy { to, from, bytes, chunk });
            }
        }
        plan.reduced = (length, chunk);
        plan.is_gathered = true;
        plan.blocks = blocks(bytes);
        Ok(())
    }
}

//! A communication domain whose ranks have devices of one machine.
//!
//! Each rank has a stage: device memory to which the others copy. One kernel carries out an operation: it
//! pushes to the stages of the others, waits for them on the device, reduces, and copies from its own
//! stage. The host waits for no device, and for other ranks at most some milliseconds: before large operations,
//! in which ranks access the buffers of each other.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use gpu::{
    Device, Exchange, ExchangeCopy, ExchangePlace, ExchangeReduction, Memory, Point, Slice, Stream,
    Uuid,
};
use ipc::{Layout, Segment};
use serde::{Deserialize, Serialize};

use crate::buffer_agreement::{Agreed, BufferAgreement, DirectOutcomes, RankBuffers};
use crate::call::Call;
use crate::call_board::CallBoard;
use crate::collective_call::{CheckedCall, CollectiveCall};
use crate::controller::Change;
use crate::device_paths::DevicePaths;
use crate::domain_key::{CommDomainKey, digest};
use crate::domain_options::{DomainOptions, JOIN, Kind, segment_too_small};
use crate::error::{Error, ErrorKind, Result};
use crate::members::{Failure, Members};
use crate::operation::{OpKey, Operation, SizeClass};
use crate::parameters::Parameters;
use crate::peer_watch::PeerWatch;
use crate::place::Place;
use crate::rendezvous::Offer;
use crate::second_path::{ReleaseWords, SecondPath};
use crate::status_file::DomainKind;

/// Bytes of a half of a stage: of the spaces for even or for odd chunks.
const HALF_BYTES: u64 = 16 << 20;
/// From this size on ranks reduce the buffers of each other directly, if all can, and copy to them.
const MIN_DIRECT_REDUCTION: u64 = 16 << 20;
const MIN_DIRECT_COPY: u64 = 32 << 20;
/// Blocks that copy what stays on the device, beside copy engines: more are no faster.
const COPY_BLOCKS: u32 = 16;
/// Blocks of a direct reduction.
const REDUCE_BLOCKS: u32 = 128;
/// Up to this size each rank reduces all elements, instead of a share.
const ONE_STEP_BYTES: u64 = 64 << 10;
/// The parts of two paths are divided at multiples of this.
const SPLIT_GRANULE: u64 = 1 << 20;
/// Chunks and shares of ranks begin at multiples of this.
const GRANULE: u64 = 256;
/// How long a rank that leaves waits for its operations, before these give up.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);
const STATE: Layout = Layout::new("fabricast device domain", 1);
/// Offsets of the words of the state: set to stop the devices, and the number of an exchange that was given
/// up.
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
    board: Arc<CallBoard>,
    agreement: BufferAgreement,
    /// A stream for each other rank, to which copy engines copy.
    copy_streams: Vec<Stream>,
    second: SecondPath,
    paths: DevicePaths,
}

/// Gives up the operations of a [`DeviceDomain`], also while another thread starts one.
#[derive(Debug, Clone)]
pub struct DeviceAbort {
    members: Arc<Members>,
    stop: StopDevices,
}

impl DeviceAbort {
    /// Gives up all operations that run, on this rank; the domain is over for all ranks. Without effect
    /// in a forked child, and after the end of the domain.
    pub fn abort(&self) {
        if self.members.check_fork("abort").is_ok() {
            self.members.fail(Failure::Left { rank: self.members.rank() });
            self.stop.run();
        }
    }

    /// Checks whether operations were given up, also after the end of the domain.
    ///
    /// # Errors
    /// Those of [`DeviceDomain::check`].
    pub fn check(&self, operation: &'static str) -> Result<()> {
        self.members.check(operation)
    }
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
        let offer = Offer::new(bytes, descriptors.map_err(&failed)?);
        let build = digest([HALF_BYTES, ONE_STEP_BYTES, Exchange::WORD_BYTES]);
        let kind = Kind::new("devices", DomainKind::DeviceMemory, build);
        let words = |ranks| {
            CallBoard::required_words(ranks)
                + BufferAgreement::required_words(ranks)
                + SecondPath::required_words(ranks)
        };
        let mut joined = options.join(kind, key, rank, None, words, offer)?;
        let (first_extra, status) = (joined.first_extra(), joined.take_status());
        let (members, offers) = joined.into_members();
        let board = CallBoard::new(Arc::clone(&members), first_extra);
        let board = Arc::new(board.ok_or_else(segment_too_small)?);
        let first_extra = first_extra + CallBoard::required_words(members.count());
        let agreement = BufferAgreement::new(Arc::clone(&members), first_extra, device);
        let agreement = agreement.ok_or_else(segment_too_small)?;
        let first_extra = first_extra + BufferAgreement::required_words(members.count());
        let second = SecondPath::new(Arc::clone(&members), first_extra, device);
        let paths = DevicePaths::new(rank, members.count(), options.fixed(), status);
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
        let stop_devices = StopDevices { state: state.clone(), words: second.release() };
        let watch = {
            let (members_of_watch, board) = (Arc::clone(&members), Arc::clone(&board));
            let members = Arc::clone(&members);
            let give_up = move |failure| {
                members.fail(failure);
                stop_devices.run();
            };
            PeerWatch::start(members_of_watch, move || board.failure(), give_up)?
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
            board,
            agreement,
            copy_streams: Vec::new(),
            second,
            paths,
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

    /// How large operations were decided: whether ranks access the buffers of each other.
    #[must_use]
    pub fn outcomes(&self) -> DirectOutcomes {
        self.agreement.outcomes()
    }

    /// A handle that gives up the operations of this rank, from any thread.
    #[must_use]
    pub fn abort_handle(&self) -> DeviceAbort {
        DeviceAbort { members: Arc::clone(&self.members), stop: self.stop_devices() }
    }

    fn stop_devices(&self) -> StopDevices {
        StopDevices { state: self.state.clone(), words: self.second.release() }
    }

    /// The point behind the last operation that this rank has started.
    #[must_use]
    pub fn last(&self) -> Option<&Point> {
        self.last.as_ref()
    }

    /// Returns whether an operation that this rank had started was given up by its device: then the
    /// results of it and of later ones are not valid.
    #[must_use]
    pub fn has_given_up(&self) -> bool {
        use ipc::Words;
        self.state.words().load(FAILED as usize / 8, std::sync::atomic::Ordering::Acquire) != 0
    }

    /// Checks whether operations were given up.
    ///
    /// # Errors
    /// [`RankFailed`](ErrorKind::RankFailed), [`Closed`](ErrorKind::Closed),
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) or [`Mismatch`](ErrorKind::Mismatch), with the
    /// rank: then results since the last check are not valid.
    pub fn check(&self, operation: &'static str) -> Result<()> {
        self.members.check(operation)
    }

    /// Starts an operation on a stream of the device. Its addresses are of the device. If a rank does not
    /// start it within this time, all ranks give up: [`check`](Self::check) names that rank.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), [`Unavailable`](ErrorKind::Unavailable) for
    /// unequal blocks, and for a stream that is captured into a CUDA graph;
    /// [`Mismatch`](ErrorKind::Mismatch) if another rank has started another operation: that one learns it by
    /// `check`; [`RankFailed`](ErrorKind::RankFailed) if a rank has ended before; errors of the device.
    ///
    /// # Safety
    /// Input and output are memory of this device, valid for the blocks of the call until the operation
    /// is done, and apart from each other or placed as the call allows.
    pub unsafe fn start(
        &mut self,
        call: &CollectiveCall<'_>,
        stream: &Stream,
        timeout: Duration,
    ) -> Result<()> {
        let operation = call.operation.name();
        self.check(operation)?;
        let checked = call.check(self.rank(), self.size())?;
        if checked.longest().is_none() || checked.call().blocks != 0 {
            let detail = "blocks of devices are equal";
            return Err(Error::new(operation, ErrorKind::Unavailable, detail));
        }
        let failed = of_device(operation);
        let (device, found) = (self.device.name(), stream.device().name());
        if device != found {
            let detail = format!("the stream is of {found}, the domain has {device}");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        if stream.is_capturing().map_err(&failed)? {
            let detail = "the stream is captured into a CUDA graph, which would repeat the operation \
                          without the other ranks. Start it between graphs";
            return Err(Error::new(operation, ErrorKind::Unavailable, detail));
        }
        let started = self.board.start(checked.call(), timeout);
        started.map_err(|failure| {
            self.stop_devices().run();
            self.members.error(operation, failure)
        })?;
        // SAFETY: the caller's promise.
        let started = unsafe { self.start_checked(&checked, stream) };
        started.map_err(|error| {
            // The others would wait for what this rank has not started.
            self.abort_handle().abort();
            failed(error)
        })
    }
}

impl DeviceDomain {
    /// Starts an operation behind the one before.
    ///
    /// # Safety
    /// The promises of [`start`](Self::start).
    unsafe fn start_checked(&mut self, checked: &CheckedCall, stream: &Stream) -> gpu::Result<()> {
        if let Some(last) = &self.last {
            stream.wait_for(last)?;
        }
        // SAFETY: the caller's promise.
        let agreed = unsafe { self.agree(checked) };
        if let Some((agreed, parameters)) = agreed {
            self.start_direct(checked, agreed.buffers(), parameters, stream)?;
        } else {
            // SAFETY: the caller's promise.
            let plan = unsafe { Plan::new(self, checked) }?;
            let chunks = plan.chunks;
            plan.start(self, stream)?;
            self.next = self.next.wrapping_add(chunks);
        }
        self.last = Some(stream.point()?);
        Ok(())
    }
}

impl DeviceDomain {
    /// Agrees with the other ranks on a direct operation; None if it is too small, or a rank does not.
    ///
    /// # Safety
    /// As for [`start`](Self::start).
    unsafe fn agree(&mut self, checked: &CheckedCall) -> Option<(Agreed, Parameters)> {
        let least = match checked.call().reduce_op {
            Some(_) => MIN_DIRECT_REDUCTION,
            None => MIN_DIRECT_COPY,
        };
        if self.size() == 1 || checked.bytes() < least {
            return None;
        }
        let whole = |places: &[Place]| {
            let (first, last) = (places.first()?, places.last()?);
            let end = last.at().addr() + last.bytes();
            Some((first.at().addr() as u64, (end - first.at().addr()) as u64))
        };
        let slice = |places: &[Place]| {
            let (address, length) = whole(places)?;
            // SAFETY: valid until the operation is done, by the caller's promise.
            let memory = unsafe { Memory::foreign(&self.device, address, length, ()) };
            Some(memory.whole())
        };
        let overlap = match (whole(checked.from()), whole(checked.to())) {
            (Some((from, given)), Some((to, taken))) => from < to + taken && to < from + given,
            _ => false,
        };
        // Others would read or write where this rank has not read yet.
        let is_overwritten = match checked.call().operation {
            Operation::AllToAll => overlap,
            Operation::ReduceScatter => {
                overlap && checked.from()[self.rank() as usize].at() != checked.to()[0].at()
            }
            _ => false,
        };
        let (operation, bytes) = (checked.call().operation, checked.bytes());
        let key = Self::key(checked);
        let may_split = self.paths.may_split(operation, bytes);
        let report = self.paths.report(key, may_split && self.second.open(bytes));
        if is_overwritten {
            self.agreement.agree(None, &report);
            return None;
        }
        // Of a rank that contributes nothing, or gets nothing, there is no such buffer.
        let own = RankBuffers::new(slice(checked.from()), slice(checked.to()));
        let agreed = self.agreement.agree(Some(&own), &report)?;
        let parameters = match may_split {
            true => self.paths.agree(key, agreed.reports()),
            false => Parameters::default(),
        };
        Some((agreed, parameters))
    }

    fn key(checked: &CheckedCall) -> OpKey {
        let Call { operation, data_type, .. } = *checked.call();
        OpKey { operation, size_class: SizeClass::of(checked.bytes()), data_type }
    }

    /// The parameters that were used last for a key: the same on all ranks.
    #[must_use]
    pub fn parameters(&self, key: OpKey) -> Parameters {
        self.paths.parameters(key)
    }

    /// Changes of the parameters of a key, the latest first; none if this is not rank 0.
    #[must_use]
    pub fn history(&self, key: OpKey) -> Vec<Change> {
        self.paths.history(key)
    }

    /// Starts an operation whose ranks access each other's buffers.
    fn start_direct(
        &mut self,
        checked: &CheckedCall,
        buffers: &[RankBuffers],
        parameters: Parameters,
        stream: &Stream,
    ) -> gpu::Result<()> {
        use Operation::{AllReduce, Reduce, ReduceScatter};
        match checked.call().operation {
            AllReduce | Reduce | ReduceScatter => self.reduce_direct(checked, buffers, stream),
            _ => self.move_direct(checked, buffers, parameters, stream),
        }
    }

    /// An exchange of which only the waits remain.
    fn base(&self, blocks: u32) -> Exchange<'_> {
        Exchange {
            rank: self.rank(),
            number: self.next,
            chunks: 1,
            stage_distance: 0,
            words: &self.words,
            stop: &self.stop,
            failed: &self.failed,
            pushes: &[],
            reduction: None,
            is_gathered: false,
            copies: &[],
            blocks,
        }
    }

    /// Waits on the stream until all ranks are there.
    fn meet(&mut self, stream: &Stream) -> gpu::Result<()> {
        stream.exchange(&self.base(1))?;
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Copies this rank's blocks into the outputs of the others, by copy engines; a part of them by the
    /// second path.
    fn move_direct(
        &mut self,
        checked: &CheckedCall,
        buffers: &[RankBuffers],
        parameters: Parameters,
        stream: &Stream,
    ) -> gpu::Result<()> {
        let (rank, ranks) = (self.rank(), self.size());
        let Call { operation, root, .. } = *checked.call();
        let has_one_giver = matches!(operation, Operation::Broadcast | Operation::Scatter);
        let gives = |rank: u32| !has_one_giver || root == Some(rank);
        let length = checked.longest().unwrap_or(0) as u64;
        let has_each = matches!(operation, Operation::Scatter | Operation::AllToAll);
        let from_offset = |to: u32| if has_each { u64::from(to) * length } else { 0 };
        let to_offset = |from: u32| if has_one_giver { 0 } else { u64::from(from) * length };
        let may_split = self.paths.may_split(operation, checked.bytes());
        let fast = if may_split { parameters.fast_bytes(length, SPLIT_GRANULE) } else { length };
        self.meet(stream)?;
        let begin = stream.point()?;
        let mut measurement = None;
        if may_split {
            let device = self.device.clone();
            let begin = || {
                let event = device.event_with_time()?;
                stream.record(&event)?;
                Ok(event)
            };
            let bytes = [fast, length - fast];
            measurement = self.paths.measure(Self::key(checked), parameters, bytes, begin)?;
        }
        let mut ends = Vec::new();
        if fast < length {
            ends.extend(self.copy_second(buffers, gives, to_offset, [fast, length], &begin)?);
            if let (Some(measurement), Some(streams)) = (&mut measurement, self.second.streams()) {
                streams.iter().try_for_each(|it| measurement.end(1, &self.device, it))?;
            }
        }
        if let Some(input) = buffers[rank as usize].input().filter(|_| gives(rank)) {
            while self.copy_streams.len() + 1 < ranks as usize {
                self.copy_streams.push(self.device.stream()?);
            }
            let others = (rank + 1..ranks).chain(0..rank);
            for (other, copies) in others.zip(&self.copy_streams) {
                let Some(output) = buffers[other as usize].output() else { continue };
                copies.wait_for(&begin)?;
                let from = input.slice(from_offset(other), fast)?;
                copies.copy(&output.slice(to_offset(rank), fast)?, &from)?;
                ends.push(copies.point()?);
                if let Some(measurement) = &mut measurement {
                    measurement.end(0, &self.device, copies)?;
                }
            }
            if let Some(output) = buffers[rank as usize].output() {
                let from = input.slice(from_offset(rank), length)?;
                let to = output.slice(to_offset(rank), length)?;
                if from.address() != to.address() {
                    // By a few multiprocessors: a copy engine would delay the others.
                    let own = [self.words[rank as usize].clone()];
                    let pushes = [ExchangeCopy::whole(&to, &from)];
                    let base = self.base(COPY_BLOCKS);
                    stream.exchange(&Exchange { rank: 0, words: &own, pushes: &pushes, ..base })?;
                }
            }
        }
        measurement.into_iter().for_each(|it| self.paths.keep(it));
        ends.iter().try_for_each(|end| stream.wait_for(end))?;
        self.meet(stream)
    }

    /// Copies the last part of the blocks by the second path. Returns when that is done.
    fn copy_second(
        &mut self,
        buffers: &[RankBuffers],
        gives: impl Fn(u32) -> bool,
        to_offset: impl Fn(u32) -> u64,
        [first, end]: [u64; 2],
        begin: &Point,
    ) -> gpu::Result<Vec<Point>> {
        let (rank, bytes) = (self.rank(), end - first);
        self.second.streams().into_iter().flatten().try_for_each(|it| it.wait_for(begin))?;
        for giver in (0..self.size()).filter(|giver| gives(*giver)) {
            let own = &buffers[rank as usize];
            if giver != rank
                && let Some(output) = own.output()
            {
                self.second.take(giver, &output.slice(to_offset(giver) + first, bytes)?)?;
            } else if let Some(input) = own.input().filter(|_| giver == rank) {
                self.second.give(&input.slice(first, bytes)?)?;
            }
            self.second.note(giver, bytes);
        }
        let streams = self.second.streams().into_iter().flatten();
        streams.map(Stream::point).collect()
    }

    /// Reduces this rank's share of all inputs, into all outputs.
    fn reduce_direct(
        &mut self,
        checked: &CheckedCall,
        buffers: &[RankBuffers],
        stream: &Stream,
    ) -> gpu::Result<()> {
        let (rank, ranks) = (u64::from(self.rank()), u64::from(self.size()));
        let Call { operation, data_type, reduce_op, root, .. } = *checked.call();
        let total = checked.from()[0].bytes() as u64;
        let (begin, length) = match operation {
            Operation::ReduceScatter => (total * rank, total),
            _ => {
                let share = total.div_ceil(ranks).next_multiple_of(GRANULE);
                let begin = (share * rank).min(total);
                (begin, (begin + share).min(total) - begin)
            }
        };
        let part = |slice: &Slice, begin| slice.slice(begin, length);
        let inputs = buffers.iter().filter_map(|it| it.input());
        let inputs: Vec<Slice> = inputs.map(|it| part(it, begin)).collect::<gpu::Result<_>>()?;
        let gets = |number: u64| match operation {
            Operation::ReduceScatter => number == rank,
            Operation::Reduce => root == u32::try_from(number).ok(),
            _ => true,
        };
        let to = if operation == Operation::ReduceScatter { 0 } else { begin };
        let outputs = (0..).zip(buffers).filter(|(number, _)| gets(*number));
        let outputs = outputs.filter_map(|(_, it)| it.output());
        let outputs: Vec<Slice> = outputs.map(|it| part(it, to)).collect::<gpu::Result<_>>()?;
        let sources: Vec<_> = inputs.iter().map(ExchangePlace::Buffer).collect();
        let results: Vec<_> = outputs.iter().map(ExchangePlace::Buffer).collect();
        let reduction = reduce_op.filter(|_| length > 0).map(|op| {
            let (sources, results) = (&sources, &results);
            ExchangeReduction { data_type, op, sources, results, bytes: length, chunk: length }
        });
        let base = self.base(REDUCE_BLOCKS);
        stream.exchange(&Exchange { reduction, is_gathered: true, ..base })?;
        self.next = self.next.wrapping_add(1);
        Ok(())
    }
}

/// Lets the device give up what it waits for.
#[derive(Debug, Clone)]
struct StopDevices {
    state: Segment,
    words: ReleaseWords,
}

impl StopDevices {
    fn run(&self) {
        use ipc::Words;
        self.state.words().store(STOP as usize / 8, 1, std::sync::atomic::Ordering::Release);
        self.words.run();
    }
}

/// Imports the stage of another rank.
fn import(device: &Device, offer: &Offer) -> Result<gpu::Result<Stage>> {
    let malformed =
        |why: String| Error::new(JOIN, ErrorKind::Malformed, format!("offer of a stage: {why}"));
    let (bytes, descriptors) = (offer.bytes(), offer.descriptors());
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
        if self.members.check_fork("leave communication domain").is_err() {
            return;
        }
        self.members.leave();
        // Kernels use memory of the domain until they have ended.
        if let Some(last) = &self.last
            && last.wait(LEAVE_TIMEOUT).is_err()
        {
            // A thread that still waits for a result learns it.
            self.members.fail(Failure::Left { rank: self.members.rank() });
            self.stop_devices().run();
            let _ = last.wait(LEAVE_TIMEOUT);
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
            call: *checked.call(),
        };
        // SAFETY: the caller's promise.
        let builder = unsafe { Builder::new(domain, checked) };
        match checked.call().operation {
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
        let root = checked.call().root.unwrap_or(0).into();
        let (rank, ranks) = (domain.rank().into(), domain.size().into());
        Self { domain, checked, rank, ranks, root }
    }

    /// A part of a buffer of the caller.
    fn buffer(&self, place: Place, offset: u64, bytes: u64) -> gpu::Result<PlannedPlace> {
        let (at, all) = (place.at(), place.bytes());
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
        let (from, to) = (self.checked.from(), self.checked.to());
        let operation = self.checked.call().operation;
        let has_one_giver = matches!(operation, Operation::Broadcast | Operation::Scatter);
        let gives = |rank: u64| !has_one_giver || rank == self.root;
        let gets = |rank: u64| operation != Operation::Gather || rank == self.root;
        let longest = self.checked.longest().unwrap_or(0) as u64;
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
                let bytes = place.bytes() as u64;
                let (to, from) = (slot(other, self.rank)?, self.buffer(place, 0, bytes)?);
                plan.pushes.push(PlannedCopy { to, from, bytes, chunk });
            }
            if gets(self.rank) {
                let (from, to) = (block(from, self.rank), block(to, self.rank));
                if from.at() != to.at() {
                    let bytes = from.bytes() as u64;
                    let (from, to) = (self.buffer(from, 0, bytes)?, self.buffer(to, 0, bytes)?);
                    plan.pushes.push(PlannedCopy { to, from, bytes, chunk });
                }
            }
        }
        if gets(self.rank) {
            for other in self.others().filter(|other| gives(*other)) {
                let place = block(to, other);
                let bytes = place.bytes() as u64;
                let (to, from) = (self.buffer(place, 0, bytes)?, slot(self.rank, other)?);
                plan.copies.push(PlannedCopy { to, from, bytes, chunk });
            }
        }
        plan.blocks = blocks(longest * slots);
        Ok(())
    }

    fn reduce_scatter(&self, plan: &mut Plan) -> gpu::Result<()> {
        let (from, to) = (self.checked.from(), self.checked.to());
        let longest = self.checked.longest().unwrap_or(0) as u64;
        let (chunk, chunks) = self.chunk(self.ranks, longest);
        plan.chunks = chunks;
        for other in self.others() {
            let place = from[other as usize];
            let bytes = place.bytes() as u64;
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
        let (from, to) = (self.checked.from(), self.checked.to());
        let (from, to) = (from[0], to.first().copied());
        let bytes = from.bytes() as u64;
        let is_to_all = self.checked.call().operation == Operation::AllReduce;
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

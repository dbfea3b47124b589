//! Processes that share a segment: the coordinator, and the workers that it starts.
//!
//! A worker connects to a socket, as members of a node do. It sends its pidfd, and receives its
//! name, its task and the segment.

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ipc::{
    Caller, Channel, ChannelError, ChannelListener, Layout, MappedWords, Participant,
    ParticipantTable, PidFd, Segment, WordRange, Words,
};
use nix::sys::signal::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::process::pin;
use crate::progress::Progress;
use crate::temp_dir::TempDir;
use crate::worker::Worker;
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::process::this_program;

/// Maximum characters of a worker's failure.
const MAX_MESSAGE_LENGTH: usize = 4000;
const LAYOUT: Layout = Layout::new("fabricast bench", 1);
/// Timeout of a step of the setup.
const SETUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a measurement.
pub(crate) const LONGEST: Duration = Duration::from_secs(600);

/// What a worker does. `main` lists the [`TaskType`] of each.
pub(crate) trait Task: Serialize + DeserializeOwned {
    const NAME: &'static str;
    /// The result, apart from what [`WorkerResult`] has for all.
    type Detail: Serialize + DeserializeOwned;

    /// Calls `ready` after the setup, and measures when it returns.
    fn run(
        &self,
        shared: &SharedSegment,
        ready: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<WorkerResult<Self::Detail>, Failure>;
}

/// A task that workers of this program can run.
pub(crate) struct TaskType {
    name: &'static str,
    run: fn(&Channel, &WorkerSetup, &SharedSegment) -> Result<(), Failure>,
}

impl TaskType {
    pub(crate) const fn of<T: Task>() -> Self {
        Self { name: T::NAME, run: run::<T> }
    }
}

fn run<T: Task>(
    channel: &Channel,
    setup: &WorkerSetup,
    shared: &SharedSegment,
) -> Result<(), Failure> {
    let task = T::deserialize(&setup.task)
        .map_err(|error| Failure::failed(format!("parse the worker's task failed: {error}")))?;
    let result = task.run(shared, || {
        send_answer(channel, &WorkerStatus::Ready)?;
        channel.receive(SETUP_TIMEOUT).map_err(broken("wait for the start")).map(drop)
    })?;
    leave(&setup.directory, &result_of(setup.number), &result)
}

#[derive(Debug, Serialize, Deserialize)]
struct WorkerSetup {
    name: u32,
    /// The number of the worker, and the directory for its result.
    number: usize,
    directory: PathBuf,
    core: Option<usize>,
    task_type: String,
    task: Value,
}

/// The result of a worker.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct WorkerResult<D = ()> {
    /// Nanoseconds of each sample.
    pub(crate) samples: Histogram,
    /// Nanoseconds of all.
    pub(crate) elapsed: u64,
    pub(crate) iterations: u64,
    pub(crate) verified: bool,
    /// Number of involuntary context switches.
    pub(crate) involuntary_switches: u64,
    pub(crate) detail: D,
}

/// The status of a worker. Its result is in a file, since it may be longer than a message.
#[derive(Debug, Serialize, Deserialize)]
enum WorkerStatus {
    Ready,
    WorkerResult,
    Failed { exit: i32, message: String },
}

/// A histogram with space for the longest measurement, so that adding samples allocates nothing.
pub(crate) fn empty_histogram() -> Histogram {
    Histogram::up_to(LONGEST.as_nanos() as u64)
}

/// Writes a file for another process of the measurement, atomically.
pub(crate) fn leave(directory: &Path, name: &str, what: &impl Serialize) -> Result<(), Failure> {
    let draft = directory.join(format!("{name}.draft"));
    let left = std::fs::write(&draft, to_bytes(what)?)
        .and_then(|()| std::fs::rename(draft, directory.join(name)));
    left.map_err(|error| Failure::failed(format!("write file {name} failed: {error}")))
}

/// Reads a file of another process, if it exists.
pub(crate) fn find<T: DeserializeOwned>(
    directory: &Path,
    name: &str,
) -> Result<Option<T>, Failure> {
    let Ok(bytes) = std::fs::read(directory.join(name)) else { return Ok(None) };
    let found = serde_json::from_slice(&bytes);
    found.map(Some).map_err(|error| Failure::failed(format!("{name}: {error}")))
}

/// Like [`find`], but the file must exist.
pub(crate) fn take<T: DeserializeOwned>(directory: &Path, name: &str) -> Result<T, Failure> {
    find(directory, name)?.ok_or_else(|| Failure::failed(format!("file {name} is missing")))
}

/// The memory that all processes map: the participant table first, then the words of the
/// measurement.
#[derive(Debug)]
pub(crate) struct SharedSegment {
    participants: ParticipantTable<WordRange<MappedWords>>,
    words: MappedWords,
    me: Participant,
}

fn broken(what: &str) -> impl Fn(ChannelError) -> Failure {
    move |error| {
        let exit = match error {
            ChannelError::DeadlineExceeded { .. } => Exit::Deadline,
            _ => Exit::Failed,
        };
        Failure::new(exit, format!("{what} failed: {error}"))
    }
}

fn own_pidfd() -> Result<PidFd, Failure> {
    let opened = PidFd::of_this_process();
    opened.map_err(|error| Failure::failed(format!("open a pidfd of this process failed: {error}")))
}

impl SharedSegment {
    const FIRST: usize = ParticipantTable::<MappedWords>::WORDS;

    fn new(segment: &Segment, me: Option<Participant>) -> Result<Self, Failure> {
        let words = segment.words();
        let short = || Failure::failed("the segment is too short");
        let part = WordRange::new(words.clone(), 0, Self::FIRST).ok_or_else(short)?;
        let participants = ParticipantTable::new(part).ok_or_else(short)?;
        let me = match me {
            Some(me) => me,
            None => participants
                .admit(own_pidfd()?)
                .ok_or_else(|| Failure::failed("the participant table is full"))?,
        };
        Ok(Self { participants, words, me })
    }

    pub(crate) fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &self.participants)
    }

    /// The words of the measurement.
    pub(crate) fn part(&self) -> Result<WordRange<MappedWords>, Failure> {
        self.part_from(0)
    }

    /// Like [`Self::part`], without the first words.
    pub(crate) fn part_from(&self, words: usize) -> Result<WordRange<MappedWords>, Failure> {
        let first = Self::FIRST + words;
        let count = self.words.count().saturating_sub(first);
        let part = WordRange::new(self.words.clone(), first, count);
        part.ok_or_else(|| Failure::failed("the segment is too short"))
    }
}

/// A worker, and the channel to it.
struct WorkerConnection {
    worker: Worker,
    channel: Channel,
}

/// The workers, and what they share with this process. Dropping it ends them.
pub(crate) struct WorkerGroup {
    pub(crate) shared: SharedSegment,
    segment: Segment,
    workers: Vec<WorkerConnection>,
    is_isolated: bool,
    /// Shown from the begin of the measurement until its results.
    progress: Cell<Option<Progress>>,
    /// The last field: all workers have ended when it is removed.
    directory: TempDir,
}

impl WorkerGroup {
    /// Without workers, and with so many words for the measurement.
    pub(crate) fn new(words: usize) -> Result<Self, Failure> {
        let directory = TempDir::create()?;
        let bytes = (SharedSegment::FIRST + words) * size_of::<u64>();
        let segment = Segment::create(LAYOUT, bytes).map_err(Failure::of)?;
        let shared = SharedSegment::new(&segment, None)?;
        let (workers, progress) = (Vec::new(), Cell::default());
        Ok(Self { shared, segment, workers, is_isolated: false, progress, directory })
    }

    /// The directory of the measurement's sockets.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Workers that are started from now on have their own namespaces, as in containers.
    pub(crate) fn isolate(&mut self) {
        self.is_isolated = true;
    }

    /// The signal that ends a worker. After SIGTERM a provider removes its shared memory. unshare
    /// ignores it; SIGKILL of unshare kills the worker, too.
    fn signal(&self) -> Signal {
        if self.is_isolated { Signal::SIGKILL } else { Signal::SIGTERM }
    }

    /// The command of a worker: this program.
    fn program(&self) -> Command {
        /// With a /proc of its own, as containers have: CUDA does not start without.
        const NAMESPACES: [&str; 7] =
            ["--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--ipc", "--net"];
        if !self.is_isolated {
            return this_program("fabricast-bench");
        }
        let mut command = Command::new("unshare");
        command.args(NAMESPACES);
        // /proc/self/exe would be unshare itself.
        let own = "/proc/self/exe";
        command.arg(std::fs::read_link(own).unwrap_or_else(|_| PathBuf::from(own)));
        command
    }

    /// Starts a worker for each task, on the core beside it.
    pub(crate) fn start_workers<T: Task>(
        &mut self,
        tasks: &[(T, Option<usize>)],
    ) -> Result<(), Failure> {
        self.segment.mark_ready();
        let path = self.directory().join("socket");
        let listener = ChannelListener::bind(&path).map_err(broken("listen for workers"))?;
        for (number, (task, core)) in tasks.iter().enumerate() {
            let mut command = self.program();
            command.arg("bench-worker").arg(&path);
            let worker = Worker::start(command, "a worker", self.signal())?;
            let channel = listener.accept(SETUP_TIMEOUT).map_err(broken("wait for a worker"))?;
            self.workers.push(WorkerConnection { worker, channel });
            let Some(WorkerConnection { channel, .. }) = self.workers.last() else { continue };
            let mut hello =
                channel.receive(SETUP_TIMEOUT).map_err(broken("receive a worker's pidfd"))?;
            let life = hello.descriptors.pop().map(PidFd::from_fd);
            let Some(Ok(life)) = life else {
                return Err(Failure::failed("a worker did not send a descriptor of itself"));
            };
            let full = || Failure::failed("too many workers");
            let name = self.shared.participants.admit(life).ok_or_else(full)?.number();
            let directory = self.directory().to_owned();
            let (core, task_type) = (*core, T::NAME.to_owned());
            let task = serde_json::to_value(task).map_err(Failure::of)?;
            let setup = WorkerSetup { name, number, directory, core, task_type, task };
            let bytes = to_bytes(&setup)?;
            channel
                .send(&bytes, &[self.segment.as_fd()], SETUP_TIMEOUT)
                .map_err(broken("set up a worker"))?;
        }
        for worker in &self.workers {
            match answer(&worker.channel, SETUP_TIMEOUT)? {
                WorkerStatus::Ready => {}
                WorkerStatus::Failed { exit, message } => return Err(failed(exit, &message)),
                WorkerStatus::WorkerResult => {
                    return Err(Failure::failed("a worker finished before it was started"));
                }
            }
        }
        Ok(())
    }

    /// Process numbers of the workers, in the order of their start.
    pub(crate) fn processes(&self) -> Vec<u32> {
        self.workers.iter().map(|worker| worker.worker.number()).collect()
    }

    /// Starts the measurement in all workers.
    pub(crate) fn begin(&self) -> Result<(), Failure> {
        for worker in &self.workers {
            worker.channel.send(b"go", &[], SETUP_TIMEOUT).map_err(broken("start a worker"))?;
        }
        self.progress.set(Some(Progress::begin("measuring".to_owned())));
        Ok(())
    }

    /// The results of all workers.
    pub(crate) fn results<D: DeserializeOwned>(&mut self) -> Result<Vec<WorkerResult<D>>, Failure> {
        self.results_ending_with(0, |_| Ok(()))
    }

    /// Like [`Self::results`], where the first workers end only after the others: `end` ends them.
    pub(crate) fn results_ending_with<D: DeserializeOwned>(
        &mut self,
        first: usize,
        end: impl FnOnce(&SharedSegment) -> Result<(), Failure>,
    ) -> Result<Vec<WorkerResult<D>>, Failure> {
        let first = first.min(self.workers.len());
        let others = self.results_of(first..self.workers.len())?;
        end(&self.shared)?;
        let mut results = self.results_of(0..first)?;
        results.extend(others);
        self.progress.take();
        self.workers.iter_mut().for_each(|member| member.worker.expect_exit());
        Ok(results)
    }

    fn results_of<D: DeserializeOwned>(
        &self,
        workers: Range<usize>,
    ) -> Result<Vec<WorkerResult<D>>, Failure> {
        workers
            .map(|number| match answer(&self.workers[number].channel, LONGEST)? {
                WorkerStatus::WorkerResult => take(self.directory(), &result_of(number)),
                WorkerStatus::Failed { exit, message } => Err(failed(exit, &message)),
                WorkerStatus::Ready => Err(Failure::failed("a worker is ready again")),
            })
            .collect()
    }
}

/// The file with the result of a worker.
fn result_of(number: usize) -> String {
    format!("result-{number}")
}

/// The failure of a worker, with its exit code.
fn failed(exit: i32, message: &str) -> Failure {
    Failure::new(Exit::from_code(exit), format!("a worker: {message}"))
}

fn to_bytes(value: &impl Serialize) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(value).map_err(Failure::of)
}

fn answer(channel: &Channel, timeout: Duration) -> Result<WorkerStatus, Failure> {
    let bytes = channel.receive(timeout).map_err(broken("receive a worker's answer"))?.bytes;
    serde_json::from_slice(&bytes)
        .map_err(|error| Failure::failed(format!("parse a worker's answer failed: {error}")))
}

fn send_answer(channel: &Channel, answer: &WorkerStatus) -> Result<(), Failure> {
    // The coordinator may wait for another worker first, maybe for the whole measurement.
    channel.send(&to_bytes(answer)?, &[], LONGEST).map_err(broken("send a worker's answer"))
}

/// Nanoseconds of the clock that all processes of a machine share.
pub(crate) fn now() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    time.map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// Runs a worker: `fabricast bench-worker SOCKET`.
pub(crate) fn work(path: &Path, types: &[TaskType]) -> Result<(), Failure> {
    let channel =
        Channel::connect(path, SETUP_TIMEOUT).map_err(broken("connect to the coordinator"))?;
    let life = own_pidfd()?;
    channel.send(b"hello", &[life.as_fd()], SETUP_TIMEOUT).map_err(broken("send the pidfd"))?;
    let mut message = channel.receive(SETUP_TIMEOUT).map_err(broken("wait for the setup"))?;
    let setup: WorkerSetup = serde_json::from_slice(&message.bytes)
        .map_err(|error| Failure::failed(format!("parse the worker's setup failed: {error}")))?;
    let result = message
        .descriptors
        .pop()
        .ok_or_else(|| Failure::failed("the setup has no segment"))
        .and_then(|segment| follow(&channel, &setup, segment, types));
    let answer = match result {
        Ok(()) => WorkerStatus::WorkerResult,
        Err(failure) => WorkerStatus::Failed {
            exit: failure.exit() as i32,
            message: failure.to_string().chars().take(MAX_MESSAGE_LENGTH).collect(),
        },
    };
    send_answer(&channel, &answer)
}

fn follow(
    channel: &Channel,
    setup: &WorkerSetup,
    segment: std::os::fd::OwnedFd,
    types: &[TaskType],
) -> Result<(), Failure> {
    if let Some(core) = setup.core {
        pin(core)?;
    }
    let segment = Segment::open(segment, LAYOUT).map_err(Failure::of)?;
    let me = Participant::from_number(setup.name);
    let me = me.ok_or_else(|| Failure::failed("the worker's setup names no participant"))?;
    let shared = SharedSegment::new(&segment, Some(me))?;
    let known = types.iter().find(|it| it.name == setup.task_type);
    let known = known.ok_or_else(|| Failure::failed("the worker's task is unknown"))?;
    (known.run)(channel, setup, &shared)
}

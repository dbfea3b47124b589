//! Shared by the tests: a node directory, child processes (this program, started again), and
//! messages whose contents can be checked.

use std::ffi::OsStr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gpu::{Device, Memory, Stream};
use pubsub::{MemoryLocation, Node, NodeOptions, Publisher, Sample, ServiceMode, TopicSettings};
use testkit::children::{self, Child};

/// Reached only by a test that fails.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The directory of a node. Dropping it removes the directory.
pub struct TestDir(PathBuf);

impl TestDir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        log();
        let name = format!("fabricast-node-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Joins, and becomes the service if no process is.
    pub fn join(&self) -> Node {
        Node::join(options(&self.0)).unwrap()
    }

    /// Joins a node whose service is another process.
    pub fn join_served(&self) -> Node {
        Node::join(NodeOptions { service: ServiceMode::External, ..options(&self.0) }).unwrap()
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn options(directory: &Path) -> NodeOptions {
    NodeOptions {
        directory: directory.to_owned(),
        label: "test".into(),
        service_timeout: TIMEOUT,
        ..NodeOptions::default()
    }
}

/// A topic of short messages.
pub fn settings() -> TopicSettings {
    let memory = match std::env::var("TEST_DEVICE") {
        Ok(name) => MemoryLocation::Device(name.parse().unwrap()),
        Err(_) => MemoryLocation::Host,
    };
    TopicSettings { memory, depth: 8, max_held: 8, largest: 4096, ..TopicSettings::default() }
}

/// A topic of short messages on a device, and the device.
pub fn device_topic() -> (TopicSettings, Device) {
    let name = std::env::var("TEST_DEVICE").unwrap_or_else(|_| "emulated:0".into());
    let device = Device::open(name.parse().unwrap()).unwrap();
    (TopicSettings { memory: MemoryLocation::Device(device.name()), ..settings() }, device)
}

/// Blocks streams until it is opened.
pub struct Gate {
    word: Memory,
    key: Stream,
}

impl Gate {
    pub fn new(device: &Device) -> Self {
        let (word, key) = (device.allocate(4096).unwrap(), device.stream().unwrap());
        key.fill(&word.whole(), 0).unwrap();
        key.synchronize(TIMEOUT).unwrap();
        Self { word, key }
    }

    pub fn block(&self, stream: &Stream) {
        stream.wait_for_word(&self.word.slice(0, 4).unwrap(), 1).unwrap();
    }

    pub fn open(&self) {
        self.key.write_word(&self.word.slice(0, 4).unwrap(), 1).unwrap();
    }
}

/// Publishes numbers on a stream, which copies them from memory of this process.
#[track_caller]
pub fn publish_on(publisher: &Publisher, stream: &Stream, numbers: std::ops::Range<u64>) {
    let device = stream.device();
    let uploads = device.stream().unwrap();
    for number in numbers {
        let bytes = message(number);
        let source = device.allocate(4096).unwrap();
        let source = source.slice(0, bytes.len() as u64).unwrap();
        uploads.upload(&source, &bytes, TIMEOUT).unwrap();
        publisher.push_on(stream, &source, TIMEOUT).unwrap();
    }
}

/// Publishes two numbers on a stream, two behind a gate that stays closed, and one from the host.
/// Then waits to be killed.
pub fn publish_and_hang(node: &Node, topic: &str) -> ! {
    let (settings, device) = device_topic();
    let publisher = node.topic(topic, &settings).unwrap().publisher().unwrap();
    while publisher.subscribers() == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    let stream = device.stream().unwrap();
    publish_on(&publisher, &stream, 0..2);
    Gate::new(&device).block(&stream);
    publish_on(&publisher, &stream, 2..4);
    publish(&publisher, 4..5);
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// The message of a number, which determines contents and length.
pub fn message(number: u64) -> Vec<u8> {
    let length = 8 + (number * 37 % 4000) as usize;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((8..length).map(|at| (at as u64 ^ number) as u8));
    bytes
}

/// Checks a message and returns its number.
#[track_caller]
pub fn number_of(sample: &Sample) -> u64 {
    let bytes = sample.to_vec().unwrap();
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!(bytes, message(number), "message {number} differs from what was published");
    number
}

#[track_caller]
pub fn publish(publisher: &Publisher, numbers: std::ops::Range<u64>) {
    for number in numbers {
        publisher.push(&message(number), TIMEOUT).unwrap();
    }
}

/// All permutations of `0..COUNT`.
pub fn orders<const COUNT: usize>() -> Vec<[usize; COUNT]> {
    let mut orders = vec![Vec::new()];
    for _ in 0..COUNT {
        let longer = orders.into_iter().flat_map(|order: Vec<usize>| {
            let is_new = |next: &usize| !order.contains(next);
            let next: Vec<_> = (0..COUNT).filter(is_new).collect();
            next.into_iter().map(move |next| [&order[..], &[next]].concat())
        });
        orders = longer.collect();
    }
    orders.into_iter().map(|order| order.try_into().unwrap()).collect()
}

/// Waits for a condition and panics after the timeout.
#[track_caller]
pub fn until(expected: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < end, "timeout: waited for {expected}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A child process. Dropping it kills the process.
pub struct ChildProcess(Child);

impl ChildProcess {
    /// Starts a child in a role, which is followed by its arguments.
    pub fn start(role: &str, directory: &Path) -> Self {
        let args = std::iter::once(directory.as_os_str()).chain(role.split(' ').map(OsStr::new));
        Self(Child::start(&mut children::respawn(args)))
    }

    /// Like [`start`](Self::start), with the output of the child piped to [`line`](Self::line).
    pub fn start_piped(role: &str, directory: &Path) -> Self {
        let args = std::iter::once(directory.as_os_str()).chain(role.split(' ').map(OsStr::new));
        Self(Child::start(children::respawn(args).stdout(Stdio::piped())))
    }

    /// Like [`start_piped`](Self::start_piped), with these variables in its environment.
    pub fn start_in(environment: &[(&str, &str)], role: &str, directory: &Path) -> Self {
        let args = std::iter::once(directory.as_os_str()).chain(role.split(' ').map(OsStr::new));
        let mut command = children::respawn(args);
        Self(Child::start(command.envs(environment.iter().copied()).stdout(Stdio::piped())))
    }

    /// Writes a line to its input.
    pub fn say(&mut self, line: &str) {
        self.0.say(line);
    }

    /// The next line of output; None if the process has ended.
    #[track_caller]
    pub fn line(&mut self) -> Option<String> {
        self.0.line(TIMEOUT)
    }

    #[track_caller]
    pub fn finish(&mut self) {
        self.0.finish(2 * TIMEOUT);
    }

    /// Ends the process in order, by closing its input.
    #[track_caller]
    pub fn end(&mut self) {
        self.0.end(2 * TIMEOUT);
    }

    /// Sends SIGSTOP.
    #[track_caller]
    pub fn stop(&self) {
        self.0.stop(TIMEOUT);
    }

    pub fn kill(&mut self) {
        self.0.kill();
    }
}

impl Deref for ChildProcess {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

/// Forks a child that inherits all descriptors of this process and holds them until the test ends.
#[allow(unsafe_code)]
pub fn fork_idle_child() {
    use nix::libc;
    use nix::unistd::{ForkResult, fork};
    // SAFETY: the child only reads and ends.
    if let ForkResult::Child = unsafe { fork() }.unwrap() {
        let mut byte = [0_u8];
        // SAFETY: room for one byte.
        unsafe { libc::read(0, byte.as_mut_ptr().cast(), 1) };
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) }
    }
}

/// Prints the log of the library if `TEST_LOG` is set.
pub fn log() {
    if std::env::var_os("TEST_LOG").is_some() {
        let filter = tracing_subscriber::filter::LevelFilter::DEBUG;
        let _ = tracing_subscriber::fmt()
            .with_max_level(filter)
            .with_writer(std::io::stderr)
            .try_init();
    }
}

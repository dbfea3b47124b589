//! The devices under test, and the resources that a case must leave unchanged.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Implementation, Slice, Stream};
use testkit::bytes::{first_difference, pattern};

/// The implementation under test: `cuda` or `emulated`.
pub const VARIABLE: &str = "FABRICAST_CONFORMANCE";

/// The devices under test.
pub struct Fixture {
    pub first: Device,
    /// None on a machine with one device.
    pub second: Option<Device>,
    pub stream: Stream,
}

impl Fixture {
    pub fn open() -> gpu::Result<Self> {
        let implementation = match std::env::var(VARIABLE).as_deref() {
            Ok("cuda") => Implementation::Cuda,
            _ => Implementation::Emulated,
        };
        let name = |number| DeviceName { implementation, number };
        let first = Device::open(name(0))?;
        let second = match Device::count(implementation)? {
            1 => None,
            _ => Some(Device::open(name(1))?),
        };
        let stream = first.stream()?;
        Ok(Self { first, second, stream })
    }

    pub fn is_emulated(&self) -> bool {
        self.first.name().implementation == Implementation::Emulated
    }

    pub fn fill(&self, slice: &Slice, seed: u64) {
        let bytes = pattern(slice.length() as usize, seed);
        self.stream.upload(slice, &bytes, gpu::DEFAULT_TIMEOUT).unwrap();
    }

    /// Panics unless the bytes are those of the pattern.
    #[track_caller]
    pub fn check(&self, slice: &Slice, seed: u64) {
        let mut bytes = vec![0; slice.length() as usize];
        self.stream.download(slice, &mut bytes, gpu::DEFAULT_TIMEOUT).unwrap();
        let expected = pattern(bytes.len(), seed);
        let wrong = first_difference(&bytes, &expected);
        assert_eq!(wrong, None, "{slice:?} has a wrong byte");
    }
}

/// The resources that a case must leave unchanged.
#[derive(Debug, PartialEq, Eq)]
pub struct ResourceSnapshot {
    descriptors: BTreeSet<String>,
    shared_memory: BTreeSet<String>,
    free: Vec<u64>,
    used: Vec<u64>,
    legacy: u64,
    leaks: u64,
}

impl ResourceSnapshot {
    pub fn now(fixture: &Fixture) -> Self {
        // Other tests run at the same time: their resources are not visible here.
        let process = std::process::id().to_string();
        let is_ours = |name: &String| name.contains("fabricast") || name.contains(&process);
        let devices = || std::iter::once(&fixture.first).chain(&fixture.second);
        Self {
            descriptors: descriptors(),
            shared_memory: names("/dev/shm").into_iter().filter(is_ours).collect(),
            free: devices().map(|device| device.free_memory().unwrap()).collect(),
            used: devices().map(|device| device.budget().1).collect(),
            legacy: gpu::open_legacy_handles(),
            leaks: gpu::leaked_streams(),
        }
    }

    /// Panics unless all resources are as before. Resources of other parts, such as the driver
    /// after the exit of a process, may take a moment to be released.
    pub fn compare(&self, fixture: &Fixture) {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let now = Self::now(fixture);
            if *self == now || Instant::now() > end {
                assert_eq!(*self, now, "resources were leaked");
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn names(directory: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Number and target of every open file descriptor, except the one that reads the list.
fn descriptors() -> BTreeSet<String> {
    let numbers = names("/proc/self/fd");
    let meaning = |number: &String| {
        let target = std::fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
        Some(format!("{number} {}", target.display()))
    };
    numbers.iter().filter_map(meaning).collect()
}

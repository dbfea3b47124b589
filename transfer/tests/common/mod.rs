//! Common parts of tests with several processes: child processes, which run this program again with
//! an environment variable; and a leak check.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName};
use testkit::children::{self, Child};

pub const TIMEOUT: Duration = Duration::from_secs(20);
pub const LENGTH: u64 = 6 << 20;

/// How long another process may take.
const LONGEST: Duration = Duration::from_secs(600);

/// Taken by every test: tests count descriptors, mappings and free memory, and configure emulated
/// devices, so they run one at a time in a process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn device() -> Device {
    let name = std::env::var("TEST_DEVICE").unwrap_or("emulated:0".to_owned());
    Device::open(name.parse().unwrap()).unwrap()
}

/// The next device of the same kind, if there is one.
pub fn next_device(device: &Device) -> Option<Device> {
    Device::open(DeviceName { number: device.name().number + 1, ..device.name() }).ok()
}

/// Consecutive numbers, starting with `first`.
pub fn numbers(length: u64, first: u32) -> Vec<u8> {
    testkit::bytes::numbers(length as usize, first)
}

/// Kills its process on drop.
pub struct ChildProcess(pub Child);

impl ChildProcess {
    #[track_caller]
    pub fn finish(&mut self) {
        self.0.finish(LONGEST);
    }

    pub fn kill(&mut self) {
        self.0.kill();
    }
}

/// Starts the other process, through another program if one is named, and optionally as another
/// user.
pub fn start(role: &str, directory: &Path, wrapper: &[&str], user: Option<u32>) -> ChildProcess {
    let mut command = children::respawn_with(wrapper, [OsStr::new(role), directory.as_os_str()]);
    if let Some(user) = user {
        command.uid(user);
    }
    // The GPUs that other processes see, where this one sees others.
    if let Ok(devices) = std::env::var("TEST_PEER_DEVICES") {
        command.env("CUDA_VISIBLE_DEVICES", devices);
    }
    ChildProcess(Child::start(&mut command))
}

/// Resources that must be the same afterwards.
#[derive(Debug, PartialEq, Eq)]
pub struct LeakCheck {
    descriptors: usize,
    shared_memory: BTreeSet<String>,
    mapped: usize,
    free: u64,
}

impl LeakCheck {
    fn now(device: &Device) -> Self {
        let names = |directory: &str| -> BTreeSet<String> {
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        // Other tests run concurrently: their resources do not count.
        let process = std::process::id().to_string();
        let is_own = |name: &String| name.contains("fabricast") || name.contains(&process);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            descriptors: names("/proc/self/fd").len(),
            shared_memory: names("/dev/shm").into_iter().filter(is_own).collect(),
            mapped: maps.lines().filter(|line| line.contains("fabricast")).count(),
            free: device.free_memory().unwrap(),
        }
    }

    /// The resources now, when threads have dropped what was left to them.
    pub fn begin(device: &Device) -> Self {
        let end = Instant::now() + Duration::from_secs(10);
        let mut last = Self::now(device);
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let now = Self::now(device);
            if now == last || Instant::now() > end {
                return now;
            }
            last = now;
        }
    }

    #[track_caller]
    pub fn compare(&self, device: &Device) {
        let end = Instant::now() + Duration::from_secs(10);
        while *self != Self::now(device) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(*self, Self::now(device), "resources were leaked");
    }
}

//! What tests in several processes have in common: another process, which is this program again,
//! told by its environment; and what must be the same afterwards.

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

/// What every test begins with: they count descriptors, mappings and free memory, and
/// change how the emulated behaves, so there is one at a time in a process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn device() -> Device {
    let name = std::env::var("FABRICAST_TEST_DEVICE").unwrap_or("emulated:0".to_owned());
    Device::open(name.parse().unwrap()).unwrap()
}

/// Another device of the same kind, if there is one.
pub fn next_device(device: &Device) -> Option<Device> {
    Device::open(DeviceName { number: device.name().number + 1, ..device.name() }).ok()
}

/// Words that are numbered from `first` on.
pub fn numbers(length: u64, first: u32) -> Vec<u8> {
    (0..length as u32 / 4).flat_map(|at| (first + at).to_le_bytes()).collect()
}

/// Kills what it started at the latest when it is dropped.
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

/// Starts the other side, by way of another program if one is named, and as another user.
pub fn start(role: &str, place: &Path, by_way_of: &[&str], user: Option<u32>) -> ChildProcess {
    let mut command = children::respawn_with(by_way_of, [OsStr::new(role), place.as_os_str()]);
    if let Some(user) = user {
        command.uid(user);
    }
    ChildProcess(Child::start(&mut command))
}

/// What must be the same afterwards.
#[derive(Debug, PartialEq, Eq)]
pub struct LeakCheck {
    descriptors: usize,
    shared_memory: BTreeSet<String>,
    mapped: usize,
    free: u64,
}

impl LeakCheck {
    pub fn now(device: &Device) -> Self {
        let names = |directory: &str| -> BTreeSet<String> {
            let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        // Other tests run meanwhile: of theirs nothing is known here.
        let process = std::process::id().to_string();
        let is_ours = |name: &String| name.contains("fabricast") || name.contains(&process);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            descriptors: names("/proc/self/fd").len(),
            shared_memory: names("/dev/shm").into_iter().filter(is_ours).collect(),
            mapped: maps.lines().filter(|line| line.contains("fabricast")).count(),
            free: device.free_memory().unwrap(),
        }
    }

    #[track_caller]
    pub fn compare(&self, device: &Device) {
        let end = Instant::now() + Duration::from_secs(10);
        while *self != Self::now(device) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(*self, Self::now(device), "left behind");
    }
}

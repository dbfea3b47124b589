//! What the tests have in common.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpu::{Device, DeviceName, Memory};
use transfer::{Admission, ElementType, ShareService, Shared, Tensor};

use crate::other_side::is_here;

pub const PATIENCE: Duration = Duration::from_secs(20);
pub const LENGTH: u64 = 6 << 20;

/// What every test begins with: they count descriptors, mappings and free memory, and
/// change how the stand-in behaves, so there is one at a time in a process. None in the
/// other process of a test, which has only its role to play.
pub fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    (!is_here()).then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

pub fn device() -> Device {
    let name = std::env::var("FABRICAST_TEST_DEVICE").unwrap_or("stand-in:0".to_owned());
    Device::open(name.parse().unwrap()).unwrap()
}

/// Another device of the same kind, if there is one.
pub fn peer(device: &Device) -> Option<Device> {
    Device::open(DeviceName { number: device.name().number + 1, ..device.name() }).ok()
}

/// Words that are numbered from `first` on.
pub fn numbers(length: u64, first: u32) -> Vec<u8> {
    (0..length as u32 / 4).flat_map(|at| (first + at).to_le_bytes()).collect()
}

pub fn fill(memory: &Memory, first: u32) {
    let stream = memory.mapped_for().stream().unwrap();
    stream.upload(&memory.whole(), &numbers(memory.length(), first), PATIENCE).unwrap();
}

#[track_caller]
pub fn check(memory: &Memory, first: u32) {
    let stream = memory.mapped_for().stream().unwrap();
    let sum = stream.checksum(&memory.whole(), PATIENCE).unwrap();
    assert_eq!(sum, gpu::checksum(&numbers(memory.length(), first)), "other numbers");
}

/// A matrix in the middle of the memory, turned round.
pub fn tensor() -> Tensor {
    Tensor {
        element: ElementType::U32,
        shape: vec![1000, 100],
        strides: vec![1, 1000],
        byte_offset: 4096,
    }
}

/// A service in a directory of its own, with memory numbered from 1 on as "numbers".
pub struct House {
    pub device: Device,
    pub memory: Memory,
    pub service: Option<ShareService>,
    directory: PathBuf,
}

impl House {
    pub fn open() -> Self {
        Self::open_for(Admission::own_user())
    }

    pub fn open_for(admission: Admission) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-share-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let device = device();
        let memory = device.allocate_shared(LENGTH, &[]).unwrap();
        fill(&memory, 1);
        let service = ShareService::start(&directory.join("socket"), admission).unwrap();
        let before = service.offer("numbers", Shared::new(&memory, &tensor()).unwrap());
        assert!(before.unwrap().is_none());
        Self { device, memory, service: Some(service), directory }
    }

    pub fn service(&self) -> &ShareService {
        self.service.as_ref().unwrap()
    }

    pub fn path(&self) -> PathBuf {
        self.directory.join("socket")
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.service = None;
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// What must be the same afterwards.
#[derive(Debug, PartialEq, Eq)]
pub struct Ground {
    descriptors: usize,
    shared_memory: BTreeSet<String>,
    free: u64,
    mapped: usize,
}

impl Ground {
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
            free: device.free_memory().unwrap(),
            mapped: maps.lines().filter(|line| line.contains("fabricast")).count(),
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

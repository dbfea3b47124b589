//! Failure states of CUDA, emulated by a fake driver (`fake_driver/driver.c`): the driver is
//! shut down, its context is destroyed, a graph is captured, a device lacks a feature.
//!
//! Each case is a separate process, whose library path lists the fake driver first.
#![allow(unsafe_code)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gpu::{
    Block, CopyMethod, DEFAULT_TIMEOUT, Device, ErrorKind, HostMapping, Memory, WritesOrdering,
};
use libloading::Library;
use testkit::children::{self, Child};
use testkit::temp_dir::TempDir;

const LENGTH: u64 = 4096;

/// The fake driver.
struct Driver(Library);

impl Driver {
    fn find() -> Self {
        // SAFETY: the library that the parent built, and that the device uses as well.
        Self(unsafe { Library::new("libcuda.so.1") }.unwrap())
    }

    fn set(&self, what: &str, value: i32) {
        // SAFETY: functions of the fake driver that take one number.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>(what.as_bytes()).unwrap()(value) }
    }

    fn ask(&self, what: &str) -> i32 {
        // SAFETY: functions of the fake driver that return a number.
        unsafe { self.0.get::<unsafe extern "C" fn() -> i32>(what.as_bytes()).unwrap()() }
    }
}

testkit::child_entry!(enter);

fn enter(words: &[&str]) {
    if let ["gpu-direct", ordering, options] = *words {
        return gpu_direct(ordering.parse().unwrap(), options.parse().unwrap());
    }
    if let ["hidden"] = *words {
        return hidden_device();
    }
    let device = Device::open("cuda:0".parse().unwrap()).unwrap();
    let driver = Driver::find();
    match *words {
        ["over", code] => copies_are_over(&driver, &device, code.parse().unwrap()),
        ["gone", code] => context_is_destroyed(&driver, device, code.parse().unwrap()),
        ["unknown", code] => unknown(&driver, &device, code.parse().unwrap()),
        ["capture"] => capture(&driver, &device),
        ["read-only"] => read_only(&driver, &device),
        _ => panic!("{words:?}"),
    }
}

/// Copies are in flight when the driver begins to return this code from every call: they count
/// as over.
fn copies_are_over(driver: &Driver, device: &Device, code: i32) {
    let memory = device.allocate(LENGTH).unwrap();
    let [first, second] = [(); 2].map(|()| device.stream().unwrap());
    driver.set("fake_be_busy", 1);
    first.fill(&memory.whole(), 1).unwrap();
    second.fill(&memory.whole(), 2).unwrap();
    let point = first.point().unwrap();
    assert!(!point.is_done().unwrap());
    driver.set("fake_fail", code);
    let start = Instant::now();
    let error = point.is_done().unwrap_err();
    assert!(gpu::proves_idle(&error), "{error}");
    let error = first.close(DEFAULT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceFailed, "{error}");
    drop((second, memory, point));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(gpu::leaked_streams(), 0);
}

/// The context was destroyed, and its memory with it: none of it is used, even if the driver
/// works again because another library retains the context again.
fn context_is_destroyed(driver: &Driver, device: Device, code: i32) {
    let memory = device.allocate(LENGTH).unwrap();
    let stream = device.stream().unwrap();
    let bytes = [7; LENGTH as usize];
    stream.upload(&memory.whole(), &bytes, DEFAULT_TIMEOUT).unwrap();
    let blocks = [Block { to: 0, from: 64, length: 64 }, Block { to: 128, from: 256, length: 64 }];
    let copy = || {
        let (to, from) = (memory.whole(), memory.whole());
        stream.copy_blocks(&to, &from, &blocks, CopyMethod::Kernel)
    };
    copy().unwrap();
    stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    // The pages of the host memory are unmapped.
    driver.set("fake_destroy", code);
    let is_gone = |error: gpu::Error| error.kind() == ErrorKind::DeviceFailed;
    assert!(is_gone(stream.upload(&memory.whole(), &bytes, DEFAULT_TIMEOUT).unwrap_err()));
    driver.set("fake_fail", 0);
    assert!(is_gone(stream.upload(&memory.whole(), &bytes, DEFAULT_TIMEOUT).unwrap_err()));
    assert!(is_gone(copy().unwrap_err()));
    assert!(is_gone(device.allocate(LENGTH).unwrap_err()));
    drop((stream, memory, device));
    assert_eq!(driver.ask("fake_late_calls"), 0, "handles of the destroyed context were used");
}

/// A failure whose code proves nothing about operations in flight.
fn unknown(driver: &Driver, device: &Device, code: i32) {
    let memory = device.allocate(LENGTH).unwrap();
    let stream = device.stream().unwrap();
    driver.set("fake_be_busy", 1);
    stream.fill(&memory.whole(), 1).unwrap();
    driver.set("fake_fail", code);
    let error = stream.close(Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert_eq!(gpu::leaked_streams(), 1);
}

/// Another thread captures in global mode: no call of this library invalidates the capture.
fn capture(driver: &Driver, device: &Device) {
    driver.set("fake_capture", 1);
    let [from, to] = [(); 2].map(|()| device.allocate(LENGTH).unwrap());
    let stream = device.stream().unwrap();
    stream.upload(&from.whole(), &[7; LENGTH as usize], DEFAULT_TIMEOUT).unwrap();
    stream.copy(&to.whole(), &from.whole()).unwrap();
    stream.point().unwrap().wait(DEFAULT_TIMEOUT).unwrap();
    let mut bytes = [0; LENGTH as usize];
    stream.download(&to.whole(), &mut bytes, DEFAULT_TIMEOUT).unwrap();
    assert_eq!(bytes, [7; LENGTH as usize]);
    drop((from, to));
    stream.close(DEFAULT_TIMEOUT).unwrap();
    assert_eq!(driver.ask("fake_was_invalidated"), 0);
}

/// A page of host memory.
#[derive(Debug)]
struct Page(Box<[u64; 512]>);

// SAFETY: it does not move, and no reference to its bytes exists.
unsafe impl HostMapping for Page {
    fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn length(&self) -> u64 {
        LENGTH
    }

    fn is_read_only(&self) -> bool {
        true
    }
}

/// The driver is asked whether it supports read-only memory, and does not get such memory
/// otherwise.
fn read_only(driver: &Driver, device: &Device) {
    const READ_ONLY: i32 = 8;
    driver.set("fake_lack_read_only", 1);
    let error = device.register(Page(Box::new([0; 512]))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
    assert_eq!(driver.ask("fake_registered_flags"), -1, "the memory was registered");
    driver.set("fake_lack_read_only", 0);
    let memory = device.register(Page(Box::new([0; 512]))).unwrap();
    assert!(memory.is_read_only());
    assert_eq!(driver.ask("fake_registered_flags") & READ_ONLY, READ_ONLY);
}

/// Memory of a device that is not visible is mapped by a device that is in use, if there is one.
fn hidden_device() {
    let driver = Driver::find();
    driver.set("fake_devices", 3);
    driver.set("fake_only_context", 2);
    let for_hidden = || Device::for_memory_of(gpu::Uuid([9; 16])).unwrap().name().to_string();
    assert_eq!(for_hidden(), "cuda:2", "another library uses this one");
    let _used = Device::open("cuda:1".parse().unwrap()).unwrap();
    assert_eq!(for_hidden(), "cuda:1");
    let visible = gpu::Uuid([1; 16]);
    assert_eq!(Device::for_memory_of(visible).unwrap().name().to_string(), "cuda:0");
}

/// The driver flushes for all devices, if it can and its order does not suffice.
fn gpu_direct(ordering: i32, options: i32) {
    const NOT_CALLED: i32 = -1;
    const ALL_DEVICES: i32 = 200;
    let driver = Driver::find();
    driver.set("fake_order_writes", ordering);
    driver.set("fake_flush_options", options);
    let device = Device::open("cuda:0".parse().unwrap()).unwrap();
    let found = device.properties().gpu_direct;
    assert!(found.rdma && found.rdma_mapped, "{found:?}");
    let flushed = device.flush_remote_writes();
    match (ordering, options & 1) {
        (ALL_DEVICES, _) => {
            assert_eq!(found.writes_ordering, WritesOrdering::AllDevices);
            flushed.unwrap();
            assert_eq!(driver.ask("fake_flushed_scope"), NOT_CALLED);
        }
        (_, 1) => {
            assert!(found.makes_writes_visible() && found.needs_flush(), "{found:?}");
            flushed.unwrap();
            assert_eq!(driver.ask("fake_flushed_scope"), ALL_DEVICES);
        }
        _ => {
            assert!(!found.makes_writes_visible(), "{found:?}");
            assert_eq!(flushed.unwrap_err().kind(), ErrorKind::NotSupported);
            assert_eq!(driver.ask("fake_flushed_scope"), NOT_CALLED);
        }
    }
    let memory = device.allocate(LENGTH).unwrap();
    memory.set_sync_memops().unwrap();
    assert_eq!(driver.ask("fake_sync_memops"), 1);
    // SAFETY: the address is only passed to the fake driver.
    let mapped = unsafe { Memory::foreign(&device, 1, LENGTH, ()) };
    assert_eq!(mapped.set_sync_memops().unwrap_err().kind(), ErrorKind::NotSupported);
}

/// Runs a case with the fake driver first in the library path.
fn run(words: &[&str]) {
    if std::env::var_os("TEST_EMULATOR").is_some() {
        testkit::skip!("the C compiler does not target the emulated processor");
    }
    let directory = TempDir::new(&format!("fabricast-fake-driver-{}", words.join("-")));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_driver/driver.c");
    let library = directory.join("libcuda.so.1");
    let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
    let compiled = Command::new(compiler)
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status()
        .expect("a C compiler, which builds need as well");
    assert!(compiled.success());
    // Also found before a libcuda that is installed for development.
    std::os::unix::fs::symlink(&library, directory.join("libcuda.so")).unwrap();
    let mut command = children::respawn(words);
    Child::start(command.env("LD_LIBRARY_PATH", &*directory)).end(6 * DEFAULT_TIMEOUT);
}

#[test]
fn nothing_is_in_flight_after_driver_shutdown() {
    run(&["over", "4"]);
}

#[test]
fn nothing_is_in_flight_in_a_reset_or_destroyed_context() {
    run(&["over", "201"]);
    run(&["over", "709"]);
}

#[test]
fn handles_of_a_destroyed_context_are_not_used() {
    run(&["gone", "4"]);
    run(&["gone", "201"]);
    run(&["gone", "709"]);
}

#[test]
fn failed_queries_do_not_count_as_done() {
    run(&["unknown", "901"]);
}

#[test]
fn captures_of_other_threads_stay_valid() {
    run(&["capture"]);
}

#[test]
fn read_only_memory_is_registered_if_supported() {
    run(&["read-only"]);
}

#[test]
fn used_device_maps_memory_of_a_hidden_one() {
    run(&["hidden"]);
}

#[test]
fn remote_writes_are_flushed_as_the_device_requires() {
    for ordering in ["0", "100", "200"] {
        for options in ["0", "1", "2", "3"] {
            run(&["gpu-direct", ordering, options]);
        }
    }
}

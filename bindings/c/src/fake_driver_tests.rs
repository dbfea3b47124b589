//! The functions of rgaps.h in a process with a CUDA driver: a fake one, whose memory the processor
//! cannot read.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::path::Path;
use std::process::Command;

use gpu::PointerAttributes;

use crate::failure::fabricast_error_message;
use crate::rgaps::{
    publisher_destroy, publisher_init, publisher_push, subscriber_destroy, subscriber_init,
    subscriber_pull,
};
use crate::stream::{fabricast_stream_adopt, fabricast_stream_close};

const CHILD: &str = "TEST_FAKE_DRIVER";
const LENGTH: usize = 100_000;

fn is_loaded() -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains("libcuda.so")
}

#[test]
fn device_pointers_are_detected_by_the_loaded_driver() {
    if std::env::var_os(CHILD).is_some() {
        return in_a_process_with_a_driver();
    }
    let name = format!("fabricast-c-fake-driver-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_driver.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(directory.join("libcuda.so.1"))
        .arg(source)
        .status();
    assert!(compiled.expect("a C compiler").success());
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fake_driver_tests::device_pointers_are_detected_by_the_loaded_driver"])
        .args(["--nocapture", "--test-threads", "1"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", &directory)
        .env("FABRICAST_DIRECTORY", directory.join("node"))
        .env("FABRICAST_DEVICE", "host")
        .output()
        .unwrap();
    std::fs::remove_dir_all(directory).unwrap();
    let errors = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}: {errors}", child.status);
}

fn in_a_process_with_a_driver() {
    let plain: Vec<u8> = (0..LENGTH).map(|at| (at * 13) as u8).collect();
    let topic = c"fake".as_ptr().cast_mut();
    // SAFETY: valid texts; open handles; pointers valid for the passed lengths.
    unsafe {
        let publisher = publisher_init(topic);
        let subscriber = subscriber_init(topic);
        let push = |from: *const u8, length: usize| {
            publisher_push(publisher, length, from.cast::<c_void>().cast_mut())
        };
        let arrived = |length: usize| {
            let at = subscriber_pull(subscriber).cast::<u8>();
            assert!(!at.is_null());
            std::slice::from_raw_parts(at, length).to_vec()
        };
        // A host pointer loads no driver.
        assert_eq!(push(plain.as_ptr(), LENGTH), 0);
        assert_eq!(arrived(LENGTH), plain);
        assert!(!is_loaded());

        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!driver.is_null());
        let find = |name: &CStr| libc::dlsym(driver, name.as_ptr());
        type Allocate = unsafe extern "C" fn(*mut u64, usize) -> i32;
        type Copy = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> i32;
        let allocate: Allocate = std::mem::transmute(find(c"cuMemAlloc_v2"));
        let copy: Copy = std::mem::transmute(find(c"cuMemcpyAsync"));
        let mut memory = 0;
        assert_eq!(allocate(&raw mut memory, LENGTH), 0);
        let from: Vec<u8> = plain.iter().rev().copied().collect();
        assert_eq!(copy(memory, from.as_ptr() as u64, LENGTH, std::ptr::null_mut()), 0);

        let found = PointerAttributes::of(memory + 5).expect("the driver knows it");
        assert_eq!(found.device, Some(gpu::DeviceName::cuda(0)));
        assert_eq!((found.base, found.length), (memory, LENGTH as u64));
        assert_eq!(PointerAttributes::of(plain.as_ptr() as u64), None);

        // The topic is in host memory, the message in device memory.
        let pointer = std::ptr::with_exposed_provenance::<u8>(memory as usize);
        assert_eq!(push(pointer, LENGTH), 0);
        assert_eq!(arrived(LENGTH), from);
        assert_eq!(push(pointer.wrapping_add(1000), 5000), 0);
        assert_eq!(arrived(5000), from[1000..6000]);
        assert_eq!(push(plain.as_ptr(), LENGTH), 0);
        assert_eq!(arrived(LENGTH), plain);
        let too_much = push(pointer.wrapping_add(1), LENGTH);
        assert_eq!(too_much, crate::status::Status::InvalidArgument as i32);
        streams();
        subscriber_destroy(subscriber);
        publisher_destroy(publisher);
    }
}

/// Streams of the driver, of which one is being captured.
unsafe fn streams() {
    let adopt = |handle: usize| {
        let (device, mut stream) = (c"cuda:0".as_ptr(), std::ptr::null_mut());
        let handle = std::ptr::without_provenance_mut(handle);
        // SAFETY: a valid text, and room for a handle; the fake driver does not use the stream.
        let status = unsafe { fabricast_stream_adopt(device, handle, &raw mut stream) };
        (status, stream)
    };
    let says = |text: &str| {
        // SAFETY: a text until the next failure.
        let message = unsafe { CStr::from_ptr(fabricast_error_message()) };
        assert!(message.to_str().unwrap().contains(text), "{message:?}");
    };
    for handle in [0, 4096] {
        let (status, stream) = adopt(handle);
        assert_eq!(status, 0);
        // SAFETY: an open handle.
        assert_eq!(unsafe { fabricast_stream_close(stream) }, 0);
    }
    let failed = (crate::status::Status::Failed as i32, std::ptr::null_mut());
    assert_eq!(adopt(7), failed);
    says("the stream is being captured into a graph");
    assert_eq!(adopt(2), failed);
    says("per-thread default stream");
}

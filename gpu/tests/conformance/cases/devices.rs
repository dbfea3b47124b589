//! Opening devices, their properties and access between them.
#![allow(unsafe_code)]

use gpu::{Device, DeviceName, ErrorKind, LinkCounters, PeerAccess};

use super::{Skip, second, skip};
use crate::fixture::Fixture;

pub fn properties_are_plausible(fixture: &Fixture) -> Result<(), Skip> {
    for device in std::iter::once(&fixture.first).chain(&fixture.second) {
        let properties = device.properties();
        assert!(!properties.product.is_empty() && !properties.driver.is_empty());
        assert!(properties.granularity.is_power_of_two() && properties.granularity >= 4096);
        let free = device.free_memory().unwrap();
        assert!(free > 0 && free <= properties.total_memory);
        assert!(properties.handle_types.file_descriptor);
        assert_eq!(device.peer_access(device.name()).unwrap(), PeerAccess::Same);
        println!("{}: {properties:?}", device.name());
    }
    if let Some(other) = &fixture.second {
        assert_ne!(fixture.first.properties().uuid, other.properties().uuid);
    }
    Ok(())
}

pub fn absent_device_is_refused(fixture: &Fixture) -> Result<(), Skip> {
    let name = DeviceName { number: 999, ..fixture.first.name() };
    let error = Device::open(name).unwrap_err();
    assert_eq!((error.kind(), error.device()), (ErrorKind::NoSuchDevice, Some(name)));
    Ok(())
}

pub fn opening_twice_returns_the_same_device(fixture: &Fixture) -> Result<(), Skip> {
    let again = Device::open(fixture.first.name()).unwrap();
    let (_, used) = again.budget();
    let memory = fixture.first.allocate(1 << 20).unwrap();
    assert_eq!(again.budget().1, used + (1 << 20), "clones share one budget");
    drop(memory);
    assert_eq!(again.budget().1, used);
    let found = Device::find(fixture.first.properties().uuid).unwrap();
    assert_eq!(found.name(), fixture.first.name());
    assert_eq!(fixture.first.name().uuid().unwrap(), fixture.first.properties().uuid);
    let error = Device::find(gpu::Uuid([9; 16])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSuchDevice);
    Ok(())
}

pub fn survey_finds_the_device(fixture: &Fixture) -> Result<(), Skip> {
    let survey = Device::survey();
    let mut names = survey.devices.iter().map(Device::name);
    assert!(names.any(|name| name == fixture.first.name()), "{survey:?}");
    // The emulated devices always exist; an unavailable device has a reason.
    assert!(survey.devices.iter().any(|device| device.name() == DeviceName::emulated(0)));
    for (_, error) in &survey.missing {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    Ok(())
}

pub fn threads_share_a_device(fixture: &Fixture) -> Result<(), Skip> {
    std::thread::scope(|scope| {
        for seed in 0..4_u8 {
            scope.spawn(move || {
                let stream = fixture.first.stream().unwrap();
                let (from, to) = (
                    fixture.first.allocate(40_000).unwrap(),
                    fixture.first.allocate(40_000).unwrap(),
                );
                for _ in 0..50 {
                    stream.fill(&from.whole(), seed).unwrap();
                    stream.copy(&to.whole(), &from.whole()).unwrap();
                }
                let expected = gpu::checksum(&vec![seed; 40_000]);
                assert_eq!(stream.checksum(&to.whole(), gpu::DEFAULT_TIMEOUT).unwrap(), expected);
            });
        }
    });
    Ok(())
}

pub fn handles_fail_in_a_forked_child(fixture: &Fixture) -> Result<(), Skip> {
    let memory = fixture.first.allocate(4096).unwrap();
    // SAFETY: the child only queries handles, which need no other threads, and exits without
    // running any destructor.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let errors = [
            fixture.first.allocate(4096).map(drop),
            fixture.first.stream().map(drop),
            fixture.stream.fill(&memory.whole(), 1),
            fixture.stream.synchronize(gpu::DEFAULT_TIMEOUT),
            memory.export_piece(0).map(drop),
            // With CUDA, opening a device again fails, too: the parent initialised the driver.
            if fixture.is_emulated() {
                fixture.stream.is_done().map(drop)
            } else {
                Device::open(fixture.first.name()).map(drop)
            },
        ];
        let all = errors
            .iter()
            .all(|result| result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Forked));
        drop(memory);
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: our child, one valid number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "a handle did not return Forked");
    // The parent's handles still work.
    fixture.fill(&memory.whole(), 1);
    fixture.check(&memory.whole(), 1);
    Ok(())
}

pub fn link_counters_count_transferred_bytes(fixture: &Fixture) -> Result<(), Skip> {
    if fixture.is_emulated() {
        assert_eq!(LinkCounters::of(&fixture.first).unwrap_err().kind(), ErrorKind::NotSupported);
        return skip("an emulated device has no links");
    }
    let counters = match LinkCounters::of(&fixture.first) {
        Ok(counters) => counters,
        Err(error) => return skip(&error.to_string()),
    };
    let other = second(fixture)?;
    fixture.first.enable_peer(other).unwrap();
    let length = 1 << 30;
    let (from, to) = (fixture.first.allocate(length).unwrap(), other.allocate(length).unwrap());
    let before = counters.read().unwrap();
    fixture.stream.copy(&to.whole(), &from.whole()).unwrap();
    fixture.stream.synchronize(gpu::DEFAULT_TIMEOUT).unwrap();
    let moved = counters.read().unwrap().since(&before);
    println!("{moved:?} for {length} bytes");
    match moved.nvlink_sent {
        // Each link rounds to kibibytes, before and after; other traffic is small.
        Some(sent) => {
            assert!(sent + (64 << 10) >= length && sent < length + length / 10, "{moved:?}");
        }
        None => return skip("this device does not count"),
    }
    Ok(())
}

/// A framework in the same thread has its own current device.
pub fn current_context_of_the_caller_is_preserved(fixture: &Fixture) -> Result<(), Skip> {
    use cudarc::driver::sys;
    if fixture.is_emulated() {
        return skip("an emulated device has no contexts");
    }
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is loaded and initialised; space for a handle.
        let code = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        context as usize
    };
    let work = |device: &Device| {
        let memory = device.allocate(4096).unwrap();
        let stream = device.stream().unwrap();
        stream.fill(&memory.whole(), 1).unwrap();
        stream.checksum(&memory.whole(), gpu::DEFAULT_TIMEOUT).unwrap();
    };
    assert_eq!(current(), 0, "no context is current yet");
    work(&fixture.first);
    assert_eq!(current(), 0);
    let other = fixture.second.as_ref().unwrap_or(&fixture.first);
    let mut framework_context = std::ptr::null_mut();
    // SAFETY: the calls of a framework: its device's primary context, made current.
    unsafe {
        let number = other.name().number as i32;
        assert_eq!(
            sys::cuDevicePrimaryCtxRetain(&raw mut framework_context, number),
            sys::CUresult::CUDA_SUCCESS
        );
        assert_eq!(sys::cuCtxSetCurrent(framework_context), sys::CUresult::CUDA_SUCCESS);
    }
    work(&fixture.first);
    assert_eq!(current(), framework_context as usize, "after calls and drops");
    // SAFETY: reverts the calls above.
    unsafe {
        assert_eq!(sys::cuCtxSetCurrent(std::ptr::null_mut()), sys::CUresult::CUDA_SUCCESS);
        let number = other.name().number as i32;
        assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(number), sys::CUresult::CUDA_SUCCESS);
    }
    Ok(())
}

pub fn remote_writes_are_flushed(fixture: &Fixture) -> Result<(), Skip> {
    let gpu_direct = fixture.first.properties().gpu_direct;
    println!("{gpu_direct:?}");
    let flushed = fixture.first.flush_remote_writes();
    match gpu_direct.makes_writes_visible() {
        true => flushed.unwrap(),
        false => assert_eq!(flushed.unwrap_err().kind(), ErrorKind::NotSupported),
    }
    Ok(())
}

//! Devices as such.
#![allow(unsafe_code)]

use gpu::{Device, DeviceName, ErrorKind, LinkCounters, PeerAccess};

use super::{Skip, second, skip};
use crate::house::House;

pub fn properties_make_sense(house: &House) -> Result<(), Skip> {
    for device in std::iter::once(&house.first).chain(&house.second) {
        let properties = device.properties();
        assert!(!properties.product.is_empty() && !properties.driver.is_empty());
        assert!(properties.granularity.is_power_of_two() && properties.granularity >= 4096);
        let free = device.free_memory().unwrap();
        assert!(free > 0 && free <= properties.total_memory);
        assert!(properties.handle_types.file_descriptor);
        assert_eq!(device.peer_access(device).unwrap(), PeerAccess::Same);
        println!("{}: {properties:?}", device.name());
    }
    if let Some(other) = &house.second {
        assert_ne!(house.first.properties().uuid, other.properties().uuid);
    }
    Ok(())
}

pub fn a_device_that_is_not_there_is_refused(house: &House) -> Result<(), Skip> {
    let name = DeviceName { number: 999, ..house.first.name() };
    let error = Device::open(name).unwrap_err();
    assert_eq!((error.kind(), error.device()), (ErrorKind::NoSuchDevice, Some(name)));
    Ok(())
}

pub fn opened_twice_it_is_the_same(house: &House) -> Result<(), Skip> {
    let again = Device::open(house.first.name()).unwrap();
    let (_, used) = again.budget();
    let memory = house.first.allocate(1 << 20).unwrap();
    assert_eq!(again.budget().1, used + (1 << 20), "one budget");
    drop(memory);
    assert_eq!(again.budget().1, used);
    let found = Device::find(house.first.properties().uuid).unwrap();
    assert_eq!(found.name(), house.first.name());
    assert_eq!(house.first.name().uuid().unwrap(), house.first.properties().uuid);
    let error = Device::find(gpu::Uuid([9; 16])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSuchDevice);
    Ok(())
}

pub fn a_survey_finds_it(house: &House) -> Result<(), Skip> {
    let survey = Device::survey();
    let mut names = survey.devices.iter().map(Device::name);
    assert!(names.any(|name| name == house.first.name()), "{survey:?}");
    // The stand-in is always there; what is missing says why.
    assert!(survey.devices.iter().any(|device| device.name() == DeviceName::stand_in(0)));
    for (_, error) in &survey.missing {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    Ok(())
}

pub fn threads_share_a_device(house: &House) -> Result<(), Skip> {
    std::thread::scope(|scope| {
        for seed in 0..4_u8 {
            scope.spawn(move || {
                let stream = house.first.stream().unwrap();
                let (from, to) =
                    (house.first.allocate(40_000).unwrap(), house.first.allocate(40_000).unwrap());
                for _ in 0..50 {
                    stream.fill(&from.whole(), seed).unwrap();
                    stream.copy(&to.whole(), &from.whole()).unwrap();
                }
                let expected = gpu::checksum(&vec![seed; 40_000]);
                assert_eq!(stream.checksum(&to.whole(), gpu::PATIENCE).unwrap(), expected);
            });
        }
    });
    Ok(())
}

pub fn a_handle_says_that_the_process_forked(house: &House) -> Result<(), Skip> {
    let memory = house.first.allocate(4096).unwrap();
    // SAFETY: the child asks handles, which know nothing of threads, and leaves without
    // running anybody's clean-up.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let said = [
            house.first.allocate(4096).map(drop),
            house.first.stream().map(drop),
            house.stream.fill(&memory.whole(), 1),
            house.stream.synchronize(gpu::PATIENCE),
            memory.export_pieces().map(drop),
            // With CUDA not even anew: its driver was started by the parent.
            if house.is_stand_in() {
                house.stream.is_done().map(drop)
            } else {
                Device::open(house.first.name()).map(drop)
            },
        ];
        let all = said
            .iter()
            .all(|result| result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Forked));
        drop(memory);
        // SAFETY: ends this process, at once.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: our child, one valid number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "not every handle said so");
    // The parent's are as good as before.
    house.fill(&memory.whole(), 1);
    house.check(&memory.whole(), 1);
    Ok(())
}

pub fn links_count_what_they_carry(house: &House) -> Result<(), Skip> {
    if house.is_stand_in() {
        assert_eq!(LinkCounters::of(&house.first).unwrap_err().kind(), ErrorKind::NotSupported);
        return skip("a stand-in has no links");
    }
    let counters = match LinkCounters::of(&house.first) {
        Ok(counters) => counters,
        Err(error) => return skip(&error.to_string()),
    };
    let other = second(house)?;
    house.first.enable_peer(other).unwrap();
    let length = 1 << 30;
    let (from, to) = (house.first.allocate(length).unwrap(), other.allocate(length).unwrap());
    let before = counters.read().unwrap();
    house.stream.copy(&to.whole(), &from.whole()).unwrap();
    house.stream.synchronize(gpu::PATIENCE).unwrap();
    let moved = counters.read().unwrap().since(&before);
    println!("{moved:?} for {length} bytes");
    match moved.nvlink_sent {
        // Each link tells whole kibibytes, before and after; what else there is, is little.
        Some(sent) => {
            assert!(sent + (64 << 10) >= length && sent < length + length / 10, "{moved:?}");
        }
        None => return skip("this device does not count"),
    }
    Ok(())
}

/// A framework in the same thread has its own idea of the current device.
pub fn the_caller_keeps_its_own_context(house: &House) -> Result<(), Skip> {
    use cudarc::driver::sys;
    if house.is_stand_in() {
        return skip("a stand-in has no contexts");
    }
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is there, and was started; room for a handle.
        let code = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        context as usize
    };
    let work = |device: &Device| {
        let memory = device.allocate(4096).unwrap();
        let stream = device.stream().unwrap();
        stream.fill(&memory.whole(), 1).unwrap();
        stream.checksum(&memory.whole(), gpu::PATIENCE).unwrap();
    };
    assert_eq!(current(), 0, "nobody has made one current");
    work(&house.first);
    assert_eq!(current(), 0);
    let other = house.second.as_ref().unwrap_or(&house.first);
    let mut theirs = std::ptr::null_mut();
    // SAFETY: as a framework would: its device's primary context, made current.
    unsafe {
        let number = other.name().number as i32;
        assert_eq!(
            sys::cuDevicePrimaryCtxRetain(&raw mut theirs, number),
            sys::CUresult::CUDA_SUCCESS
        );
        assert_eq!(sys::cuCtxSetCurrent(theirs), sys::CUresult::CUDA_SUCCESS);
    }
    work(&house.first);
    assert_eq!(current(), theirs as usize, "after calls and drops");
    // SAFETY: undoes what was done above.
    unsafe {
        assert_eq!(sys::cuCtxSetCurrent(std::ptr::null_mut()), sys::CUresult::CUDA_SUCCESS);
        let number = other.name().number as i32;
        assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(number), sys::CUresult::CUDA_SUCCESS);
    }
    Ok(())
}

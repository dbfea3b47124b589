//! Operations that fail.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gpu::stand_in::fail_after;
use gpu::{ErrorKind, Memory, PATIENCE};

use super::{Skip, skip};
use crate::child::Child;
use crate::house::House;

/// A failing operation is told by whoever asks next, and nothing after it is done.
pub fn a_failure_is_told_and_stays(house: &House) -> Result<(), Skip> {
    let memory = house.first.allocate(1 << 20).unwrap();
    house.fill(&memory.whole(), 1);
    let event = house.first.event().unwrap();
    let part = memory.slice(0, 4096).unwrap();
    if house.is_stand_in() {
        fail_after(0, 1);
        house.stream.fill(&part, 2).unwrap();
        house.stream.fill(&part, 3).unwrap();
    } else {
        // A kernel reads where nothing is.
        // SAFETY: it is not true, and that is the point: the driver ends this context.
        let nowhere = unsafe { Memory::foreign(&house.first, 0x10_0000, 4096, ()) };
        let _ = house.stream.checksum(&nowhere.whole(), PATIENCE);
    }
    let _ = house.stream.record(&event);
    let error = house.stream.synchronize(PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceFailed, "{error}");
    assert_eq!(error.device(), Some(house.first.name()));
    assert_eq!(house.stream.is_done().unwrap_err().kind(), ErrorKind::DeviceFailed);
    assert!(event.is_done().is_err());
    println!("{error}");
    // Nothing hangs, whatever is dropped.
    drop((memory, part, event));
    Ok(())
}

/// No copy outlives a context: whoever resets the device, such as `cudaDeviceReset`, leaves nothing to
/// wait for.
pub fn streams_of_a_reset_device_are_closed_at_once(house: &House) -> Result<(), Skip> {
    if house.is_stand_in() {
        return skip("a stand-in is not reset");
    }
    let memory = house.first.allocate(1 << 20).unwrap();
    let (first, second) = (house.first.stream().unwrap(), house.first.stream().unwrap());
    first.fill(&memory.whole(), 1).unwrap();
    second.fill(&memory.whole(), 2).unwrap();
    let point = first.point().unwrap();
    let number = house.first.name().number as i32;
    // SAFETY: as any library of the process may do.
    let code = unsafe { sys::cuDevicePrimaryCtxReset_v2(number) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    let error = point.is_done().unwrap_err();
    println!("{error}");
    assert!(gpu::is_over(&error), "{error}");
    let start = Instant::now();
    let error = first.close(PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceFailed, "{error}");
    drop((second, memory, point));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(gpu::leaked_streams(), 0);
    Ok(())
}

/// A static object's destructor runs when the driver was shut down already.
pub fn streams_dropped_at_exit_are_not_waited_for(_: &House) -> Result<(), Skip> {
    let mut child = Child::start("drop-at-exit", &[], &[]);
    let line = child.line();
    println!("{line}");
    let words: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
    assert!(words[0] < 2000, "{} ms", words[0]);
    assert_eq!(words[1], 0, "streams that were leaked");
    child.finish();
    Ok(())
}

//! Operations that fail.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gpu::emulated::fail_after;
use gpu::{DEFAULT_TIMEOUT, ErrorKind, Memory};

use super::{Skip, skip};
use crate::child::Child;
use crate::fixture::Fixture;

/// The next query reports a failed operation, and no later operation is done.
pub fn failure_is_reported_and_permanent(fixture: &Fixture) -> Result<(), Skip> {
    let memory = fixture.first.allocate(1 << 20).unwrap();
    fixture.fill(&memory.whole(), 1);
    let event = fixture.first.event().unwrap();
    let part = memory.slice(0, 4096).unwrap();
    if fixture.is_emulated() {
        fail_after(0, 1);
        fixture.stream.fill(&part, 2).unwrap();
        fixture.stream.fill(&part, 3).unwrap();
    } else {
        // A kernel reads an invalid address. SAFETY: the promise is broken on purpose: the
        // driver ends this context.
        let nowhere = unsafe { Memory::foreign(&fixture.first, 0x10_0000, 4096, ()) };
        let _ = fixture.stream.checksum(&nowhere.whole(), DEFAULT_TIMEOUT);
    }
    let _ = fixture.stream.record(&event);
    let error = fixture.stream.synchronize(DEFAULT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceFailed, "{error}");
    assert_eq!(error.device(), Some(fixture.first.name()));
    assert_eq!(fixture.stream.is_done().unwrap_err().kind(), ErrorKind::DeviceFailed);
    assert!(event.is_done().is_err());
    println!("{error}");
    // No drop hangs.
    drop((memory, part, event));
    Ok(())
}

/// No copy outlives a context: after a reset of the device, for example by `cudaDeviceReset`,
/// nothing has to be waited for.
pub fn streams_of_a_reset_device_close_at_once(fixture: &Fixture) -> Result<(), Skip> {
    if fixture.is_emulated() {
        return skip("an emulated device cannot be reset");
    }
    let memory = fixture.first.allocate(1 << 20).unwrap();
    let (first, second) = (fixture.first.stream().unwrap(), fixture.first.stream().unwrap());
    first.fill(&memory.whole(), 1).unwrap();
    second.fill(&memory.whole(), 2).unwrap();
    let point = first.point().unwrap();
    let number = fixture.first.name().number as i32;
    // SAFETY: a call that any library of the process may make.
    let code = unsafe { sys::cuDevicePrimaryCtxReset_v2(number) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    let error = point.is_done().unwrap_err();
    println!("{error}");
    assert!(gpu::proves_idle(&error), "{error}");
    let start = Instant::now();
    let error = first.close(DEFAULT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceFailed, "{error}");
    drop((second, memory, point));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(gpu::leaked_streams(), 0);
    Ok(())
}

/// A static object's destructor runs after the driver was shut down.
pub fn streams_dropped_at_exit_are_not_waited_for(_: &Fixture) -> Result<(), Skip> {
    let mut child = Child::start("drop-at-exit", &[], &[]);
    let line = child.line();
    println!("{line}");
    let words: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
    assert!(words[0] < 2000, "{} ms", words[0]);
    assert_eq!(words[1], 0, "a stream was leaked");
    child.finish();
    Ok(())
}

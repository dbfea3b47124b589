//! Operations that fail.
#![allow(unsafe_code)]

use gpu::stand_in::fail_after;
use gpu::{ErrorKind, Memory, PATIENCE};

use super::Skip;
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

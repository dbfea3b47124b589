//! Memory that was allocated the plain way, in other processes.
#![allow(unsafe_code)]

use gpu::{ErrorKind, LegacyHandle, Memory};

use super::{Skip, skip};
use crate::child::{Child, handle_from_text, handle_to_text};
use crate::house::House;

const LENGTH: u64 = 8 << 20;

fn must_have(house: &House) -> Result<(), Skip> {
    if house.first.properties().handle_types.legacy {
        return Ok(());
    }
    let handle = LegacyHandle { bytes: [1; 64], offset: 0, length: 1 };
    let error = house.first.open_legacy_of_another(&handle).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    skip("the device has no legacy handles")
}

pub fn a_handle_is_opened_once(house: &House) -> Result<(), Skip> {
    must_have(house)?;
    let memory = house.first.allocate(LENGTH).unwrap();
    house.fill(&memory.whole(), 1);
    let handle = memory.export_legacy().unwrap();
    let mut child = Child::start("open-legacy", &[], &handle_to_text(&handle));
    assert_eq!(child.line(), "ready");
    house.check(&memory.whole(), 2);
    child.finish();
    Ok(())
}

/// As a framework hands out tensors: small ones, in the middle of what it allocated.
pub fn a_part_of_an_allocation_is_opened(house: &House) -> Result<(), Skip> {
    must_have(house)?;
    for length in [300, 100_000, 5 << 20] {
        let memory = house.first.allocate(length + (1 << 20)).unwrap();
        let address = memory.address() + 4096;
        // SAFETY: inside of the memory, which is kept by being its owner.
        let parts = unsafe {
            let adopted = house.first.adopt(address, length, memory.clone()).unwrap();
            [adopted, Memory::foreign(&house.first, address, length, memory.clone())]
        };
        for part in parts {
            house.fill(&part.whole(), 1);
            let handle = part.export_legacy().unwrap();
            assert!(handle.offset >= 4096 && handle.length == length);
            let mut child = Child::start("open-legacy", &[], &handle_to_text(&handle));
            assert_eq!(child.line(), "ready");
            house.check(&part.whole(), 2);
            child.finish();
        }
    }
    Ok(())
}

pub fn a_handle_means_nothing_at_home(house: &House) -> Result<(), Skip> {
    must_have(house)?;
    let memory = house.first.allocate(LENGTH).unwrap();
    let handle = memory.export_legacy().unwrap();
    let error = house.first.open_legacy_of_another(&handle).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    assert_eq!(gpu::open_legacy_handles(), 0);
    Ok(())
}

pub fn what_is_no_handle_is_refused(house: &House) -> Result<(), Skip> {
    must_have(house)?;
    let mut child = Child::start("hold-legacy", &[], &[LENGTH.to_string()]);
    let line = child.line();
    let words: Vec<_> = line.split(' ').collect();
    let good = handle_from_text(&words);
    let mut altered = good;
    altered.bytes[8..].fill(0x77);
    let bad = [
        LegacyHandle { bytes: [0; 64], ..good },
        LegacyHandle { bytes: [0xff; 64], ..good },
        altered,
        // More than there is.
        LegacyHandle { length: 1 << 40, ..good },
        LegacyHandle { offset: u64::MAX, ..good },
        LegacyHandle { length: 0, ..good },
    ];
    for handle in bad {
        let error = house.first.open_legacy_of_another(&handle).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    }
    assert_eq!(gpu::open_legacy_handles(), 0, "nothing stays open");
    let memory = house.first.open_legacy_of_another(&good).unwrap();
    house.check(&memory.whole(), 4);
    drop(memory);
    child.finish();
    Ok(())
}

/// Who imported it keeps it, whole: although its maker is gone, and others take all the
/// memory that they can get.
pub fn memory_whose_maker_died_is_no_garbage(house: &House) -> Result<(), Skip> {
    must_have(house)?;
    let length = 64 << 20;
    let mut maker = Child::start("hold-legacy", &[], &[length.to_string()]);
    let line = maker.line();
    let words: Vec<_> = line.split(' ').collect();
    let handle = handle_from_text(&words);
    let memory = house.first.open_legacy_of_another(&handle).unwrap();
    house.check(&memory.whole(), 4);
    maker.kill();
    let mut takers = Vec::new();
    for _ in 0..3 {
        let mut taker = Child::start("take-memory", &[], &[(2_u64 << 30).to_string()]);
        assert_eq!(taker.line(), "ready");
        takers.push(taker);
    }
    let copy = house.first.allocate(length).unwrap();
    let copied = house.stream.copy(&copy.whole(), &memory.whole());
    let copied = copied.and_then(|()| house.stream.synchronize(gpu::PATIENCE));
    match copied {
        Ok(()) => {
            house.check(&copy.whole(), 4);
            println!("the importer keeps the memory whole");
        }
        Err(error) => println!("the importer is told: {error}"),
    }
    takers.into_iter().for_each(Child::finish);
    // Who comes later is refused.
    drop(memory);
    let late = house.first.open_legacy_of_another(&handle);
    match late {
        Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}"),
        Ok(memory) => house.check(&memory.whole(), 4),
    }
    Ok(())
}

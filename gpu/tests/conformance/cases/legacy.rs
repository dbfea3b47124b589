//! `cuMemAlloc` memory in other processes.
#![allow(unsafe_code)]

use gpu::{ErrorKind, LegacyHandle, Memory};

use super::{Skip, skip};
use crate::child::{Child, handle_from_text, handle_to_text};
use crate::fixture::Fixture;

const LENGTH: u64 = 8 << 20;

fn must_have(fixture: &Fixture) -> Result<(), Skip> {
    if fixture.first.properties().handle_types.legacy {
        return Ok(());
    }
    let handle = LegacyHandle { bytes: [1; 64], offset: 0, length: 1 };
    let error = fixture.first.open_legacy_handle(&handle).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    skip("the device has no legacy handles")
}

pub fn legacy_handle_is_opened_once(fixture: &Fixture) -> Result<(), Skip> {
    must_have(fixture)?;
    let memory = fixture.first.allocate(LENGTH).unwrap();
    fixture.fill(&memory.whole(), 1);
    let handle = memory.export_legacy().unwrap();
    let mut child = Child::start("open-legacy", &[], &handle_to_text(&handle));
    assert_eq!(child.line(), "ready");
    fixture.check(&memory.whole(), 2);
    child.finish();
    Ok(())
}

/// Allocates tensors like a framework: small ones, in the middle of an allocation.
pub fn part_of_an_allocation_can_be_opened(fixture: &Fixture) -> Result<(), Skip> {
    must_have(fixture)?;
    for length in [300, 100_000, 5 << 20] {
        let memory = fixture.first.allocate(length + (1 << 20)).unwrap();
        let address = memory.address() + 4096;
        // SAFETY: inside of the memory, which is its own owner and thus kept alive.
        let parts = unsafe {
            let adopted = fixture.first.adopt(address, length, memory.clone()).unwrap();
            [adopted, Memory::foreign(&fixture.first, address, length, memory.clone())]
        };
        for part in parts {
            fixture.fill(&part.whole(), 1);
            let handle = part.export_legacy().unwrap();
            assert!(handle.offset >= 4096 && handle.length == length);
            let mut child = Child::start("open-legacy", &[], &handle_to_text(&handle));
            assert_eq!(child.line(), "ready");
            fixture.check(&part.whole(), 2);
            child.finish();
        }
    }
    Ok(())
}

pub fn own_legacy_handle_is_refused(fixture: &Fixture) -> Result<(), Skip> {
    must_have(fixture)?;
    let memory = fixture.first.allocate(LENGTH).unwrap();
    let handle = memory.export_legacy().unwrap();
    let error = fixture.first.open_legacy_handle(&handle).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    assert_eq!(gpu::open_legacy_handles(), 0);
    Ok(())
}

pub fn invalid_legacy_handle_is_refused(fixture: &Fixture) -> Result<(), Skip> {
    must_have(fixture)?;
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
        // More than the allocation has.
        LegacyHandle { length: 1 << 40, ..good },
        LegacyHandle { offset: u64::MAX, ..good },
        LegacyHandle { length: 0, ..good },
    ];
    for handle in bad {
        let error = fixture.first.open_legacy_handle(&handle).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    }
    assert_eq!(gpu::open_legacy_handles(), 0, "nothing stays open");
    let memory = fixture.first.open_legacy_handle(&good).unwrap();
    fixture.check(&memory.whole(), 4);
    drop(memory);
    child.finish();
    Ok(())
}

/// An importer keeps the whole memory, even if its exporter exited and other processes allocate
/// all free memory.
pub fn imported_memory_outlives_its_exporter(fixture: &Fixture) -> Result<(), Skip> {
    must_have(fixture)?;
    let length = 64 << 20;
    let mut maker = Child::start("hold-legacy", &[], &[length.to_string()]);
    let line = maker.line();
    let words: Vec<_> = line.split(' ').collect();
    let handle = handle_from_text(&words);
    let memory = fixture.first.open_legacy_handle(&handle).unwrap();
    fixture.check(&memory.whole(), 4);
    maker.kill();
    let mut allocators = Vec::new();
    for _ in 0..3 {
        let mut allocator = Child::start("take-memory", &[], &[(2_u64 << 30).to_string()]);
        assert_eq!(allocator.line(), "ready");
        allocators.push(allocator);
    }
    let copy = fixture.first.allocate(length).unwrap();
    let copied = fixture.stream.copy(&copy.whole(), &memory.whole());
    let copied = copied.and_then(|()| fixture.stream.synchronize(gpu::DEFAULT_TIMEOUT));
    match copied {
        Ok(()) => {
            fixture.check(&copy.whole(), 4);
            println!("the importer keeps the memory whole");
        }
        Err(error) => println!("the importer gets an error: {error}"),
    }
    allocators.into_iter().for_each(Child::finish);
    // A later import is refused.
    drop(memory);
    let late = fixture.first.open_legacy_handle(&handle);
    match late {
        Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}"),
        Ok(memory) => fixture.check(&memory.whole(), 4),
    }
    Ok(())
}

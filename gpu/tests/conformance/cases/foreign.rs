//! Memory of another library: adopted, and exported to other processes.
#![allow(unsafe_code)]

use std::fmt::Debug;
use std::os::fd::{AsFd, OwnedFd};

use gpu::emulated::ForeignMemory;
use gpu::{Allocator, DEFAULT_TIMEOUT, Device, ErrorKind, Memory};

use super::{Skip, second, skip};
use crate::child::Child;
use crate::fixture::Fixture;

const EXPORTABLE: Allocator = Allocator::Mapped { exportable: true };

/// A framework's segment: mapped by another library in pieces of this many granules. On CUDA,
/// memory of this library takes its place: the driver does not distinguish owners.
fn segment(fixture: &Fixture, granules: &[u64]) -> (u64, Box<dyn Debug + Send + Sync>) {
    let granule = fixture.first.properties().granularity;
    let lengths: Vec<_> = granules.iter().map(|count| count * granule).collect();
    if fixture.is_emulated() {
        let memory = ForeignMemory::new(0, &lengths, EXPORTABLE).unwrap();
        return (memory.address(), Box::new(memory));
    }
    let memory = fixture.first.allocate_pieces(&lengths).unwrap();
    (memory.address(), Box::new(memory))
}

/// A tensor inside a segment.
fn tensor(fixture: &Fixture, granules: &[u64], offset: u64, length: u64) -> Memory {
    let (address, owner) = segment(fixture, granules);
    // SAFETY: inside of the segment, which the tensor keeps alive.
    unsafe { fixture.first.adopt(address + offset, length, owner) }.unwrap()
}

/// All pieces of memory.
fn export_all(memory: &Memory) -> gpu::Result<Vec<(OwnedFd, u64)>> {
    (0..memory.pieces()?.lengths.len()).map(|number| memory.export_piece(number)).collect()
}

pub fn foreign_pieces_are_shared_with_another_process(fixture: &Fixture) -> Result<(), Skip> {
    let granule = fixture.first.properties().granularity;
    let granules = [1, 2, 1, 3, 1];
    // Begins and ends in the middle of pieces; in one piece; at their bounds; all of it.
    for (offset, length, lengths) in [
        (granule / 2 + 512, 4 * granule, &granules[..4]),
        (granule + 4096, granule, &granules[1..2]),
        (3 * granule, granule, &granules[2..3]),
        (0, 8 * granule, &granules[..]),
        (2 * granule, 300, &granules[1..2]),
    ] {
        let memory = tensor(fixture, &granules, offset, length);
        assert_eq!(memory.device(), Some(fixture.first.name()));
        fixture.fill(&memory.whole(), 1);
        let lengths: Vec<_> = lengths.iter().map(|count| count * granule).collect();
        let pieces = memory.pieces().unwrap();
        assert_eq!(pieces.lengths, lengths);
        let (descriptors, found): (Vec<_>, Vec<_>) =
            export_all(&memory).unwrap().into_iter().unzip();
        assert_eq!(found, lengths);
        let descriptors: Vec<_> = descriptors.iter().collect();
        let numbers = [pieces.offset, length].into_iter().chain(lengths);
        let arguments: Vec<_> = numbers.map(|number| number.to_string()).collect();
        let mut child = Child::start("import-pieces", &descriptors, &arguments);
        assert_eq!(child.line(), "ready");
        fixture.check(&memory.whole(), 2);
        child.finish();
    }
    Ok(())
}

pub fn foreign_pieces_outlive_their_owner(fixture: &Fixture) -> Result<(), Skip> {
    let granule = fixture.first.properties().granularity;
    let (address, owner) = segment(fixture, &[1, 1, 1]);
    // SAFETY: inside of the segment; after the segment is dropped, the memory is only exported.
    let memory = unsafe { fixture.first.adopt(address + granule / 2, 2 * granule, ()) }.unwrap();
    fixture.fill(&memory.whole(), 1);
    let free = fixture.first.free_memory().unwrap();
    drop(owner);
    assert_eq!(fixture.first.free_memory().unwrap(), free, "its pieces are retained");
    let pieces = memory.pieces().unwrap();
    let exported = export_all(&memory).unwrap();
    drop(memory);
    let importer = fixture.first.importer(3 * granule).unwrap();
    for (descriptor, length) in exported {
        importer.add(descriptor.as_fd(), length).unwrap();
    }
    let same = importer.finish(pieces.offset, 2 * granule).unwrap();
    fixture.check(&same.whole(), 1);
    drop(same);
    assert!(fixture.first.free_memory().unwrap() >= free + 3 * granule, "the pieces are released");
    Ok(())
}

pub fn memory_pieces_are_imported_one_at_a_time(fixture: &Fixture) -> Result<(), Skip> {
    let granule = fixture.first.properties().granularity;
    let (count, offset) = (40, granule / 4);
    let length = count * granule - granule / 2;
    let memory = tensor(fixture, &vec![1; count as usize], offset, length);
    fixture.fill(&memory.slice(length - granule, granule).unwrap(), 1);
    let pieces = memory.pieces().unwrap();
    assert_eq!(pieces.lengths.len() as u64, count);
    let importer = fixture.first.importer(count * granule).unwrap();
    for number in 0..pieces.lengths.len() {
        let (descriptor, length) = memory.export_piece(number).unwrap();
        assert_eq!(length, pieces.lengths[number]);
        importer.add(descriptor.as_fd(), length).unwrap();
    }
    let error = memory.export_piece(pieces.lengths.len()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    let same = importer.finish(pieces.offset, length).unwrap();
    fixture.check(&same.slice(length - granule, granule).unwrap(), 1);
    assert_eq!(same.pieces().unwrap(), pieces);
    // Imported memory can be exported again, if the driver allows it.
    let again = match export_all(&same) {
        Ok(again) => again,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
            return Ok(());
        }
    };
    let importer = fixture.first.importer(count * granule).unwrap();
    for (descriptor, length) in again {
        importer.add(descriptor.as_fd(), length).unwrap();
    }
    let third = importer.finish(0, offset + length).unwrap();
    drop((memory, same));
    fixture.check(&third.slice(offset + length - granule, granule).unwrap(), 1);
    Ok(())
}

pub fn pieces_that_do_not_fit_are_refused(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let granule = device.properties().granularity;
    let (exported, _) = device.allocate_shared(granule, &[]).unwrap().export_piece(0).unwrap();
    let piece = || exported.as_fd();
    // More than was reserved.
    let importer = device.importer(2 * granule).unwrap();
    importer.add(piece(), granule).unwrap();
    importer.add(piece(), granule).unwrap();
    let error = importer.add(piece(), granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    // The failure does not affect existing pieces. Both pieces are the same memory.
    let memory = importer.finish(granule - 100, 200).unwrap();
    fixture.fill(&memory.slice(100, 100).unwrap(), 1);
    let importer = device.importer(granule).unwrap();
    importer.add(piece(), granule).unwrap();
    fixture.check(&importer.finish(0, 100).unwrap().whole(), 1);
    drop(memory);
    // More than all pieces have.
    for (offset, length) in [(1, granule), (granule + 1, 0), (u64::MAX, 2), (0, u64::MAX)] {
        let importer = device.importer(4 * granule).unwrap();
        importer.add(piece(), granule).unwrap();
        let error = importer.finish(offset, length).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    }
    let error = device.importer(granule).unwrap().finish(0, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    // Only the last piece may be a part of a granule, or the next would have another offset.
    let importer = device.importer(2 * granule).unwrap();
    importer.add(piece(), granule - 4096).unwrap();
    let error = importer.add(piece(), granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    // An empty list, and a file descriptor that is not memory.
    assert_eq!(device.importer(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let (pipe, _other_end) = std::io::pipe().unwrap();
    let error = device.importer(granule).unwrap().add(pipe.as_fd(), granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    Ok(())
}

pub fn unexportable_foreign_memory_reports_the_reason(fixture: &Fixture) -> Result<(), Skip> {
    let plain = fixture.first.allocate(1 << 20).unwrap();
    // SAFETY: inside of the memory, which is its own owner and thus kept alive.
    let part = unsafe { fixture.first.adopt(plain.address() + 4096, 8192, plain.clone()) }.unwrap();
    fixture.fill(&part.whole(), 1);
    fixture.check(&plain.slice(4096, 8192).unwrap(), 1);
    let error = part.export_piece(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("legacy handle"), "{error}");
    if fixture.first.properties().handle_types.legacy {
        assert!(part.export_legacy().unwrap().offset >= 4096);
    }
    // Memory that was not looked up. SAFETY: the same.
    let part = unsafe { Memory::foreign(&fixture.first, plain.address(), 8192, plain.clone()) };
    let error = part.export_piece(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSupported);
    assert!(error.to_string().contains("adopt"), "{error}");
    if !fixture.is_emulated() {
        return skip(
            "pools and managed memory of other libraries exist on the emulated device only",
        );
    }
    let granule = fixture.first.properties().granularity;
    for (allocator, word) in [
        (Allocator::Mapped { exportable: false }, "without a shareable handle"),
        (Allocator::Pool, "cudaMallocAsync"),
        (Allocator::Managed, "cudaMallocManaged"),
        (Allocator::Host, "host memory"),
    ] {
        let memory = ForeignMemory::new(0, &[granule, granule], allocator).unwrap();
        // SAFETY: inside of the memory, which it owns.
        let memory = unsafe { fixture.first.adopt(memory.address(), 2 * granule, memory) }.unwrap();
        fixture.fill(&memory.slice(granule - 100, 1000).unwrap(), 1);
        fixture.check(&memory.slice(granule - 100, 1000).unwrap(), 1);
        for error in [
            memory.export_piece(0).unwrap_err(),
            memory.pieces().unwrap_err(),
            memory.export_legacy().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
            assert!(error.to_string().contains(word), "{error}");
        }
    }
    Ok(())
}

pub fn adopting_unmapped_memory_is_refused(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let granule = device.properties().granularity;
    let adopt = |device: &Device, address, length| {
        // SAFETY: no operation uses it.
        unsafe { device.adopt(address, length, ()) }.unwrap_err().kind()
    };
    let plain = device.allocate(granule).unwrap();
    let address = plain.address();
    assert_eq!(adopt(device, address, 0), ErrorKind::InvalidArgument);
    assert_eq!(adopt(device, address, u64::MAX), ErrorKind::InvalidArgument);
    assert_eq!(adopt(device, address, 1 << 40), ErrorKind::OutOfBounds);
    let nowhere = Box::new(5_u64);
    assert_eq!(adopt(device, &raw const *nowhere as u64, 8), ErrorKind::InvalidArgument);
    // A segment that ends before the range does. No memory is mapped behind it.
    let (address, owner) = segment(fixture, &[1, 1]);
    let beyond = adopt(device, address + granule, granule + 1);
    assert!(matches!(beyond, ErrorKind::InvalidArgument | ErrorKind::Other), "{beyond:?}");
    drop(owner);
    Ok(())
}

pub fn adopted_memory_is_accessible_where_mapped(fixture: &Fixture) -> Result<(), Skip> {
    let other = second(fixture)?;
    let granule = fixture.first.properties().granularity;
    // Mapped for both devices, in the driver's view.
    let both = fixture.first.allocate_shared(2 * granule, &[other.name()]).unwrap();
    fixture.fill(&both.whole(), 1);
    // SAFETY: inside of the memory, mapped for both, which is its own owner and thus kept
    // alive.
    let (here, there) = unsafe {
        let (address, length) = (both.address() + 4096, granule);
        let here = fixture.first.adopt(address, length, both.clone()).unwrap();
        (here, other.adopt(address, length, both.clone()).unwrap())
    };
    for memory in [&here, &there] {
        assert_eq!(memory.device(), Some(fixture.first.name()), "the memory has not moved");
    }
    let stream = other.stream().unwrap();
    let copy = other.allocate(granule).unwrap();
    // Access to this device's cuMemAlloc memory does not imply access to memory that other
    // libraries mapped.
    let error = stream.copy(&copy.whole(), &here.whole()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPeerAccess, "{error}");
    stream.copy(&copy.whole(), &there.whole()).unwrap();
    let sum = stream.checksum(&copy.whole(), DEFAULT_TIMEOUT).unwrap();
    assert_eq!(sum, fixture.stream.checksum(&here.whole(), DEFAULT_TIMEOUT).unwrap());
    Ok(())
}

//! Memory of several processes.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use gpu::{DEFAULT_TIMEOUT, Device, ErrorKind, Memory};

use super::{Skip, second};
use crate::child::{Child, imported, receive};
use crate::fixture::Fixture;

const LENGTH: u64 = 8 << 20;

/// The only piece of the memory.
fn exported(memory: &Memory) -> OwnedFd {
    memory.export_piece(0).unwrap().0
}

fn piece(device: &Device, length: u64) -> OwnedFd {
    exported(&device.allocate_shared(length, &[]).unwrap())
}

pub fn memory_is_shared_with_another_process(fixture: &Fixture) -> Result<(), Skip> {
    let memory = fixture.first.allocate_shared(LENGTH, &[]).unwrap();
    fixture.fill(&memory.whole(), 1);
    let exported = exported(&memory);
    let mut child = Child::start("import", &[&exported], &[LENGTH.to_string()]);
    assert_eq!(child.line(), "ready");
    fixture.check(&memory.whole(), 2);
    child.finish();
    // It also works in one process, and both are the same memory.
    let again = imported(&fixture.first, &exported, LENGTH).unwrap();
    assert_ne!(again.address(), memory.address());
    fixture.fill(&again.whole(), 4);
    fixture.check(&memory.whole(), 4);
    Ok(())
}

pub fn shared_memory_outlives_its_exporter(fixture: &Fixture) -> Result<(), Skip> {
    let (parent_socket, theirs) = UnixStream::pair().unwrap();
    let theirs = OwnedFd::from(theirs);
    let mut child = Child::start("export-and-die", &[&theirs], &[LENGTH.to_string()]);
    assert_eq!(child.line(), "ready");
    let exported = receive(&OwnedFd::from(parent_socket));
    let memory = imported(&fixture.first, &exported, LENGTH).unwrap();
    child.kill();
    fixture.check(&memory.whole(), 3);
    // Also for a later import.
    let late = imported(&fixture.first, &exported, LENGTH).unwrap();
    fixture.fill(&late.whole(), 1);
    fixture.check(&memory.whole(), 1);
    Ok(())
}

pub fn peer_device_imports_memory(fixture: &Fixture) -> Result<(), Skip> {
    let other = second(fixture)?;
    let memory = fixture.first.allocate_shared(LENGTH, &[]).unwrap();
    fixture.fill(&memory.whole(), 1);
    let imported = imported(other, &exported(&memory), LENGTH).unwrap();
    assert_eq!(imported.device(), Some(fixture.first.name()), "the memory has not moved");
    // The peer reads and writes it, and so does the device of the memory.
    let stream = other.stream().unwrap();
    let theirs = other.allocate(LENGTH).unwrap();
    stream.copy(&theirs.whole(), &imported.whole()).unwrap();
    stream.fill(&imported.whole(), 0).unwrap();
    stream.copy(&imported.whole(), &theirs.whole()).unwrap();
    stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    fixture.check(&memory.whole(), 1);
    fixture.check(&imported.whole(), 1);
    let sum = stream.checksum(&imported.whole(), DEFAULT_TIMEOUT).unwrap();
    assert_eq!(sum, fixture.stream.checksum(&memory.whole(), DEFAULT_TIMEOUT).unwrap());
    // Memory that was allocated for both needs no import.
    let both = fixture.first.allocate_shared(LENGTH, &[other.name()]).unwrap();
    stream.copy(&both.whole(), &theirs.whole()).unwrap();
    stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    fixture.check(&both.whole(), 1);
    Ok(())
}

pub fn invalid_memory_descriptor_is_refused(fixture: &Fixture) -> Result<(), Skip> {
    let (pipe, _other_end) = std::io::pipe().unwrap();
    let file: OwnedFd = File::open("/dev/null").unwrap().into();
    let program: OwnedFd = File::open("/proc/self/exe").unwrap().into();
    for wrong in [&OwnedFd::from(pipe), &file, &program] {
        let error = imported(&fixture.first, wrong, LENGTH).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    }
    // Shorter than claimed.
    let memory = fixture.first.allocate_shared(LENGTH, &[]).unwrap();
    let exported = exported(&memory);
    let error = imported(&fixture.first, &exported, 16 * LENGTH).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    // Still usable with its true length.
    fixture.fill(&memory.whole(), 1);
    let imported = imported(&fixture.first, &exported, LENGTH).unwrap();
    fixture.check(&imported.whole(), 1);
    Ok(())
}

pub fn memory_grows_in_two_processes(fixture: &Fixture) -> Result<(), Skip> {
    let granule = fixture.first.properties().granularity;
    let all = [(); 2].map(|()| fixture.first.importer(8 * granule).unwrap());
    let memory = all[0].memory().clone();
    assert_eq!((memory.length(), all[1].memory().length()), (0, 0));
    let lengths = [granule, 3 * granule, 2 * granule];
    for length in lengths {
        let piece = piece(&fixture.first, length);
        all.iter().for_each(|importer| importer.add(piece.as_fd(), length).unwrap());
    }
    let pieces = memory.pieces().unwrap();
    assert_eq!((pieces.offset, &pieces.lengths[..]), (0, &lengths[..]));
    assert_eq!(all[1].memory().pieces().unwrap(), pieces);
    assert_eq!((memory.length(), all[1].memory().length()), (6 * granule, 6 * granule));
    // A range across the bounds of pieces is valid.
    let (offset, length) = (granule - 1000, 4 * granule);
    fixture.fill(&memory.slice(offset, length).unwrap(), 1);
    fixture.check(&all[1].memory().slice(offset, length).unwrap(), 1);
    let [first, _] = all;
    let beyond = piece(&fixture.first, 3 * granule);
    let error = first.add(beyond.as_fd(), 3 * granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    assert!(error.to_string().contains(&format!("{} left", 2 * granule)), "{error}");
    first.add(piece(&fixture.first, 2 * granule).as_fd(), 2 * granule).unwrap();
    assert_eq!(memory.export_piece(4).unwrap_err().kind(), ErrorKind::OutOfBounds);
    // Memory in use is unaffected.
    assert_eq!(first.finish(0, granule).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(memory.length(), 8 * granule);
    Ok(())
}

pub fn threads_grow_memory(fixture: &Fixture) -> Result<(), Skip> {
    let granule = fixture.first.properties().granularity;
    let piece = piece(&fixture.first, granule);
    for _ in 0..20 {
        let importer = fixture.first.importer(16 * granule).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for number in 1..5 {
                        importer.add(piece.as_fd(), granule).unwrap();
                        // Added pieces are usable, whatever others do.
                        importer.memory().slice(0, number * granule).unwrap();
                    }
                });
            }
        });
        let memory = importer.memory();
        assert_eq!((memory.length(), memory.pieces().unwrap().lengths.len()), (16 * granule, 16));
    }
    Ok(())
}

pub fn imported_memory_reports_the_device_of_its_pieces(fixture: &Fixture) -> Result<(), Skip> {
    let other = second(fixture)?;
    let granule = fixture.first.properties().granularity;
    let theirs = other.importer(4 * granule).unwrap();
    theirs.add(piece(&fixture.first, granule).as_fd(), granule).unwrap();
    assert_eq!(theirs.memory().device(), Some(fixture.first.name()));
    let error = theirs.add(piece(other, granule).as_fd(), granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    Ok(())
}

pub fn only_shareable_memory_is_exported(fixture: &Fixture) -> Result<(), Skip> {
    let plain = fixture.first.allocate(4096).unwrap();
    assert_eq!(plain.export_piece(0).unwrap_err().kind(), ErrorKind::NotSupported);
    let shared = fixture.first.allocate_shared(4096, &[]).unwrap();
    assert_eq!(shared.export_legacy().unwrap_err().kind(), ErrorKind::NotSupported);
    Ok(())
}

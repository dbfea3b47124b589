//! Memory of several processes.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use gpu::{ErrorKind, PATIENCE, Pool};

use super::{Skip, second};
use crate::child::{Child, receive};
use crate::house::House;

const LENGTH: u64 = 8 << 20;

pub fn another_process_reads_and_writes_it(house: &House) -> Result<(), Skip> {
    let memory = house.first.allocate_shared(LENGTH, &[]).unwrap();
    house.fill(&memory.whole(), 1);
    let exported = memory.export().unwrap();
    let mut child = Child::start("import", &[&exported], &[LENGTH.to_string()]);
    assert_eq!(child.line(), "ready");
    house.check(&memory.whole(), 2);
    child.finish();
    // In one process it works, too, and both are the same memory.
    let again = house.first.import(exported.as_fd(), LENGTH).unwrap();
    assert_ne!(again.address(), memory.address());
    house.fill(&again.whole(), 4);
    house.check(&memory.whole(), 4);
    Ok(())
}

pub fn memory_outlives_its_maker(house: &House) -> Result<(), Skip> {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let theirs = OwnedFd::from(theirs);
    let mut child = Child::start("export-and-die", &[&theirs], &[LENGTH.to_string()]);
    assert_eq!(child.line(), "ready");
    let exported = receive(&OwnedFd::from(mine));
    let memory = house.first.import(exported.as_fd(), LENGTH).unwrap();
    child.kill();
    house.check(&memory.whole(), 3);
    // Also for whoever imports it only now.
    let late = house.first.import(exported.as_fd(), LENGTH).unwrap();
    house.fill(&late.whole(), 1);
    house.check(&memory.whole(), 1);
    Ok(())
}

pub fn a_peer_imports_it(house: &House) -> Result<(), Skip> {
    let other = second(house)?;
    let memory = house.first.allocate_shared(LENGTH, &[]).unwrap();
    house.fill(&memory.whole(), 1);
    let imported = other.import(memory.export().unwrap().as_fd(), LENGTH).unwrap();
    assert_eq!(imported.device(), Some(house.first.name()), "it lies where it lay");
    // The peer reads and writes it, and so does the device that it lies on.
    let stream = other.stream().unwrap();
    let theirs = other.allocate(LENGTH).unwrap();
    stream.copy(&theirs.whole(), &imported.whole()).unwrap();
    stream.fill(&imported.whole(), 0).unwrap();
    stream.copy(&imported.whole(), &theirs.whole()).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    house.check(&memory.whole(), 1);
    house.check(&imported.whole(), 1);
    let sum = stream.checksum(&imported.whole(), PATIENCE).unwrap();
    assert_eq!(sum, house.stream.checksum(&memory.whole(), PATIENCE).unwrap());
    // Memory that was made for both needs no import.
    let both = house.first.allocate_shared(LENGTH, &[other]).unwrap();
    stream.copy(&both.whole(), &theirs.whole()).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    house.check(&both.whole(), 1);
    Ok(())
}

pub fn what_is_no_memory_is_refused(house: &House) -> Result<(), Skip> {
    let (pipe, _other_end) = std::io::pipe().unwrap();
    let file: OwnedFd = File::open("/dev/null").unwrap().into();
    let program: OwnedFd = File::open("/proc/self/exe").unwrap().into();
    for wrong in [&OwnedFd::from(pipe), &file, &program] {
        let error = house.first.import(wrong.as_fd(), LENGTH).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    }
    // Less than is claimed.
    let memory = house.first.allocate_shared(LENGTH, &[]).unwrap();
    let exported = memory.export().unwrap();
    let error = house.first.import(exported.as_fd(), 16 * LENGTH).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    // Still good for what it is.
    house.fill(&memory.whole(), 1);
    let imported = house.first.import(exported.as_fd(), LENGTH).unwrap();
    house.check(&imported.whole(), 1);
    Ok(())
}

pub fn a_pool_grows_in_two_places(house: &House) -> Result<(), Skip> {
    let granule = house.first.properties().granularity;
    let pool = Pool::new(&house.first, 8 * granule, &[]).unwrap();
    let same = Pool::attach(&house.first, 8 * granule).unwrap();
    assert_eq!((pool.length(), pool.limit()), (0, 8 * granule));
    let memory = pool.memory().clone();
    for (number, wanted) in [granule, 3 * granule - 5, 2 * granule].into_iter().enumerate() {
        let piece = pool.grow(wanted).unwrap();
        assert_eq!(piece.length, wanted.next_multiple_of(granule));
        let exported = pool.export(number).unwrap();
        assert_eq!(same.extend(exported.as_fd(), piece.length).unwrap(), piece);
    }
    assert_eq!(pool.pieces(), same.pieces());
    assert_eq!((pool.length(), memory.length()), (6 * granule, 6 * granule));
    // A range over the bounds of pieces is as good as any.
    let (offset, length) = (granule - 1000, 4 * granule);
    house.fill(&memory.slice(offset, length).unwrap(), 1);
    house.check(&same.memory().slice(offset, length).unwrap(), 1);
    let error = pool.grow(3 * granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverBudget);
    assert!(error.to_string().contains(&format!("{} left", 2 * granule)), "{error}");
    pool.grow(2 * granule).unwrap();
    assert_eq!(pool.export(4).unwrap_err().kind(), ErrorKind::OutOfBounds);
    Ok(())
}

pub fn threads_grow_a_pool(house: &House) -> Result<(), Skip> {
    let granule = house.first.properties().granularity;
    for _ in 0..20 {
        let pool = Pool::new(&house.first, 16 * granule, &[]).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..4 {
                        let piece = pool.grow(granule).unwrap();
                        // What was given is there, whatever others do.
                        pool.memory().slice(piece.offset, piece.length).unwrap();
                    }
                });
            }
        });
        assert_eq!((pool.length(), pool.pieces().len()), (16 * granule, 16));
    }
    Ok(())
}

pub fn a_pool_lies_where_its_pieces_lie(house: &House) -> Result<(), Skip> {
    let other = second(house)?;
    let granule = house.first.properties().granularity;
    let pool = Pool::new(&house.first, 4 * granule, &[]).unwrap();
    let piece = pool.grow(granule).unwrap();
    let theirs = Pool::attach(other, 4 * granule).unwrap();
    theirs.extend(pool.export(0).unwrap().as_fd(), piece.length).unwrap();
    assert_eq!(theirs.memory().device(), Some(house.first.name()));
    // Each grows in one place only.
    assert_eq!(theirs.grow(granule).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let exported = pool.export(0).unwrap();
    let error = pool.extend(exported.as_fd(), granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let elsewhere = other.allocate_shared(granule, &[]).unwrap().export().unwrap();
    let error = theirs.extend(elsewhere.as_fd(), granule).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    Ok(())
}

pub fn only_what_was_made_to_be_shared_is_exported(house: &House) -> Result<(), Skip> {
    let plain = house.first.allocate(4096).unwrap();
    assert_eq!(plain.export().unwrap_err().kind(), ErrorKind::NotSupported);
    let shared = house.first.allocate_shared(4096, &[]).unwrap();
    assert_eq!(shared.export_legacy().unwrap_err().kind(), ErrorKind::NotSupported);
    Ok(())
}

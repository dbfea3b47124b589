use std::time::{Duration, Instant};

use ipc::{Immortal, Spin};

use super::*;

const ID: PoolId = PoolId { place: SharedPlace::Host, direction: Direction::Here };
const PIECE: u64 = 1 << 20;

fn caller(place: u32) -> Caller<'static> {
    Caller::new(Participant::new(place, 1).unwrap(), &Immortal)
}

fn opened(pool: &Pool) -> Pool {
    Pool::open(pool.books().try_clone_to_owned().unwrap()).unwrap()
}

fn map_all(from: &Pool, to: &Pool) {
    for (number, (descriptor, length)) in from.pieces().unwrap().into_iter().enumerate() {
        to.map_piece(number, descriptor, length).unwrap();
    }
}

#[test]
fn what_one_process_writes_another_reads_at_the_same_place() {
    let made = Pool::create(ID, 64 << 20, 4096).unwrap();
    let other = opened(&made);
    assert_eq!((other.id(), other.limit()), (ID, 64 << 20));
    let me = caller(1);
    let kind = made.allocate(&me, 100).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::WouldBlock);

    let (descriptor, length) = made.make_piece(PIECE).unwrap();
    assert!(length >= PIECE);
    made.map_piece(0, descriptor, length).unwrap();
    assert_eq!((made.admitted(), made.length()), (0, 0));
    map_all(&made, &other);
    map_all(&made, &other);
    made.admit_piece(&me, 0).unwrap();
    other.admit_piece(&me, 0).unwrap();
    assert_eq!((other.admitted(), other.length()), (1, length));
    assert_eq!(made.statistics(&me).unwrap().total, length);

    let (block, place) = made.allocate(&me, 1000).unwrap();
    assert_eq!(place.offset % 256, 0);
    let (here, there) = (made.slice(place, 5).unwrap(), other.slice(place, 5).unwrap());
    assert_ne!(here.address(), there.address());
    made.write(&here, b"hello", Duration::from_secs(20)).unwrap();
    let mut found = [0; 5];
    other.read(&there, &mut found, Duration::from_secs(20)).unwrap();
    assert_eq!(&found, b"hello");
    assert!(made.slice(place, place.length + 1).is_err());

    // One who never freed it is gone.
    assert_eq!(other.reclaim(&caller(2), me.me).unwrap(), 1);
    assert!(made.free(&me, block).is_err());
    assert_eq!(made.statistics(&me).unwrap().free, length);
}

#[test]
fn pieces_come_in_order_and_once() {
    let pool = Pool::create(ID, 64 << 20, 64).unwrap();
    let me = caller(1);
    let (descriptor, length) = pool.make_piece(PIECE).unwrap();
    let gap = pool.map_piece(1, descriptor.try_clone().unwrap(), length).unwrap_err();
    assert_eq!(gap.kind(), ErrorKind::InvalidArgument);
    assert!(pool.admit_piece(&me, 0).is_err(), "it is not mapped");
    pool.map_piece(0, descriptor, length).unwrap();
    let (descriptor, length) = pool.make_piece(PIECE).unwrap();
    pool.map_piece(1, descriptor, length).unwrap();
    assert!(pool.admit_piece(&me, 1).is_err(), "the first is not admitted");
    for number in [0, 0, 1, 0] {
        pool.admit_piece(&me, number).unwrap();
    }
    assert_eq!(pool.statistics(&me).unwrap().total, pool.length());
    assert!(pool.may_grow(pool.limit() - pool.length()));
    assert!(!pool.may_grow(pool.limit() - pool.length() + 1));
    assert!(pool.should_ask(1) && !pool.should_ask(1), "it was asked for");
}

#[test]
fn books_of_other_things_are_refused() {
    let pool = Pool::create(ID, 4 << 20, 64).unwrap();
    let words = pool.segment.words();
    for (at, value) in [(0, u64::MAX), (0, 1 << 20), (2, 7), (4, 9)] {
        let was = ipc::Words::swap(&words, at, value);
        let error = Pool::open(pool.books().try_clone_to_owned().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        ipc::Words::swap(&words, at, was);
    }
    let null = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(Pool::open(null.into()).unwrap_err().kind(), ErrorKind::Malformed);
    opened(&pool);
}

#[test]
fn who_waits_for_memory_hears_of_it() {
    let pool = Pool::create(ID, 4 << 20, 64).unwrap();
    let (descriptor, length) = pool.make_piece(PIECE).unwrap();
    pool.map_piece(0, descriptor, length).unwrap();
    pool.admit_piece(&caller(1), 0).unwrap();
    let (block, _) = pool.allocate(&caller(1), length).unwrap();
    let far = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            pool.ledger().wait(&mut Spin::Never, far, || pool.allocate(&caller(2), 10).ok())
        });
        std::thread::yield_now();
        pool.free(&caller(1), block).unwrap();
        assert!(waits.join().unwrap().is_some());
    });
}

#[test]
fn a_note_is_about_one_message() {
    let pool = Pool::create(ID, 4 << 20, 64).unwrap();
    let (descriptor, length) = pool.make_piece(PIECE).unwrap();
    pool.map_piece(0, descriptor, length).unwrap();
    let me = caller(1);
    pool.admit_piece(&me, 0).unwrap();
    let (block, _) = pool.allocate(&me, 10).unwrap();
    let note = pool.ledger().note(block);
    assert!(note.times().allocated > 0);
    note.set_metadata(b"0123456789");
    note.set_way(Way::StagedRing);
    note.set_origin(&[9; 16]);
    note.stamp(Stage::Wire, 5);
    assert_eq!(&*note.metadata(10), b"0123456789");
    assert_eq!(&*note.metadata(3), b"012");
    assert_eq!((note.way(), note.origin(), note.times().wire), (Way::StagedRing, [9; 16], 5));
    pool.free(&me, block).unwrap();
    let (next, _) = pool.allocate(&me, 10).unwrap();
    assert_eq!(next.number(), block.number());
    let note = pool.ledger().note(next);
    assert_eq!((note.way(), note.origin(), note.times().wire), (Way::SharedMemory, [0; 16], 0));
    // A name of nothing is harmless.
    pool.ledger().note(Block::from_bits(u64::MAX)).set_metadata(&[1; 256]);
}

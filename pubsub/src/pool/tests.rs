use std::time::{Duration, Instant};

use ipc::{AlwaysAlive, BlockRange, WaitStrategy};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::*;

const ID: PoolId = PoolId { place: SharedLocation::Host, direction: Direction::Local };
const PIECE: u64 = 1 << 20;

fn caller(place: u32) -> Caller<'static> {
    Caller::new(Participant::new(place, 1).unwrap(), &AlwaysAlive)
}

/// Stores this participant, or none, as the holder of the allocator's lock.
pub(crate) fn is_held_by(pool: &Pool, participant: Option<Participant>) {
    const LOCK: usize = control::ALLOCATOR + 3;
    let word = participant.map_or(0, |participant| participant.number().into());
    ipc::Words::store(&pool.segment.words(), LOCK, word, std::sync::atomic::Ordering::Release);
}

fn opened(pool: &Pool) -> Pool {
    Pool::open(pool.control_segment().try_clone_to_owned().unwrap()).unwrap()
}

fn map_all(from: &Pool, to: &Pool) {
    for number in 0..from.held() {
        to.adopt_piece(number, from.piece(number).unwrap().unwrap()).unwrap();
    }
}

#[test]
fn two_processes_share_the_memory_of_a_pool() {
    let made = Pool::create(ID, 64 << 20, 4096).unwrap();
    let other = opened(&made);
    assert_eq!((other.id(), other.limit()), (ID, 64 << 20));
    let me = caller(1);
    let kind = made.allocate(&me, 100).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::WouldBlock);

    let piece = made.make_piece(PIECE).unwrap();
    let length = piece.length;
    assert!(length >= PIECE);
    made.adopt_piece(0, piece).unwrap();
    assert_eq!((made.admitted(), made.length()), (0, 0));
    map_all(&made, &other);
    map_all(&made, &other);
    made.admit_piece(&me, 0).unwrap();
    other.admit_piece(&me, 0).unwrap();
    assert_eq!((other.admitted(), other.length()), (1, length));
    assert_eq!(made.statistics(&me).unwrap().total, length);

    let (block, place) = made.allocate(&me, 1000).unwrap();
    assert_eq!(place.offset % 256, 0);
    let (local, remote) = (made.slice(place, 5).unwrap(), other.slice(place, 5).unwrap());
    assert_ne!(local.address(), remote.address());
    made.write(&local, b"hello", Duration::from_secs(20)).unwrap();
    let mut found = [0; 5];
    other.read(&remote, &mut found, Duration::from_secs(20)).unwrap();
    assert_eq!(&found, b"hello");
    assert!(made.slice(place, place.length + 1).is_err());

    // The process that never freed it is dead.
    assert_eq!(other.reclaim(&caller(2), me.me).unwrap(), 1);
    assert!(made.free(&me, block).is_err());
    assert_eq!(made.statistics(&me).unwrap().free, length);
}

#[test]
fn pieces_are_admitted_in_order_and_once() {
    let pool = Pool::create(ID, 64 << 20, 64).unwrap();
    let me = caller(1);
    let piece = pool.make_piece(PIECE).unwrap();
    let gap = pool.adopt_piece(1, piece.try_clone().unwrap()).unwrap_err();
    assert_eq!(gap.kind(), ErrorKind::InvalidArgument);
    assert_eq!(pool.store_piece(1, piece.try_clone().unwrap()), PieceStored::Rejected);
    assert!(pool.admit_piece(&me, 0).is_err(), "the piece is missing");
    pool.adopt_piece(0, piece).unwrap();
    pool.adopt_piece(1, pool.make_piece(PIECE).unwrap()).unwrap();
    assert!(pool.admit_piece(&me, 1).is_err(), "the first is not admitted");
    for number in [0, 0, 1, 0] {
        pool.admit_piece(&me, number).unwrap();
    }
    assert_eq!(pool.statistics(&me).unwrap().total, pool.length());
    assert!(pool.may_grow(pool.limit() - pool.length()));
    assert!(!pool.may_grow(pool.limit() - pool.length() + 1));
    let admitted = pool.admitted();
    let request = pool.growth_request(admitted, 1).unwrap();
    assert!(pool.growth_request(admitted, 1).is_none(), "pending");
    assert!(!request.is_outdated(&pool));
    pool.adopt_piece(admitted, pool.make_piece(PIECE).unwrap()).unwrap();
    pool.admit_piece(&me, admitted).unwrap();
    assert!(request.is_outdated(&pool) && pool.growth_request(admitted + 1, 1).is_some());
}

/// A piece was replaced while the process that had it was disconnected.
#[test]
fn replaced_piece_is_not_mistaken_for_the_new_one() {
    let me = caller(1);
    let made = Pool::create(ID, 64 << 20, 64).unwrap();
    let (disconnected, other) = (opened(&made), opened(&made));
    made.adopt_piece(0, made.make_piece(PIECE).unwrap()).unwrap();
    map_all(&made, &disconnected);
    // Its creator dies, and a process without it creates another one.
    other.adopt_piece(0, other.make_piece(PIECE).unwrap()).unwrap();
    assert_eq!(
        other.store_piece(0, disconnected.piece(0).unwrap().unwrap()),
        PieceStored::Rejected
    );
    other.admit_piece(&me, 0).unwrap();
    let (_, place) = other.allocate(&me, 5).unwrap();
    other.write(&other.slice(place, 5).unwrap(), b"hello", Duration::ZERO).unwrap();
    // It does not take its own piece for the message's memory.
    assert_eq!(disconnected.slice(place, 5).unwrap_err().kind(), ErrorKind::WouldBlock);
    disconnected.map_admitted_pieces().unwrap();
    map_all(&other, &disconnected);
    let mut found = [0; 5];
    disconnected.read(&disconnected.slice(place, 5).unwrap(), &mut found, Duration::ZERO).unwrap();
    assert_eq!(&found, b"hello");
    // A mapped piece is not replaced any more.
    assert!(disconnected.adopt_piece(0, made.piece(0).unwrap().unwrap()).is_err());
    // The control segment names the right piece, also where the other one was stored first.
    let late = opened(&made);
    let right = || other.piece(0).unwrap().unwrap();
    assert_eq!(late.store_piece(0, made.piece(0).unwrap().unwrap()), PieceStored::Rejected);
    assert_eq!(made.store_piece(0, right()), PieceStored::Replaced);
    assert_eq!(
        (late.store_piece(0, right()), late.store_piece(0, right())),
        (PieceStored::Stored, PieceStored::Stored)
    );
    let beyond = BlockRange { offset: place.offset + (1 << 30), ..place };
    assert_eq!(late.slice(beyond, 5).unwrap_err().kind(), ErrorKind::Malformed);
}

#[test]
fn admitted_piece_is_not_replaced() {
    let me = caller(1);
    let pool = Pool::create(ID, 64 << 20, 64).unwrap();
    let other = opened(&pool);
    pool.adopt_piece(0, pool.make_piece(PIECE).unwrap()).unwrap();
    pool.admit_piece(&me, 0).unwrap();
    // As after an interruption behind the allocator's extension.
    ipc::Words::store(&pool.segment.words(), 3, 0, std::sync::atomic::Ordering::Release);
    other.adopt_piece(0, other.make_piece(PIECE).unwrap()).unwrap();
    assert_eq!(other.admit_piece(&me, 0).unwrap_err().kind(), ErrorKind::Failed);
    assert_eq!(other.store_piece(0, pool.piece(0).unwrap().unwrap()), PieceStored::Replaced);
    other.admit_piece(&me, 0).unwrap();
    assert_eq!(other.length(), PIECE.max(pool.length()));
}

#[test]
fn pool_of_an_unseen_device_is_stored() {
    let device = PoolId { place: SharedLocation::Device([7; 16]), ..ID };
    let words = PoolControl::<MappedWords>::required_words(64, 1 << 30);
    let segment = Segment::create(LAYOUT, words * 8).unwrap();
    PoolControl::format(segment.words(), device, 64 << 20, 64).unwrap();
    segment.mark_ready();
    let control_segment = || segment.as_fd().try_clone_to_owned().unwrap();
    assert_eq!(Pool::open(control_segment()).unwrap_err().kind(), ErrorKind::NoDevice);
    let pool = Pool::keep(control_segment(), None).unwrap();
    assert!(pool.id() == device && pool.device().is_none());
    assert!(pool.has_control_segment(segment.as_fd()).unwrap());
    let other = Pool::create(ID, 64 << 20, 64).unwrap();
    assert!(!pool.has_control_segment(other.control_segment()).unwrap());
    // It passes pieces on to other processes, and reclaims.
    let me = caller(1);
    assert_eq!(pool.store_piece(0, other.make_piece(PIECE).unwrap()), PieceStored::Stored);
    pool.admit_piece(&me, 0).unwrap();
    let (_, place) = pool.allocate(&me, 10).unwrap();
    assert_eq!(pool.slice(place, 10).unwrap_err().kind(), ErrorKind::NoDevice);
    assert_eq!(pool.make_piece(PIECE).unwrap_err().kind(), ErrorKind::NoDevice);
    assert_eq!(pool.owners(&me).unwrap().into_iter().collect::<Vec<_>>(), [me.me]);
    assert_eq!(pool.reclaim(&me, me.me).unwrap(), 1);
    assert!(pool.piece(0).unwrap().is_some());
}

#[test]
fn invalid_control_segments_are_rejected() {
    let pool = Pool::create(ID, 4 << 20, 64).unwrap();
    let words = pool.segment.words();
    for (at, value) in [(0, u64::MAX), (0, 1 << 20), (2, 7), (4, 9)] {
        let was = ipc::Words::swap(&words, at, value);
        let error = Pool::open(pool.control_segment().try_clone_to_owned().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        ipc::Words::swap(&words, at, was);
    }
    let null = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(Pool::open(null.into()).unwrap_err().kind(), ErrorKind::Malformed);
    opened(&pool);
}

#[test]
fn freed_memory_wakes_a_waiting_process() {
    let pool = Pool::create(ID, 4 << 20, 64).unwrap();
    pool.adopt_piece(0, pool.make_piece(PIECE).unwrap()).unwrap();
    pool.admit_piece(&caller(1), 0).unwrap();
    let (block, _) = pool.allocate(&caller(1), pool.length()).unwrap();
    let far = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            pool.control()
                .wait(&mut WaitStrategy::Block, far, || pool.allocate(&caller(2), 10).ok())
        });
        std::thread::yield_now();
        pool.free(&caller(1), block).unwrap();
        assert!(waiting.join().unwrap().is_some());
    });
}

#[test]
fn sample_info_is_reset_for_each_message() {
    let pool = Pool::create(ID, 4 << 20, 64).unwrap();
    pool.adopt_piece(0, pool.make_piece(PIECE).unwrap()).unwrap();
    let me = caller(1);
    pool.admit_piece(&me, 0).unwrap();
    let (block, _) = pool.allocate(&me, 10).unwrap();
    let sample_info = pool.control().sample_info(block);
    assert!(sample_info.times().allocated > 0);
    sample_info.set_metadata(b"0123456789");
    sample_info.set_path(DeliveryPath::StagedRing);
    sample_info.set_origin(&[9; 16]);
    sample_info.stamp(Stage::Wire, 5);
    assert_eq!(&*sample_info.metadata(10), b"0123456789");
    assert_eq!(&*sample_info.metadata(3), b"012");
    assert_eq!(
        (sample_info.path(), sample_info.origin(), sample_info.times().wire),
        (DeliveryPath::StagedRing, [9; 16], 5)
    );
    pool.free(&me, block).unwrap();
    let (next, _) = pool.allocate(&me, 10).unwrap();
    assert_eq!(next.number(), block.number());
    let sample_info = pool.control().sample_info(next);
    assert_eq!(
        (sample_info.path(), sample_info.origin(), sample_info.times().wire),
        (DeliveryPath::SharedMemory, [0; 16], 0)
    );
    // An invalid block has no effect.
    pool.control().sample_info(Block::from_bits(u64::MAX)).set_metadata(&[1; 256]);
}

#[test]
fn failed_mapping_of_a_pool_is_retried() {
    const LIMIT: u64 = 1 << 38;
    let pool = Pool::create(ID, LIMIT, 64).unwrap();
    let child = testkit::children::ForkedChild::new(|| {
        let addresses = |most| setrlimit(Resource::RLIMIT_AS, most, RLIM_INFINITY).unwrap();
        let pool = Pool::keep(pool.control_segment().try_clone_to_owned().unwrap(), None).unwrap();
        // Beside the existing mapping, which the child inherits, there is no room for another one.
        addresses(LIMIT + LIMIT / 2);
        let error = pool.ensure_mapped().unwrap_err();
        addresses(RLIM_INFINITY);
        pool.ensure_mapped().unwrap_or_else(|again| panic!("{error}, and then: {again}"));
    });
    assert!(child.wait().success());
}

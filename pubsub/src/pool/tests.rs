use std::time::{Duration, Instant};

use ipc::{AlwaysAlive, BlockRange, WaitStrategy};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

use super::*;

const ID: PoolId = PoolId { place: SharedLocation::Host, direction: Direction::Local };
const PIECE: u64 = 1 << 20;

fn caller(place: u32) -> Caller<'static> {
    Caller::new(Participant::new(place, 1).unwrap(), &AlwaysAlive)
}

/// As if one who is stopped, or nobody, had the allocator's lock.
pub(crate) fn is_held_by(pool: &Pool, who: Option<Participant>) {
    const LOCK: usize = control::ALLOCATOR + 3;
    let word = who.map_or(0, |who| who.number().into());
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
fn what_one_process_writes_another_reads_at_the_same_place() {
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
    let (local, there) = (made.slice(place, 5).unwrap(), other.slice(place, 5).unwrap());
    assert_ne!(local.address(), there.address());
    made.write(&local, b"hello", Duration::from_secs(20)).unwrap();
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
    let piece = pool.make_piece(PIECE).unwrap();
    let gap = pool.adopt_piece(1, piece.try_clone().unwrap()).unwrap_err();
    assert_eq!(gap.kind(), ErrorKind::InvalidArgument);
    assert_eq!(pool.store_piece(1, piece.try_clone().unwrap()), PieceStored::Rejected);
    assert!(pool.admit_piece(&me, 0).is_err(), "it is not there");
    pool.adopt_piece(0, piece).unwrap();
    pool.adopt_piece(1, pool.make_piece(PIECE).unwrap()).unwrap();
    assert!(pool.admit_piece(&me, 1).is_err(), "the first is not admitted");
    for number in [0, 0, 1, 0] {
        pool.admit_piece(&me, number).unwrap();
    }
    assert_eq!(pool.statistics(&me).unwrap().total, pool.length());
    assert!(pool.may_grow(pool.limit() - pool.length()));
    assert!(!pool.may_grow(pool.limit() - pool.length() + 1));
    assert!(pool.should_request_growth(1) && !pool.should_request_growth(1), "it was asked for");
}

/// A piece that was made in place of another, while somebody who had the other was away.
#[test]
fn a_piece_is_known_by_more_than_its_number() {
    let me = caller(1);
    let made = Pool::create(ID, 64 << 20, 64).unwrap();
    let (away, other) = (opened(&made), opened(&made));
    made.adopt_piece(0, made.make_piece(PIECE).unwrap()).unwrap();
    map_all(&made, &away);
    // Its maker dies, and whoever did not get it makes another one.
    other.adopt_piece(0, other.make_piece(PIECE).unwrap()).unwrap();
    assert_eq!(other.store_piece(0, away.piece(0).unwrap().unwrap()), PieceStored::Rejected);
    other.admit_piece(&me, 0).unwrap();
    let (_, place) = other.allocate(&me, 5).unwrap();
    other.write(&other.slice(place, 5).unwrap(), b"hello", Duration::ZERO).unwrap();
    // What it has it does not take for the message's memory.
    assert_eq!(away.slice(place, 5).unwrap_err().kind(), ErrorKind::WouldBlock);
    away.map_admitted_pieces().unwrap();
    map_all(&other, &away);
    let mut found = [0; 5];
    away.read(&away.slice(place, 5).unwrap(), &mut found, Duration::ZERO).unwrap();
    assert_eq!(&found, b"hello");
    // From now on it stays.
    assert!(away.adopt_piece(0, made.piece(0).unwrap().unwrap()).is_err());
    // The books know which is the right one, also where the other came first.
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
fn a_piece_that_messages_may_lie_in_is_not_replaced() {
    let me = caller(1);
    let pool = Pool::create(ID, 64 << 20, 64).unwrap();
    let other = opened(&pool);
    pool.adopt_piece(0, pool.make_piece(PIECE).unwrap()).unwrap();
    pool.admit_piece(&me, 0).unwrap();
    // As if it had been cut short behind the allocator's extension.
    ipc::Words::store(&pool.segment.words(), 3, 0, std::sync::atomic::Ordering::Release);
    other.adopt_piece(0, other.make_piece(PIECE).unwrap()).unwrap();
    assert_eq!(other.admit_piece(&me, 0).unwrap_err().kind(), ErrorKind::Failed);
    assert_eq!(other.store_piece(0, pool.piece(0).unwrap().unwrap()), PieceStored::Replaced);
    other.admit_piece(&me, 0).unwrap();
    assert_eq!(other.length(), PIECE.max(pool.length()));
}

#[test]
fn a_pool_whose_device_is_not_seen_is_kept() {
    let device = PoolId { place: SharedLocation::Device([7; 16]), ..ID };
    let words = PoolControl::<MappedWords>::required_words(64);
    let segment = Segment::create(LAYOUT, words * 8).unwrap();
    PoolControl::format(segment.words(), device, 64 << 20, 64).unwrap();
    segment.mark_ready();
    let control_segment = || segment.as_fd().try_clone_to_owned().unwrap();
    assert_eq!(Pool::open(control_segment()).unwrap_err().kind(), ErrorKind::NoDevice);
    let kept = Pool::keep(control_segment()).unwrap();
    assert!(kept.id() == device && kept.device().is_none());
    assert!(kept.has_control_segment(segment.as_fd()).unwrap());
    let other = Pool::create(ID, 64 << 20, 64).unwrap();
    assert!(!kept.has_control_segment(other.control_segment()).unwrap());
    // What others have mapped it hands on, and cleans up.
    let me = caller(1);
    assert_eq!(kept.store_piece(0, other.make_piece(PIECE).unwrap()), PieceStored::Stored);
    kept.admit_piece(&me, 0).unwrap();
    let (_, place) = kept.allocate(&me, 10).unwrap();
    assert_eq!(kept.slice(place, 10).unwrap_err().kind(), ErrorKind::NoDevice);
    assert_eq!(kept.make_piece(PIECE).unwrap_err().kind(), ErrorKind::NoDevice);
    assert_eq!(kept.owners(&me).unwrap().into_iter().collect::<Vec<_>>(), [me.me]);
    assert_eq!(kept.reclaim(&me, me.me).unwrap(), 1);
    assert!(kept.piece(0).unwrap().is_some());
}

#[test]
fn books_of_other_things_are_refused() {
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
fn who_waits_for_memory_hears_of_it() {
    let pool = Pool::create(ID, 4 << 20, 64).unwrap();
    pool.adopt_piece(0, pool.make_piece(PIECE).unwrap()).unwrap();
    pool.admit_piece(&caller(1), 0).unwrap();
    let (block, _) = pool.allocate(&caller(1), pool.length()).unwrap();
    let far = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            pool.control()
                .wait(&mut WaitStrategy::Block, far, || pool.allocate(&caller(2), 10).ok())
        });
        std::thread::yield_now();
        pool.free(&caller(1), block).unwrap();
        assert!(waits.join().unwrap().is_some());
    });
}

#[test]
fn a_note_is_about_one_message() {
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
    // A name of nothing is harmless.
    pool.control().sample_info(Block::from_bits(u64::MAX)).set_metadata(&[1; 256]);
}

#[test]
fn a_pool_that_could_not_be_mapped_once_is_mapped_later() {
    const LIMIT: u64 = 1 << 38;
    let pool = Pool::create(ID, LIMIT, 64).unwrap();
    let child = testkit::children::ForkedChild::new(|| {
        let addresses = |most| setrlimit(Resource::RLIMIT_AS, most, RLIM_INFINITY).unwrap();
        let kept = Pool::keep(pool.control_segment().try_clone_to_owned().unwrap()).unwrap();
        // Beside the one that is mapped, which the child has too, there is no room for another.
        addresses(LIMIT + LIMIT / 2);
        let error = kept.ensure_mapped().unwrap_err();
        addresses(RLIM_INFINITY);
        kept.ensure_mapped().unwrap_or_else(|again| panic!("{error}, and then: {again}"));
    });
    assert!(child.wait().success());
}

//! Segments that are not what a rank expects: of other layouts, lengths and domains, and overwritten ones.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ipc::{ChannelListener, Layout, PidFd, Segment};
use testkit::temp_dir::TempDir;

use crate::members::Members;
use crate::rendezvous::{Offer, RANK, Rendezvous, WELCOME};
use crate::{CommDomain, CommDomainKey, DomainOptions, ErrorKind, ReduceOp};

const LAYOUT: Layout = Layout::new("rendezvous", 1);
const KEY: u64 = 77;
/// Words that a rank expects: of several pages.
const WORDS: usize = 4096;
const TIMEOUT: Duration = Duration::from_secs(20);

/// What a program sends that pretends to be the first of two ranks.
struct Welcome {
    process_ids: Vec<u8>,
    segment: Option<Segment>,
    ranks: usize,
}

impl Welcome {
    fn with(segment: Segment) -> Self {
        let process_ids = control::codec::encode(WELCOME, &vec![1_u32, 2]);
        Self { process_ids, segment: Some(segment), ranks: 2 }
    }
}

fn segment(layout: Layout, words: usize) -> Segment {
    let segment = Segment::create(layout, words * 8).unwrap();
    segment.mark_ready();
    segment
}

/// The kind of the error of a rank that joins a program with this welcome; None if it joins.
fn joins(welcome: Welcome) -> Option<ErrorKind> {
    let directory = TempDir::new("rendezvous-foreign");
    let socket = directory.join("domain.sock");
    let listener = ChannelListener::bind(&socket).unwrap();
    let rank = Rendezvous::new(socket, [1, 2], String::new(), LAYOUT, WORDS * 8, Offer::default());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // The rank looks first whether a listener is there.
            let channels = std::iter::repeat_with(|| listener.accept(TIMEOUT).unwrap());
            let channel = channels.into_iter().find(|channel| channel.receive(TIMEOUT).is_ok());
            let channel = channel.unwrap();
            let Welcome { process_ids, segment, ranks } = welcome;
            let descriptors: Vec<_> = segment.iter().map(AsFd::as_fd).collect();
            channel.send(&process_ids, &descriptors, TIMEOUT).unwrap();
            let own = PidFd::of_this_process().unwrap();
            for _ in 0..ranks {
                let bytes = control::codec::encode(RANK, &Vec::<u8>::new());
                let _ = channel.send(&bytes, &[own.as_fd()], TIMEOUT);
            }
            channel.end();
        });
        let joined = rank.join(Duration::from_millis(500));
        let joined = joined.and_then(|joined| Members::new(joined, 1, vec![0, 1], KEY, None));
        joined.err().map(|error| error.kind())
    })
}

#[test]
fn segments_of_other_layouts_lengths_and_domains_are_refused() {
    assert_eq!(joins(Welcome::with(segment(LAYOUT, WORDS))), None);
    let malformed = Some(ErrorKind::Malformed);
    assert_eq!(joins(Welcome::with(segment(Layout::new("another", 1), WORDS))), malformed);
    assert_eq!(joins(Welcome::with(segment(Layout::new("rendezvous", 2), WORDS))), malformed);
    assert_eq!(joins(Welcome::with(segment(LAYOUT, WORDS / 8))), malformed);
    // Of another domain.
    for (at, word) in [(0, KEY + 1), (1, 3)] {
        use ipc::Words;
        let foreign = segment(LAYOUT, WORDS);
        foreign.words().store(at, word, std::sync::atomic::Ordering::Release);
        assert_eq!(joins(Welcome::with(foreign)), malformed);
    }
}

#[test]
fn other_messages_of_a_rendezvous_are_refused() {
    let malformed = Some(ErrorKind::Malformed);
    let good = || Welcome::with(segment(LAYOUT, WORDS));
    assert_eq!(joins(Welcome { segment: None, ..good() }), malformed);
    assert_eq!(joins(Welcome { process_ids: vec![WELCOME, 0xff], ..good() }), malformed);
    assert_eq!(joins(Welcome { process_ids: vec![1, 2, 3], ..good() }), malformed);
    let one = control::codec::encode(WELCOME, &vec![1_u32]);
    assert_eq!(joins(Welcome { process_ids: one, ..good() }), malformed);
    assert_eq!(joins(Welcome { ranks: 1, ..good() }), Some(ErrorKind::Failed));
}

/// Another process may write anything to the segment. Then operations give errors or wrong results, in time.
#[test]
fn overwritten_segments_neither_end_the_process_nor_hang_it() {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for turn in 0..12 {
        let directory = TempDir::new("segment-overwritten");
        let options = DomainOptions::new().directory(&directory).job(&turn.to_string());
        let options = options.timeout(Duration::from_secs(1));
        let key = CommDomainKey::of_first_ranks(2);
        let timeout = Duration::from_millis(150);
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let run = |rank: u32| {
            let began = Instant::now();
            // The words are written while the ranks join, too.
            let Ok(mut domain) = CommDomain::join(&key, rank, &options) else { return };
            let mut elements = vec![1_u32; 40_000];
            let mut all = vec![0_u32; 80_000];
            for _ in 0..50 {
                let reduced = domain.all_reduce(&mut elements, ReduceOp::Max, timeout);
                if reduced.and_then(|()| domain.all_gather(&elements, &mut all, timeout)).is_err() {
                    break;
                }
            }
            assert!(began.elapsed() < Duration::from_secs(15));
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || run(rank)));
            let writer = scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    for file in segments() {
                        let length = file.metadata().map_or(0, |metadata| metadata.len());
                        // The first pages have the words by which ranks wait for each other.
                        let most = if next() % 2 == 0 { length.min(8192) } else { length };
                        let at = (next() % most.max(8)) & !7;
                        let _ = file.write_at(&next().to_ne_bytes(), at);
                    }
                }
            });
            let ended = ranks.map(std::thread::ScopedJoinHandle::join);
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            ended.into_iter().for_each(|ended| ended.unwrap());
            writer.join().unwrap();
        });
    }
}

/// The segments of domains that this process has open.
fn segments() -> Vec<std::fs::File> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.to_string_lossy().contains("fabricast domain") {
            found.extend(std::fs::File::options().write(true).open(entry.path()));
        }
    }
    found
}

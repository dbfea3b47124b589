//! Requests as inference engines make them: prepared lists, several regions, the order of streams,
//! and cancellation; on every path.

use std::time::{Duration, Instant};

use gpu::{Block, Device, emulated};
use transfer::path::{Operation, Path, Policy};
use transfer::{ErrorKind, Notice, Rights, Route, Token};

use crate::common::{LENGTH, TIMEOUT, alone, device, start};
use crate::fixture::{AgentFixture, FILL, PeerProcess, SUM, blocks_of, fill, read, sum, sum_of};
use crate::rails::tcp;

const WHOLE: [Block; 1] = [Block { to: 0, from: 0, length: LENGTH }];
/// The tag of notices with more than a checksum.
pub const LONG: u64 = 1 << 21;
/// The paths between two processes of a machine.
const PATHS: [(&str, Path); 4] = [
    ("=cuda-ipc", Path::CudaIpc),
    ("=service-copied", Path::ServiceCopied),
    ("=host-staged", Path::HostStaged),
    ("=fabric-staged", Path::FabricStaged),
];

/// Calls a test for each path, with a peer in another process.
fn on_each_path(check: impl Fn(&mut AgentFixture, &PeerProcess, &Route)) {
    let mut fixture = AgentFixture::open_with_rails(tcp(), 1);
    let directory = fixture.directory.clone();
    let _service = start("copy service", &directory, &[], None);
    read(&directory.join("serves"));
    let role = format!("shared by {} 1: shared", tcp());
    let peer = fixture.peer_process(&role, &[]);
    for (policy, path) in PATHS {
        let policy: Policy = policy.parse().unwrap();
        let (region, descriptor) = (&fixture.region, &peer.descriptor);
        let joined = fixture.agent.join(peer.peer, region, descriptor, &policy, TIMEOUT);
        let route = joined.unwrap();
        assert_eq!(route.path(), path);
        check(&mut fixture, &peer, &route);
    }
    fixture.end(peer);
}

fn compared(first: u64) -> Notice {
    Notice::new(1 << 20, &sum_of(LENGTH, first).to_le_bytes()).unwrap()
}

fn wait(fixture: &mut AgentFixture, token: Token) -> u64 {
    fixture.agent.wait(token, TIMEOUT).unwrap().bytes
}

#[test]
fn prepared_transfers_are_repeated_whole_and_by_index() {
    let _alone = alone();
    on_each_path(|fixture, peer, route| {
        let blocks = blocks_of(4096);
        let put = fixture.agent.prepare(Operation::Put, route, blocks.clone()).unwrap();
        let get = fixture.agent.prepare(Operation::Get, route, blocks.clone()).unwrap();
        assert_eq!((put.bytes(), put.blocks().len()), (LENGTH, blocks.len()));
        for first in [30, 31] {
            fill(&fixture.memory, LENGTH, first);
            let token = fixture.agent.submit(&put, None, Some(compared(first))).unwrap();
            assert_eq!(wait(fixture, token), LENGTH);
            assert_eq!(fixture.reply(), 1, "{}", route.path());
        }
        // Every other block; then the rest.
        fixture.request(peer, FILL, 40);
        fill(&fixture.memory, LENGTH, 0);
        let (even, odd): (Vec<u32>, Vec<u32>) =
            (0..blocks.len() as u32).partition(|index| index % 2 == 0);
        for indices in [&even, &odd] {
            assert_ne!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 40));
            let token = fixture.agent.submit(&get, Some(indices), None).unwrap();
            assert_eq!(wait(fixture, token), indices.len() as u64 * 4096);
        }
        assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 40), "{}", route.path());
        let token = fixture.agent.submit(&get, Some(&[]), None).unwrap();
        assert_eq!(wait(fixture, token), 0);
        let error = fixture.agent.submit(&get, Some(&[0, blocks.len() as u32]), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        let outside = vec![Block { to: 1, from: 0, length: LENGTH }];
        let error = fixture.agent.prepare(Operation::Put, route, outside).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    });
}

#[test]
fn one_notice_follows_the_data_of_several_regions() {
    let _alone = alone();
    let mut fixture = AgentFixture::open_with_rails(tcp(), 1);
    let directory = fixture.directory.clone();
    let _service = start("copy service", &directory, &[], None);
    read(&directory.join("serves"));
    let role = format!("shared by {} 1: shared", tcp());
    let peer = fixture.peer_process(&role, &[]);
    // One route for each path: the parts of a request may take different ones.
    let routes = PATHS.map(|(policy, _)| {
        let policy: Policy = policy.parse().unwrap();
        let (region, descriptor) = (&fixture.region, &peer.descriptor);
        fixture.agent.join(peer.peer, region, descriptor, &policy, TIMEOUT).unwrap()
    });
    let quarter = LENGTH / 4;
    let pages: Vec<Vec<Block>> = (0..4)
        .map(|number| {
            let all = blocks_of(64 << 10).into_iter();
            all.filter(|block| block.to / quarter == number).collect()
        })
        .collect();
    for first in 50..60 {
        fill(&fixture.memory, LENGTH, first);
        let parts: Vec<_> =
            routes.iter().zip(&pages).map(|(route, blocks)| (route, blocks.into())).collect();
        let token = fixture.agent.put_parts(&parts, Some(compared(first))).unwrap();
        let done = fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!((done.bytes, done.path), (LENGTH, None));
        assert_eq!(fixture.reply(), 1, "round {first}");
    }
    fixture.request(&peer, FILL, 70);
    let parts: Vec<_> =
        routes.iter().zip(&pages).map(|(route, blocks)| (route, blocks.into())).collect();
    fixture.agent.fence(peer.peer).unwrap();
    let token = fixture.agent.get_parts(&parts, None).unwrap();
    fixture.agent.flush(peer.peer, TIMEOUT).unwrap();
    assert_eq!(wait(&mut fixture, token), LENGTH);
    assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 70));
    // Nothing is copied if one part is wrong.
    let outside = [Block { to: 0, from: LENGTH, length: 1 }];
    let parts = [(&routes[0], (&WHOLE).into()), (&routes[1], (&outside).into())];
    fill(&fixture.memory, LENGTH, 0);
    let error = fixture.agent.get_parts(&parts, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    assert_eq!(fixture.agent.in_flight(), 0);
    assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 0));
    assert_eq!(fixture.agent.put_parts(&[], None).unwrap_err().kind(), ErrorKind::Malformed);
    fixture.end(peer);
}

/// The peer compares the data with the first eight bytes of a notice.
#[test]
fn long_notices_follow_their_data() {
    let _alone = alone();
    on_each_path(|fixture, peer, route| {
        for (first, length) in
            [(100, 8), (101, 65), (102, 1000), (103, transfer::MAX_NOTICE_LENGTH)]
        {
            fill(&fixture.memory, LENGTH, first);
            let mut data = sum_of(LENGTH, first).to_le_bytes().to_vec();
            data.extend((8..length).map(|at| at as u8));
            let notice = Notice::new(LONG, &data).unwrap();
            let token = fixture.agent.put(route, &WHOLE, Some(notice)).unwrap();
            wait(fixture, token);
            assert_eq!(fixture.reply(), 1, "{} bytes by {}", length, route.path());
        }
        // As many as the peer has room for, and more.
        let data = [sum_of(LENGTH, 103).to_le_bytes().to_vec(), vec![9; 4000]].concat();
        let tokens: Vec<_> = (0..60)
            .map(|_| {
                let notice = Notice::new(LONG, &data).unwrap();
                fixture.agent.notify(peer.peer, notice).unwrap()
            })
            .collect();
        for token in tokens {
            fixture.agent.wait(token, TIMEOUT).unwrap();
            assert_eq!(fixture.reply(), 1);
        }
    });
}

/// A stream of the caller's that is slow to write.
fn slow_stream(delay: Duration) -> Option<(Device, gpu::Stream)> {
    let device = device();
    let stream = device.stream().unwrap();
    (device.name().implementation == gpu::Implementation::Emulated).then(|| {
        let number = device.name().number;
        emulated::configure_faults(number, emulated::FaultConfig { delay, ..Default::default() });
        (device, stream)
    })
}

#[test]
fn transfers_follow_the_work_of_a_stream() {
    let _alone = alone();
    on_each_path(|fixture, peer, route| {
        let Some((device, stream)) = slow_stream(Duration::from_millis(100)) else {
            testkit::skip!("only emulated devices can be slowed down");
        };
        let whole = fixture.memory.whole();
        stream.fill(&whole, 5).unwrap();
        // Begun before the stream has written.
        let token = fixture.agent.put_after(route, &WHOLE, None, &stream).unwrap();
        assert!(!stream.is_done().unwrap(), "the stream is too fast for this test");
        emulated::configure_faults(device.name().number, emulated::FaultConfig::default());
        let by_device = matches!(route.path(), Path::CudaIpc | Path::ServiceCopied);
        match fixture.agent.delay_stream(token, &stream, TIMEOUT) {
            Ok(()) => assert!(by_device, "{}", route.path()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NoPath);
                assert!(!by_device, "{error}");
                wait(fixture, token);
            }
        }
        // Later work does not overtake the put.
        stream.fill(&whole, 6).unwrap();
        if by_device {
            // Without progress of this process.
            stream.synchronize(TIMEOUT).unwrap();
            wait(fixture, token);
        }
        let expected = gpu::checksum(&vec![5; LENGTH as usize]);
        assert_eq!(fixture.request(peer, SUM, 0), expected, "{}", route.path());
        // An operation that is over delays nothing.
        fixture.agent.delay_stream(token, &stream, TIMEOUT).unwrap();
        stream.synchronize(TIMEOUT).unwrap();
        // A get, behind a fence, prepared, and without data.
        fixture.request(peer, FILL, 80);
        fixture.agent.fence(peer.peer).unwrap();
        let get = fixture.agent.prepare(Operation::Get, route, WHOLE.to_vec()).unwrap();
        let token = fixture.agent.submit_after(&get, None, None, &stream).unwrap();
        wait(fixture, token);
        assert_eq!(sum(&fixture.memory, LENGTH), sum_of(LENGTH, 80));
        let token = fixture.agent.get_after(route, &[], None, &stream).unwrap();
        assert_eq!(wait(fixture, token), 0);
    });
}

/// The caller does not wait for the data.
#[test]
fn stream_waits_for_all_parts_of_an_operation() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer = fixture.peer_process("shared", &[]);
    let routes = [fixture.join(&peer), fixture.join(&peer)];
    let halves = [0, LENGTH / 2].map(|at| [Block { to: at, from: at, length: LENGTH / 2 }]);
    fill(&fixture.memory, LENGTH, 100);
    let Some((device, stream)) = slow_stream(Duration::from_millis(100)) else {
        testkit::skip!("only emulated devices can be slowed down");
    };
    let parts: Vec<_> =
        routes.iter().zip(&halves).map(|(route, half)| (route, half.into())).collect();
    let token = fixture.agent.put_parts(&parts, None).unwrap();
    fixture.agent.delay_stream(token, &stream, Duration::ZERO).unwrap();
    stream.fill(&fixture.memory.whole(), 6).unwrap();
    wait(&mut fixture, token);
    emulated::configure_faults(device.name().number, emulated::FaultConfig::default());
    assert_eq!(fixture.request(&peer, SUM, 0), sum_of(LENGTH, 100));
    stream.synchronize(TIMEOUT).unwrap();
    fixture.end(peer);
}

#[test]
fn cancelled_operations_end_and_send_no_notice() {
    let _alone = alone();
    on_each_path(|fixture, peer, route| {
        fill(&fixture.memory, LENGTH, 90);
        // An idle machine copies all of them before the first is cancelled.
        let slowed = slow_stream(Duration::from_millis(1));
        // Far more than is in flight at a time, then one that has not begun.
        let tokens: Vec<_> =
            (0..300).map(|_| fixture.agent.put(route, &WHOLE, None).unwrap()).collect();
        fixture.agent.fence(peer.peer).unwrap();
        let last = fixture.agent.put(route, &WHOLE, Some(compared(1))).unwrap();
        assert!(fixture.agent.cancel(last).unwrap(), "{}", route.path());
        let error = fixture.agent.wait(last, TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        let mut cancelled = 0;
        for token in tokens.into_iter().rev() {
            let is_cancelled = fixture.agent.cancel(token).unwrap();
            match fixture.agent.wait(token, TIMEOUT) {
                Ok(_) => assert!(!is_cancelled, "{}", route.path()),
                Err(error) => {
                    assert!(is_cancelled && error.kind() == ErrorKind::Cancelled, "{error}");
                    cancelled += 1;
                }
            }
        }
        if let Some((device, _)) = &slowed {
            emulated::configure_faults(device.name().number, emulated::FaultConfig::default());
        }
        // Rails have taken all requests, and a GPU is faster than this.
        let is_queued = slowed.is_some() && route.path() != Path::FabricStaged;
        assert!(cancelled > 0 || !is_queued, "{}", route.path());
        let failed = fixture.agent.flush(peer.peer, TIMEOUT).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Failed);
        fixture.agent.flush(peer.peer, TIMEOUT).unwrap();
        // The notice of a cancelled put does not arrive: the next reply is for another.
        let token = fixture.agent.put(route, &WHOLE, Some(compared(90))).unwrap();
        wait(fixture, token);
        assert_eq!(fixture.reply(), 1, "{}", route.path());
        assert!(!fixture.agent.cancel(token).unwrap(), "it is over");
    });
}

/// Peers that leave take the parts of an operation with them.
#[test]
fn operation_of_several_parts_ends_with_its_peer() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer);
    let own = device().allocate_shared(LENGTH, &[]).unwrap();
    let region = fixture.agent.register(&own, Rights::ALL).unwrap();
    let (descriptor, policy) = (&peer.descriptor, Policy::default());
    let second = fixture.agent.join(peer.peer, &region, descriptor, &policy, TIMEOUT).unwrap();
    fixture.agent.fence(peer.peer).unwrap();
    let parts = [(&route, (&WHOLE).into()), (&second, (&WHOLE).into())];
    let token = fixture.agent.put_parts(&parts, Some(compared(1))).unwrap();
    let _ = fixture.agent.disconnect(peer.peer, Duration::ZERO);
    let begin = Instant::now();
    let _ = fixture.agent.wait(token, TIMEOUT);
    assert!(begin.elapsed() < TIMEOUT / 2);
    assert_eq!(fixture.agent.in_flight(), 0);
    drop(peer);
}

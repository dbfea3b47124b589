//! Operations of devices: emulated ones, whose ranks are threads here.

use std::thread;
use std::time::Duration;

use gpu::{Device, Memory, Stream};
use reduction::{DataType, ReduceOp, reduce};
use testkit::bytes::pattern;
use testkit::children::ForkedChild;
use testkit::temp_dir::TempDir;

use crate::{
    Blocks, CollectiveCall, CommDomainKey, DeviceDomain, DomainOptions, ErrorKind, Operation,
};

/// A rank, with a stream and its buffers.
struct Rank {
    domain: DeviceDomain,
    stream: Stream,
    input: Memory,
    output: Memory,
}

const TIMEOUT: Duration = Duration::from_secs(60);
/// Space for the buffers of a rank.
const BYTES: u64 = 64 << 20;

/// Bytes that are numbers of all types, without NaN.
fn bytes(length: usize, rank: u32) -> Vec<u8> {
    pattern(length, u64::from(rank) + 1).into_iter().map(|byte| byte & 0x3f).collect()
}

/// A rank of two, each of which may be a process.
fn join_of_two(directory: &TempDir, rank: u32) -> Rank {
    let options = DomainOptions::new().directory(directory);
    let key = CommDomainKey::of_first_ranks(2);
    let device = Device::open("emulated:0".parse().unwrap()).unwrap();
    let domain = DeviceDomain::join(&key, rank, &device, &options).unwrap();
    let memory = || device.allocate(1 << 20).unwrap();
    let (stream, input, output) = (device.stream().unwrap(), memory(), memory());
    Rank { domain, stream, input, output }
}

impl Rank {
    /// Copies bytes to the input, carries out an operation, and returns the output.
    fn run(
        &mut self,
        call: &CollectiveCall<'_>,
        input: &[u8],
        output: usize,
        offset: u64,
    ) -> Vec<u8> {
        let Self { domain, stream, .. } = self;
        let from = self.input.slice(offset, input.len() as u64).unwrap();
        let to = self.output.slice(offset, output as u64).unwrap();
        stream.upload(&from, input, gpu::DEFAULT_TIMEOUT).unwrap();
        stream.fill(&to, 0xee).unwrap();
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let output_place = pointer(to.address());
        let call = CollectiveCall { input: pointer(from.address()), output: output_place, ..*call };
        // SAFETY: slices of so many bytes, which this waits for.
        #[allow(unsafe_code)]
        unsafe {
            domain.start(&call, stream, TIMEOUT).unwrap();
        }
        let mut found = vec![0; output];
        stream.download(&to, &mut found, gpu::DEFAULT_TIMEOUT).unwrap();
        domain.check("test").unwrap();
        found
    }
}

fn call<'a>(operation: Operation, send: Blocks<'a>, receive: Blocks<'a>) -> CollectiveCall<'a> {
    CollectiveCall {
        operation,
        data_type: DataType::U8,
        reduce_op: ReduceOp::Sum,
        root: 0,
        input: std::ptr::null(),
        send,
        output: std::ptr::null_mut(),
        receive,
    }
}

/// Runs each rank in a thread, with a device of its own if there are so many.
fn run(ranks: u32, each: impl Fn(Rank) + Sync) {
    let directory = TempDir::new(&format!("devices-{ranks}"));
    let options = DomainOptions::new().directory(&directory);
    let key = CommDomainKey::of_first_ranks(ranks);
    thread::scope(|scope| {
        for rank in 0..ranks {
            let (options, key, each) = (&options, &key, &each);
            scope.spawn(move || {
                let device =
                    Device::open(format!("emulated:{}", rank % 2).parse().unwrap()).unwrap();
                let domain = DeviceDomain::join(key, rank, &device, options).unwrap();
                let memory = || device.allocate(BYTES).unwrap();
                let (stream, input, output) = (device.stream().unwrap(), memory(), memory());
                each(Rank { domain, stream, input, output });
            });
        }
    });
}

fn check_moves(rank: &mut Rank, count: usize, offset: u64) {
    let (number, ranks) = (rank.domain.rank(), rank.domain.size());
    let own = bytes(count, number);
    let all: Vec<u8> = (0..ranks).flat_map(|rank| bytes(count, rank)).collect();
    let (one, each) = (Blocks::One(count), Blocks::Each(count));
    let gather = call(Operation::AllGather, one, each);
    assert!(rank.run(&gather, &own, all.len(), offset) == all);
    let root = count as u32 % ranks;
    let is_root = number == root;
    let with_root =
        |operation, send, receive| CollectiveCall { root, ..call(operation, send, receive) };
    let found = rank.run(&with_root(Operation::Broadcast, one, one), &own, count, offset);
    assert!(found == bytes(count, root));
    let found = rank.run(&with_root(Operation::Gather, one, each), &own, all.len(), offset);
    assert!(found == if is_root { all.clone() } else { vec![0xee; all.len()] });
    let given = if is_root { all.clone() } else { vec![1; all.len()] };
    let found = rank.run(&with_root(Operation::Scatter, each, one), &given, count, offset);
    assert!(found == own);
    let send: Vec<u8> = (0..ranks).flat_map(|to| bytes(count, number + 10 * to)).collect();
    let expected: Vec<u8> = (0..ranks).flat_map(|from| bytes(count, from + 10 * number)).collect();
    let found = rank.run(&call(Operation::AllToAll, each, each), &send, send.len(), offset);
    assert!(found == expected);
}

fn check_reductions(rank: &mut Rank, data_type: DataType, op: ReduceOp, count: usize) {
    let (number, ranks) = (rank.domain.rank(), rank.domain.size());
    let size = data_type.size();
    let reduced = |elements: usize| -> Vec<u8> {
        let all: Vec<Vec<u8>> = (0..ranks).map(|rank| bytes(elements * size, rank)).collect();
        let sources: Vec<*const u8> = all.iter().map(|it| it.as_ptr()).collect();
        let mut result = vec![0; elements * size];
        // SAFETY: vectors of so many elements.
        #[allow(unsafe_code)]
        unsafe {
            reduce(op, data_type, result.as_mut_ptr(), &sources, elements);
        }
        result
    };
    let with = |operation, send, receive| CollectiveCall {
        data_type,
        reduce_op: op,
        root: 1 % ranks,
        ..call(operation, send, receive)
    };
    let (one, each) = (Blocks::One(count), Blocks::Each(count));
    let own = bytes(count * size, number);
    let expected = reduced(count);
    let found = rank.run(&with(Operation::AllReduce, one, one), &own, count * size, 0);
    assert!(found == expected, "{op} of {count} {data_type}");
    let found = rank.run(&with(Operation::Reduce, one, one), &own, count * size, 0);
    assert!(found == if number == 1 % ranks { expected } else { vec![0xee; count * size] });
    let own = bytes(count * size * ranks as usize, number);
    let expected = reduced(count * ranks as usize);
    let found = rank.run(&with(Operation::ReduceScatter, each, one), &own, count * size, 0);
    assert!(found == expected[number as usize * count * size..][..count * size]);
}

#[test]
fn operations_of_devices_match_the_host() {
    for ranks in [1, 2, 3] {
        run(ranks, |mut rank| {
            for (count, offset) in
                [(0, 0), (1, 1), (255, 3), (4096, 16), (1_000_003, 8), (9_000_000, 0)]
            {
                if count < 1 << 22 || ranks == 2 {
                    check_moves(&mut rank, count, offset);
                }
            }
            for count in [1, 77, 20_000, 1_000_003] {
                check_reductions(&mut rank, DataType::F32, ReduceOp::Sum, count);
            }
            // Shares of several chunks.
            check_reductions(&mut rank, DataType::U16, ReduceOp::Max, 5_000_019);
        });
    }
}

#[test]
fn devices_reduce_all_types() {
    run(2, |mut rank| {
        for data_type in DataType::ALL {
            for op in ReduceOp::ALL {
                check_reductions(&mut rank, data_type, op, 50_001);
            }
        }
    });
}

#[test]
fn operation_of_devices_is_given_up_when_a_rank_is_killed() {
    let directory = TempDir::new("devices-killed");
    let join = |rank: u32| join_of_two(&directory, rank);
    let lost = ForkedChild::new(|| {
        let _rank = join(1);
        thread::sleep(Duration::from_secs(60));
    });
    let rank = join(0);
    let Rank { mut domain, stream, input, output } = rank;
    let pointer =
        |memory: &Memory| std::ptr::with_exposed_provenance_mut::<u8>(memory.address() as usize);
    let call = CollectiveCall {
        input: pointer(&input),
        output: pointer(&output),
        ..call(Operation::AllGather, Blocks::One(1000), Blocks::Each(1000))
    };
    // SAFETY: both have more bytes, and are kept until the end.
    #[allow(unsafe_code)]
    unsafe {
        domain.start(&call, &stream, TIMEOUT).unwrap();
    }
    assert!(!stream.is_done().unwrap());
    lost.kill();
    stream.synchronize(Duration::from_millis(200)).unwrap();
    let error = domain.check("all-gather").unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[1][..]), "{error}");
    // SAFETY: as above.
    #[allow(unsafe_code)]
    let error = unsafe { domain.start(&call, &stream, TIMEOUT) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::RankFailed);
}

#[test]
fn operation_of_devices_is_given_up_when_another_thread_aborts() {
    run(2, |rank| {
        let Rank { mut domain, stream, input, output } = rank;
        let pointer = |memory: &Memory| {
            std::ptr::with_exposed_provenance_mut::<u8>(memory.address() as usize)
        };
        let call = CollectiveCall {
            input: pointer(&input),
            output: pointer(&output),
            ..call(Operation::AllGather, Blocks::One(1000), Blocks::Each(1000))
        };
        if domain.rank() == 1 {
            // It does not call, and the other one gives up.
            while domain.check("test").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        // SAFETY: both have more bytes, and are kept until the end.
        #[allow(unsafe_code)]
        unsafe {
            domain.start(&call, &stream, TIMEOUT).unwrap();
        }
        assert!(!stream.is_done().unwrap() && !domain.has_given_up());
        let abort = domain.abort_handle();
        thread::spawn(move || abort.abort()).join().unwrap();
        stream.synchronize(Duration::from_millis(500)).unwrap();
        assert!(domain.has_given_up());
        assert_eq!(domain.check("test").unwrap_err().kind(), ErrorKind::Closed);
    });
}

impl Rank {
    /// Starts an all-gather of so many bytes, and waits for its end.
    fn gather(&mut self, count: usize, timeout: Duration) -> crate::Result<()> {
        let Self { domain, stream, input, output } = self;
        let pointer = |memory: &Memory| {
            std::ptr::with_exposed_provenance_mut::<u8>(memory.address() as usize)
        };
        let call = CollectiveCall {
            input: pointer(input),
            output: pointer(output),
            ..call(Operation::AllGather, Blocks::One(count), Blocks::Each(count))
        };
        // SAFETY: both have more bytes, and this waits for the end.
        #[allow(unsafe_code)]
        let started = unsafe { domain.start(&call, stream, timeout) };
        stream.synchronize(TIMEOUT).unwrap();
        started.and_then(|()| domain.check("all-gather"))
    }
}

#[test]
fn different_operations_of_devices_are_named_on_all_ranks() {
    run(3, |mut rank| {
        // Another rank may be ahead, and fail before the last check.
        let early = (0..200).find_map(|_| rank.gather(1000, TIMEOUT).err());
        let count = if rank.domain.rank() == 2 { 2000 } else { 1000 };
        let error = early.or_else(|| rank.gather(count, TIMEOUT).err()).unwrap();
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{text}");
        assert!(text.contains("operation 201") && error.ranks().contains(&2), "{text}");
        let both = ["all-gather of 1000 u8", "all-gather of 2000 u8"];
        assert!(both.iter().all(|call| text.contains(call)), "{text}");
    });
}

#[test]
fn late_rank_of_devices_is_named_at_the_deadline() {
    run(3, |mut rank| {
        rank.gather(1000, TIMEOUT).unwrap();
        if rank.domain.rank() == 1 {
            while rank.domain.check("test").is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        } else {
            let began = std::time::Instant::now();
            let error = rank.gather(1000, Duration::from_millis(300)).unwrap_err();
            let kind = (error.kind(), error.ranks());
            assert_eq!(kind, (ErrorKind::DeadlineExceeded, &[1][..]), "{error}");
            let took = began.elapsed();
            let expected = Duration::from_millis(200)..Duration::from_secs(2);
            assert!(expected.contains(&took), "{took:?}");
        }
    });
}

#[test]
fn rank_that_has_left_is_named_unless_it_has_done_its_part() {
    run(2, |mut rank| {
        rank.gather(1000, TIMEOUT).unwrap();
        if rank.domain.rank() == 0 {
            let error = rank.gather(1000, TIMEOUT).unwrap_err();
            assert_eq!((error.kind(), error.ranks()), (ErrorKind::Closed, &[1][..]), "{error}");
        }
    });
}

#[test]
fn difference_is_found_although_a_rank_is_far_ahead() {
    let is_ahead = std::sync::Barrier::new(2);
    run(2, |mut rank| {
        if rank.domain.rank() == 1 {
            is_ahead.wait();
            let error = rank.gather(2000, TIMEOUT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            return;
        }
        let pointer = |memory: &Memory| {
            std::ptr::with_exposed_provenance_mut::<u8>(memory.address() as usize)
        };
        let call = CollectiveCall {
            input: pointer(&rank.input),
            output: pointer(&rank.output),
            ..call(Operation::AllGather, Blocks::One(1000), Blocks::Each(1000))
        };
        for _ in 0..100 {
            // SAFETY: both have more bytes, and are kept until the end.
            #[allow(unsafe_code)]
            unsafe {
                rank.domain.start(&call, &rank.stream, TIMEOUT).unwrap();
            }
        }
        is_ahead.wait();
        rank.stream.synchronize(Duration::from_secs(10)).unwrap();
        let error = rank.domain.check("all-gather").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(error.to_string().contains("operation 1 "), "{error}");
    });
}

#[test]
fn abort_of_a_rank_ends_the_operations_of_the_others() {
    let have_started = std::sync::Barrier::new(2);
    run(3, |rank| {
        let Rank { mut domain, stream, input, output } = rank;
        let pointer = |memory: &Memory| {
            std::ptr::with_exposed_provenance_mut::<u8>(memory.address() as usize)
        };
        let call = CollectiveCall {
            input: pointer(&input),
            output: pointer(&output),
            ..call(Operation::AllGather, Blocks::One(1000), Blocks::Each(1000))
        };
        if domain.rank() < 2 {
            // SAFETY: both have more bytes, and are kept until the end.
            #[allow(unsafe_code)]
            unsafe {
                domain.start(&call, &stream, TIMEOUT).unwrap();
            }
            have_started.wait();
        }
        if domain.rank() == 1 {
            domain.abort_handle().abort();
        }
        // The last rank does not start it, and the first one waits for that.
        stream.synchronize(Duration::from_secs(5)).unwrap();
        while domain.check("test").is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
        let error = domain.check("all-gather").unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::Closed, &[1][..]), "{error}");
    });
}

#[test]
fn stream_of_another_device_is_refused() {
    run(2, |mut rank| {
        let other = 1 - rank.domain.rank() % 2;
        let device = Device::open(format!("emulated:{other}").parse().unwrap()).unwrap();
        let own = std::mem::replace(&mut rank.stream, device.stream().unwrap());
        let error = rank.gather(1000, TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        // The domain goes on.
        rank.stream = own;
        rank.gather(1000, TIMEOUT).unwrap();
    });
}

#[test]
fn forked_child_leaves_the_watch_to_its_parent() {
    let directory = TempDir::new("devices-forked");
    let join = |rank: u32| join_of_two(&directory, rank);
    let lost = ForkedChild::new(|| {
        let _rank = join(1);
        thread::sleep(Duration::from_secs(60));
    });
    let rank = join(0);
    let mut watched = Some(rank);
    let child = ForkedChild::new(|| {
        let Rank { domain, stream, input, output } = watched.take().unwrap();
        std::mem::forget((stream, input, output));
        drop(domain);
    });
    assert!(child.wait().success());
    lost.kill();
    let end = std::time::Instant::now() + Duration::from_secs(10);
    while watched.as_ref().is_some_and(|rank| rank.domain.check("test").is_ok()) {
        assert!(std::time::Instant::now() < end);
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn rank_that_ends_after_it_has_left_is_no_failure() {
    let directory = TempDir::new("devices-left");
    let join = |rank: u32| join_of_two(&directory, rank);
    let other = ForkedChild::new(|| {
        let mut rank = join(1);
        rank.gather(1000, TIMEOUT).unwrap();
    });
    let mut rank = join(0);
    rank.gather(1000, TIMEOUT).unwrap();
    assert!(other.wait().success());
    thread::sleep(Duration::from_millis(200));
    rank.domain.check("test").unwrap();
    let error = rank.gather(1000, TIMEOUT).unwrap_err();
    assert_eq!((error.kind(), error.ranks()), (ErrorKind::Closed, &[1][..]), "{error}");
}

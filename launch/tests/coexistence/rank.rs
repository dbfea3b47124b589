//! What the ranks of the jobs do.

use std::path::Path;
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use fabric::Policy as ProviderPolicy;
use gpu::Block;
use launch::{FabricUse, Group, GroupOptions};
use testkit::children::say;
use transfer::path::Policy;
use transfer::{Event, HostBuffer, Notice, Rights};

use crate::mpi::{Implementation, Mpi, ThreadLevel};
use crate::signals;

type Outcome = Result<(), Box<dyn std::error::Error>>;

pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Of a start that does not succeed.
const SHORT: Duration = Duration::from_secs(2);
/// Bytes of a put and of a message of MPI.
const LENGTH: usize = 64 << 10;
/// Puts and messages while both are used at once.
const ROUNDS: u32 = 40;
/// The tag of the first round's notice.
const TAG: u64 = 100;

pub(crate) fn run(words: &[&str]) {
    let [mpi, directory, task @ ..] = words else { panic!("{words:?}") };
    let (mpi, directory) = (Implementation::of_name(mpi), Path::new(directory));
    match *task {
        ["steps", steps] => run_steps(mpi, directory, steps),
        ["next"] => next(mpi, directory),
        ["threads", level] => run_threads(mpi, directory, level),
        ["provider", provider] => run_provider(mpi, directory, provider),
        ["end", how, during] => end(mpi, directory, how, during),
        ["survive"] => survive(directory),
        ["signals", order, provider] => signals::run(mpi, directory, order, provider),
        ["bad", what] => bad(directory, what),
        _ => panic!("{words:?}"),
    }
}

pub(crate) fn options(directory: &Path) -> GroupOptions {
    GroupOptions::new().directory(directory).label("coexistence").timeout(LONG)
}

/// The bytes that a rank sends in a round.
fn bytes(rank: u32, round: u32) -> Vec<u8> {
    let first = rank * 31 + round * 7;
    (0..LENGTH as u32).map(|at| (at / 3 + first) as u8).collect()
}

/// Each rank puts into the next one, round after round, while the notices of its own neighbour
/// arrive.
pub(crate) fn put_around(group: &mut Group, rounds: u32) -> Outcome {
    let (rank, size) = (group.rank(), group.size());
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let inbox = HostBuffer::new(LENGTH as u64 * u64::from(rounds))?;
    let region = group.agent().register(&inbox, Rights::WRITE)?;
    let descriptor = region.descriptor().encode()?;
    let descriptors = group.all_gather(&descriptor, LONG)?;
    let peer = group.peer(next, LONG)?;
    let source = (0..rounds).flat_map(|round| bytes(rank, round)).collect();
    let source = HostBuffer::from_vec(source)?;
    let source = group.agent().register_local(source)?;
    let (descriptor, policy) = (&descriptors[next as usize], Policy::default());
    let route = group.agent().join(peer, &source, descriptor, &policy, LONG)?;
    let puts: Vec<transfer::Result<_>> = (0..rounds)
        .map(|round| {
            let notice = Notice::new(TAG + u64::from(round), b"")?;
            let at = u64::from(round) * LENGTH as u64;
            let block = Block { to: at, from: at, length: LENGTH as u64 };
            group.agent().put(&route, &[block], Some(notice))
        })
        .collect();
    for put in puts {
        group.agent().wait(put?, LONG)?;
    }
    let mut arrived = 0;
    while arrived < rounds {
        let Event::Notice { from, notice } = group.agent().next_event(LONG)? else {
            continue;
        };
        assert_eq!(group.rank_of(from), Some(last));
        let round = (notice.tag - TAG) as u32;
        let mut found = vec![0; LENGTH];
        inbox.read(LENGTH as u64 * u64::from(round), &mut found)?;
        assert!(found == bytes(last, round), "other bytes of rank {last} in round {round}");
        arrived += 1;
    }
    // The neighbour may still put.
    group.barrier(LONG)?;
    Ok(())
}

/// Each rank sends messages of MPI to the next one.
fn send_around(mpi: &Mpi, (rank, size): (u32, u32), rounds: u32) {
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    for round in 0..rounds {
        let mut received = vec![0; LENGTH];
        mpi.send_receive(next, &bytes(rank, round), last, &mut received);
        assert!(received == bytes(last, round), "other bytes by MPI in round {round}");
    }
}

fn place(group: &Group) -> (u32, u32) {
    (group.rank(), group.size())
}

/// g, c, d: a group starts, is closed, is dropped; p: puts; i, f: MPI starts, ends; m: messages.
fn run_steps(mpi: Implementation, directory: &Path, steps: &str) {
    let mpi = Mpi::load(mpi);
    let mut group = None;
    let mut known = None;
    for step in steps.chars() {
        match step {
            'g' => {
                let started = Group::start_with(options(directory)).unwrap();
                known = Some(place(&started));
                group = Some(started);
            }
            'p' => put_around(group.as_mut().unwrap(), 2).unwrap(),
            'c' => group.take().unwrap().close(LONG).unwrap(),
            'd' => drop(group.take().unwrap()),
            'i' => mpi.init(ThreadLevel::Single),
            'm' => send_around(&mpi, known.unwrap(), 2),
            'f' => mpi.finalize(),
            _ => panic!("{step}"),
        }
    }
    say("done");
}

/// Puts of a thread, and messages of MPI at the same time.
fn run_threads(implementation: Implementation, directory: &Path, level: &str) {
    let mpi = Mpi::load(implementation);
    let level = match level {
        "funneled" => ThreadLevel::Funneled,
        _ => ThreadLevel::Multiple,
    };
    mpi.init(level);
    let mut group = match level {
        // Started and closed by another thread than the one that started MPI.
        ThreadLevel::Multiple => thread::scope(|scope| {
            scope.spawn(|| Group::start_with(options(directory)).unwrap()).join().unwrap()
        }),
        _ => Group::start_with(options(directory)).unwrap(),
    };
    let place = place(&group);
    thread::scope(|scope| {
        scope.spawn(move || {
            put_around(&mut group, ROUNDS).unwrap();
            group.close(LONG).unwrap();
        });
        send_around(&mpi, place, ROUNDS);
    });
    mpi.finalize();
    say("done");
}

/// Puts by a fabric, and messages of MPI at the same time.
fn run_provider(implementation: Implementation, directory: &Path, provider: &str) {
    let mpi = Mpi::load(implementation);
    mpi.init(ThreadLevel::Funneled);
    let mut group = Group::start_with(over(directory, provider)).unwrap();
    let place = place(&group);
    let used = group.agent().card().fabrics.len();
    thread::scope(|scope| {
        scope.spawn(move || {
            put_around(&mut group, ROUNDS / 4).unwrap();
            group.close(LONG).unwrap();
        });
        send_around(&mpi, place, ROUNDS / 4);
    });
    mpi.finalize();
    say(&format!("done {used} {}", signals::libraries("libfabric.so")));
}

/// Options for a provider: without one, no fabric is opened.
pub(crate) fn over(directory: &Path, provider: &str) -> GroupOptions {
    let providers: ProviderPolicy = provider.parse().unwrap();
    let options = options(directory).providers(providers);
    match provider {
        "" => options,
        // Its addresses are names.
        "=shm" => options.fabric_use(FabricUse::Always),
        _ => options.force_remote().source(std::net::Ipv4Addr::LOCALHOST.into()),
    }
}

/// A job like the one that ended before it.
fn next(implementation: Implementation, directory: &Path) {
    let mpi = Mpi::load(implementation);
    mpi.init(ThreadLevel::Funneled);
    let mut group = Group::start_with(over(directory, "=shm")).unwrap();
    let node = group.node(pubsub::NodeOptions::default(), LONG).unwrap();
    put_around(&mut group, 2).unwrap();
    send_around(&mpi, place(&group), 2);
    drop(node);
    group.close(LONG).unwrap();
    mpi.finalize();
    say("done");
}

/// Rank 1 ends without closing anything, while the others wait for it.
fn end(implementation: Implementation, directory: &Path, how: &str, during: &str) {
    say(&format!("process {}", process::id()));
    let mpi = Mpi::load(implementation);
    mpi.init(ThreadLevel::Funneled);
    let options = match during {
        "fabric" => over(directory, "=shm"),
        _ => options(directory),
    };
    let mut group = Group::start_with(options).unwrap();
    let _node = group.node(pubsub::NodeOptions::default(), LONG).unwrap();
    put_around(&mut group, 2).unwrap();
    if group.rank() == 1 {
        match how {
            "abort" => mpi.abort(3),
            "kill" => signals::kill_this_process(),
            // The exit handlers run, and no destructor of this function.
            "exit" => process::exit(0),
            "_exit" => signals::end_without_handlers(),
            _ => panic!("{how}"),
        }
    }
    let wait = |group: &mut Group| match during {
        "puts" => put_around(group, 2),
        _ => Ok(group.barrier(LONG)?),
    };
    while wait(&mut group).is_ok() {}
    // The launcher ends the others, too: that of MPICH not always after an exit with 0.
    thread::sleep(SHORT);
}

/// Rank 1 is killed, and the launcher keeps the others.
fn survive(directory: &Path) {
    let mut group = Group::start_with(options(directory)).unwrap();
    put_around(&mut group, 1).unwrap();
    if group.rank() == 1 {
        signals::kill_this_process();
    }
    let error = group.barrier(LONG).unwrap_err();
    say(&format!("{error} {:?}", error.ranks()));
}

/// Rank 1 is started with a mistake, and each rank says what it learns.
fn bad(directory: &Path, what: &str) {
    let is_wrong =
        ["PMI_RANK", "PMIX_RANK"].iter().any(|it| std::env::var(it).as_deref() == Ok("1"));
    let set = |name: &str, value: &str| {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(name, value) };
    };
    let begin = Instant::now();
    let started = match what {
        "option" => {
            set("FABRICAST_DIRECTORY", directory.to_str().unwrap());
            if is_wrong {
                set("FABRICAST_INSECURE", "nonsense");
            }
            Group::start()
        }
        _ => {
            if is_wrong {
                set("FABRICAST_LAUNCHER", "torchrun");
            }
            Group::start_with(options(directory).timeout(SHORT))
        }
    };
    let error = started.unwrap_err();
    assert!(begin.elapsed() < 2 * SHORT, "{:?}", begin.elapsed());
    say(&error.to_string());
    // The launcher may end the others when one ends.
    thread::sleep((2 * SHORT).saturating_sub(begin.elapsed()));
}

//! Ranks that `mpirun` of MPICH starts.
//!
//! This program is its own rank: with words it runs one of the functions below instead of the
//! tests. The MPI library is loaded at run time, as an extension of another language does it.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::process::{Command, ExitStatus, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use control::launcher::{Environment, ErrorKind, Exchange, Result, start};
use libloading::os::unix::Library;
use testkit::children::{self, Child};

const MPIRUN: &str = "mpirun.mpich";
const MPI: &str = "libmpich.so.12";
const TIMEOUT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(2);

testkit::child_entry!(|words| match words {
    ["gather"] => gather_rounds(),
    ["absent"] => absent(),
    ["ends", how] => ends(how),
    ["mpi-later"] => mpi_later(),
    ["mpi-before"] => mpi_before(),
    ["mpi-before-at-port"] => mpi_before_at_port(),
    ["measure"] => measure(),
    _ => panic!("unknown words {words:?}"),
});

// ------------------------------------------------------------------ ranks

fn connect() -> Result<Box<dyn Exchange>> {
    start(&Environment::of_this_process(), TIMEOUT)
}

/// What a rank contributes in a round.
fn bytes(rank: u32, round: u32) -> Vec<u8> {
    let length = [0, 1, 5000, 100_000][(rank + round) as usize % 4];
    (0..length).map(|at| (at * 7 + rank * 31 + round) as u8).collect()
}

fn gather(job: &mut dyn Exchange, round: u32) {
    let gathered = job.all_gather(&bytes(job.rank(), round), TIMEOUT).unwrap();
    let expected: Vec<_> = (0..job.size()).map(|rank| bytes(rank, round)).collect();
    assert!(gathered == expected, "round {round} of rank {}", job.rank());
}

fn gather_rounds() {
    let mut job = connect().unwrap();
    for round in 0..3 {
        gather(&mut *job, round);
    }
    let local = job.local().unwrap();
    let (rank, size) = (job.rank(), job.size());
    children::say(&format!(
        "rank {rank} of {size}, {} of {} here, by {}, job {}",
        local.rank,
        local.size,
        job.name(),
        job.job()
    ));
}

/// The last rank never calls.
fn absent() {
    let environment = Environment::of_this_process();
    let number = |name| environment.number::<u32>(name).unwrap();
    let rank = number("PMI_RANK").or(number("PMI_ID")).unwrap();
    if number("MPI_LOCALNRANKS") == Some(rank + 1) {
        return std::thread::sleep(2 * SHORT);
    }
    // They give up, and end, one after the other.
    std::thread::sleep(Duration::from_millis(200) * rank);
    let mut job = connect().unwrap();
    let error = job.all_gather(b"x", SHORT).unwrap_err();
    children::say(&format!("{error} {:?}", error.ranks()));
}

/// Rank 0 ends before the others.
fn ends(how: &str) {
    let mut job = connect().unwrap();
    gather(&mut *job, 0);
    match (how, job.rank()) {
        ("by-return", 0) => {}
        ("by-exit", 0) => std::process::exit(0),
        ("leaked", 0) => std::mem::forget(job),
        // The launcher ends with another message if it kills a rank that waits for its answer.
        ("by-abort", 0) => {
            std::thread::sleep(SHORT / 2);
            std::process::abort()
        }
        ("by-abort", _) => std::thread::sleep(TIMEOUT),
        ("started-again", _) => {
            drop(job);
            gather(&mut *connect().unwrap(), 1);
            gather(&mut *connect().unwrap(), 2);
        }
        _ => std::thread::sleep(SHORT / 2),
    }
}

struct Mpi(Library);

impl Mpi {
    fn init() -> Self {
        // SAFETY: the library's start has no preconditions.
        let mpi = Self(unsafe { Library::new(MPI) }.unwrap());
        // SAFETY: as the MPI standard declares it; null pointers are allowed.
        let code = unsafe {
            let init =
                mpi.0.get::<unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int>(b"MPI_Init\0");
            init.unwrap()(null_mut(), null_mut())
        };
        assert_eq!(code, 0);
        mpi
    }

    fn finalize(&self) {
        // SAFETY: as the MPI standard declares it.
        let code =
            unsafe { self.0.get::<unsafe extern "C" fn() -> c_int>(b"MPI_Finalize\0").unwrap()() };
        assert_eq!(code, 0);
    }
}

fn mpi_later() {
    let mut job = connect().unwrap();
    gather(&mut *job, 0);
    drop(job);
    let mpi = Mpi::init();
    let is_at_port = Environment::of_this_process().text("PMI_PORT").is_some();
    match connect() {
        Ok(mut job) if !is_at_port => gather(&mut *job, 1),
        Err(error) if is_at_port => assert_eq!(error.kind(), ErrorKind::Unavailable),
        other => panic!("{other:?}"),
    }
    mpi.finalize();
    let error = connect().unwrap_err();
    children::say(&error.to_string());
}

fn mpi_before() {
    let mpi = Mpi::init();
    let mut job = connect().unwrap();
    gather(&mut *job, 0);
    mpi.finalize();
    let error = job.all_gather(b"x", TIMEOUT).unwrap_err();
    children::say(&error.to_string());
}

fn mpi_before_at_port() {
    let mpi = Mpi::init();
    let error = connect().unwrap_err();
    mpi.finalize();
    children::say(&error.to_string());
}

fn measure() {
    const ROUNDS: u32 = 200;
    let begin = Instant::now();
    let mut job = connect().unwrap();
    let connected = begin.elapsed();
    job.all_gather(&[7; 200], TIMEOUT).unwrap();
    let mut times: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            job.all_gather(&[7; 200], TIMEOUT).unwrap();
            begin.elapsed()
        })
        .collect();
    times.sort();
    let at = |part: usize| times[times.len() * part / 100];
    if job.rank() == 0 {
        children::say(&format!(
            "{} ranks: connected in {connected:?}, 200 bytes gathered in {:?} (p50), {:?} (p99)",
            job.size(),
            at(50),
            at(99)
        ));
    }
}

// ------------------------------------------------------------------ tests

/// Runs ranks, and returns their lines, sorted.
fn run(options: &[&str], words: &[&str]) -> (Vec<String>, ExitStatus) {
    let program: Vec<_> = [MPIRUN].iter().chain(options).copied().collect();
    let mut command = children::respawn_with(&program, words);
    command.env("MPIEXEC_PORT_RANGE", testkit::addresses::launcher_ports());
    Child::run(&mut command, 2 * TIMEOUT)
}

/// Runs ranks that must end as they should.
fn run_well(options: &[&str], words: &[&str]) -> Vec<String> {
    let (lines, status) = run(options, words);
    assert!(status.success(), "{status}: {lines:#?}");
    lines
}

fn is_installed() -> bool {
    Command::new(MPIRUN).arg("--version").stdout(Stdio::null()).status().is_ok()
}

macro_rules! need_mpirun {
    () => {
        if !is_installed() {
            testkit::skip!("{MPIRUN} is not installed");
        }
    };
}

#[test]
fn bytes_of_all_ranks_are_gathered() {
    need_mpirun!();
    let pmi2: &[&str] = &["-env", "FABRICAST_LAUNCHER", "pmi2"];
    let port: &[&str] = &["-pmi-port"];
    let cases: [(&[&[&str]], usize, &str); 5] = [
        (&[], 4, "PMI-1"),
        (&[port], 2, "PMI-1"),
        (&[pmi2], 4, "PMI-2"),
        (&[port, pmi2], 2, "PMI-2"),
        (&[], 1, "no launcher"),
    ];
    for (options, size, name) in cases {
        let number = size.to_string();
        let options = [&options.concat()[..], &["-n", &number]].concat();
        let lines = run_well(&options, &["gather"]);
        let job = lines[0].rsplit(' ').next().unwrap();
        let line =
            |rank| format!("rank {rank} of {size}, {rank} of {size} here, by {name}, job {job}");
        assert_eq!(lines, (0..size).map(line).collect::<Vec<_>>());
    }
}

#[test]
fn rank_that_never_calls_is_named() {
    need_mpirun!();
    for (options, size, name) in [
        (&["-n", "4"][..], 4, "PMI-1"),
        (&["-pmi-port", "-n", "2"], 2, "PMI-1"),
        (&["-env", "FABRICAST_LAUNCHER", "pmi2", "-n", "4"], 4, "PMI-2"),
    ] {
        let last = size - 1;
        let expected = format!(
            "exchange among ranks ({name}) failed: deadline exceeded: rank {last} did not come \
             within 2s. Check that all ranks call it [{last}]"
        );
        assert_eq!(run_well(options, &["absent"]), vec![expected; last]);
    }
}

#[test]
fn ranks_may_end_one_after_the_other() {
    need_mpirun!();
    for options in [&["-n", "3"][..], &["-pmi-port", "-n", "3"]] {
        for how in ["by-return", "by-exit", "leaked", "started-again"] {
            let lines = run_well(options, &["ends", how]);
            assert!(lines.is_empty(), "{how}: {lines:?}");
        }
    }
    let (lines, status) = run(&["-n", "3"], &["ends", "by-abort"]);
    assert!(!status.success() && lines.iter().any(|line| line.contains("BAD TERMINATION")));
}

#[test]
fn mpi_may_use_the_same_connection() {
    need_mpirun!();
    // SAFETY: the library's start has no preconditions.
    if unsafe { Library::new(MPI) }.is_err() {
        testkit::skip!("{MPI} is not installed");
    }
    let after = "connect to launcher (PMI-1) failed: not available: the connection to the launcher \
                 has been closed in this process, as MPI_Finalize does. Start the group before \
                 MPI_Finalize";
    assert_eq!(run_well(&["-n", "2"], &["mpi-later"]), [after; 2]);
    assert_eq!(run_well(&["-pmi-port", "-n", "2"], &["mpi-later"]), [after; 2]);
    let after = after.replace("connect to launcher", "exchange among ranks");
    let after = after.replace("not available", "closed");
    assert_eq!(run_well(&["-n", "2"], &["mpi-before"]), vec![after; 2]);
    let beside = "connect to launcher (PMI-1) failed: not available: the launcher at PMI_PORT \
                  answers one connection of each process, and MPI uses it. Start the group before \
                  MPI_Init, or start the job without -pmi-port";
    assert_eq!(run_well(&["-pmi-port", "-n", "2"], &["mpi-before-at-port"]), [beside; 2]);
}

#[test]
#[ignore = "a measurement"]
fn measure_exchanges() {
    for ranks in ["4", "32"] {
        println!("{}", run_well(&["-n", ranks], &["measure"]).join("\n"));
    }
}

//! PMIx with the `mpirun` of Open MPI, alone and beside MPI.
//!
//! Each rank is this test program again, as a child with words.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use control::launcher::{ErrorKind, Exchange, connect_by_pmix};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use testkit::children::{self, Child};
use testkit::temp_dir::TempDir;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(2);
/// How long a job may take, on a busy machine as well.
const LONGEST_JOB: Duration = Duration::from_secs(120);
const MPI: &str = "libmpi.so.40";

testkit::child_entry!(enter);

fn enter(words: &[&str]) {
    match *words {
        ["available"] => match connect_by_pmix(LONG) {
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                children::say(&error.to_string())
            }
            Err(error) => panic!("{error}"),
            Ok(_) => {}
        },
        ["available", "MPI"] => {
            Mpi::load();
        }
        ["gather"] => gather(),
        ["measure"] => measure(),
        ["miss", what] => miss(what),
        ["leave"] => leave(),
        ["stop"] => stop(),
        ["kill", directory] => kill(Path::new(directory)),
        ["steps", steps] => run_steps(steps),
        _ => panic!("{words:?}"),
    }
}

/// The bytes of a rank: its length tells the rank, too.
fn bytes_of(rank: u32, length: usize) -> Vec<u8> {
    let first = rank as usize * 7;
    (first..first + length + usize::from(length > 1) * rank as usize).map(|at| at as u8).collect()
}

/// Gathers bytes of this length.
fn gather_once(job: &mut dyn Exchange, length: usize) {
    let own = bytes_of(job.rank(), length);
    let gathered = job.all_gather(&own, LONG).unwrap();
    let expected: Vec<_> = (0..job.size()).map(|rank| bytes_of(rank, length)).collect();
    assert!(gathered == expected, "rank {} got other bytes", job.rank());
}

fn gather() {
    let mut job = connect_by_pmix(LONG).unwrap();
    for length in [0, 1, 5000, 100_000, 0] {
        gather_once(&mut *job, length);
    }
    let local = job.local().unwrap();
    assert_eq!((local.rank, local.size), (job.rank(), job.size()));
    children::say(&format!("rank {} of {} in {}", job.rank(), job.size(), job.job()));
}

fn measure() {
    let begin = Instant::now();
    let mut job = connect_by_pmix(LONG).unwrap();
    let connected = begin.elapsed();
    let mut times = Vec::new();
    for _ in 0..3 {
        let begin = Instant::now();
        gather_once(&mut *job, 200);
        times.push(format!("{:.2} ms", begin.elapsed().as_secs_f64() * 1e3));
    }
    let connected = connected.as_secs_f64() * 1e3;
    children::say(&format!("rank {}: {connected:.1} ms, {}", job.rank(), times.join(", ")));
}

/// Rank 3 does not connect, or does not call: the others say it. It fails if the launcher does not
/// end it, which mpirun 4.1 seldom forgets when three ranks fail at once.
fn miss(what: &str) {
    if what == "connect" && std::env::var("PMIX_RANK").as_deref() == Ok("3") {
        std::thread::sleep(LONGEST_JOB / 4);
        std::process::exit(1);
    }
    let mut job = connect_by_pmix(LONG).unwrap();
    gather_unless(what == "connect", &mut *job);
    if job.rank() == 3 {
        std::thread::sleep(LONGEST_JOB / 4);
        std::process::exit(1);
    }
    let begin = Instant::now();
    let error = job.all_gather(b"card", SHORT).unwrap_err();
    assert!(begin.elapsed() >= SHORT, "{:?}", begin.elapsed());
    children::say(&format!("{error} ({:?})", error.ranks()));
    // The launcher ends the job at the first rank that fails.
    std::thread::sleep(SHORT);
    std::process::exit(1);
}

fn gather_unless(is_alone: bool, job: &mut dyn Exchange) {
    if !is_alone {
        gather_once(job, 10);
    }
}

/// Rank 3 exits before the second exchange.
fn leave() {
    let mut job = connect_by_pmix(LONG).unwrap();
    gather_once(&mut *job, 10);
    if job.rank() == 3 {
        // The launcher notices it only if the others wait already.
        std::thread::sleep(SHORT);
        return;
    }
    let error = job.all_gather(b"card", 5 * SHORT).unwrap_err();
    children::say(&format!("{error} ({:?})", error.ranks()));
}

/// The launcher is stopped before the second exchange.
fn stop() {
    let mut job = connect_by_pmix(LONG).unwrap();
    gather_once(&mut *job, 10);
    // The other ranks may still take the bytes of the first exchange.
    std::thread::sleep(SHORT / 2);
    signal_launcher("-STOP");
    let begin = Instant::now();
    let error = job.all_gather(b"card", SHORT).unwrap_err();
    assert!(begin.elapsed() < 4 * SHORT, "{:?}", begin.elapsed());
    // All ranks stop it, and all resume it.
    std::thread::sleep(SHORT);
    signal_launcher("-CONT");
    children::say(&error.to_string());
    std::process::exit(1);
}

fn signal_launcher(signal: &str) {
    let launcher = std::os::unix::process::parent_id().to_string();
    assert!(Command::new("kill").args([signal, &launcher]).status().unwrap().success());
}

/// Rank 3 kills the launcher while the others wait for it. Their output would be lost.
fn kill(directory: &Path) {
    let mut job = connect_by_pmix(LONG).unwrap();
    gather_once(&mut *job, 10);
    if job.rank() == 3 {
        std::thread::sleep(SHORT / 2);
        signal_launcher("-KILL");
        return;
    }
    let error = job.all_gather(b"card", LONG).unwrap_err();
    let part = directory.join(format!("part-{}", job.rank()));
    std::fs::write(&part, error.to_string()).unwrap();
    std::fs::rename(part, directory.join(format!("rank-{}", job.rank()))).unwrap();
}

/// The functions of an MPI library.
struct Mpi(Library);

impl Mpi {
    fn load() -> Self {
        // SAFETY: its initialisers are those of Open MPI. Its plugins need its names.
        Self(unsafe { Library::open(Some(MPI), RTLD_NOW | RTLD_GLOBAL) }.unwrap())
    }

    fn init(&self) {
        type Init = unsafe extern "C" fn(*mut c_void, *mut c_void) -> i32;
        let none = std::ptr::null_mut();
        // SAFETY: MPI allows null pointers instead of the arguments of main.
        let code = unsafe { self.0.get::<Init>(b"MPI_Init").unwrap()(none, none) };
        assert_eq!(code, 0);
    }

    fn finalize(&self) {
        // SAFETY: no arguments.
        let code =
            unsafe { self.0.get::<unsafe extern "C" fn() -> i32>(b"MPI_Finalize").unwrap()() };
        assert_eq!(code, 0);
    }
}

/// i and f: MPI_Init and MPI_Finalize; c, g, d: connect, gather, drop; k: a fork exits.
fn run_steps(steps: &str) {
    let mpi = Mpi::load();
    let mut job = None;
    for step in steps.chars() {
        match step {
            'i' => mpi.init(),
            'f' => mpi.finalize(),
            'c' => job = Some(connect_by_pmix(LONG).unwrap()),
            'g' => gather_once(&mut **job.as_mut().unwrap(), 200),
            'd' => job = None,
            'k' => {
                let exit = || std::process::exit(0);
                assert!(children::ForkedChild::new(exit).wait().success());
            }
            _ => panic!("{step}"),
        }
    }
    children::say("done");
    std::mem::forget(mpi.0);
}

/// Runs a job of this program; returns its lines, sorted, and its status.
#[track_caller]
fn launch(ranks: u32, words: &[&str]) -> (Vec<String>, ExitStatus) {
    let ranks = ranks.to_string();
    let launcher = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", &ranks];
    Child::run(&mut children::respawn_with(&launcher, words), LONGEST_JOB)
}

/// Why there is no such job.
fn obstacle(words: &[&str]) -> Option<String> {
    if std::env::var_os("TEST_EMULATOR").is_some() {
        return Some("the launcher does not run the emulator".to_owned());
    }
    let version = Command::new("mpirun.openmpi").arg("--version").output();
    if !version.is_ok_and(|output| output.status.success()) {
        return Some("needs mpirun.openmpi".to_owned());
    }
    let (lines, status) = launch(1, words);
    if !status.success() {
        return Some(format!("needs {MPI}"));
    }
    lines.into_iter().next()
}

/// Skips a test if no job of this kind can run.
macro_rules! skip_unless {
    ($($words:expr),*) => {
        if let Some(obstacle) = obstacle(&[$($words),*]) {
            testkit::skip!("{obstacle}");
        }
    };
}

#[test]
fn all_ranks_gather_the_bytes_of_all_ranks() {
    skip_unless!("available");
    let (lines, status) = launch(4, &["gather"]);
    assert!(status.success(), "{status}");
    assert_eq!(lines.len(), 4, "{lines:?}");
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("rank {rank} of 4 in ")), "{line}");
    }
}

#[test]
fn many_ranks_gather() {
    skip_unless!("available");
    let (lines, status) = launch(32, &["measure"]);
    assert!(status.success(), "{status}");
    assert_eq!(lines.len(), 32, "{lines:?}");
    lines.iter().for_each(|line| println!("{line}"));
}

#[test]
fn missing_rank_is_named_by_all_others_and_the_job_ends() {
    skip_unless!("available");
    for what in ["connect", "call"] {
        let (lines, status) = launch(4, &["miss", what]);
        let text = "exchange among ranks (PMIx) failed: deadline exceeded: rank 3 did not come \
                    within 2s. Check that all ranks call it ([3])";
        assert_eq!(lines, [text; 3], "{what}");
        assert!(!status.success());
    }
}

#[test]
fn rank_that_left_is_named_by_all_others() {
    skip_unless!("available");
    let (lines, status) = launch(4, &["leave"]);
    assert_eq!(lines.len(), 3, "{lines:?}");
    for line in lines {
        let end = [
            "a rank failed: rank 3 ended without calling it ([3])",
            // On a busy machine, if it left before the others waited.
            "deadline exceeded: rank 3 did not come within 10s. Check that all ranks call it ([3])",
        ];
        assert!(end.iter().any(|end| line.ends_with(end)), "{line}");
    }
    assert!(status.success(), "{status}");
}

#[test]
fn stopped_launcher_is_reported() {
    skip_unless!("available");
    let (lines, status) = launch(2, &["stop"]);
    let text = "exchange among ranks (PMIx) failed: deadline exceeded: the launcher's server did \
                not answer within 2s. Check that mpirun or srun is not stopped";
    assert!(!lines.is_empty() && lines.iter().all(|line| line == text), "{lines:?}");
    assert!(!status.success());
}

#[test]
fn killed_launcher_is_reported_at_once() {
    skip_unless!("available");
    let directory = TempDir::new("fabricast-pmix-kill");
    let (_, status) = launch(4, &["kill", directory.to_str().unwrap()]);
    assert!(!status.success());
    let end = Instant::now() + LONG / 2;
    for rank in 0..3 {
        let path = directory.join(format!("rank-{rank}"));
        while !path.exists() {
            assert!(Instant::now() < end, "rank {rank} still waits");
            std::thread::sleep(Duration::from_millis(10));
        }
        let text = std::fs::read_to_string(path).unwrap();
        let begin =
            "exchange among ranks (PMIx) failed: closed: the connection to the launcher is lost";
        assert!(text.starts_with(begin), "{text}");
    }
}

/// The launcher counts a rank as failed that does not close its connection, and MPI cannot be
/// initialised after the connection was closed.
#[test]
fn exchange_and_mpi_share_a_process_in_any_order() {
    skip_unless!("available", "MPI");
    for steps in ["cgd", "icgdf", "cgidf", "cgifd", "cgdif", "ifcg", "cgifg", "cgkifk"] {
        let (lines, status) = launch(2, &["steps", steps]);
        assert!(status.success(), "{steps}: {status}");
        assert_eq!(lines, ["done"; 2], "{steps}");
    }
}

//! Defects of libpmix and of the launcher's server, emulated by a fake library
//! (`fake_pmix/library.c`).
//!
//! Each case is a separate process, since a process connects once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use control::launcher::{Error, ErrorKind, Exchange, connect_by_pmix};
use testkit::children::{self, Child, ForkedChild};
use testkit::temp_dir::TempDir;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(400);
/// What the exchange may take longer than its timeout, on a busy machine as well.
const DELAY: Duration = Duration::from_secs(5);

testkit::child_entry!(enter);

fn enter(words: &[&str]) {
    match *words {
        ["connects", kind, text] => {
            let begin = Instant::now();
            let error = connect_by_pmix(2 * SHORT).unwrap_err();
            assert!(begin.elapsed() < 2 * SHORT + DELAY);
            expect(&error, "connect to launcher (PMIx) failed", kind, text);
        }
        ["connects twice", kind, text] => {
            let error = connect_by_pmix(SHORT).unwrap_err();
            expect(&error, "connect to launcher (PMIx) failed", kind, text);
            // The library's call is still under way, so there is no second one.
            std::thread::sleep(Duration::from_millis(1500));
            assert_eq!(connect_by_pmix(SHORT).unwrap_err().to_string(), error.to_string());
        }
        ["gathers", "all"] => gathers_all(),
        ["gathers", "often"] => gathers_often(),
        ["gathers", "too much"] => gathers_too_much(),
        ["gathers", kind, text, ranks] => fails(kind, text, ranks),
        ["forks"] => forks(),
        ["describes", "local"] => {
            let job = connect();
            let local = job.local().unwrap();
            assert_eq!(job.job(), format!("fake-{}", std::process::id()));
            assert_eq!((job.rank(), job.size()), (0, 3));
            assert_eq!((local.rank, local.size), (0, 2));
        }
        _ => panic!("{words:?}"),
    }
}

fn connect() -> Box<dyn Exchange> {
    connect_by_pmix(LONG).unwrap()
}

fn expect(error: &Error, begin: &str, kind: &str, text: &str) {
    assert_eq!(format!("{:?}", error.kind()), kind, "{error}");
    let shown = error.to_string();
    assert!(shown.starts_with(begin) && shown.contains(text), "{shown}");
}

fn gathers_all() {
    let mut job = connect();
    for own in [&b"\0card"[..], b"", b"\0", &[0; 100_000]] {
        let mut all = [own; 3].map(<[u8]>::to_vec);
        for (rank, bytes) in all.iter_mut().enumerate() {
            bytes.iter_mut().take(1).for_each(|first| *first = rank as u8);
        }
        assert_eq!(job.all_gather(own, LONG).unwrap(), all);
    }
    // Another object of the same job continues.
    drop(job);
    assert_eq!(connect().all_gather(b"\0", LONG).unwrap(), [[0], [1], [2]]);
}

fn resident_pages() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn gathers_often() {
    let (mut job, own) = (connect(), vec![0; 200_000]);
    let mut gather = |times: u32| {
        for _ in 0..times {
            job.all_gather(&own, LONG).unwrap();
        }
    };
    gather(20);
    let before = resident_pages();
    gather(200);
    // A fifth of the 80 MB that were returned.
    assert!(resident_pages() < before + 4000, "{} pages", resident_pages() - before);
}

fn gathers_too_much() {
    let mut job = connect();
    let error = job.all_gather(&vec![0; (64 << 20) + 1], LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(job.all_gather(b"\0", LONG).unwrap(), [[0], [1], [2]]);
}

fn fails(kind: &str, text: &str, ranks: &str) {
    let (mut job, begin) = (connect(), Instant::now());
    let error = job.all_gather(b"\0card", SHORT).unwrap_err();
    assert!(begin.elapsed() < SHORT + DELAY, "{:?}", begin.elapsed());
    expect(&error, "exchange among ranks (PMIx) failed", kind, text);
    let found: Vec<_> = error.ranks().iter().map(u32::to_string).collect();
    assert_eq!(found.join(","), ranks, "{error}");
    // A callback after that is harmless; a further exchange returns the same error.
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(job.all_gather(b"\0card", SHORT).unwrap_err().to_string(), error.to_string());
    assert_eq!(connect().all_gather(b"", SHORT).unwrap_err().to_string(), error.to_string());
}

/// A fork can neither exchange nor connect, and its exit does not close the connection.
fn forks() {
    let mut job = connect();
    let child = ForkedChild::new(|| {
        let text = "is connected, and this process is its fork";
        let error = job.all_gather(b"", LONG).unwrap_err();
        expect(&error, "exchange among ranks (PMIx) failed", "Failed", text);
        let error = connect_by_pmix(LONG).unwrap_err();
        expect(&error, "connect to launcher (PMIx) failed", "Failed", text);
        std::process::exit(0);
    });
    assert!(child.wait().success());
    assert_eq!(job.all_gather(b"\0", LONG).unwrap(), [[0], [1], [2]]);
}

struct Case {
    directory: TempDir,
    command: Command,
}

impl Case {
    fn new(words: &[&str]) -> Self {
        let name = std::thread::current().name().unwrap_or("unnamed").to_owned();
        let directory = TempDir::new(&format!("fabricast-fake-pmix-{name}"));
        let mut command = children::respawn(words);
        command.env("FAKE_PMIX_LOG", directory.join("log"));
        Self { directory, command }.library(&[])
    }

    /// Compiles the fake with these options.
    fn library(self, options: &[&str]) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_pmix/library.c");
        let library: PathBuf = self.directory.join("libpmix-fake.so");
        let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
        let compiled = Command::new(compiler)
            .args(["-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", "-o"])
            .args([&library, &source])
            .args(options)
            .status()
            .expect("a C compiler, which builds need as well");
        assert!(compiled.success());
        self.variable("FABRICAST_PMIX_LIBRARY", library.to_str().unwrap())
    }

    fn variable(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    fn defects(self, defects: &str) -> Self {
        self.variable("FAKE_PMIX", defects)
    }

    /// Runs the case; returns the calls that the library recorded.
    #[track_caller]
    fn run(mut self) -> Vec<String> {
        Child::start(&mut self.command).end(6 * LONG);
        let log = std::fs::read_to_string(self.directory.join("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }
}

/// Skips a test whose library would be for another processor.
macro_rules! skip_if_emulated {
    () => {
        if std::env::var_os("TEST_EMULATOR").is_some() {
            testkit::skip!("the C compiler does not target the emulated processor");
        }
    };
}

#[test]
fn job_is_described_and_closed_once_at_exit() {
    skip_if_emulated!();
    assert_eq!(Case::new(&["describes", "local"]).run(), ["init", "finalize"]);
}

#[test]
fn bytes_of_all_ranks_are_gathered() {
    skip_if_emulated!();
    let log = Case::new(&["gathers", "all"]).run();
    for (call, times) in [("init", 1), ("fence", 5), ("finalize", 1)] {
        // The last fence may be recorded while the process exits, or not at all.
        let found = log.iter().filter(|line| *line == call).count();
        assert!(found == times || call == "fence" && found + 1 == times, "{log:?}");
    }
    Case::new(&["gathers", "all"]).defects("fence-at-once bad-peers").run();
}

#[test]
fn memory_of_returned_values_is_freed() {
    skip_if_emulated!();
    Case::new(&["gathers", "often"]).run();
}

#[test]
fn too_many_bytes_are_refused_before_the_exchange() {
    skip_if_emulated!();
    Case::new(&["gathers", "too much"]).run();
}

#[test]
fn fork_of_a_connected_process_is_refused() {
    skip_if_emulated!();
    let log = Case::new(&["forks"]).run();
    assert_eq!(log.iter().filter(|line| *line == "finalize").count(), 1);
}

#[test]
fn missing_library_is_reported_with_its_remedy() {
    skip_if_emulated!();
    let connects = |text| Case::new(&["connects", "Unavailable", text]);
    connects("no libpmix: ").variable("FABRICAST_PMIX_LIBRARY", "/nowhere/libpmix.so.2").run();
    connects("/nowhere/libpmix.so.2")
        .variable("FABRICAST_PMIX_LIBRARY", "/nowhere/libpmix.so.2")
        .run();
    connects("Install libpmix2").variable("FABRICAST_PMIX_LIBRARY", "/nowhere/x").run();
    connects("has no PMIx_Fence_nb. Install").library(&["-DWITHOUT_FENCE"]).run();
}

#[test]
fn old_or_unknown_version_is_refused() {
    skip_if_emulated!();
    for (version, text) in [
        ("PMIx 2.2.3", "is of version \"PMIx 2.2.3\", 3 is the oldest supported version"),
        ("devel", "is of version \"devel\", 3 is the oldest"),
    ] {
        let case = Case::new(&["connects", "Unavailable", text]);
        assert_eq!(case.variable("FAKE_PMIX_VERSION", version).run(), [""; 0]);
    }
    Case::new(&["gathers", "all"]).variable("FAKE_PMIX_VERSION", "3.1.5").run();
}

#[test]
fn failed_connections_are_reported() {
    skip_if_emulated!();
    let connects = |defects, kind, text| Case::new(&["connects", kind, text]).defects(defects);
    let text = "PMIx_Init: UNREACHABLE (-25). Start the program by mpirun";
    assert_eq!(connects("init-fails", "Unavailable", text).run(), ["init"]);
    connects("init-fails no-texts", "Unavailable", text).run();
    connects("endless-name", "Malformed", "the job's name is no text").run();
    connects("no-ranks", "Malformed", "rank 0 of 0").run();
    connects("no-size", "Failed", "the number of ranks: FAKE (-46)").run();
}

#[test]
fn connection_without_an_answer_ends_at_the_deadline() {
    skip_if_emulated!();
    let text = "its server did not answer within 800ms. Check that mpirun or srun is not stopped";
    let log = Case::new(&["connects", "DeadlineExceeded", text]).defects("init-hangs").run();
    assert_eq!(log, ["init"]);
}

#[test]
fn late_connection_is_closed_at_exit() {
    skip_if_emulated!();
    let words = ["connects twice", "DeadlineExceeded", "did not answer within 400ms"];
    assert_eq!(Case::new(&words).defects("init-late").run(), ["init", "finalize"]);
}

#[test]
fn exit_does_not_wait_forever_for_the_server() {
    skip_if_emulated!();
    let begin = Instant::now();
    Case::new(&["describes", "local"]).defects("finalize-hangs").run();
    assert!(begin.elapsed() < LONG, "{:?}", begin.elapsed());
}

fn gather_fails(defects: &str, kind: &str, text: &str, ranks: &str) -> Vec<String> {
    Case::new(&["gathers", kind, text, ranks]).defects(defects).run()
}

#[test]
fn ranks_that_do_not_come_are_named() {
    skip_if_emulated!();
    let late = |defects, text, ranks| gather_fails(defects, "DeadlineExceeded", text, ranks);
    let text = "rank 1 did not come within 400ms. Check that all ranks call it";
    late("fence-never rank-1-absent", text, "1");
    late("fence-never rank-2-absent", "rank 2 did not come", "2");
    late("fence-never rank-1-absent rank-2-absent", "ranks 1, 2 did not come", "1,2");
    late("fence-never", "not all ranks came within 400ms", "");
}

#[test]
fn fence_that_ends_too_late_is_harmless() {
    skip_if_emulated!();
    let text = "rank 1 did not come";
    let log = gather_fails("fence-late rank-1-absent", "DeadlineExceeded", text, "1");
    assert_eq!(log, ["init", "fence", "finalize"]);
}

#[test]
fn ranks_that_left_are_named() {
    skip_if_emulated!();
    let text = "rank 1 ended without calling it";
    gather_fails("fence-partial rank-1-absent", "RankFailed", text, "1");
    let text = "rank 2 ended without calling it";
    gather_fails("get-misses rank-2-absent", "RankFailed", text, "2");
    gather_fails("get-misses", "DeadlineExceeded", "PMIx_Get: FAKE (-24)", "2");
    gather_fails("fence-partial ask-fails", "Failed", "PMIx_Fence_nb: FAKE (-52)", "");
}

#[test]
fn server_that_stops_to_answer_is_reported() {
    skip_if_emulated!();
    let silent = |defects, ranks| {
        let text = "the launcher's server did not answer within 400ms; rank 1 of this machine has \
                    not started. Check that mpirun or srun is not stopped";
        gather_fails(defects, "DeadlineExceeded", text, ranks)
    };
    silent("commit-hangs", "1");
    silent("fence-never server-silent", "1");
    silent("fence-never ask-fails", "1");
    let text = "the bytes of rank 1 did not arrive within 400ms";
    gather_fails("get-hangs", "DeadlineExceeded", text, "1");
}

#[test]
fn failed_calls_are_reported() {
    skip_if_emulated!();
    gather_fails("put-fails", "Failed", "PMIx_Put: FAKE (-1)", "");
    gather_fails("commit-fails", "Failed", "PMIx_Commit: FAKE (-1)", "");
    gather_fails("fence-fails", "Failed", "PMIx_Fence_nb: FAKE (-1)", "");
    gather_fails("fence-lost", "Closed", "PMIx_Fence_nb: FAKE (-61)", "");
    gather_fails("get-fails", "Failed", "PMIx_Get: FAKE (-1)", "");
}

#[test]
fn malformed_values_are_refused() {
    skip_if_emulated!();
    let malformed = |defect, text| gather_fails(defect, "Malformed", text, "1");
    malformed("get-null", "the launcher returned no value for rank 1");
    malformed("get-null-bytes", "the launcher returned 5 bytes at a null pointer for rank 1");
    malformed("get-huge", "the launcher returned 9223372036854775807 bytes for rank 1");
    malformed("get-text", "the launcher returned something else than bytes for rank 1");
    malformed("get-type-99", "the launcher returned value of type 99 for rank 1");
}

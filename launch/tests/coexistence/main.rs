//! A group and MPI in one process: order, threads, signals, providers, ends.
//!
//! This program is its own rank: with words it runs a function of `rank` instead of the tests. MPI
//! is loaded at run time. Each test exists for Open MPI and for MPICH.
#![allow(unsafe_code)]

mod mpi;
mod rank;
mod signals;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use testkit::children::{self, Child};
use testkit::temp_dir::TempDir;

use self::mpi::Implementation;

testkit::child_entry!(rank::run);

/// How long a job may take, on a busy machine as well.
const LONGEST_JOB: Duration = Duration::from_secs(120);
/// How long processes may outlive their launcher.
const LONGEST_END: Duration = Duration::from_secs(10);

/// The directory of a test, and the MPI that starts its ranks.
struct Jobs {
    mpi: Implementation,
    directory: TempDir,
    /// Files in /dev/shm before.
    shared_memory: BTreeSet<PathBuf>,
}

impl Jobs {
    fn new(mpi: Implementation, test: &str) -> Self {
        let directory = TempDir::new(&format!("fabricast-{}-{test}", mpi.name()));
        Self { mpi, directory, shared_memory: shared_memory() }
    }

    /// Runs ranks, and returns their lines, sorted.
    #[track_caller]
    fn run(&self, options: &[&str], ranks: u32, task: &[&str]) -> (Vec<String>, ExitStatus) {
        let ranks = ranks.to_string();
        let launcher = [self.mpi.launcher(), options, &["-n", &ranks]].concat();
        let words = [&[self.mpi.name(), self.directory.to_str().unwrap()], task].concat();
        let mut command = children::respawn_with(&launcher, words);
        for variable in ["DIRECTORY", "LABEL", "SOURCE", "PROVIDER", "INSECURE", "LAUNCHER"] {
            command.env_remove(format!("FABRICAST_{variable}"));
        }
        command.env("MPIEXEC_PORT_RANGE", testkit::addresses::launcher_ports());
        Child::run(&mut command, LONGEST_JOB)
    }

    /// Runs ranks that must end as they should; each writes these lines.
    #[track_caller]
    fn run_well(&self, options: &[&str], ranks: u32, task: &[&str], expected: &[&str]) {
        let (lines, status) = self.run(options, ranks, task);
        assert!(status.success(), "{task:?}: {status}: {lines:#?}");
        let each = expected.iter().flat_map(|line| vec![(*line).to_owned(); ranks as usize]);
        assert_eq!(lines, each.collect::<Vec<_>>(), "{task:?}");
    }

    /// Nothing is left in the directory, nor in /dev/shm.
    #[track_caller]
    fn check_that_nothing_is_left(&self) {
        assert_eq!(self.directory.entries(), Vec::<PathBuf>::new());
        assert_eq!(self.new_shared_memory(), Vec::<PathBuf>::new());
    }

    /// After an end without closing: only what the next start removes.
    #[track_caller]
    fn check_what_is_left(&self, uses_shm: bool) {
        for path in self.directory.entries() {
            let name = path.file_name().unwrap().to_string_lossy();
            assert!(name.starts_with("agent-") || name.starts_with("job-"), "{name}");
        }
        assert!(uses_shm || self.new_shared_memory().is_empty());
    }

    /// Files of this library in /dev/shm that were not there before.
    fn new_shared_memory(&self) -> Vec<PathBuf> {
        shared_memory().difference(&self.shared_memory).cloned().collect()
    }
}

/// Files of the provider shm of processes that no longer exist: those of MPI have other names, and
/// other tests may run.
fn shared_memory() -> BTreeSet<PathBuf> {
    let is_of_ended_process = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        let process = name.split_once('-').and_then(|(number, _)| number.parse::<u32>().ok());
        process.is_some_and(|process| !is_running(process))
    };
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_of_ended_process).collect()
}

/// Does a process exist that has not ended?
fn is_running(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Rank 1 of 3 ends in one of these ways, and the launcher ends the others.
fn ranks_end(jobs: &Jobs, how: &str, during: &str) {
    let begin = Instant::now();
    let (lines, status) = jobs.run(&[], 3, &["end", how, during]);
    // The launcher of MPICH reports success if a process exits with 0.
    assert!(how.ends_with("exit") || !status.success(), "{how} {during}: {status}");
    let processes = lines.iter().filter_map(|line| line.strip_prefix("process ")?.parse().ok());
    let processes: Vec<u32> = processes.collect();
    assert!(begin.elapsed() < LONGEST_JOB / 2, "{how} {during}: {:?}", begin.elapsed());
    assert_eq!(processes.len(), 3, "{lines:#?}");
    let end = Instant::now() + LONGEST_END;
    while processes.iter().any(|process| is_running(*process)) {
        assert!(Instant::now() < end, "a process of {processes:?} survives its launcher");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Makes the directories of jobs look older than a minute.
fn age_directories(directory: &Path) {
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(120);
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("job-") {
            let times = std::fs::FileTimes::new().set_modified(long_ago);
            std::fs::File::open(entry.path()).unwrap().set_times(times).unwrap();
        }
    }
}

/// Orders of the steps of `rank::run_steps`.
fn orders(mpi: Implementation) -> &'static [&'static str] {
    let all = &["gpimpcmf", "igpmfpc", "gpcgpdimgpcf", "igpcmfgpc"];
    match mpi {
        Implementation::OpenMpi => all,
        // Its connection to the launcher ends with MPI_Finalize.
        Implementation::Mpich => &all[..3],
    }
}

/// Options of the launcher that choose MPI's transport, and the provider of the group. This Open MPI
/// can use libfabric; the MPICH of Debian 12 uses UCX.
fn transports(mpi: Implementation) -> &'static [(&'static [&'static str], &'static str)] {
    match mpi {
        Implementation::OpenMpi => &[
            (
                &[
                    "--mca",
                    "pml",
                    "cm",
                    "--mca",
                    "mtl",
                    "ofi",
                    "--mca",
                    "mtl_ofi_provider_include",
                    "tcp;ofi_rxm",
                ],
                "=tcp;ofi_rxm",
            ),
            (&["--mca", "pml", "ob1", "--mca", "btl", "self,vader"], "=net"),
        ],
        Implementation::Mpich => &[(&[], "=tcp;ofi_rxm"), (&[], "=net")],
    }
}

/// What ranks 0 and 2 learn of the mistake of rank 1, and rank 1 itself, sorted.
fn texts_of_mistake(mpi: Implementation, what: &str) -> Vec<String> {
    let protocol = match mpi {
        Implementation::OpenMpi => "PMIx",
        Implementation::Mpich => "PMI-1",
    };
    let exchange = format!("exchange among ranks ({protocol}) failed");
    let source = "read group options failed: invalid argument: read environment variable \
                  FABRICAST_INSECURE failed: invalid argument: \"nonsense\": true or false is expected";
    let late = format!(
        "{exchange}: deadline exceeded: rank 1 did not come within 2s. Check that all ranks call it"
    );
    let launcher = "read launch environment failed: invalid environment: FABRICAST_LAUNCHER=torchrun, \
                    but TORCHELASTIC_RUN_ID is not set. Start the program by that launcher, or unset \
                    FABRICAST_LAUNCHER";
    match what {
        "option" => {
            let others = format!("{exchange}: a rank failed: rank 1: {source}");
            vec![others.clone(), others, source.to_owned()]
        }
        _ => vec![late.clone(), late, launcher.to_owned()],
    }
}

macro_rules! tests_with {
    ($module:ident, $mpi:expr) => {
        mod $module {
            use super::*;

            macro_rules! jobs {
                ($test:literal) => {
                    match $mpi.obstacle() {
                        None => Jobs::new($mpi, $test),
                        Some(obstacle) => testkit::skip!("{obstacle}"),
                    }
                };
            }

            #[test]
            fn group_and_mpi_start_and_end_in_any_order() {
                let jobs = jobs!("order");
                for steps in orders($mpi) {
                    jobs.run_well(&[], 3, &["steps", steps], &["done"]);
                }
                jobs.check_that_nothing_is_left();
            }

            #[test]
            fn puts_and_messages_of_mpi_run_at_once() {
                let jobs = jobs!("threads");
                for level in ["funneled", "multiple"] {
                    jobs.run_well(&[], 4, &["threads", level], &["done"]);
                }
                jobs.check_that_nothing_is_left();
            }

            #[test]
            fn both_use_fabrics() {
                let jobs = jobs!("providers");
                for (options, provider) in transports($mpi) {
                    jobs.run_well(options, 2, &["provider", provider], &["done 1 1"]);
                }
                jobs.check_that_nothing_is_left();
            }

            #[test]
            fn signals_and_exit_handlers_stay_those_of_the_program() {
                let jobs = jobs!("signals");
                let lines =
                    ["done", "exit handler after the group", "exit handler before the group"];
                for (order, provider) in [
                    ("group-first", ""),
                    ("group-first", "=tcp;ofi_rxm"),
                    ("mpi-first", ""),
                    ("mpi-first", "=net"),
                ] {
                    jobs.run_well(&[], 2, &["signals", order, provider], &lines);
                }
                jobs.check_that_nothing_is_left();
            }

            #[test]
            fn next_job_starts_cleanly_after_any_end() {
                let jobs = jobs!("ends");
                for (how, during) in [
                    ("abort", "barrier"),
                    ("kill", "barrier"),
                    ("kill", "puts"),
                    ("kill", "fabric"),
                    ("exit", "barrier"),
                    ("_exit", "barrier"),
                ] {
                    ranks_end(&jobs, how, during);
                    jobs.check_what_is_left(during == "fabric");
                    age_directories(&jobs.directory);
                    jobs.run_well(&[], 3, &["next"], &["done"]);
                    jobs.check_that_nothing_is_left();
                }
            }

            #[test]
            fn mistake_of_one_rank_is_reported_by_all() {
                let jobs = jobs!("bad");
                for what in ["option", "launcher"] {
                    // The status depends on whether rank 1 has connected to the launcher.
                    let (lines, _) = jobs.run(&[], 3, &["bad", what]);
                    // On a busy machine a tenth of the time passes before the ranks exchange bytes.
                    let lines: Vec<_> =
                        lines.iter().map(|line| line.replace("within 1.9s", "within 2s")).collect();
                    assert_eq!(lines, texts_of_mistake($mpi, what), "{what}");
                }
                jobs.check_that_nothing_is_left();
            }
        }
    };
}

/// The launcher of MPICH ends them.
#[test]
fn ranks_that_outlive_a_killed_one_name_it() {
    let mpi = Implementation::OpenMpi;
    if let Some(obstacle) = mpi.obstacle() {
        testkit::skip!("{obstacle}");
    }
    let jobs = Jobs::new(mpi, "survivors");
    let (lines, _) = jobs.run(&["--enable-recovery"], 3, &["survive"]);
    assert_eq!(lines, ["barrier of ranks failed: a rank failed: rank 1 has ended [1]"; 2]);
}

tests_with!(open_mpi, Implementation::OpenMpi);
tests_with!(mpich, Implementation::Mpich);

//! Programs of a fake NCCL and a fake HCCL (`fake_nccl/`), which preload this library. Each rank is a process.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use testkit::children::Child;
use testkit::temp_dir::TempDir;

const TIMEOUT: Duration = Duration::from_secs(60);
const FORCE_OURS: (&str, &str) = ("FABRICAST_NCCL_FORCE", "ours");

macro_rules! needs_a_compiler {
    () => {
        if std::env::var_os("TEST_EMULATOR").is_some() {
            testkit::skip!("the C compiler does not target the emulated processor");
        }
    };
}

/// The folder of the compiled programs and libraries. All tests share it: a compiler takes longer than most.
fn compiled() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nccl");
    let sources = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut sources: Vec<_> = sources.collect();
    sources.sort();
    let mut hasher = DefaultHasher::new();
    sources.iter().for_each(|path| std::fs::read(path).unwrap().hash(&mut hasher));
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder_of = |name: &str| place.join(format!("fake_nccl-{:016x}{name}", hasher.finish()));
    let found = folder_of("");
    if found.exists() {
        return found;
    }
    let new = folder_of(&format!("-{}", std::process::id()));
    std::fs::create_dir_all(&new).unwrap();
    let compile = |output: &str, arguments: &str| {
        let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
        let mut command = Command::new(compiler);
        command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(new.join(output));
        command.current_dir(&folder).args(arguments.split(' ')).arg("-L").arg(&new);
        // Libraries follow the files that need them.
        command.args(
            ["-l:libhccl.so", "-l:libnccl.so.2"].iter().filter(|it| new.join(&it[3..]).exists()),
        );
        let status = command.status().expect("a C compiler, which builds need as well");
        assert!(status.success(), "{output}");
    };
    compile("libnccl.so.2", "-shared -fPIC -Wl,-soname,libnccl.so.2 nccl.c elements.c -lm");
    compile("program", "program.c -lpthread");
    compile("libhccl.so", "-shared -fPIC -Wl,-soname,libhccl.so hccl.c");
    compile("hccl_program", "hccl_program.c");
    if std::fs::rename(&new, &found).is_err() {
        // Another test was faster.
        std::fs::remove_dir_all(&new).unwrap();
    }
    found
}

/// Ranks of a program, and a directory for them.
struct Job {
    directory: TempDir,
    name: String,
    ranks: u32,
    program: &'static str,
    /// Variables of all ranks, or of one (`NAME@0`).
    variables: Vec<(String, String)>,
}

/// What a rank printed, and how it ended.
struct Outcome {
    lines: Vec<String>,
    status: ExitStatus,
}

impl Job {
    fn new(name: &str, ranks: u32, variables: &[(&str, &str)]) -> Self {
        let directory = TempDir::new(&format!("interposer-{name}"));
        let name = format!("{name}-{}", std::process::id());
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let variables = variables.iter().map(own).collect();
        Self { directory, name, ranks, program: "program", variables }
    }

    /// Programs of HCCL.
    fn of_hccl(self) -> Self {
        Self { program: "hccl_program", ..self }
    }

    fn report_path(&self, rank: u32) -> PathBuf {
        self.directory.join(format!("report-{rank}"))
    }

    fn start(&self, rank: u32, commands: &[&str]) -> Child {
        let this = std::env::current_exe().unwrap();
        let library = this.with_file_name("libfabricast_nccl.so");
        assert!(library.exists(), "{}", library.display());
        let mut command = Command::new(compiled().join(self.program));
        command
            .args([rank.to_string(), self.ranks.to_string(), self.name.clone()])
            .args(commands)
            .env("LD_LIBRARY_PATH", compiled())
            .env("LD_PRELOAD", library)
            .env("FABRICAST_DIRECTORY", self.directory.join("runtime"))
            .env("FABRICAST_NCCL_REPORT", self.report_path(rank))
            .env("FABRICAST_NCCL_JOIN_TIMEOUT", "20")
            .env_remove("LOCAL_WORLD_SIZE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        for (name, value) in &self.variables {
            let (name, of_rank) = name.split_once('@').unwrap_or((name, ""));
            if of_rank.is_empty() || of_rank == rank.to_string() {
                command.env(name, value.replace("RANK", &rank.to_string()));
            }
        }
        Child::start(&mut command)
    }

    /// Runs all ranks with the same commands.
    fn run(&self, commands: &[&str]) -> Vec<Outcome> {
        let children: Vec<_> = (0..self.ranks).map(|rank| self.start(rank, commands)).collect();
        let outcomes = children.into_iter().map(|mut child| {
            let lines = std::iter::from_fn(|| child.line(TIMEOUT)).collect();
            Outcome { lines, status: child.wait(TIMEOUT) }
        });
        outcomes.collect()
    }

    /// Runs all ranks, which must succeed.
    fn succeed(&self, commands: &[&str]) -> Vec<Vec<String>> {
        let outcomes = self.run(commands).into_iter().map(|outcome| {
            assert!(outcome.status.success(), "{:?}: {:?}", outcome.status, outcome.lines);
            outcome.lines
        });
        outcomes.collect()
    }

    fn report(&self, rank: u32) -> String {
        std::fs::read_to_string(self.report_path(rank)).unwrap_or_default()
    }

    /// Rows of the report of a rank: the operation, and how often it was ours and the library's.
    fn rows(&self, rank: u32) -> Vec<(String, u64, u64)> {
        let report = self.report(rank);
        let rows = report.lines().filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words.get(at)?.parse().ok();
            Some((
                format!("{} {} {}", words.first()?, words.get(1)?, words.get(2)?),
                number(4)?,
                number(5)?,
            ))
        });
        rows.collect()
    }

    /// Operations of a kind that were ours and the library's, which must be the same on all ranks.
    fn counts(&self, operation: &str) -> (u64, u64) {
        for rank in 1..self.ranks {
            assert_eq!(self.rows(rank), self.rows(0), "rank {rank}");
        }
        let of_kind = self.rows(0).into_iter().filter(|(name, ..)| name.starts_with(operation));
        of_kind.fold((0, 0), |(ours, other), row| (ours + row.1, other + row.2))
    }
}

#[test]
fn ours_gives_right_results_for_all_operations_and_types() {
    needs_a_compiler!();
    let job = Job::new("ours", 2, &[FORCE_OURS]);
    let lines = job.succeed(&["all", "operations"]);
    assert_eq!(lines[0], ["all done", "0 operations of NCCL"]);
    let kinds = ["all-gather", "all-reduce", "broadcast", "reduce", "reduce-scatter", "all-to-all"];
    for operation in kinds.into_iter().chain(["gather", "scatter"]) {
        let (ours, other) = job.counts(&format!("{operation} "));
        assert!(ours > 20 && other == 0, "{operation}: {ours} and {other}");
    }
    // A third rank: shares that are not equal.
    let job = Job::new("three", 3, &[FORCE_OURS]);
    job.succeed(&["all"]);
}

#[test]
fn measured_choices_are_right_and_the_same_on_all_ranks() {
    needs_a_compiler!();
    let job = Job::new("measured", 3, &[]);
    job.succeed(&["all", "reduce:60", "all"]);
    let (ours, other) = job.counts("");
    assert!(ours > 0 && other > 0, "{ours} and {other}");
}

#[test]
fn faster_library_is_chosen_by_all_ranks() {
    needs_a_compiler!();
    let job = Job::new("slow-nccl", 2, &[("FAKE_NCCL_DELAY_US", "20000")]);
    job.succeed(&["reduce:60"]);
    let (ours, other) = job.counts("all-reduce");
    assert!(ours >= 40 && other >= 3, "{ours} and {other}");
    let report = job.report(0);
    let row = report.lines().last().unwrap();
    let gain: f64 = row.split_whitespace().last().unwrap().parse().unwrap();
    assert!(gain > 1.5, "{report}");
    let job = Job::new("slow-ours", 2, &[("FAKE_ENGINE_DELAY_US", "20000")]);
    job.succeed(&["reduce:60"]);
    let (ours, other) = job.counts("all-reduce");
    assert!(other >= 40 && ours >= 3, "{ours} and {other}");
}

#[test]
fn operations_are_switched_off_one_by_one() {
    needs_a_compiler!();
    let job = Job::new("listed", 2, &[FORCE_OURS, ("FABRICAST_NCCL_OPERATIONS", "all-gather")]);
    job.succeed(&["all"]);
    let (ours, other) = job.counts("");
    assert_eq!((ours, other), job.counts("all-gather "));
    assert!(ours > 0 && job.report(1).contains("not in FABRICAST_NCCL_OPERATIONS"));
    let job = Job::new("forced", 2, &[("FABRICAST_NCCL_FORCE", "nccl")]);
    job.succeed(&["reduce:20"]);
    assert_eq!(job.counts("all-reduce"), (0, 20));
    let job = Job::new("off", 2, &[("FABRICAST_NCCL", "off")]);
    let lines = job.succeed(&["reduce:20", "operations"]);
    assert_eq!(lines[0][1], "20 operations of NCCL");
    assert!(job.report(0).is_empty());
}

#[test]
fn groups_keep_the_order_of_their_operations() {
    needs_a_compiler!();
    for (name, variables) in [("group-ours", &[FORCE_OURS][..]), ("group-measured", &[])] {
        let job = Job::new(name, 2, variables);
        job.succeed(&["groups", "reduce:20", "groups"]);
        let (ours, other) = job.counts("");
        assert!(ours > 0 && ours + other == 140, "{ours} and {other}");
    }
}

#[test]
fn sends_and_receives_become_an_all_to_all_on_request() {
    needs_a_compiler!();
    let job = Job::new("sends-left", 3, &[FORCE_OURS]);
    assert_eq!(job.succeed(&["sends", "operations"])[0][1], "20 operations of NCCL");
    let composed = [("FABRICAST_NCCL_SEND_RECV", "1")];
    let job = Job::new("sends-ours", 3, &[composed[0], FORCE_OURS]);
    // One has blocks that do not follow each other.
    assert_eq!(job.succeed(&["sends", "operations"])[0][1], "1 operations of NCCL");
    assert_eq!(job.counts("all-to-all"), (19, 0));
    let job = Job::new("sends-measured", 3, &composed);
    job.succeed(&["sends"]);
}

#[test]
fn captured_streams_and_custom_reductions_are_left() {
    needs_a_compiler!();
    let job = Job::new("left", 2, &[FORCE_OURS]);
    let lines = job.succeed(&["capture", "custom", "reduce:5", "operations"]);
    assert_eq!(lines[1][3], "11 operations of NCCL");
    assert_eq!(job.counts("all-reduce"), (5, 0));
    let report = job.report(0);
    assert!(report.contains("10 operations left to nccl: stream is captured"), "{report}");
    assert!(report.contains("1 operations left to nccl: custom reduction"), "{report}");
}

#[test]
fn communicators_are_destroyed_made_again_and_split() {
    needs_a_compiler!();
    let job = Job::new("again", 4, &[FORCE_OURS]);
    let commands = ["reduce:5", "again", "reduce:5", "split", "reduce:5", "destroy", "operations"];
    let lines = job.succeed(&commands);
    assert_eq!(lines[3].last().unwrap(), "0 operations of NCCL");
    let report = job.report(0);
    assert_eq!(report.matches("fabricast: nccl communicator").count(), 3, "{report}");
    assert!(
        report.contains("rank 1 of 2"),
        "ranks of a split are in the order of the keys: {report}"
    );
}

#[test]
fn unsuitable_communicators_are_left_with_the_reason() {
    needs_a_compiler!();
    let reason_of = |job: Job, commands: &[&str]| {
        job.succeed(commands);
        job.report(0)
    };
    let report = reason_of(Job::new("alone", 1, &[FORCE_OURS]), &["reduce:5"]);
    assert!(report.contains("left to nccl: it has one rank"), "{report}");
    let report = reason_of(Job::new("launched", 2, &[("LOCAL_WORLD_SIZE", "1")]), &["reduce:5"]);
    assert!(report.contains("its ranks are on several machines"), "{report}");
    let report = reason_of(Job::new("non-blocking", 2, &[]), &["non-blocking", "reduce:5"]);
    assert!(report.contains("it is non-blocking"), "{report}");
    // On two machines ranks have no directory in common.
    let variables =
        [("FABRICAST_NCCL_JOIN_TIMEOUT", "0.3"), ("FABRICAST_DIRECTORY", "/tmp/fabricast-RANK")];
    let began = Instant::now();
    let report = reason_of(Job::new("machines", 2, &variables), &["reduce:5"]);
    assert!(report.contains("left to nccl: join communication domain"), "{report}");
    assert!(began.elapsed() < Duration::from_secs(5));
    // One rank passes all on.
    let variables = [("FABRICAST_NCCL@1", "off"), ("FABRICAST_NCCL_JOIN_TIMEOUT", "0.3")];
    let report = reason_of(Job::new("half-off", 2, &variables), &["reduce:5"]);
    assert!(report.contains("left to nccl: join communication domain"), "{report}");
    // Ranks with different settings.
    let variables =
        [("FABRICAST_NCCL_OPERATIONS@0", "all-gather"), ("FABRICAST_NCCL_JOIN_TIMEOUT", "1")];
    let report = reason_of(Job::new("settings", 2, &variables), &["reduce:5"]);
    assert!(report.contains("version mismatch"), "{report}");
}

#[test]
fn abort_ends_the_wait_of_another_thread() {
    needs_a_compiler!();
    let job = Job::new("abort", 2, &[FORCE_OURS]);
    let lines = job.succeed(&["reduce:5", "abort"]);
    assert_ne!(lines[0][1], "code 0");
    // The other rank gets the error of a remote one.
    assert_eq!(lines[1][1], "code 6, asynchronous error 6");
}

#[test]
fn killed_rank_is_an_error_of_the_others() {
    needs_a_compiler!();
    let job = Job::new("death", 3, &[FORCE_OURS]);
    let began = Instant::now();
    let outcomes = job.run(&["reduce:5", "death"]);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(!outcomes[1].status.success());
    for rank in [0, 2] {
        assert_eq!(outcomes[rank].lines[1], "code 6, asynchronous error 6");
    }
}

#[test]
fn malformed_variables_give_one_warning_each() {
    needs_a_compiler!();
    let job = Job::new("malformed", 2, &[("FABRICAST_NCCL_FORCE", "both")]);
    let mut other = job.start(1, &["reduce:20"]);
    let this = std::env::current_exe().unwrap();
    let output = Command::new(compiled().join("program"))
        .args(["0", "2", &job.name, "reduce:20"])
        .env("LD_LIBRARY_PATH", compiled())
        .env("LD_PRELOAD", this.with_file_name("libfabricast_nccl.so"))
        .env("FABRICAST_DIRECTORY", job.directory.join("runtime"))
        .env("FABRICAST_NCCL_FORCE", "both")
        .env("FABRICAST_NCCL_REPORT", "1")
        .output()
        .unwrap();
    assert!(output.status.success() && other.wait(TIMEOUT).success());
    let text = String::from_utf8_lossy(&output.stderr);
    let warnings: Vec<&str> = text.lines().filter(|line| line.contains("is ignored")).collect();
    let expected =
        "fabricast: FABRICAST_NCCL_FORCE=both is ignored: the value is not \"ours\" or \"nccl\"";
    assert_eq!(warnings, [expected], "{text}");
    // The report is there, too.
    assert!(text.contains("all-reduce"), "{text}");
}

#[test]
fn operations_of_hccl_are_agreed_on_and_measured() {
    needs_a_compiler!();
    let job = Job::new("hccl", 2, &[FORCE_OURS]).of_hccl();
    assert_eq!(job.succeed(&[]), [["done"], ["done"]]);
    for operation in ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"] {
        assert_eq!(job.counts(operation), (0, 50), "{operation}");
    }
    let report = job.report(1);
    let row = report.lines().find(|line| line.contains("all-reduce")).unwrap();
    let words: Vec<&str> = row.split_whitespace().collect();
    assert!(words[6] == "-" && words[7].parse::<f64>().unwrap() > 0.0, "{report}");
}

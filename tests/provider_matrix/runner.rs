//! Running cells, each in a process of its own.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fabric::{Version, failed_closes};

use crate::cells::{Cell, GROUPS, Group, MEMORIES, Memory, kind_name};
use crate::exclusions::{self, Conditions};
use crate::report::{self, Outcome, Report, Row};
use crate::{cases, cuda};

#[derive(Default)]
pub struct Options {
    pub only: Vec<String>,
    pub json: Option<PathBuf>,
    pub label: String,
    pub list: bool,
    pub report: Vec<PathBuf>,
    /// Whole stages that did not run, each with its reason.
    pub skipped: Vec<(String, String)>,
    /// `--report` was given, with or without files.
    pub reporting: bool,
}

/// How long one cell may take. An emulated machine needs more.
pub fn cell_limit() -> Duration {
    let seconds = std::env::var("FABRICAST_MATRIX_LIMIT").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(60))
}

pub fn run(options: &Options) -> ExitCode {
    match run_all(options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("provider_matrix: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_all(options: &Options) -> Result<bool, String> {
    if options.reporting {
        let mut reports =
            options.report.iter().map(|p| Report::load(p)).collect::<Result<Vec<_>, _>>()?;
        reports.extend(options.skipped.iter().map(|(stage, why)| skipped_report(stage, why)));
        return Ok(report::print(&reports));
    }
    let conditions = Conditions { library: Version::running(), has_cuda: cuda::is_available() };
    let list = exclusions::load()?;
    let mut report = Report {
        label: if options.label.is_empty() {
            "this machine".to_owned()
        } else {
            options.label.clone()
        },
        library: Version::running().to_string(),
        headers: Version::headers().to_string(),
        rows: Vec::new(),
    };
    // First who is here at all, then what there is to run.
    let mut planned = Vec::new();
    for group in GROUPS {
        for memory in MEMORIES {
            let cells = cells_of(group, *memory, &options.only);
            if options.list {
                cells.iter().for_each(|cell| println!("{cell}"));
                continue;
            }
            let Some(first) = cells.first() else { continue };
            let missing = probe(first);
            for cell in cells {
                let excluded = exclusions::find(&list, &cell, &conditions, missing.is_some());
                let decided = match (excluded, &missing) {
                    (Some(exclusion), _) => {
                        Some(row(&cell, Outcome::Skipped, exclusion.reason, 0.0))
                    }
                    (None, Some(why)) => Some(row(&cell, Outcome::Failed, why, 0.0)),
                    (None, None) => None,
                };
                planned.push((cell, decided));
            }
        }
    }
    report.rows = run_planned(planned);
    if options.list {
        return Ok(true);
    }
    if let Some(path) = &options.json {
        report.save(path)?;
    }
    Ok(report::print(&[report]))
}

fn cells_of(group: &Group, memory: Memory, only: &[String]) -> Vec<Cell> {
    let mut cells: Vec<Cell> = cases::all()
        .into_iter()
        .map(|case| Cell {
            provider: group.provider.to_owned(),
            kind: group.kind,
            memory,
            case: case.name.to_owned(),
        })
        .collect();
    cells.retain(|cell| {
        let name = cell.to_string();
        only.is_empty() || only.iter().any(|pattern| name.contains(pattern.as_str()))
    });
    cells
}

/// Runs what is not decided yet, several at a time: a cell spends most of its
/// time asleep in libfabric's start (0.2 s in some builds) and in waits.
fn run_planned(planned: Vec<(Cell, Option<Row>)>) -> Vec<Row> {
    let jobs = std::env::var("FABRICAST_MATRIX_JOBS").ok().and_then(|text| text.parse().ok());
    let next = AtomicUsize::new(0);
    let rows: Vec<OnceLock<Row>> = planned.iter().map(|_| OnceLock::new()).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs.unwrap_or(4) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some((cell, decided)) = planned.get(at) else { break };
                    let row = decided.clone().unwrap_or_else(|| {
                        run_one(cell, cell.group().map_or(&[][..], |g| g.environment))
                    });
                    if row.outcome == Outcome::Failed {
                        eprintln!(
                            "FAILED {cell}: {}",
                            row.detail.lines().last().unwrap_or_default()
                        );
                    }
                    let _ = rows[at].set(row);
                }
            });
        }
    });
    rows.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// A stage that did not run: all its cells count as skipped.
fn skipped_report(stage: &str, reason: &str) -> Report {
    let only_verbs = stage.starts_with("verbs");
    let rows = GROUPS
        .iter()
        .filter(|group| group.provider.starts_with("verbs") == only_verbs)
        .flat_map(|group| {
            cases::all().into_iter().map(|case| {
                let cell = Cell {
                    provider: group.provider.to_owned(),
                    kind: group.kind,
                    memory: Memory::Host,
                    case: case.name.to_owned(),
                };
                row(&cell, Outcome::Skipped, reason, 0.0)
            })
        })
        .collect();
    Report { label: stage.to_owned(), library: "-".to_owned(), headers: "-".to_owned(), rows }
}

fn row(cell: &Cell, outcome: Outcome, detail: &str, seconds: f64) -> Row {
    Row {
        provider: cell.provider.clone(),
        endpoint: kind_name(cell.kind).to_owned(),
        memory: cell.memory.name().to_owned(),
        case: cell.case.clone(),
        outcome,
        detail: detail.to_owned(),
        seconds,
    }
}

/// Why the provider cannot be had here, if it cannot. Asked in a process of its
/// own, like everything that touches a provider.
fn probe(cell: &Cell) -> Option<String> {
    let probe = Cell { case: "probe".to_owned(), ..cell.clone() };
    let environment = cell.group().map_or(&[][..], |g| g.environment);
    let row = run_one(&probe, environment);
    (row.outcome != Outcome::Passed).then_some(row.detail)
}

fn run_one(cell: &Cell, environment: &[(&str, &str)]) -> Row {
    let started = Instant::now();
    let finished =
        |outcome, detail: &str| row(cell, outcome, detail, started.elapsed().as_secs_f64());
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return finished(Outcome::Failed, &error.to_string()),
    };
    // Output goes to files: a pipe that nobody reads could block the child.
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("provider_matrix.{}.{number}", std::process::id());
    let base = std::env::temp_dir().join(name);
    let output = match std::fs::File::create(&base) {
        Ok(file) => file,
        Err(error) => return finished(Outcome::Failed, &error.to_string()),
    };
    let clone = output.try_clone().map_or_else(|_| Stdio::null(), Stdio::from);
    let child = Command::new(program)
        .arg("--cell")
        .arg(cell.to_string())
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(clone)
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return finished(Outcome::Failed, &error.to_string()),
    };
    let mut pause = Duration::from_millis(1);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if started.elapsed() > cell_limit() => {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            Ok(None) => std::thread::sleep(pause),
            Err(error) => return finished(Outcome::Failed, &error.to_string()),
        }
        pause = (pause * 2).min(Duration::from_millis(10));
    };
    let text = std::fs::read_to_string(&base).unwrap_or_default();
    let _ = std::fs::remove_file(&base);
    match status {
        Some(status) if status.success() => finished(Outcome::Passed, ""),
        Some(status) => finished(Outcome::Failed, &format!("{status}\n{text}")),
        None => {
            finished(Outcome::Failed, &format!("hung: killed after {:?}\n{text}", cell_limit()))
        }
    }
}

/// In the child: runs one cell.
pub fn run_cell(text: &str) -> ExitCode {
    let cell: Cell = match text.parse() {
        Ok(cell) => cell,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    if cell.case == "probe" {
        return match cell.offer(fabric::Caps::empty()) {
            Ok(_) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let Some(case) = cases::all().into_iter().find(|c| c.name == cell.case) else {
        eprintln!("no case {}", cell.case);
        return ExitCode::from(2);
    };
    match (case.run)(&cell) {
        Ok(()) if failed_closes() > 0 && !case.leaves_objects => {
            eprintln!("{} libfabric objects could not be closed", failed_closes());
            ExitCode::FAILURE
        }
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

//! Runs cells, each in its own process.

use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fabric::{Version, failed_closes};

use crate::cells::{Cell, GROUPS, Group, MEMORIES, Memory, kind_name};
use crate::exclusions::{self, Conditions};
use crate::pair::CaseResult;
use crate::report::{self, Outcome, Report, Row};
use crate::{cases, cuda};

#[derive(Default)]
pub struct Options {
    pub only: Vec<String>,
    pub exclude: Vec<String>,
    pub json: Option<PathBuf>,
    pub label: String,
    pub headers_only: bool,
    pub list: bool,
    pub report: Vec<PathBuf>,
    /// Whole stages that did not run, each with its reason.
    pub skipped: Vec<(String, String)>,
    /// `--report` was given, with or without files.
    pub reporting: bool,
}

/// Time limit of one cell. An emulated machine needs more.
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
    let conditions = Conditions {
        library: Version::running(),
        has_cuda: cuda::is_available(),
        headers_only: options.headers_only,
    };
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
    // First query which providers are available, then select the cells.
    let mut planned = Vec::new();
    for group in GROUPS {
        for memory in MEMORIES {
            let cells = cells_of(group, *memory, options);
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

fn cells_of(group: &Group, memory: Memory, options: &Options) -> Vec<Cell> {
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
        let is_any = |patterns: &[String]| patterns.iter().any(|p| name.contains(p.as_str()));
        (options.only.is_empty() || is_any(&options.only)) && !is_any(&options.exclude)
    });
    cells
}

/// Runs the undecided cells, several at a time: a cell sleeps most of its time, in libfabric's
/// start (0.2 s in some builds) and in waits.
fn run_planned(planned: Vec<(Cell, Option<Row>)>) -> Vec<Row> {
    let rows: Vec<OnceLock<Row>> = planned.iter().map(|_| OnceLock::new()).collect();
    let mut undecided: Vec<usize> = Vec::new();
    for (at, (_, decided)) in planned.iter().enumerate() {
        match decided {
            Some(row) => {
                let _ = rows[at].set(row.clone());
            }
            None => undecided.push(at),
        }
    }
    // Only cells of one group share a process.
    let size = number("FABRICAST_MATRIX_BATCH", 1);
    let batches: Vec<&[usize]> = undecided
        .chunk_by(|a, b| planned[*a].0.is_same_group(&planned[*b].0))
        .flat_map(|group| group.chunks(size))
        .collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..number("FABRICAST_MATRIX_JOBS", 4) {
            scope.spawn(|| {
                while let Some(batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let cells: Vec<&Cell> = batch.iter().map(|at| &planned[*at].0).collect();
                    for (at, row) in batch.iter().zip(run_batch(&cells)) {
                        if row.outcome == Outcome::Failed {
                            let last = row.detail.lines().last().unwrap_or_default();
                            eprintln!("FAILED {}: {last}", planned[*at].0);
                        }
                        let _ = rows[*at].set(row);
                    }
                }
            });
        }
    });
    rows.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// A positive number from the environment.
fn number(variable: &str, default: usize) -> usize {
    let value = std::env::var(variable).ok().and_then(|text| text.parse().ok());
    value.filter(|n| *n > 0).unwrap_or(default)
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

/// Why the provider is not available here, if it is not. Queried in a separate process, like
/// every use of a provider.
fn probe(cell: &Cell) -> Option<String> {
    let row = run_one(&Cell { case: "probe".to_owned(), ..cell.clone() });
    (row.outcome != Outcome::Passed).then_some(row.detail)
}

fn run_one(cell: &Cell) -> Row {
    run_batch(&[cell]).remove(0)
}

/// Printed by the child before and after each cell.
const BEGIN: &str = "@@ begin";
const PASSED: &str = "@@ passed";
const FAILED: &str = "@@ failed";

/// Runs several cells in one process. If that process dies or hangs, only the running cell is
/// lost, and another process runs the rest.
fn run_batch(cells: &[&Cell]) -> Vec<Row> {
    let mut rows = Vec::new();
    while rows.len() < cells.len() {
        match run_process(&cells[rows.len()..]) {
            Ok(more) if !more.is_empty() => rows.extend(more),
            Ok(_) => rows.push(row(
                cells[rows.len()],
                Outcome::Failed,
                "the process reported nothing",
                0.0,
            )),
            Err(error) => {
                rows.push(row(cells[rows.len()], Outcome::Failed, &error.to_string(), 0.0))
            }
        }
    }
    rows
}

/// Runs one process: returns the rows of the cells that it completed; the last may have ended
/// the process.
fn run_process(cells: &[&Cell]) -> std::io::Result<Vec<Row>> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    // Output goes to a file: a pipe that is not read could block the child.
    let base =
        std::env::temp_dir().join(format!("provider_matrix.{}.{number}", std::process::id()));
    let output = std::fs::File::create(&base)?;
    let mut command = testkit::children::this_program();
    for cell in cells {
        command.arg("--cell").arg(cell.to_string());
    }
    let environment = cells[0].group().map_or(&[][..], |g| g.environment);
    let mut child = command
        .envs(environment.iter().copied())
        // Freed blocks of megabytes go back to the system. By default glibc raises this threshold
        // when one is freed, and whether the next ones stay in the heap, and look like a leak,
        // depends on its layout.
        .env("MALLOC_MMAP_THRESHOLD_", "131072")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    let mut pause = Duration::from_millis(1);
    let mut since = Instant::now();
    let mut ended = 0;
    let mut starts = vec![since];
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        let text = std::fs::read(&base)?;
        let now = count_ends(&String::from_utf8_lossy(&text));
        if now > ended {
            ended = now;
            since = Instant::now();
            starts.resize(ended + 1, since);
        }
        if since.elapsed() > cell_limit() {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    };
    let text = String::from_utf8_lossy(&std::fs::read(&base)?).into_owned();
    std::fs::remove_file(&base)?;
    Ok(read_rows(cells, &text, status, &starts))
}

fn count_ends(text: &str) -> usize {
    text.lines().filter(|line| *line == PASSED || *line == FAILED).count()
}

fn read_rows(
    cells: &[&Cell],
    text: &str,
    status: Option<std::process::ExitStatus>,
    starts: &[Instant],
) -> Vec<Row> {
    let end = Instant::now();
    let mut rows = Vec::new();
    let mut detail = String::new();
    let seconds = |at: usize| {
        let start = starts.get(at).copied().unwrap_or(end);
        (starts.get(at + 1).copied().unwrap_or(end) - start).as_secs_f64()
    };
    let mut running = false;
    for line in text.lines() {
        let at = rows.len();
        match line {
            BEGIN => {
                running = true;
                detail.clear();
            }
            PASSED | FAILED if at < cells.len() => {
                let outcome = if line == PASSED { Outcome::Passed } else { Outcome::Failed };
                let detail = if line == PASSED { "" } else { detail.as_str() };
                rows.push(row(cells[at], outcome, detail, seconds(at)));
                running = false;
            }
            other => {
                detail.push_str(other);
                detail.push('\n');
            }
        }
    }
    let clean = status.is_some_and(|s| s.success()) && !running;
    if !clean && rows.len() < cells.len() {
        let at = rows.len();
        let why = status.map_or_else(
            || format!("hung: killed after {:?}", cell_limit()),
            |status| status.to_string(),
        );
        rows.push(row(cells[at], Outcome::Failed, &format!("{why}\n{detail}"), seconds(at)));
    }
    rows
}

/// In the child: runs cells, and reports the result of each.
pub fn run_cells(names: &[String]) -> ExitCode {
    for name in names {
        println!("{BEGIN}");
        let before = failed_closes();
        let result = std::panic::catch_unwind(|| run_cell(name, before));
        let ended = match result {
            Ok(Ok(())) => PASSED,
            Ok(Err(error)) => {
                println!("{error}");
                FAILED
            }
            // The panic message is in the output already.
            Err(_) => FAILED,
        };
        println!("{ended}");
    }
    ExitCode::SUCCESS
}

fn run_cell(name: &str, failed_before: u64) -> CaseResult {
    let cell: Cell = name.parse()?;
    if cell.case == "probe" {
        cell.offer(fabric::Caps::empty())?;
        return Ok(());
    }
    let case = cases::all()
        .into_iter()
        .find(|c| c.name == cell.case)
        .ok_or_else(|| format!("no case {}", cell.case))?;
    (case.run)(&cell)?;
    let failed = failed_closes() - failed_before;
    if failed > 0 && !case.may_leak_objects {
        return Err(format!("{failed} libfabric objects could not be closed").into());
    }
    Ok(())
}

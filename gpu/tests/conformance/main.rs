//! What every implementation of a device must do: one suite for CUDA and for the emulated
//! device.
//!
//! Every case runs in its own process, and twice: the second run must leave file descriptors,
//! device memory and /dev/shm unchanged. A case that a device cannot do is skipped with its
//! reason, counted and printed; a run without cases fails.
//!
//! ```text
//! conformance [--implementation cuda|emulated] [--json FILE] [NAME…]   run cases
//! conformance --list --format terse                                    list them, for nextest
//! conformance NAME --exact                                             run one, here
//! ```
#![allow(missing_docs, unreachable_pub)]

mod cases;
mod child;
mod fixture;

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use cases::{CASES, Case, Skip};
use fixture::{Fixture, ResourceSnapshot};

/// The exit codes of the process of one case.
const SKIPPED: u8 = 77;
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Default)]
struct Options {
    implementation: Option<String>,
    json: Option<String>,
    names: Vec<String>,
    exact: bool,
    list: bool,
    ignored: bool,
}

fn main() -> ExitCode {
    let mut options = Options::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--implementation" => options.implementation = arguments.next(),
            "--json" => options.json = arguments.next(),
            "--exact" => options.exact = true,
            "--list" => options.list = true,
            "--ignored" => options.ignored = true,
            "--format" => drop(arguments.next()),
            // Arguments that `cargo test` passes to harnesses are ignored.
            "--nocapture" | "--quiet" | "-q" => {}
            name if !name.starts_with("--") => options.names.push(name.to_owned()),
            other => {
                eprintln!("conformance: \"{other}\" is not an argument; see the top of main.rs");
                return ExitCode::from(2);
            }
        }
    }
    if options.list {
        let cases = CASES.iter().filter(|_| !options.ignored);
        cases.for_each(|case| println!("{}: test", case.name));
        return ExitCode::SUCCESS;
    }
    // Processes of cases inherit the choice.
    if let Some(implementation) = &options.implementation {
        // SAFETY: no other thread is running yet.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var(fixture::VARIABLE, implementation);
        }
    }
    match (options.exact, options.names.as_slice()) {
        (true, [name]) => run_here(name),
        _ => run_all(&options),
    }
}

fn run_here(name: &str) -> ExitCode {
    let Some(case) = CASES.iter().find(|case| case.name == name) else {
        eprintln!("conformance: there is no case \"{name}\"");
        return ExitCode::from(2);
    };
    let fixture = match Fixture::open() {
        Ok(fixture) => fixture,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    match run_case(case, &fixture) {
        Ok(()) => {
            println!("passed: {name} on {}", fixture.first.name());
            ExitCode::SUCCESS
        }
        Err(Skip(reason)) => {
            println!("skipped: {name}: {reason}");
            testkit::skip::record_as(&format!("conformance::{name}"), &reason);
            // A harness without a skip status takes it for passed.
            match std::env::var_os("NEXTEST") {
                Some(_) => ExitCode::SUCCESS,
                None => ExitCode::from(SKIPPED),
            }
        }
    }
}

/// Runs a case twice, unless it makes the device unusable.
fn run_case(case: &Case, fixture: &Fixture) -> Result<(), Skip> {
    (case.run)(fixture)?;
    if case.breaks_device {
        return Ok(());
    }
    let before = ResourceSnapshot::now(fixture);
    (case.run)(fixture)?;
    before.compare(fixture);
    Ok(())
}

struct Outcome {
    name: &'static str,
    result: &'static str,
    detail: String,
    seconds: f64,
}

fn run_all(options: &Options) -> ExitCode {
    let wanted = |case: &&Case| {
        options.names.is_empty() || options.names.iter().any(|name| case.name.contains(name))
    };
    let outcomes: Vec<_> = CASES.iter().filter(wanted).map(run_apart).collect();
    for outcome in &outcomes {
        let Outcome { name, result, detail, seconds } = outcome;
        println!(
            "{result:8} {seconds:6.2} s  {name}{}{detail}",
            ["  ", ""][usize::from(detail.is_empty())]
        );
    }
    let count = |result| outcomes.iter().filter(|outcome| outcome.result == result).count();
    let (passed, skipped, failed) = (count("passed"), count("skipped"), count("failed"));
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if let Some(path) = &options.json {
        let lines: Vec<_> = outcomes.iter().map(json_line).collect();
        let text = format!("[\n{}\n]\n", lines.join(",\n"));
        if let Err(error) = std::fs::write(path, text) {
            eprintln!("conformance: {path}: {error}");
            return ExitCode::FAILURE;
        }
    }
    match failed == 0 && passed > 0 {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn json_line(outcome: &Outcome) -> String {
    let detail: String = outcome.detail.chars().filter(|c| !c.is_control()).collect();
    let detail = detail.replace('\\', "/").replace('"', "'");
    format!(
        r#"{{"case": "{}", "result": "{}", "seconds": {:.3}, "detail": "{detail}"}}"#,
        outcome.name, outcome.result, outcome.seconds
    )
}

/// Runs a case in its own process, so that a crash or a hang costs one case.
fn run_apart(case: &Case) -> Outcome {
    let start = Instant::now();
    let finish = |result, detail: String| Outcome {
        name: case.name,
        result,
        detail,
        seconds: start.elapsed().as_secs_f64(),
    };
    let spawned = std::io::pipe().and_then(|(reader, writer)| {
        let child = testkit::children::this_program()
            .args([case.name, "--exact"])
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            // So that its own children can be killed with it.
            .process_group(0)
            .spawn()?;
        Ok((child, reader))
    });
    let (mut child, mut reader) = match spawned {
        Ok(spawned) => spawned,
        Err(error) => return finish("failed", error.to_string()),
    };
    // Read while it runs: a pipe holds little.
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = reader.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if start.elapsed() < TIMEOUT => {
                std::thread::sleep(Duration::from_millis(5));
            }
            _ => {
                child::end_group(&child);
                let _ = child.wait();
                break None;
            }
        }
    };
    let text = reader.join().unwrap_or_default();
    match status.and_then(|status| status.code()) {
        Some(0) => finish("passed", String::new()),
        Some(code) if code == i32::from(SKIPPED) => {
            let prefix = format!("skipped: {}: ", case.name);
            let reason = text.lines().find_map(|line| line.strip_prefix(&prefix));
            finish("skipped", reason.unwrap_or_default().to_owned())
        }
        _ => {
            let how = status.map_or("timed out".to_owned(), |status| status.to_string());
            finish("failed", format!("({how})\n{text}"))
        }
    }
}

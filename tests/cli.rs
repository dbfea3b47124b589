//! The command as users run it.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::pty::{Winsize, openpty};
use serde_json::Value;

/// Runs the command to its end, within a minute.
fn fabricast(arguments: &[&str]) -> Output {
    fabricast_with(arguments, &[])
}

fn fabricast_with(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let start = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_fabricast"))
        .args(arguments)
        .env_remove("FI_PROVIDER")
        .env_remove("FABRICAST_LOG")
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "{arguments:?} took too long");
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeed(arguments: &[&str]) -> String {
    let output = fabricast(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{out}\n{err}");
    out
}

/// The exit code and standard error.
fn fail(arguments: &[&str]) -> (i32, String) {
    let output = fabricast(arguments);
    let message = text(&output.stderr);
    (output.status.code().unwrap_or_else(|| panic!("{arguments:?}: a signal: {message}")), message)
}

fn info() -> Value {
    serde_json::from_str(&succeed(&["info", "--json"])).unwrap()
}

/// RDM providers of this machine that the benchmark supports.
fn providers() -> Vec<String> {
    let info = info();
    let mut names: Vec<String> = Vec::new();
    for entry in info["providers"].as_array().unwrap() {
        let name = entry["provider"].as_str().unwrap();
        let known = ["shm", "net", "tcp", "tcp;ofi_rxm"].contains(&name);
        if known && entry["endpoint"] == "rdm" && !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
        }
    }
    assert!(!names.is_empty(), "no provider to test with: {info}");
    names
}

#[test]
fn info_shows_providers_and_choices_in_120_columns() {
    let out = succeed(&["info"]);
    assert!(out.starts_with("fabricast 0."), "{out}");
    for word in [
        "libfabric",
        "FI_HMEM",
        "mr_mode",
        "taken",
        "peers on other machines",
        "cuda:0",
        "verdict  provider",
        "reasons (points)",
        "score: the sum of the points",
    ] {
        assert!(out.contains(word), "{word} is missing:\n{out}");
    }
    for line in out.lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
    assert!(!out.contains('\x1b'), "colours are for terminals only");
}

/// What the command prints on a terminal of 80 columns.
fn on_terminal(arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(&size, None).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_fabricast"))
        .args(arguments)
        .env_remove("NO_COLOR")
        .env("TERM", "xterm")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stderr(terminal.slave.try_clone().unwrap())
        .stdout(terminal.slave)
        .spawn()
        .unwrap();
    // Reading fails when the last writer has closed the terminal.
    let (mut printed, mut buffer) = (Vec::new(), [0; 4096]);
    let mut master = std::fs::File::from(terminal.master);
    while let Ok(length @ 1..) = master.read(&mut buffer) {
        printed.extend(&buffer[..length]);
    }
    child.wait().unwrap();
    text(&printed).replace('\r', "")
}

#[test]
fn reports_and_help_fit_a_terminal_of_80_columns() {
    let directory = testkit::temp_dir::TempDir::new("fabricast-terminal");
    let node = [("FABRICAST_DIRECTORY", directory.to_str().unwrap())];
    for arguments in
        [&["info"][..], &["paths"], &["config"], &["--help"], &["paths", "--help"], &["pub", "-h"]]
    {
        let out = on_terminal(arguments, &node);
        assert!(out.lines().count() > 5, "{out}");
        for line in out.replace("\x1b[1m", "").replace("\x1b[0m", "").lines() {
            assert!(line.chars().count() <= 80, "{arguments:?}: {line}");
        }
    }
}

#[test]
fn escape_sequences_need_a_terminal_that_takes_them() {
    assert!(on_terminal(&["info"], &[]).contains("\x1b[1mProviders\x1b[0m"));
    for plain in [("TERM", "dumb"), ("NO_COLOR", "1")] {
        let out = on_terminal(&["info"], &[plain]);
        assert!(out.contains("\nProviders\n") && !out.contains('\x1b'), "{plain:?}: {out}");
    }
}

#[test]
fn control_characters_of_arguments_are_escaped_in_errors() {
    const NAME: &str = "a\x1b[31mb\u{9b}5m\x07";
    for arguments in [
        &["pub", NAME][..],
        &["sub", "topic", "--label", NAME],
        &[NAME],
        &["topics", "--directory", NAME],
    ] {
        let output = fabricast_with(arguments, &[("FABRICAST_DIRECTORY", "/tmp/none")]);
        let printed = text(&output.stderr);
        assert!(!output.status.success() && printed.contains("\\u{1b}[31mb"), "{printed}");
        let is_control = |it: char| it.is_control() && it != '\n';
        assert!(!printed.contains(is_control), "{arguments:?}: {printed:?}");
    }
}

#[test]
fn info_is_one_json_document() {
    let info = info();
    assert!(info["versions"]["libfabric_running"]["major"].as_u64() >= Some(1), "{info}");
    let provider = &info["providers"][0];
    for key in ["provider", "domain", "endpoint", "cq_data_size", "mr_mode", "device_memory"] {
        assert!(!provider[key].is_null(), "{key} is missing: {provider}");
    }
    let choices = info["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4, "host and device memory, near and far");
    let near = &choices[0];
    assert_eq!((&near["memory"], &near["reach"]), (&"host".into(), &"same_machine".into()));
    assert!(near["taken"].is_string(), "{near}");
    for candidate in near["candidates"].as_array().unwrap() {
        assert!(!candidate["reasons"].as_array().unwrap().is_empty(), "{candidate}");
    }
}

#[test]
fn verbose_info_has_all_attributes_of_a_provider() {
    let provider = &providers()[0];
    let out = succeed(&["info", "--provider", provider, "--verbose"]);
    assert!(out.contains("fi_info:") && out.contains("fi_tx_attr:"), "{out}");
}

#[test]
fn unknown_provider_is_answered_with_the_available_ones() {
    let (code, message) = fail(&["info", "--provider", "carrier-pigeon"]);
    assert_eq!(code, 3, "{message}");
    assert!(message.contains("carrier-pigeon") && message.contains(&providers()[0]), "{message}");
}

#[test]
fn filter_of_libfabric_applies_and_is_shown() {
    let output = fabricast_with(&["info", "--policy", "=shm"], &[("FI_PROVIDER", "shm")]);
    if output.status.success() {
        let out = text(&output.stdout);
        assert!(out.contains("FI_PROVIDER=shm is set"), "{out}");
        assert!(!out.contains("sockets") && !out.contains("tcp"), "{out}");
    }
    let arguments = ["info", "--provider", "carrier-pigeon"];
    let output = fabricast_with(&arguments, &[("FI_PROVIDER", "shm")]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("FI_PROVIDER=shm"), "{}", text(&output.stderr));
}

#[test]
fn policy_with_an_unknown_provider_is_a_warning() {
    for (policy, code) in [("carrier-pigeon", 0), ("^carrier-pigeon", 0), ("=carrier-pigeon", 3)] {
        let output = fabricast(&["info", "--policy", policy, "--json"]);
        assert_eq!(output.status.code(), Some(code), "{policy}");
        let error = text(&output.stderr);
        assert!(error.contains("policy names unknown provider \"carrier-pigeon\""), "{error}");
        assert!(serde_json::from_slice::<Value>(&output.stdout).is_ok());
    }
    let known = &providers()[0];
    let output = fabricast(&["info", "--policy", known]);
    assert!(!text(&output.stderr).contains("unknown provider"), "{}", text(&output.stderr));
}

#[test]
fn info_takes_provider_and_source_of_the_settings() {
    let required = [("FABRICAST_PROVIDER", "carrier-pigeon")];
    let output = fabricast_with(&["info"], &required);
    assert_eq!(output.status.code(), Some(3));
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(
        out.contains("environment FABRICAST_PROVIDER sets the policy =carrier-pigeon"),
        "{out}"
    );
    assert!(error.contains("unknown provider \"carrier-pigeon\""), "{error}");
    // The command line overrides it.
    let known = &providers()[0];
    for option in [["--policy", ""], ["--provider", known]] {
        let output = fabricast_with(&[&["info"], &option[..]].concat(), &required);
        assert_eq!(output.status.code(), Some(0), "{option:?}: {}", text(&output.stderr));
    }
    let output = fabricast_with(&["info"], &[("FABRICAST_SOURCE", "nosuchnic0")]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("FABRICAST_SOURCE"), "{}", text(&output.stderr));
    let output = fabricast_with(&["info"], &[("FABRICAST_PROVDER", "verbs")]);
    let error = text(&output.stderr);
    assert!(error.contains("The nearest setting is FABRICAST_PROVIDER"), "{error}");
}

#[test]
fn impossible_policy_fails_with_reasons() {
    let output = fabricast(&["info", "--policy", "=carrier-pigeon"]);
    assert_eq!(output.status.code(), Some(3));
    let out = text(&output.stdout);
    assert!(out.contains("policy requires carrier-pigeon"), "{out}");
    let (code, message) = fail(&["info", "--policy", "=shm,^shm"]);
    assert_eq!(code, 2, "a policy that contradicts itself: {message}");
    assert!(message.contains("required and denied"), "{message}");
}

#[test]
fn invalid_command_line_is_a_usage_error() {
    for words in [&["sub", "t", "--count", "-1"][..], &["demo", "--time", "0"], &["fly"]] {
        let (code, message) = fail(words);
        assert_eq!(code, 2, "{words:?}: {message}");
    }
    assert_eq!(fail(&[]).0, 2);
    let output = fabricast_with(&["info"], &[("FABRICAST_LOG", "loud")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(succeed(&["--help"]).contains("Exit codes"));
}

/// A copy of the program in a new directory, with this script as fabricast-bench.
fn copy(name: &str, beside: Option<&str>) -> (testkit::temp_dir::TempDir, PathBuf) {
    use std::os::unix::fs::PermissionsExt;
    let directory = testkit::temp_dir::TempDir::new(name);
    let program = directory.join("fabricast");
    std::fs::copy(env!("CARGO_BIN_EXE_fabricast"), &program).unwrap();
    if let Some(script) = beside {
        let path = directory.join("fabricast-bench");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    (directory, program)
}

#[test]
fn bench_runs_the_program_beside_this_one_or_on_the_path() {
    const SCRIPT: &str = "echo \"$*\"; exit 7";
    let (directory, program) = copy("bench-beside", Some(SCRIPT));
    let run = |program: &PathBuf, path: &std::path::Path| {
        let mut command = Command::new(program);
        command.args(["bench", "ring", "--size", "1M", "--help"]).env("PATH", path);
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let nowhere = std::path::Path::new("/nowhere");
    let expected = (Some(7), "ring --size 1M --help\n".to_owned(), String::new());
    assert_eq!(run(&program, nowhere), expected, "beside");
    let (_directory, copied) = copy("bench-path", None);
    assert_eq!(run(&copied, &directory), expected, "on the path");
    let (code, out, error) = run(&copied, nowhere);
    assert_eq!((code, out.as_str()), (Some(3), ""), "{error}");
    for words in
        ["run \"fabricast bench\" failed", copied.to_str().unwrap(), "cargo build --release -p"]
    {
        assert!(error.contains(words), "{error}");
    }
}

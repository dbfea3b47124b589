//! The command, run as users run it.

#[path = "measurements/turns.rs"]
mod turns;

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::turns::alone;

/// Runs the command to its end, which has to come soon.
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

/// The exit code and what was said about it.
fn fail(arguments: &[&str]) -> (i32, String) {
    let output = fabricast(arguments);
    let message = text(&output.stderr);
    (output.status.code().unwrap_or_else(|| panic!("{arguments:?}: a signal: {message}")), message)
}

fn last_line(out: &str) -> Value {
    let line = out.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn info() -> Value {
    serde_json::from_str(&succeed(&["info", "--json"])).unwrap()
}

/// RDM providers of this machine that the benchmark is meant for.
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
    for word in ["libfabric", "FI_HMEM", "mr_mode", "taken", "peers on other machines", "cuda:0"] {
        assert!(out.contains(word), "{word} is missing:\n{out}");
    }
    for line in out.lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
    assert!(!out.contains('\x1b'), "colour belongs on a terminal");
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
fn one_provider_is_told_of_in_full() {
    let provider = &providers()[0];
    let out = succeed(&["info", "--provider", provider, "--verbose"]);
    assert!(out.contains("fi_info:") && out.contains("fi_tx_attr:"), "{out}");
}

#[test]
fn an_unknown_provider_is_answered_with_those_there_are() {
    let (code, message) = fail(&["info", "--provider", "carrier-pigeon"]);
    assert_eq!(code, 3, "{message}");
    assert!(message.contains("carrier-pigeon") && message.contains(&providers()[0]), "{message}");
    let (code, message) = fail(&["bench", "fabric", "--provider", "carrier-pigeon"]);
    assert_eq!(code, 3, "{message}");
    assert!(message.contains("carrier-pigeon") && message.contains(&providers()[0]), "{message}");
}

#[test]
fn libfabrics_own_filter_is_obeyed_and_shown() {
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
fn a_policy_that_names_nobody_here_is_told_so() {
    for (policy, code) in [("carrier-pigeon", 0), ("^carrier-pigeon", 0), ("=carrier-pigeon", 3)] {
        let output = fabricast(&["info", "--policy", policy, "--json"]);
        assert_eq!(output.status.code(), Some(code), "{policy}");
        let said = text(&output.stderr);
        assert!(said.contains("\"carrier-pigeon\", and no provider here is called so"), "{said}");
        assert!(serde_json::from_slice::<Value>(&output.stdout).is_ok());
    }
    let known = &providers()[0];
    let output = fabricast(&["info", "--policy", known]);
    assert!(!text(&output.stderr).contains("no provider here"), "{}", text(&output.stderr));
}

#[test]
fn an_impossible_policy_ends_with_reasons() {
    let output = fabricast(&["info", "--policy", "=carrier-pigeon"]);
    assert_eq!(output.status.code(), Some(3));
    let out = text(&output.stdout);
    assert!(out.contains("policy requires carrier-pigeon"), "{out}");
    let (code, message) = fail(&["info", "--policy", "=shm,^shm"]);
    assert_eq!(code, 2, "a policy that contradicts itself: {message}");
    assert!(message.contains("required and denied"), "{message}");
}

#[test]
fn nonsense_on_the_command_line_is_a_usage_error() {
    let bench = |more: &[&'static str]| {
        let mut all = vec!["bench", "fabric", "--provider", "shm"];
        all.extend(more);
        fail(&all)
    };
    for more in [
        &["--size", "0"][..],
        &["--size", "12Q"],
        &["--iters", "-1"],
        &["--cores", "1"],
        &["--op", "dance"],
        &["--op", "write", "--waiting", "block"],
    ] {
        let (code, message) = bench(more);
        assert_eq!(code, 2, "{more:?}: {message}");
    }
    assert_eq!(fail(&[]).0, 2);
    let output = fabricast_with(&["info"], &[("FABRICAST_LOG", "loud")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(succeed(&["--help"]).contains("Exit codes"));
}

/// Every operation, both modes, several sizes: everything is verified.
#[test]
fn measurements_check_their_data() {
    let _alone = alone();
    for provider in providers() {
        for operation in ["writedata", "write", "read", "send"] {
            let sizes = [("lat", "64", "200"), ("lat", "9", "20"), ("bw", "100000", "64")];
            for (mode, size, iterations) in sizes {
                let out = succeed(&[
                    "bench",
                    "fabric",
                    "--provider",
                    &provider,
                    "--op",
                    operation,
                    "--mode",
                    mode,
                    "--size",
                    size,
                    "--iters",
                    iterations,
                    "--window",
                    "4",
                    "--waiting",
                    "busy",
                ]);
                assert_eq!(out.lines().count(), 3, "a table, then the JSON line: {out}");
                let report = last_line(&out);
                assert_eq!(report["verified"], true, "{report}");
                assert_eq!(report["provider"], provider.as_str(), "{report}");
                assert!(report["p50_us"].as_f64() > Some(0.0), "{report}");
            }
        }
    }
}

#[test]
fn the_json_line_has_the_agreed_keys() {
    let _alone = alone();
    let provider = &providers()[0];
    for threading in ["safe", "domain"] {
        let out = succeed(&[
            "bench",
            "fabric",
            "--provider",
            provider,
            "--iters",
            "100",
            "--json",
            "--threading",
            threading,
        ]);
        assert_eq!(out.lines().count(), 1, "{out}");
        let report = last_line(&out);
        for key in [
            "p50_us",
            "p99_us",
            "p999_us",
            "gb_per_s",
            "bytes",
            "iterations",
            "provider",
            "waiting",
            "cores",
            "verified",
            "op",
            "mode",
            "threading",
            "libfabric",
            "program",
        ] {
            assert!(report.get(key).is_some(), "{key} is missing: {report}");
        }
        assert_eq!(report["threading"], threading);
        assert_eq!(report["bytes"], 64);
    }
}

/// Several processes share the allocator and the queue, and all is there at the end.
#[test]
fn what_processes_share_is_measured() {
    let _alone = alone();
    for more in [
        &["alloc", "--processes", "2", "--iters", "2000"][..],
        &["alloc", "--fixed", "--size", "4K", "--iters", "2000"],
        &["queue", "--readers", "2", "--waiting", "block", "--iters", "200"],
        &["queue", "--waiting", "adaptive", "--iters", "200"],
        &["share", "--device", "stand-in:0", "--size", "1M", "--iters", "5"],
        &["share", "--device", "stand-in:0", "--reader", "stand-in:1", "--size", "4K"],
    ] {
        let out = succeed(&[&["bench"], more].concat());
        let lines = if more[0] == "share" { 3 } else { 2 };
        assert_eq!(out.lines().count(), lines, "lines for people, then the JSON line: {out}");
        let line = out.lines().last().unwrap_or_default();
        assert!(line.starts_with("{\"p50_us\":"), "{line}");
        let report = last_line(&out);
        assert_eq!(report["verified"], true, "{out}");
        assert!(report["program"].as_str().unwrap().starts_with("0."), "{out}");
        assert!(report["histogram_ns"].is_null(), "hundreds of pairs are for programs: {out}");
    }
    let out = succeed(&["bench", "alloc", "--iters", "200", "--json"]);
    assert!(!last_line(&out)["histogram_ns"].as_array().unwrap().is_empty(), "{out}");
    for more in [
        &["alloc", "--processes", "2", "--cores", "0"][..],
        &["queue", "--readers", "33"],
        &["share", "--cores", "0"],
        &["share", "--device", "tape:0"],
    ] {
        assert_eq!(fail(&[&["bench"], more].concat()).0, 2, "{more:?}");
    }
    let (code, text) = fail(&["bench", "share", "--device", "stand-in:9"]);
    assert_eq!(code, 3, "{text}");
}

#[test]
fn messages_through_a_ring_are_checked() {
    let _alone = alone();
    for provider in providers() {
        for more in [
            &["--iters", "200"][..],
            &["--iters", "50", "--size", "1", "--watermark", "0"],
            // The stamps overlap, and chunks cut them.
            &["--iters", "50", "--size", "12", "--chunk", "3"],
            &["--mode", "bw", "--size", "65539", "--chunk", "64K", "--iters", "50"],
            &["--mode", "bw", "--size", "300K", "--ring-size", "64K", "--iters", "20"],
            &["--mode", "bw", "--size", "1M", "--iters", "64", "--waiting", "adaptive"],
            &["--mode", "bw", "--size", "100K", "--iters", "64", "--notify", "msg"],
            &["--mode", "bw", "--size", "100K", "--iters", "64", "--notify", "poll"],
        ] {
            let out = succeed(&[&["bench", "ring", "--provider", &provider], more].concat());
            assert_eq!(last_line(&out)["verified"], true, "{provider} {more:?}: {out}");
        }
    }
    for (wrong, why) in [
        (&["--ring-size", "1000"][..], "1024 would do"),
        (&["--size", "1024G"], "bytes of memory"),
        (&["--source", "127.0.0.1"], "never leaves the machine"),
        (&["--serve", "127.0.0.1:0", "--size", "64"], "cannot be used with"),
    ] {
        let arguments = [&["bench", "ring", "--provider", "shm"], wrong].concat();
        let (code, text) = fail(&arguments);
        assert_eq!(code, 2, "{wrong:?}");
        assert!(text.contains(why), "{wrong:?}: {text}");
    }
}

#[test]
fn a_ring_is_measured_between_a_server_and_a_client() {
    let _alone = alone();
    for provider in providers() {
        for more in [&["--iters", "50"][..], &["--mode", "bw", "--size", "64K", "--iters", "64"]] {
            let mut server = Command::new(env!("CARGO_BIN_EXE_fabricast"))
                .args(["bench", "ring", "--provider", &provider, "--serve", "127.0.0.1:0"])
                .stderr(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let mut said = std::io::BufReader::new(server.stderr.take().unwrap());
            let mut line = String::new();
            std::io::BufRead::read_line(&mut said, &mut line).unwrap();
            let address = line.trim().rsplit(' ').next().unwrap().to_owned();
            let arguments =
                [&["bench", "ring", "--provider", &provider], more, &[&address]].concat();
            let out = succeed(&arguments);
            assert_eq!(last_line(&out)["verified"], true, "{provider} {more:?}: {out}");
            assert!(server.wait().unwrap().success(), "{provider} {more:?}");
        }
    }
    let nobody = ["bench", "ring", "--provider", "shm", "127.0.0.1:1"];
    assert!(fail(&nobody).1.contains("connecting to 127.0.0.1:1"));
}

#[test]
fn zeroing_is_measured_and_checked() {
    let _alone = alone();
    for provider in providers() {
        for size in ["1", "64", "5000", "300K"] {
            let arguments = ["--provider", &provider, "--size", size, "--iters", "20"];
            let out = succeed(&[&["bench", "zero"], &arguments[..]].concat());
            assert_eq!(last_line(&out)["verified"], true, "{provider} {size}: {out}");
            assert!(last_line(&out)["memset_p50_us"].is_number(), "{out}");
        }
    }
    assert_eq!(fail(&["bench", "zero", "--provider", "carrier-pigeon"]).0, 3);
    assert_eq!(fail(&["bench", "zero", "--provider", "shm", "--size", "2048G"]).0, 2);
}

#[test]
fn sleeping_sides_get_there_too() {
    let _alone = alone();
    for provider in providers() {
        for waiting in ["adaptive", "block"] {
            for operation in ["writedata", "read", "send"] {
                let out = succeed(&[
                    "bench",
                    "fabric",
                    "--provider",
                    &provider,
                    "--op",
                    operation,
                    "--iters",
                    "20",
                    "--waiting",
                    waiting,
                    "--json",
                ]);
                let report = last_line(&out);
                assert_eq!(
                    (&report["verified"], &report["waiting"]),
                    (&true.into(), &waiting.into())
                );
            }
        }
    }
}

/// The second process dies in the middle of it: the first says how, and leaves
/// no zombie behind.
#[test]
fn a_dead_target_is_reported() {
    let _alone = alone();
    // Before libfabric 1.19, what a killed process leaves of shm can hang the other one.
    let version = &info()["versions"]["libfabric_running"];
    let is_old = (version["major"].as_u64(), version["minor"].as_u64()) < (Some(1), Some(19));
    let all = providers();
    let provider = all.iter().find(|name| !is_old || *name != "shm").unwrap();
    let bench = Command::new(env!("CARGO_BIN_EXE_fabricast"))
        .args(["bench", "fabric", "--provider", provider, "--iters", "1G"])
        .env_remove("FI_PROVIDER")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let children = format!("/proc/{0}/task/{0}/children", bench.id());
    let children = Path::new(&children);
    let deadline = Instant::now() + Duration::from_secs(20);
    let target = loop {
        assert!(Instant::now() < deadline, "no second process was started");
        let all = std::fs::read_to_string(children).unwrap();
        if let Some(target) = all.split_whitespace().next() {
            break target.to_owned();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // Some way into the measurement.
    std::thread::sleep(Duration::from_millis(500));
    assert!(Command::new("kill").args(["-9", &target]).status().unwrap().success());
    let output = bench.wait_with_output().unwrap();
    let message = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 4)), "{:?}: {message}", output.status);
    assert!(!message.is_empty());
    assert!(!Path::new(&format!("/proc/{target}")).exists(), "a zombie is left");
}

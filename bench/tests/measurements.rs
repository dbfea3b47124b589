//! Each benchmark, with few messages: that it ends, verifies its data, and reports results.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::measurement_lock::lock_measurements;
use testkit::processes::{children, poll_until};

/// Runs the program to its end, within a minute.
fn bench(arguments: &[&str]) -> Output {
    let start = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast-bench"));
    command.args(arguments).env_remove("FI_PROVIDER").env_remove("FABRICAST_LOG");
    let output = command.output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "{arguments:?} took too long");
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[track_caller]
fn succeed(arguments: &[&str]) -> String {
    let output = bench(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{out}\n{err}");
    out
}

/// The exit code and standard error.
fn fail(arguments: &[&str]) -> (i32, String) {
    let output = bench(arguments);
    let message = text(&output.stderr);
    (output.status.code().unwrap_or_else(|| panic!("{arguments:?}: a signal: {message}")), message)
}

fn last_line(out: &str) -> Value {
    let line = out.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

/// RDM providers of this machine that the benchmarks support.
fn providers() -> Vec<&'static str> {
    let known = ["shm", "net", "tcp", "tcp;ofi_rxm"];
    let (_, message) = fail(&["zero", "--provider", "carrier-pigeon"]);
    let names = message.split("available: ").nth(1).unwrap_or_default();
    let names: Vec<_> = names.split([',', '.', '(']).map(str::trim).collect();
    let found: Vec<_> = known.into_iter().filter(|name| names.contains(name)).collect();
    assert!(!found.is_empty(), "no provider to test with: {message}");
    found
}

#[test]
fn invalid_options_are_usage_errors() {
    for more in [
        &["--size", "0"][..],
        &["--size", "12Q"],
        &["--iters", "-1"],
        &["--cores", "1"],
        &["--op", "dance"],
        &["--op", "write", "--waiting", "block"],
    ] {
        let (code, message) = fail(&[&["fabric", "--provider", "shm"], more].concat());
        assert_eq!(code, 2, "{more:?}: {message}");
    }
    assert_eq!(fail(&[]).0, 2);
    let (code, message) = fail(&["fabric", "--provider", "carrier-pigeon"]);
    assert_eq!(code, 3, "{message}");
    assert!(message.contains("carrier-pigeon") && message.contains(providers()[0]), "{message}");
    let help = succeed(&["--help"]);
    assert!(help.contains("fabricast bench") && help.contains("Exit codes"), "{help}");
}

/// Every operation, both modes, several sizes: everything is verified.
#[test]
fn measurements_verify_their_data() {
    let _lock = lock_measurements();
    for provider in providers() {
        for operation in ["writedata", "write", "read", "send"] {
            let sizes = [("lat", "64", "200"), ("lat", "9", "20"), ("bw", "100000", "64")];
            for (mode, size, iterations) in sizes {
                let out = succeed(&[
                    "fabric",
                    "--provider",
                    provider,
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
                    "poll",
                ]);
                assert_eq!(out.lines().count(), 3, "a table, then the JSON line: {out}");
                let report = last_line(&out);
                assert_eq!(report["verified"], true, "{report}");
                assert_eq!(report["provider"], provider, "{report}");
                assert!(report["p50_us"].as_f64() > Some(0.0), "{report}");
            }
        }
    }
}

#[test]
fn json_line_has_the_agreed_keys() {
    let _lock = lock_measurements();
    let provider = &providers()[0];
    for threading in ["safe", "domain"] {
        let out = succeed(&[
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

/// Several processes share the allocator and the queue, and nothing is lost.
#[test]
fn shared_allocator_and_queue_are_measured() {
    let _lock = lock_measurements();
    for more in [
        &["alloc", "--processes", "2", "--iters", "2000"][..],
        &["alloc", "--fixed", "--size", "4K", "--iters", "2000"],
        &["queue", "--readers", "2", "--waiting", "block", "--iters", "200"],
        &["queue", "--waiting", "default", "--iters", "200"],
        &["share", "--device", "emulated:0", "--size", "1M", "--iters", "5"],
        &["share", "--device", "emulated:0", "--reader", "emulated:1", "--size", "4K"],
    ] {
        let out = succeed(more);
        let lines = if more[0] == "alloc" { 2 } else { 3 };
        assert_eq!(out.lines().count(), lines, "lines of text, then the JSON line: {out}");
        let line = out.lines().last().unwrap_or_default();
        assert!(line.starts_with("{\"p50_us\":"), "{line}");
        let report = last_line(&out);
        assert_eq!(report["verified"], true, "{out}");
        assert!(report["program"].as_str().unwrap().starts_with("0."), "{out}");
        assert!(report["histogram_ns"].is_null(), "hundreds of pairs are in the JSON only: {out}");
    }
    let out = succeed(&["alloc", "--iters", "200", "--json"]);
    assert!(!last_line(&out)["histogram_ns"].as_array().unwrap().is_empty(), "{out}");
    for more in [
        &["alloc", "--processes", "2", "--cores", "0"][..],
        &["queue", "--readers", "33"],
        &["share", "--cores", "0"],
        &["share", "--device", "tape:0"],
    ] {
        assert_eq!(fail(more).0, 2, "{more:?}");
    }
    let (code, text) = fail(&["share", "--device", "emulated:9"]);
    assert_eq!(code, 3, "{text}");
}

#[test]
fn messages_through_a_ring_are_verified() {
    let _lock = lock_measurements();
    for provider in providers() {
        for more in [
            &["--iters", "200"][..],
            &["--iters", "50", "--size", "1", "--watermark", "0"],
            // The stamps overlap, and chunks cut them.
            &["--iters", "50", "--size", "12", "--chunk", "3"],
            &["--mode", "bw", "--size", "65539", "--chunk", "64K", "--iters", "50"],
            &["--mode", "bw", "--size", "300K", "--ring-size", "64K", "--iters", "20"],
            &["--mode", "bw", "--size", "1M", "--iters", "64", "--waiting", "default"],
            &["--mode", "bw", "--size", "100K", "--iters", "64", "--notify", "msg"],
        ] {
            let out = succeed(&[&["ring", "--provider", provider], more].concat());
            assert_eq!(last_line(&out)["verified"], true, "{provider} {more:?}: {out}");
        }
    }
    for (wrong, why) in [
        (&["--ring-size", "1000"][..], "1024 would do"),
        (&["--size", "1024G"], "bytes of memory"),
        (&["--source", "127.0.0.1"], "never leaves the machine"),
        (&["--serve", "127.0.0.1:0", "--size", "64"], "cannot be used with"),
    ] {
        let arguments = [&["ring", "--provider", "shm"], wrong].concat();
        let (code, text) = fail(&arguments);
        assert_eq!(code, 2, "{wrong:?}");
        assert!(text.contains(why), "{wrong:?}: {text}");
    }
}

#[test]
fn ring_is_measured_between_a_server_and_a_client() {
    let _lock = lock_measurements();
    for provider in providers() {
        for more in [&["--iters", "50"][..], &["--mode", "bw", "--size", "64K", "--iters", "64"]] {
            let mut server = Command::new(env!("CARGO_BIN_EXE_fabricast-bench"))
                .args(["ring", "--provider", provider, "--serve", "127.0.0.1:0"])
                .stderr(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let mut errors = std::io::BufReader::new(server.stderr.take().unwrap());
            let mut line = String::new();
            std::io::BufRead::read_line(&mut errors, &mut line).unwrap();
            let address = line.trim().rsplit(' ').next().unwrap().to_owned();
            let arguments = [&["ring", "--provider", provider], more, &[&address]].concat();
            let out = succeed(&arguments);
            assert_eq!(last_line(&out)["verified"], true, "{provider} {more:?}: {out}");
            assert!(server.wait().unwrap().success(), "{provider} {more:?}");
        }
    }
    let unreachable = ["ring", "--provider", "shm", "127.0.0.1:1"];
    assert!(fail(&unreachable).1.contains("connect to 127.0.0.1:1 failed"));
}

#[test]
fn zeroing_is_measured_and_verified() {
    let _lock = lock_measurements();
    for provider in providers() {
        for size in ["1", "64", "5000", "300K"] {
            let arguments = ["--provider", provider, "--size", size, "--iters", "20"];
            let out = succeed(&[&["zero"], &arguments[..]].concat());
            assert_eq!(last_line(&out)["verified"], true, "{provider} {size}: {out}");
            assert!(last_line(&out)["memset_p50_us"].is_number(), "{out}");
        }
    }
    assert_eq!(fail(&["zero", "--provider", "carrier-pigeon"]).0, 3);
    assert_eq!(fail(&["zero", "--provider", "shm", "--size", "2048G"]).0, 2);
}

#[test]
fn messages_through_polled_memory_are_verified() {
    let _lock = lock_measurements();
    for provider in providers() {
        for more in [
            &["--mode", "lat", "--iters", "200"][..],
            &["--mode", "lat", "--iters", "50", "--size", "1"],
            &["--mode", "bw", "--iters", "64", "--size", "100K"],
            // Many rounds of the slots, and chunks of different sizes.
            &["--mode", "bw", "--iters", "20", "--size", "3000001"],
            &["--mode", "bw", "--iters", "200000", "--size", "12"],
        ] {
            let out = succeed(&[&["zero", "--provider", provider], more].concat());
            let report = last_line(&out);
            assert_eq!(report["verified"], true, "{provider} {more:?}: {out}");
            assert_eq!(report["notify"], "poll", "{out}");
        }
    }
}

#[test]
fn blocking_sides_complete() {
    let _lock = lock_measurements();
    for provider in providers() {
        for waiting in ["default", "block"] {
            for operation in ["writedata", "read", "send"] {
                let out = succeed(&[
                    "fabric",
                    "--provider",
                    provider,
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

/// The target is killed: the initiator reports how, and leaves no zombie.
#[test]
fn killed_target_is_reported() {
    let _lock = lock_measurements();
    let provider = &providers()[0];
    let bench = Command::new(env!("CARGO_BIN_EXE_fabricast-bench"))
        .args(["fabric", "--provider", provider, "--iters", "20M"])
        .env_remove("FI_PROVIDER")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let target =
        poll_until("no second process was started", || children(bench.id() as i32).pop_first());
    let target = target.0.to_string();
    // In the middle of the measurement.
    std::thread::sleep(Duration::from_millis(500));
    assert!(Command::new("kill").args(["-9", &target]).status().unwrap().success());
    let output = bench.wait_with_output().unwrap();
    let message = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 4)), "{:?}: {message}", output.status);
    assert!(!message.is_empty());
    assert!(!Path::new(&format!("/proc/{target}")).exists(), "a zombie is left");
}

/// Also usage errors, and failures before the start.
#[test]
fn failure_with_json_is_one_line() {
    for (arguments, code) in [
        (&["fly", "--json"][..], 2),
        (&["ring", "--json"], 2),
        (&["ring", "--provider", "carrier-pigeon", "--json"], 3),
        (&["topic", "--size", "1", "--json"], 2),
        (&["transfer", "--from", "emulated:99", "--json"], 3),
    ] {
        let output = bench(arguments);
        let (out, error) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{arguments:?} {out} {error}");
        assert_eq!(out.lines().count(), 1, "{arguments:?} {out}");
        let line = last_line(&out);
        assert_eq!(line["exit_code"], code, "{line}");
        assert!(line["error"].as_str().is_some_and(|why| !why.is_empty()), "{line}");
    }
}

#[test]
fn too_large_measurement_fails_at_once() {
    let start = Instant::now();
    for arguments in [
        &["topic", "--size", "1024G"][..],
        &["topic", "--inter-node", "--size", "1024G"],
        &["transfer", "--from", "emulated:0", "--size", "4096G"],
        &["share", "--device", "emulated:0", "--size", "4096G"],
    ] {
        let (code, message) = fail(arguments);
        assert_eq!(code, 7, "{arguments:?}: {message}");
        for words in ["it takes ", "GiB are available", "Use a smaller --size"] {
            assert!(message.contains(words), "{words}: {arguments:?}: {message}");
        }
    }
    for arguments in
        [&["topic", "--size", "1025G"][..], &["ring", "--provider", "shm", "--ring-size", "128G"]]
    {
        let (code, message) = fail(arguments);
        assert!(code == 2 && message.contains("at most"), "{arguments:?}: {message}");
    }
    // With fewer descriptors than the service needs.
    let mut command = Command::new("sh");
    let line = "ulimit -n 200; exec \"$0\" topic --idle-topics 300 --seconds 1";
    let output =
        command.args(["-c", line, env!("CARGO_BIN_EXE_fabricast-bench")]).output().unwrap();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{message}");
    assert_eq!(
        message,
        "fabricast: measure topics failed: it takes 364 file descriptors, and this process may have 200 \
         (RLIMIT_NOFILE). Use fewer topics, or raise the limit: ulimit -Hn\n"
    );
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
}

/// A path of GPUs with emulated devices must be recognizable.
#[test]
fn json_shows_that_no_gpu_took_part() {
    let _lock = lock_measurements();
    let arguments =
        ["transfer", "--from", "emulated:0", "--size", "64K", "--iters", "11", "--json"];
    let line = last_line(&succeed(&arguments));
    assert_eq!((&line["path"], &line["emulated"]), (&"cuda-ipc".into(), &true.into()), "{line}");
}

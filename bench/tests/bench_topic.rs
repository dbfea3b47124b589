//! Benchmarks of topics, with few messages: that they end, verify their data, report results, and
//! leave nothing behind.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use testkit::measurement_lock::lock_measurements;
use testkit::processes::{cores, status};
use testkit::temp_dir::TempDir;

/// The last line of its output.
#[track_caller]
fn bench(name: &str, arguments: &[&str]) -> Value {
    let _lock = lock_measurements();
    let directory = TempDir::new(&format!("bench-topic-{name}"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast-bench"));
    command.args(["topic"]).args(arguments).args(["--waiting", "block", "--json"]);
    let output = command.env("TMPDIR", &*directory).env_remove("FI_PROVIDER").output().unwrap();
    let (out, error) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{out}\n{error}");
    assert_eq!(out.lines().count(), 1, "{out}");
    assert_eq!(directory.entries(), [""; 0].map(PathBuf::from));
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found["verified"], true, "{found}");
    found
}

/// The stages of its report.
#[track_caller]
fn stages(found: &Value) -> Vec<&str> {
    let all = found["stages"].as_array().unwrap();
    assert!(all.iter().all(|stage| stage["p50_us"].as_f64() >= Some(0.0)), "{found}");
    all.iter().map(|stage| stage["stage"].as_str().unwrap()).collect()
}

/// The numbered directories of a directory in /proc.
fn numbered(directory: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    all.map(|entry| entry.path())
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_number))
        .collect()
}

/// Two busy-polling processes need a core each: a process must not stay on the core of the one that
/// started it, nor must threads of nodes.
#[test]
fn started_process_has_its_own_core() {
    let cores: Vec<_> = cores().iter().map(usize::to_string).collect();
    let [first, second, ..] = &cores[..] else {
        testkit::skip!("only one core is available");
    };
    let _lock = lock_measurements();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast-bench"));
    command.args(["topic", "--inter-node", "--waiting", "default", "--iters", "22"]);
    command.args(["--cores", &format!("{first},{second}")]).env_remove("FI_PROVIDER");
    let mut bench = command.stdout(Stdio::null()).spawn().unwrap();
    let number = bench.id().to_string();
    let (mut targets, mut threads) = (0, 0);
    while bench.try_wait().unwrap().is_none() {
        for process in numbered(Path::new("/proc")) {
            let is_it = process.ends_with(&number);
            if !is_it && status(&process, "PPid") != number {
                continue;
            }
            let words = std::fs::read_to_string(process.join("cmdline")).unwrap_or_default();
            let is_target = words.contains("exchange-target");
            for thread in numbered(&process.join("task")) {
                let (name, where_) =
                    (status(&thread, "Name"), status(&thread, "Cpus_allowed_list"));
                // When they start, libraries use the first core for a moment.
                targets += usize::from(is_target && where_ == *second);
                // So does the thread that opens a provider: it loads libfabric.
                let is_bound = !["fabricast-bench", "fabricast-open"].contains(&name.as_str());
                if name.starts_with("fabricast-") && is_bound && !where_.is_empty() {
                    assert!(where_ != *first && where_ != *second, "{name} is on {where_}");
                    threads += 1;
                }
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(bench.wait().unwrap().success());
    assert!(targets > 0, "the other end of a ring was not seen on a core of its own");
    assert!(threads > 0, "no thread of a node was seen");
}

#[test]
fn fan_out_reports_a_row_for_each_number_of_readers() {
    let found = bench("fan-out", &["--fan-out", "2", "--iters", "22"]);
    let rows = found["rows"].as_array().unwrap();
    let asleep = |row: &&Value| row["waiting"] == "block";
    let readers: Vec<_> = rows.iter().filter(asleep).map(|row| &row["subscribers"]).collect();
    assert_eq!(readers, [1, 2], "{found}");
    for row in rows {
        for key in ["p50_us", "p99_us", "publish_p50_us", "publish_p99_us", "queue_p50_us"] {
            assert!(row[key].as_f64() > Some(0.0), "{key} in {row}");
        }
    }
}

#[test]
fn intra_node_report_is_consistent() {
    let found = bench("within", &["--iters", "33"]);
    assert!(found["p50_us"].as_f64() > Some(0.0), "{found}");
    assert_eq!((&found["iterations"], &found["bytes"]), (&33.into(), &64.into()), "{found}");
    assert_eq!(stages(&found), ["loan", "queue", "wakeup", "release"], "{found}");
    assert_eq!((&found["verified_messages"], &found["note"]), (&4.into(), &Value::Null), "{found}");
    let (all, queue) = (found["p50_us"].as_f64().unwrap(), found["queue_p50_us"].as_f64().unwrap());
    assert!(queue > 0.0, "{found}");
    let beyond = found["overhead_over_queue_us"].as_f64().unwrap();
    assert!((beyond - (all - queue)).abs() < 1e-6, "{found}");
    let more = [
        "--iters",
        "33",
        "--size",
        "1M",
        "--subscribers",
        "3",
        "--single-subscriber",
        "--time-fill",
    ];
    let found = bench("ratio", &more);
    assert!(found["fan_out_ratio"].as_f64() > Some(0.0), "{found}");
    assert_eq!(
        (&found["subscribers"], &found["verified_messages"]),
        (&3.into(), &8.into()),
        "{found}"
    );
    assert_eq!(stages(&found), ["loan", "fill", "queue", "wakeup", "release"], "{found}");
}

#[test]
fn fewer_and_more_cores_than_processes_are_accepted() {
    let core = cores()[0].to_string();
    let found = bench("one core", &["--iters", "33", "--subscribers", "2", "--cores", &core]);
    assert_eq!(found["note"], "publisher and readers share one core", "{found}");
    let four = [core.as_str(); 4].join(",");
    let found = bench("four", &["--inter-node", "--iters", "33", "--cores", &four]);
    assert!(found["note"].as_str().unwrap().starts_with("services have"), "{found}");
    assert!(found["ring_p50_us"].as_f64() > Some(0.0), "{found}");
}

#[test]
fn inter_node_report_is_consistent() {
    let found = bench("small", &["--inter-node", "--iters", "33", "--subscribers", "2"]);
    assert!(found["ring_p50_us"].as_f64() > Some(0.0), "{found}");
    assert!(found["messages_per_s"].as_f64() > Some(0.0), "{found}");
    assert_eq!((&found["path"], &found["stream_depth"]), (&"ring".into(), &1024.into()));
    let small = stages(&found);
    assert!(small.starts_with(&["loan", "queue", "wire"]), "{found}");
    assert!(small.ends_with(&["wakeup", "release"]), "{found}");
    assert!(small.contains(&found["slowest_stage"].as_str().unwrap()), "{found}");
    let device = ["--memory", "emulated:0", "--remote-memory", "emulated:1"];
    let large = ["--inter-node", "--iters", "11", "--size", "4M"];
    let found = bench("large", &[&large[..], &device].concat());
    assert_eq!(
        (&found["path"], &found["remote_memory"]),
        (&"staged-ring".into(), &"emulated:1".into())
    );
    assert_eq!(
        stages(&found),
        ["loan", "queue", "copy-out", "wire", "copy-in", "wakeup", "release"],
        "{found}"
    );
    let baselines = found["stage_baselines"].as_array().unwrap();
    assert_eq!(baselines.len(), 3, "{found}");
    assert!(baselines.iter().all(|it| it["p99_us"].as_f64() >= it["p50_us"].as_f64()), "{found}");
    assert_eq!((&found["lanes"], &found["fan_out_ratio"]), (&1.into(), &Value::Null), "{found}");
    let threads = found["threads"].as_array().unwrap();
    // Not every system counts their CPU time.
    let is_counted = Path::new("/proc/self/schedstat").exists();
    for service in ["writer", "reader"].into_iter().filter(|_| is_counted) {
        assert!(threads.iter().any(|it| it["service"] == service), "{service}: {found}");
    }
    let slowest = baselines.iter().find(|it| it["stage"] == found["slowest_stage"]).unwrap();
    assert!(
        baselines.iter().all(|it| it["p50_us"].as_f64() <= slowest["p50_us"].as_f64()),
        "{found}"
    );
    assert!(baselines.iter().all(|it| it["p50_us"].as_f64() > Some(0.0)), "{found}");
    assert!(found["ratio_to_slowest"].as_f64() > Some(0.0), "{found}");
}

/// The ring throughput baseline has as many lanes as the messages, and messages of all readers are
/// interleaved with those of one reader.
#[test]
fn several_lanes_and_readers_are_reported() {
    if cores().len() < 2 {
        eprintln!("one core has one lane");
        return;
    }
    let arguments =
        ["--inter-node", "--iters", "11", "--size", "2M", "--lanes", "2", "--single-subscriber"];
    let more = ["--subscribers", "2", "--memory", "emulated:0", "--remote-memory", "emulated:1"];
    for (more, wire_only) in [(&more[..], false), (&more[..2], true)] {
        let found = bench("lanes", &[&arguments[..], more].concat());
        assert_eq!(found["lanes"], 2, "{found}");
        let one = found["single_subscriber_p50_us"].as_f64().unwrap();
        let ratio = found["fan_out_ratio"].as_f64().unwrap();
        assert!((ratio - found["p50_us"].as_f64().unwrap() / one).abs() < 1e-6, "{found}");
        let baselines = found["stage_baselines"].as_array().unwrap();
        let stages: Vec<_> = baselines.iter().map(|it| it["stage"].as_str().unwrap()).collect();
        // Host memory is not copied out.
        let expected =
            if wire_only { &["wire", "copy-in"][..] } else { &["copy-out", "wire", "copy-in"] };
        assert_eq!(stages, expected, "{found}");
    }
}

#[test]
fn baseline_is_reported_with_its_stages() {
    let arguments = ["--baseline", "thesis", "--iters", "11", "--size", "1M", "--subscribers", "2"];
    let found =
        bench("baseline", &[&arguments[..], &["--single-subscriber", "--cores", "auto"]].concat());
    assert!(found["fan_out_ratio"].as_f64() > Some(0.0), "{found}");
    let baseline = &found["baseline"];
    assert_eq!(baseline["stages"].as_array().unwrap().len(), 5, "{found}");
    for key in ["p50_us", "bound", "ratio", "fraction_of_bound"] {
        assert!(baseline[key].as_f64() > Some(0.0), "{key}: {found}");
    }
}

#[test]
fn idle_topics_and_many_topics_are_reported() {
    let found = bench("idle", &["--idle-topics", "20", "--seconds", "1"]);
    assert!(found["cpu_percent"].is_number() && found["bytes_per_topic"].is_number(), "{found}");
    let many = ["--many-topics", "6", "--subscribers", "4", "--seconds", "1", "--size", "4K"];
    let found = bench("many", &many);
    assert_eq!((&found["lost"], &found["topics"]), (&0.into(), &6.into()), "{found}");
    assert!(found["smallest_share"].as_f64() > Some(0.0), "{found}");
    let one_way = ["--one-way", "--processes", "2", "--workers", "2"];
    let found = bench("many", &[&many[..], &one_way[..]].concat());
    assert_eq!((&found["lost"], &found["processes"]), (&0.into(), &2.into()), "{found}");
    assert!(found["smallest_share"].as_f64() > Some(0.0), "{found}");
}

#[test]
fn invalid_options_are_usage_errors() {
    for arguments in [
        &["--size", "8"][..],
        &["--cores", "1000000"],
        &["--intra-node", "--inter-node"],
        &["--fan-out", "2", "--subscribers", "2"],
        &["--fan-out", "2", "--single-subscriber"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast-bench"));
        let output = command.args(["topic"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

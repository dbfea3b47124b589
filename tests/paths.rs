//! `fabricast paths`, run as users run it, with agents of other processes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fabric::{Caps, EndpointKind, Query};
use serde_json::Value;
use testkit::children::{self, Child};
use transfer::{Agent, AgentOptions, Rights};

const TIMEOUT: Duration = Duration::from_secs(20);

testkit::child_entry!(enter);

/// What the other process does: in this directory, and with a fabric if its provider is named.
fn enter(words: &[&str]) {
    let [place, fabric @ ..] = words else { panic!("no place") };
    let place = Path::new(place);
    let mut options = AgentOptions::new("decoder").directory(place);
    if let [provider] = fabric {
        options = options.fabric(&query(provider).first().unwrap());
    }
    let agent = Agent::start(options).unwrap();
    let device = gpu::Device::open("emulated:1".parse().unwrap()).unwrap();
    let memory = device.allocate_shared(1 << 20, &[]).unwrap();
    let all = agent.register(&memory, Rights::ALL).unwrap();
    let read_only = agent.register(&memory, Rights::READ).unwrap();
    std::fs::write(place.join("read-only"), read_only.descriptor().encode().unwrap()).unwrap();
    // Last, and whole: who sees it knows that all is there.
    std::fs::write(place.join("part"), all.descriptor().encode().unwrap()).unwrap();
    std::fs::rename(place.join("part"), place.join("region")).unwrap();
    let end = Instant::now() + 3 * TIMEOUT;
    while !place.join("end").exists() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn query(provider: &str) -> Query {
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
    query.provider(provider).source("127.0.0.1")
}

/// RDM over tcp is called `net` before libfabric 1.18.
fn tcp() -> &'static str {
    if query("tcp").first().is_ok() { "tcp" } else { "net" }
}

/// Another process with an agent, and its directory.
struct AgentProcess {
    child: Child,
    directory: PathBuf,
}

impl AgentProcess {
    fn start() -> Self {
        Self::start_with(None)
    }

    fn start_with(fabric: Option<&str>) -> Self {
        let directory = empty_directory();
        let words = std::iter::once(directory.as_os_str()).chain(fabric.map(OsStr::new));
        let child = Child::start(&mut children::respawn(words));
        let other = Self { child, directory };
        let end = Instant::now() + TIMEOUT;
        while !other.directory.join("region").exists() {
            assert!(Instant::now() < end, "the other side does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        other
    }

    fn cards(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.directory).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|end| end == "card")).collect()
    }

    fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn empty_directory() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("fabricast-paths-{}-{number}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

fn fabricast(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fabricast"));
    command.arg("paths").args(arguments).env_remove("FABRICAST_LOG").output().unwrap()
}

#[track_caller]
fn succeed(arguments: &[&str]) -> String {
    let output = fabricast(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments:?}\n{out}\n{err}");
    out
}

/// The exit code, and everything that was said.
fn fail(arguments: &[&str]) -> (Option<i32>, String) {
    let output = fabricast(arguments);
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(out: &str) -> Value {
    assert_eq!(out.lines().count(), 1, "{out}");
    serde_json::from_str(out).unwrap()
}

/// The choices for an end here and one there.
fn choices<'a>(peer: &'a Value, here: &str, there: &str) -> Vec<&'a Value> {
    let has = |list: &Value, name: &str| list.as_array().unwrap().iter().any(|one| one == name);
    let choices = peer["choices"].as_array().unwrap().iter();
    let found = choices.filter(|choice| has(&choice["local"], here) && choice["remote"] == there);
    found.collect()
}

#[test]
fn the_table_is_that_of_the_documentation() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/paths.md");
    let page = std::fs::read_to_string(page).unwrap();
    let out = succeed(&[]);
    let table = json(&succeed(&["--json"]));
    let situations = table["situations"].as_array().unwrap();
    assert!(situations.len() > 10, "{table}");
    for judged in situations {
        let situation = judged["situation"].as_str().unwrap();
        let taken = match judged["taken"].as_str() {
            Some(path) => format!("`{path}`"),
            None => "**none: an error with all reasons**".to_owned(),
        };
        assert!(page.contains(&format!("| {situation} | {taken} |")), "{judged}");
        assert!(out.contains(situation), "{out}");
        assert_eq!(judged["candidates"].as_array().unwrap().len(), 5, "{judged}");
    }
    assert!(out.lines().all(|line| line.chars().count() <= 120), "{out}");
    // Another policy, another table.
    let denied = json(&succeed(&["--json", "--policy", "^cuda-ipc"]));
    let is_ipc = |judged: &Value| judged["taken"] == "cuda-ipc";
    assert!(situations.iter().any(is_ipc));
    assert!(!denied["situations"].as_array().unwrap().iter().any(is_ipc), "{denied}");
    assert!(succeed(&["--policy", "^cuda-ipc"]).contains("not cuda-ipc: the policy denies it"));
    let required = succeed(&["--policy", "=fabric-direct"]);
    for why in [
        "not same-process: the policy requires other paths",
        "not fabric-direct: they are one process",
        "not fabric-direct: the provider does not reach",
    ] {
        assert!(required.contains(why), "{why} is missing:\n{required}");
    }
    assert_eq!(fail(&["--policy", "=cuda-ipc,^cuda-ipc"]).0, Some(2));
}

#[test]
fn an_agent_that_runs_is_told_of_by_its_card_and_by_its_directory() {
    let other = AgentProcess::start();
    let cards = other.cards();
    assert_eq!(cards.len(), 1, "{cards:?}");
    let card = cards[0].display().to_string();
    for place in [&card, &other.file("")] {
        let report = json(&succeed(&["--explain", place, "--json"]));
        let [peer] = report["peers"].as_array().unwrap().as_slice() else { panic!("{report}") };
        assert_eq!((&peer["label"], &peer["locality"]), (&"decoder".into(), &"SameMachine".into()));
        let found = choices(peer, "host memory", "host memory of a shared segment");
        let [choice] = found.as_slice() else { panic!("{peer}") };
        assert_eq!(choice["taken"], "shared-memory", "{choice}");
        assert_eq!(choice["operations"], serde_json::json!(["put", "get"]));
        let refused = choice["candidates"].as_array().unwrap().iter();
        let refused = refused.filter(|candidate| candidate["verdict"] == "refused");
        assert_eq!(refused.filter(|candidate| candidate["reason"].is_string()).count(), 4);
        for choice in choices(peer, "host memory", "device memory of a pool") {
            assert_eq!(choice["taken"], "cuda-ipc", "{choice}");
        }
        if gpu::Device::count(gpu::Implementation::Cuda).unwrap_or(0) == 0 {
            for choice in choices(peer, "host memory", "device memory of cudaMalloc") {
                assert!(choice["taken"].is_null(), "{choice}");
                assert_eq!(verdict(choice, "cuda-ipc"), ("refused", "export-obstacle"), "{choice}");
                let is_why = |candidate: &Value| candidate["cause"] == "NoLegacyHandle";
                assert!(choice["candidates"].as_array().unwrap().iter().any(is_why), "{choice}");
            }
        }
    }
    let out = succeed(&["--explain", &card]);
    for words in
        ["Agent \"decoder\", on this machine", "taken", "refused: they are different processes"]
    {
        assert!(out.contains(words), "{words} is missing:\n{out}");
    }
    assert!(out.lines().all(|line| line.chars().count() <= 120), "{out}");
    // It is asked, not changed: it is there, and can be asked again.
    assert_eq!(other.cards(), cards);
}

#[test]
fn a_region_is_judged_as_it_is() {
    let other = AgentProcess::start();
    let region = ["--explain", &other.file(""), "--region", &other.file("region")];
    let report = json(&succeed(&[&region[..], &["--json"]].concat()));
    let peer = &report["peers"][0];
    for here in ["host memory", "emulated:0", "emulated:1"] {
        let found = choices(peer, here, "region 1");
        let [choice] = found.as_slice() else { panic!("{here}: {peer}") };
        assert_eq!(
            (&choice["taken"], &choice["remote_devices"][0]),
            (&"cuda-ipc".into(), &"emulated:1".into())
        );
    }
    let (code, said) = fail(&[&region[..], &["--policy", "=fabric-direct"]].concat());
    assert_eq!(code, Some(3), "{said}");
    assert!(
        said.contains("the policy requires other paths") && said.contains("no fabric"),
        "{said}"
    );
    // What its rights do not allow is said.
    let read_only = ["--explain", &other.file(""), "--region", &other.file("read-only")];
    let out = succeed(&read_only);
    assert!(out.contains("put: the region's rights do not allow it") && out.contains("; get: "));
    // Another agent's.
    let another = AgentProcess::start();
    let card = another.cards()[0].display().to_string();
    let (code, said) = fail(&["--explain", &card, "--region", &other.file("region")]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("of another agent"), "{said}");
}

/// What became of a path, and why.
fn verdict<'a>(choice: &'a Value, path: &str) -> (&'a str, &'a str) {
    let candidates = choice["candidates"].as_array().unwrap();
    let found = candidates.iter().find(|candidate| candidate["path"] == path).unwrap();
    let text = |key: &str| found[key].as_str().unwrap_or_default();
    (text("verdict"), text("reason"))
}

#[test]
fn with_a_fabric_its_paths_are_judged_too() {
    let (with, without) = (AgentProcess::start_with(Some(tcp())), AgentProcess::start());
    let ask = |other: &AgentProcess, more: &[&str]| {
        let place = other.file("");
        let arguments = [&["--explain", &place, "--timeout", "20", "--json"], more].concat();
        json(&succeed(&arguments))["peers"][0].clone()
    };
    for (more, host, device) in [
        (&["--fabric"][..], ("refused", "better"), ("refused", "not-registered")),
        (&["--fabric", tcp()], ("refused", "better"), ("refused", "not-registered")),
        (&["--fabric", "--policy", "fabric-direct"], ("taken", ""), ("refused", "not-registered")),
        (&["--fabric", "shm"], ("refused", "no-fabric"), ("refused", "no-fabric")),
        (&[], ("refused", "no-fabric"), ("refused", "no-fabric")),
    ] {
        let peer = ask(&with, more);
        let to_host = choices(&peer, "host memory", "host memory of a shared segment");
        assert_eq!(verdict(to_host[0], "fabric-direct"), host, "{more:?}: {peer}");
        let to_device = choices(&peer, "host memory", "device memory of a pool");
        assert_eq!(verdict(to_device[0], "fabric-direct"), device, "{more:?}: {peer}");
    }
    // One that has none is asked with any.
    let peer = ask(&without, &["--fabric"]);
    let found = choices(&peer, "host memory", "host memory of a shared segment");
    assert_eq!(verdict(found[0], "fabric-direct"), ("refused", "no-fabric"));
    let out = succeed(&["--explain", &without.file(""), "--fabric", tcp()]);
    let words = |out: &str| out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words(&out)
            .contains(&format!("no common provider: this agent has {}, the peer none", tcp())),
        "{out}"
    );
    // A region with its keys; and a provider that nobody has.
    let region = ["--explain", &with.file(""), "--region", &with.file("region")];
    let more = ["--fabric", "--policy", "=fabric-staged", "--json"];
    let peer = json(&succeed(&[&region[..], &more].concat()))["peers"][0].clone();
    assert_eq!(choices(&peer, "host memory", "region 1")[0]["taken"], "fabric-staged");
    let (code, said) = fail(&["--explain", &with.file(""), "--fabric", "carrier-pigeon"]);
    assert_eq!(code, Some(3), "{said}");
    assert_eq!(fail(&["--fabric", tcp()]).0, Some(2), "without a peer");
}

/// The socket is nowhere to be seen, as between containers without a common directory.
#[test]
fn a_fabric_leads_to_an_agent_whose_directory_is_not_seen() {
    let mut other = AgentProcess::start_with(Some(tcp()));
    let (card, copy) = (other.cards()[0].clone(), other.directory.join("copy"));
    std::fs::copy(&card, &copy).unwrap();
    // What lies beside the socket, too: it tells whether the agent lives.
    std::fs::remove_file(&card).unwrap();
    std::fs::remove_file(card.with_extension("")).unwrap();
    let ask = ["--explain", &copy.display().to_string(), "--json"];
    let taken = |more: &[&str]| {
        let output = fabricast(&[&ask[..], more].concat());
        let peer = json(&text(&output.stdout))["peers"][0].clone();
        let found = choices(&peer, "host memory", "host memory of a shared segment");
        (output.status.code(), found[0].clone())
    };
    let (code, choice) = taken(&["--fabric", "--timeout", "20"]);
    assert_eq!((code, &choice["taken"]), (Some(0), &"fabric-direct".into()), "{choice}");
    assert_eq!(choice["fallback"], "no-descriptor-passing");
    assert_eq!(taken(&["--timeout", "0.1"]).0, Some(6));
    // It is told who does not answer.
    other.child.kill();
    let (code, choice) = taken(&["--fabric", "--timeout", "2"]);
    assert_eq!((code, verdict(&choice, "fabric-direct")), (Some(6), ("refused", "no-fabric")));
}

#[test]
fn that_nobody_is_there_has_an_exit_code_of_its_own() {
    let mut other = AgentProcess::start();
    let card = other.cards()[0].display().to_string();
    other.child.kill();
    let start = Instant::now();
    for place in [&card, &other.file("")] {
        let (code, said) = fail(&["--explain", place]);
        assert_eq!(code, Some(6), "{said}");
        let lines: Vec<_> = said.lines().filter(|line| !line.starts_with("fabricast:")).collect();
        let gone = format!("Agent \"decoder\" is dead, its card: {card}");
        assert_eq!(lines, [gone], "{said}");
    }
    // A copy of the card, where the agent's directory is not seen.
    let copy = std::env::temp_dir().join(format!("fabricast-copy-{}", std::process::id()));
    std::fs::rename(&card, &copy).unwrap();
    let (code, said) = fail(&["--explain", &copy.display().to_string(), "--timeout", "0.1"]);
    std::fs::remove_file(&copy).unwrap();
    assert_eq!(code, Some(6), "{said}");
    assert!(said.contains("no descriptor can be passed") && said.contains("refused"), "{said}");
    assert!(start.elapsed() < TIMEOUT);
    let empty = empty_directory();
    let nothing = empty.join("agent.card").display().to_string();
    assert_eq!(fail(&["--explain", &empty.display().to_string()]).0, Some(6));
    assert_eq!(fail(&["--explain", &nothing]).0, Some(6));
    std::fs::write(&nothing, "a card of another game").unwrap();
    assert_eq!(fail(&["--explain", &nothing]).0, Some(2));
    assert_eq!(fail(&["--region", &nothing]).0, Some(2));
    std::fs::remove_dir_all(empty).unwrap();
}

#[test]
fn an_agent_takes_its_card_along_when_it_ends() {
    let mut other = AgentProcess::start();
    assert_eq!(other.cards().len(), 1);
    std::fs::write(other.directory.join("end"), "").unwrap();
    other.child.finish(TIMEOUT);
    assert!(other.cards().is_empty());
    assert_eq!(fail(&["--explain", &other.file("")]).0, Some(6));
}

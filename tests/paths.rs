//! `fabricast paths` with agents of other processes.

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

/// The child process: an agent in this directory, with a fabric if a provider is named.
fn enter(words: &[&str]) {
    let [directory, fabric @ ..] = words else { panic!("no directory") };
    let directory = Path::new(directory);
    let mut options = AgentOptions::new("decoder").directory(directory);
    if let [provider] = fabric {
        options = options.fabric(&query(provider).first().unwrap());
    }
    let agent = Agent::start(options).unwrap();
    let device = gpu::Device::open("emulated:1".parse().unwrap()).unwrap();
    let memory = device.allocate_shared(1 << 20, &[]).unwrap();
    let all = agent.register(&memory, Rights::ALL).unwrap();
    let read_only = agent.register(&memory, Rights::READ).unwrap();
    std::fs::write(directory.join("read-only"), read_only.descriptor().encode().unwrap()).unwrap();
    // Renamed last: when the parent sees it, everything is ready.
    std::fs::write(directory.join("part"), all.descriptor().encode().unwrap()).unwrap();
    std::fs::rename(directory.join("part"), directory.join("region")).unwrap();
    let end = Instant::now() + 3 * TIMEOUT;
    while !directory.join("end").exists() && Instant::now() < end {
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
            assert!(Instant::now() < end, "the other process does not start");
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

/// The exit code, and standard output and error.
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

/// The choices for local and remote memory.
fn choices<'a>(peer: &'a Value, local: &str, remote: &str) -> Vec<&'a Value> {
    let has = |list: &Value, name: &str| list.as_array().unwrap().iter().any(|one| one == name);
    let choices = peer["choices"].as_array().unwrap().iter();
    let found = choices.filter(|choice| has(&choice["local"], local) && choice["remote"] == remote);
    found.collect()
}

#[test]
fn table_equals_that_of_the_documentation() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/paths.md");
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
        assert_eq!(judged["candidates"].as_array().unwrap().len(), 7, "{judged}");
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
        "not fabric-direct: they are the same process",
        "not fabric-direct: the provider does not reach",
    ] {
        assert!(required.contains(why), "{why} is missing:\n{required}");
    }
    assert_eq!(fail(&["--policy", "=cuda-ipc,^cuda-ipc"]).0, Some(2));
}

#[test]
fn running_agent_is_explained_by_card_and_by_directory() {
    let other = AgentProcess::start();
    let cards = other.cards();
    assert_eq!(cards.len(), 1, "{cards:?}");
    let card = cards[0].display().to_string();
    for path in [&card, &other.file("")] {
        let report = json(&succeed(&["--explain", path, "--json"]));
        let [peer] = report["peers"].as_array().unwrap().as_slice() else { panic!("{report}") };
        assert_eq!((&peer["label"], &peer["locality"]), (&"decoder".into(), &"SameMachine".into()));
        let found = choices(peer, "host memory", "host memory of a shared segment");
        let [choice] = found.as_slice() else { panic!("{peer}") };
        assert_eq!(choice["taken"], "shared-memory", "{choice}");
        assert_eq!(choice["operations"], serde_json::json!(["put", "get"]));
        let refused = choice["candidates"].as_array().unwrap().iter();
        let refused = refused.filter(|candidate| candidate["verdict"] == "refused");
        assert_eq!(refused.filter(|candidate| candidate["reason"].is_string()).count(), 6);
        for choice in choices(peer, "host memory", "device memory of a pool") {
            assert_eq!(choice["taken"], "cuda-ipc", "{choice}");
        }
        if gpu::Device::count(gpu::Implementation::Cuda).unwrap_or(0) == 0 {
            for choice in choices(peer, "host memory", "device memory of cudaMalloc") {
                assert_eq!(choice["taken"], "host-staged", "{choice}");
                assert_eq!(verdict(choice, "cuda-ipc"), ("refused", "export-obstacle"), "{choice}");
                let has_cause = |candidate: &Value| candidate["cause"] == "NoLegacyHandle";
                assert!(choice["candidates"].as_array().unwrap().iter().any(has_cause), "{choice}");
            }
        }
    }
    let out = succeed(&["--explain", &card]);
    for words in
        ["Agent \"decoder\", on this machine", "taken", "refused: they are different processes"]
    {
        assert!(out.contains(words), "{words} is missing:\n{out}");
    }
    assert!(out.ends_with("To examine fabric paths, too: --fabric\n"), "{out}");
    assert!(out.lines().all(|line| line.chars().count() <= 120), "{out}");
    // The agent is not changed.
    assert_eq!(other.cards(), cards);
}

#[test]
fn region_is_explained_with_its_device_and_rights() {
    let other = AgentProcess::start();
    let region = ["--explain", &other.file(""), "--region", &other.file("region")];
    let report = json(&succeed(&[&region[..], &["--json"]].concat()));
    let peer = &report["peers"][0];
    for local in ["host memory", "emulated:0", "emulated:1"] {
        let found = choices(peer, local, "region 1");
        let [choice] = found.as_slice() else { panic!("{local}: {peer}") };
        assert_eq!(
            (&choice["taken"], &choice["remote_devices"][0]),
            (&"cuda-ipc".into(), &"emulated:1".into())
        );
    }
    let (code, output) = fail(&[&region[..], &["--policy", "=fabric-direct"]].concat());
    assert_eq!(code, Some(3), "{output}");
    assert!(
        output.contains("the policy requires other paths")
            && output.contains("no provider in common"),
        "{output}"
    );
    // Operations that its rights deny are listed.
    let read_only = ["--explain", &other.file(""), "--region", &other.file("read-only")];
    let out = succeed(&read_only);
    assert!(out.contains("put: the region's rights do not allow it") && out.contains("; get: "));
    // A region of another agent.
    let another = AgentProcess::start();
    let card = another.cards()[0].display().to_string();
    let (code, output) = fail(&["--explain", &card, "--region", &other.file("region")]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("belongs to another agent"), "{output}");
}

/// The verdict about a path, and its reason.
fn verdict<'a>(choice: &'a Value, path: &str) -> (&'a str, &'a str) {
    let candidates = choice["candidates"].as_array().unwrap();
    let found = candidates.iter().find(|candidate| candidate["path"] == path).unwrap();
    let text = |key: &str| found[key].as_str().unwrap_or_default();
    (text("verdict"), text("reason"))
}

#[test]
fn paths_of_a_fabric_are_explained() {
    let (with, without) = (AgentProcess::start_with(Some(tcp())), AgentProcess::start());
    let ask = |other: &AgentProcess, more: &[&str]| {
        let directory = other.file("");
        let arguments = [&["--explain", &directory, "--timeout", "20", "--json"], more].concat();
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
    // For an agent without a fabric any provider is used.
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
    // A region with its keys; and an unknown provider.
    let region = ["--explain", &with.file(""), "--region", &with.file("region")];
    let more = ["--fabric", "--policy", "=fabric-staged", "--json"];
    let peer = json(&succeed(&[&region[..], &more].concat()))["peers"][0].clone();
    assert_eq!(choices(&peer, "host memory", "region 1")[0]["taken"], "fabric-staged");
    let (code, output) = fail(&["--explain", &with.file(""), "--fabric", "carrier-pigeon"]);
    assert_eq!(code, Some(3), "{output}");
    assert_eq!(fail(&["--fabric", tcp()]).0, Some(2), "without a peer");
}

/// The socket is missing, as between containers without a common directory.
#[test]
fn agent_without_visible_socket_is_reached_by_the_fabric() {
    let mut other = AgentProcess::start_with(Some(tcp()));
    let (card, copy) = (other.cards()[0].clone(), other.directory.join("copy"));
    std::fs::copy(&card, &copy).unwrap();
    // And the lock file of the agent.
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
    // A killed agent does not answer.
    other.child.kill();
    let (code, choice) = taken(&["--fabric", "--timeout", "2"]);
    assert_eq!((code, verdict(&choice, "fabric-direct")), (Some(6), ("refused", "no-fabric")));
}

#[test]
fn dead_agent_is_exit_code_6() {
    let mut other = AgentProcess::start();
    let card = other.cards()[0].display().to_string();
    other.child.kill();
    let start = Instant::now();
    for path in [&card, &other.file("")] {
        let (code, output) = fail(&["--explain", path]);
        assert_eq!(code, Some(6), "{output}");
        let lines: Vec<_> = output.lines().filter(|line| !line.starts_with("fabricast:")).collect();
        let expected = format!("Agent \"decoder\" has exited, its card: {card}");
        assert_eq!(lines, [expected], "{output}");
    }
    // A copy of the card, without the directory of the agent.
    let copy = std::env::temp_dir().join(format!("fabricast-copy-{}", std::process::id()));
    std::fs::rename(&card, &copy).unwrap();
    let (code, output) = fail(&["--explain", &copy.display().to_string(), "--timeout", "0.1"]);
    std::fs::remove_file(&copy).unwrap();
    assert_eq!(code, Some(6), "{output}");
    assert!(
        output.contains("no descriptor can be passed") && output.contains("refused"),
        "{output}"
    );
    assert!(start.elapsed() < TIMEOUT);
    let empty = empty_directory();
    let nothing = empty.join("agent.card").display().to_string();
    assert_eq!(fail(&["--explain", &empty.display().to_string()]).0, Some(6));
    assert_eq!(fail(&["--explain", &nothing]).0, Some(6));
    std::fs::write(&nothing, "not a card").unwrap();
    assert_eq!(fail(&["--explain", &nothing]).0, Some(2));
    assert_eq!(fail(&["--region", &nothing]).0, Some(2));
    std::fs::remove_dir_all(empty).unwrap();
}

#[test]
fn agent_removes_its_card_when_it_ends() {
    let mut other = AgentProcess::start();
    assert_eq!(other.cards().len(), 1);
    std::fs::write(other.directory.join("end"), "").unwrap();
    other.child.finish(TIMEOUT);
    assert!(other.cards().is_empty());
    assert_eq!(fail(&["--explain", &other.file("")]).0, Some(6));
}

#[test]
fn domains_are_shown_with_what_they_learnt() {
    use fabricast::collective::{CommDomain, CommDomainKey, DomainOptions, ReduceOp};
    let directory = empty_directory();
    let path = directory.to_str().unwrap();
    let arguments = ["--collectives", "--directory", path];
    let none = format!(
        "no running domain in {path} (--directory). Domains that have ended are not shown\n"
    );
    assert_eq!(succeed(&arguments), none);
    let key = CommDomainKey::of_first_ranks(2);
    let options = DomainOptions::new().directory(&directory).job("train");
    let run = |rank: u32| {
        let mut domain = CommDomain::join(&key, rank, &options).unwrap();
        let mut elements = vec![1.0_f32; 1 << 18];
        for _ in 0..40 {
            domain.all_reduce(&mut elements, ReduceOp::Max, TIMEOUT).unwrap();
        }
        domain
    };
    let domains = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        [run(0), other.join().unwrap()]
    });
    let out = succeed(&arguments);
    let process = std::process::id();
    assert!(
        out.starts_with(&format!("host memory of 2 ranks, job train, processes {process}")),
        "{out}"
    );
    assert!(out.contains("\n  all-reduce of f32 up to 1MiB: "), "{out}");
    let all = json(&succeed(&[&arguments[..], &["--json"]].concat()));
    let operation = &all["domains"][0]["operations"][0];
    assert_eq!(
        (&operation["operation"], &operation["alpha"]),
        (&"all-reduce".into(), &1000.into())
    );
    drop(domains);
    assert_eq!(succeed(&arguments), none);
    std::fs::remove_dir_all(&directory).unwrap();
}

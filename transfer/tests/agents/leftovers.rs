//! Files of killed agents in their directory, and their removal.

use std::fs::{self, File};
use std::os::unix::fs::{chown, symlink};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use transfer::{Agent, AgentCard, AgentOptions, Condition, clean};

use crate::common::{LENGTH, TIMEOUT, alone};
use crate::fixture::{AgentFixture, SUM, sum_of};

/// The socket and the card file of an agent.
fn files(card: &[u8]) -> [PathBuf; 2] {
    let socket = AgentCard::decode(card).unwrap().socket.unwrap();
    let card_file = socket.with_extension("card");
    [socket, card_file]
}

/// The path of an agent's socket.
fn named(directory: &Path, digit: char) -> PathBuf {
    directory.join(format!("agent-{}", digit.to_string().repeat(32)))
}

fn exists(path: impl AsRef<Path>) -> bool {
    path.as_ref().symlink_metadata().is_ok()
}

#[test]
fn only_the_files_of_a_killed_agent_are_removed() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut dead = fixture.peer_process("shared", &[]);
    let alive = fixture.peer_process("shared", &[]);
    let directory = fixture.directory.clone();
    let path_of = |digit, end: &str| named(&directory, digit).with_extension(end);
    let mut foreign: Vec<_> = ["service", "agent", "agent-1.card", "their-own.card"]
        .iter()
        .map(|name| directory.join(name))
        .chain([path_of('0', ""), path_of('1', "cards")])
        .collect();
    for path in &foreign {
        fs::write(path, "not an agent's").unwrap();
    }
    let link = path_of('2', "card");
    symlink(&foreign[0], &link).unwrap();
    let folder = path_of('3', "");
    fs::create_dir(&folder).unwrap();
    // An agent that is starting, or runs on another machine.
    let locked = path_of('4', "card");
    let starting = File::create(&locked).unwrap();
    let starting = Flock::lock(starting, FlockArg::LockExclusiveNonblock).unwrap();
    let of_another = path_of('5', "card");
    fs::write(&of_another, "of another user").unwrap();
    if chown(&of_another, Some(65_534), None).is_ok() {
        foreign.push(of_another);
    }
    foreign.extend([link, folder, locked]);
    // An agent that lost its card file still answers.
    let [socket, card] = files(&alive.card);
    fs::remove_file(card).unwrap();
    foreign.push(socket);
    foreign.extend(files(&fixture.agent.card().encode().unwrap()));
    // A card file that was never completed.
    let part = path_of('6', "part");
    fs::write(&part, "half of a ca").unwrap();

    dead.other.kill();
    assert!(files(&dead.card).iter().all(exists), "the killed agent has removed its files");
    let is_card_orphaned = |card: &[u8]| AgentCard::decode(card).unwrap().is_orphaned();
    assert!(is_card_orphaned(&dead.card) && !is_card_orphaned(&alive.card));
    assert!(!is_card_orphaned(&fixture.agent.card().encode().unwrap()));
    let next = Agent::start(AgentOptions::new("next").directory(&directory)).unwrap();
    let own = files(&next.card().encode().unwrap());
    assert!(own.iter().all(exists));
    assert!(!files(&dead.card).iter().chain([&part]).any(exists), "files of the dead agent remain");
    assert!(!is_card_orphaned(&dead.card), "a removed card counts as orphaned");
    for path in &foreign {
        assert!(exists(path), "{} was removed", path.display());
    }
    drop(next);
    assert!(!own.iter().any(exists), "an ended agent left files");
    // The starting agent has ended, too.
    drop(starting);
    drop(Agent::start(AgentOptions::new("another").directory(&directory)).unwrap());
    assert!(!exists(path_of('4', "card")));
    // Running agents can be reached.
    assert_eq!(fixture.request(&alive, SUM, 0), sum_of(LENGTH, 0));
    let mut initiator = Agent::start(AgentOptions::new("initiator").directory(&directory)).unwrap();
    initiator.connect(&alive.card, TIMEOUT).unwrap();
    fixture.end(alive);
}

#[test]
fn clean_removes_dead_agents_and_reports_running_ones() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut dead = fixture.peer_process("shared", &[]);
    let alive = fixture.peer_process("shared", &[]);
    let directory = fixture.directory.clone();
    dead.other.kill();
    let link = named(&directory, '2').with_extension("card");
    symlink("/dev/null", &link).unwrap();
    let left = files(&dead.card);
    let find = |socket: &Path, dry_run| {
        let name = socket.file_name().unwrap().to_str().unwrap();
        let all = clean(&directory, dry_run).unwrap();
        all.into_iter().find(|one| one.name == name).map(|one| one.condition)
    };
    for dry_run in [true, false] {
        assert!(left.iter().all(exists), "a dry run removed files");
        let Some(Condition::Dead(mut reported)) = find(&left[0], dry_run) else { panic!() };
        reported.sort();
        assert_eq!(reported, left);
        let running = files(&alive.card);
        assert!(matches!(find(&running[0], dry_run), Some(Condition::Alive(_))));
        assert!(matches!(find(&named(&directory, '2'), true), Some(Condition::Unknown(_))));
        assert!(running.iter().chain([&link]).all(exists));
    }
    assert!(!left.iter().any(exists));
    assert_eq!(find(&left[0], false), None);
    clean(&directory.join("nowhere"), false).unwrap_err();
    fixture.end(alive);
}

#[test]
fn agents_that_start_at_once_do_not_remove_each_others_files() {
    const THREADS: usize = 4;
    const EACH: usize = 10;
    let _alone = alone();
    let fixture = AgentFixture::open();
    let start = || {
        let agent = Agent::start(AgentOptions::new("one of many").directory(&fixture.directory));
        let agent = agent.unwrap();
        let files = files(&agent.card().encode().unwrap());
        assert!(files.iter().all(exists));
        (agent, files)
    };
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    // Every second agent ends at once, while others check.
                    (0..EACH).map(|_| start()).zip((0..EACH).map(|_| drop(start()))).collect()
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<_>>| thread.join().unwrap();
        threads.into_iter().flat_map(join).collect()
    });
    assert_eq!(all.len(), THREADS * EACH);
    for ((_, files), ()) in &all {
        assert!(files.iter().all(exists), "{files:?}");
    }
    drop(all);
    let left = fs::read_dir(&fixture.directory).unwrap().count();
    assert_eq!(left, 3, "the card, the socket and the card file of the fixture");
}

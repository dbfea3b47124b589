//! What agents leave in their directory, and who removes it.

use std::fs::{self, File};
use std::os::unix::fs::{chown, symlink};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use transfer::{Agent, AgentCard, AgentOptions, Condition, clean};

use crate::common::{LENGTH, TIMEOUT, alone};
use crate::fixture::{AgentFixture, SUM, sum_of};

/// The socket and the card of one that was told of.
fn files(card: &[u8]) -> [PathBuf; 2] {
    let socket = AgentCard::decode(card).unwrap().socket.unwrap();
    let beside = socket.with_extension("card");
    [socket, beside]
}

/// As an agent's socket is called.
fn named(directory: &Path, digit: char) -> PathBuf {
    directory.join(format!("agent-{}", digit.to_string().repeat(32)))
}

fn is_there(path: impl AsRef<Path>) -> bool {
    path.as_ref().symlink_metadata().is_ok()
}

#[test]
fn what_a_killed_agent_left_is_removed_and_nothing_else() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut dead = fixture.peer_process("shared", &[]);
    let alive = fixture.peer_process("shared", &[]);
    let directory = fixture.directory.clone();
    let place = |digit, end: &str| named(&directory, digit).with_extension(end);
    let mut foreign: Vec<_> = ["service", "agent", "agent-1.card", "their-own.card"]
        .iter()
        .map(|name| directory.join(name))
        .chain([place('0', ""), place('1', "cards")])
        .collect();
    for path in &foreign {
        fs::write(path, "somebody else's").unwrap();
    }
    let link = place('2', "card");
    symlink(&foreign[0], &link).unwrap();
    let folder = place('3', "");
    fs::create_dir(&folder).unwrap();
    // One that was found in the middle of its beginning, or is on another machine.
    let locked = place('4', "card");
    let beginning = File::create(&locked).unwrap();
    let beginning = Flock::lock(beginning, FlockArg::LockExclusiveNonblock).unwrap();
    let of_another = place('5', "card");
    fs::write(&of_another, "of another user").unwrap();
    if chown(&of_another, Some(65_534), None).is_ok() {
        foreign.push(of_another);
    }
    foreign.extend([link, folder, locked]);
    // One that lost its card still answers.
    let [socket, card] = files(&alive.card);
    fs::remove_file(card).unwrap();
    foreign.push(socket);
    foreign.extend(files(&fixture.agent.card().encode().unwrap()));
    // Nobody ever finished writing this.
    let part = place('6', "part");
    fs::write(&part, "half of a ca").unwrap();

    dead.other.kill();
    assert!(files(&dead.card).iter().all(is_there), "it had no time");
    let is_left = |card: &[u8]| AgentCard::decode(card).unwrap().is_orphaned();
    assert!(is_left(&dead.card) && !is_left(&alive.card));
    assert!(!is_left(&fixture.agent.card().encode().unwrap()));
    let next = Agent::start(AgentOptions::new("next").directory(&directory)).unwrap();
    let own = files(&next.card().encode().unwrap());
    assert!(own.iter().all(is_there));
    assert!(!files(&dead.card).iter().chain([&part]).any(is_there), "something is left");
    assert!(!is_left(&dead.card), "nothing is known any more");
    for path in &foreign {
        assert!(is_there(path), "{} is gone", path.display());
    }
    drop(next);
    assert!(!own.iter().any(is_there), "it left something");
    // Who was beginning is gone as well.
    drop(beginning);
    drop(Agent::start(AgentOptions::new("another").directory(&directory)).unwrap());
    assert!(!is_there(place('4', "card")));
    // And those that live can be reached.
    assert_eq!(fixture.ask(&alive, SUM, 0), sum_of(LENGTH, 0));
    let mut visitor = Agent::start(AgentOptions::new("visitor").directory(&directory)).unwrap();
    visitor.connect(&alive.card, TIMEOUT).unwrap();
    fixture.end(alive);
}

#[test]
fn on_request_the_dead_are_removed_and_the_living_are_told_of() {
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
        assert!(left.iter().all(is_there), "a rehearsal removes nothing");
        let Some(Condition::Dead(mut said)) = find(&left[0], dry_run) else { panic!() };
        said.sort();
        assert_eq!(said, left);
        let living = files(&alive.card);
        assert!(matches!(find(&living[0], dry_run), Some(Condition::Alive(_))));
        assert!(matches!(find(&named(&directory, '2'), true), Some(Condition::Unknown(_))));
        assert!(living.iter().chain([&link]).all(is_there));
    }
    assert!(!left.iter().any(is_there));
    assert_eq!(find(&left[0], false), None);
    clean(&directory.join("nowhere"), false).unwrap_err();
    fixture.end(alive);
}

#[test]
fn agents_that_start_at_once_leave_each_other_alone() {
    const THREADS: usize = 4;
    const EACH: usize = 10;
    let _alone = alone();
    let fixture = AgentFixture::open();
    let start = || {
        let agent = Agent::start(AgentOptions::new("one of many").directory(&fixture.directory));
        let agent = agent.unwrap();
        let files = files(&agent.card().encode().unwrap());
        assert!(files.iter().all(is_there));
        (agent, files)
    };
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    // Of two that start one ends at once, while others look.
                    (0..EACH).map(|_| start()).zip((0..EACH).map(|_| drop(start()))).collect()
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Vec<_>>| thread.join().unwrap();
        threads.into_iter().flat_map(join).collect()
    });
    assert_eq!(all.len(), THREADS * EACH);
    for ((_, files), ()) in &all {
        assert!(files.iter().all(is_there), "{files:?}");
    }
    drop(all);
    let left = fs::read_dir(&fixture.directory).unwrap().count();
    assert_eq!(left, 3, "the house's card, its socket and the card beside it");
}

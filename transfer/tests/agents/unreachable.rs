//! Connecting to agents that have ended or do not answer.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use transfer::{Agent, AgentCard, AgentOptions, ErrorKind};

use crate::common::{TIMEOUT, alone};
use crate::fixture::AgentFixture;
use crate::rails::tcp;

/// Far less than the timeout, and enough for a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// CPU time of all threads of this process.
pub fn cpu_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let each = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(each.sum())
}

/// The error of connecting to this card, and its duration.
fn refusal(
    fixture: &mut AgentFixture,
    card: &[u8],
    timeout: Duration,
) -> (transfer::Error, Duration) {
    let start = Instant::now();
    let error = fixture.agent.connect(card, timeout).unwrap_err();
    (error, start.elapsed())
}

#[test]
fn killed_agent_is_detected_at_once_by_its_socket() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut peer_process = fixture.peer_process("host", &[]);
    let label = AgentCard::decode(&peer_process.card).unwrap().label;
    peer_process.other.kill();
    let (error, took) = refusal(&mut fixture, &peer_process.card, TIMEOUT);
    assert!(took < SOON, "{took:?}");
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Closed, Some(&*label)), "{error}");
    assert!(error.to_string().contains("its process has ended"), "{error}");
}

/// Another agent removed the files of the killed one, as after a restart.
#[test]
fn agent_with_a_removed_socket_has_ended() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let mut peer_process = fixture.peer_process("host", &[]);
    let card = AgentCard::decode(&peer_process.card).unwrap();
    peer_process.other.kill();
    let socket = card.socket.unwrap();
    drop(std::fs::remove_file(&socket));
    drop(std::fs::remove_file(socket.with_extension("card")));
    let (error, took) = refusal(&mut fixture, &peer_process.card, TIMEOUT);
    assert!(took < SOON, "{took:?}");
    let label = card.label;
    assert_eq!((error.kind(), error.peer()), (ErrorKind::NoPath, Some(&*label)), "{error}");
    assert_eq!(
        error.to_string(),
        format!(
            "connect to agent (peer {label}) failed: no path: agent \"{label}\" has ended, or its card is \
             from an earlier start: its socket {} is gone. Take a new card; no fabric reaches it: no \
             provider was opened at this side",
            socket.display()
        )
    );
}

#[test]
fn starting_in_a_missing_directory_says_how_to_fix_it() {
    let directory = std::env::temp_dir().join(format!("fc-no-directory-{}", std::process::id()));
    let error = Agent::start(AgentOptions::new("early").directory(&directory)).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "start agent at {} failed: open: No such file or directory (os error 2). Create the \
             directory first",
            directory.display()
        )
    );
}

#[test]
fn killed_agent_is_detected_at_once_by_its_fabric() {
    let _alone = alone();
    for provider in [tcp(), "tcp;ofi_rxm"] {
        let mut fixture = AgentFixture::open_remote(provider, 1);
        let mut peer_process = fixture.peer_process(&format!("remote by {provider} 1: host"), &[]);
        let label = AgentCard::decode(&peer_process.card).unwrap().label;
        peer_process.other.kill();
        fixture.agent.disconnect(peer_process.peer, TIMEOUT).unwrap();
        let mut try_again = || {
            let before = cpu_time();
            let (error, took) = refusal(&mut fixture, &peer_process.card, TIMEOUT);
            let used = cpu_time() - before;
            assert!(took < SOON && used < SOON / 5, "{took:?}, {used:?} of a CPU");
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Closed, Some(&*label)), "{error}");
            error.to_string()
        };
        let mut text = try_again();
        // The provider may not have detected the end of its last connection; then it opens another
        // one at the next attempt.
        if provider == tcp() && text.contains("connection lost") {
            text = try_again();
        }
        // The system's error; rxm may detect the end of its connection first.
        let has_cause = text.contains("ECONNREFUSED")
            || (provider != tcp() && text.contains("connection lost"));
        assert!(has_cause && text.contains("127.0.0.1:"), "{provider}: {text}");
    }
}

/// A stopped process, or another program at its port: the connection is established, but no answer
/// arrives.
#[test]
fn silent_agent_costs_little_cpu_time() {
    let _alone = alone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let timeout = Duration::from_secs(2);
    let mut fixture = AgentFixture::open_remote(tcp(), 1);
    let mut peer_process = fixture.peer_process(&format!("remote by {} 1: host", tcp()), &[]);
    let mut card = AgentCard::decode(&peer_process.card).unwrap();
    let port = listener.local_addr().unwrap().port();
    card.fabrics[0].address[2..4].copy_from_slice(&port.to_be_bytes());
    let before = cpu_time();
    let (error, took) = refusal(&mut fixture, &card.encode().unwrap(), timeout);
    let used = cpu_time() - before;
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert!(took >= timeout && took < timeout + SOON, "{took:?}");
    assert!(used < timeout / 5, "{used:?} of a CPU in {took:?}");
    peer_process.other.kill();
}

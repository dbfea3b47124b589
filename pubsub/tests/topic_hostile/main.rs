//! Hostile processes beside topics under traffic. Attacks run one after the other, and must not
//! disturb the readers of the healthy processes.
//!
//! A supervisor starts a service for each node, a publisher on node 1 and a reader on both nodes.
//! Each node has a network namespace, and a link joins them. The publisher publishes at a steady rate
//! on a reliable topic and on one that drops its oldest messages.
//!
//! A phase without an attack is followed by one phase for each attack. In each phase:
//!
//! * Every reader gets at least 95 % of the messages of the first phase, waits at most 2.5 s for a
//!   message, and misses none of the reliable topic.
//! * No message is logged more than once a second.
//! * The log of a service names the cause of refusals.
//!
//! Attackers run as another user if the test runs as root. The logs of all processes stay in the
//! directory `topic_hostile` of cargo's directory for temporary files.
//!
//! ```text
//! topic_hostile [--seconds N] [--seed N] [--only PHASE]
//! ```
#![allow(missing_docs, unreachable_pub)]

mod attacks;
#[path = "../replication/connect_request.rs"]
mod connect_request;
mod frames;
mod handshake;
mod limits;
mod logs;
mod members;
#[path = "../namespaces/network.rs"]
#[allow(dead_code)]
mod network;
mod outcome;
mod phases;
mod ports;
mod publisher;
mod random;
mod reader;
mod service;
mod stop_signal;
mod supervisor;
mod table;
mod topics;
mod user;
mod verdict;
mod window;
mod world;

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

testkit::child_entry!(enter);

/// The roles of child processes.
fn enter(args: &[&str]) {
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
        .with_ansi(false)
        .without_time()
        .with_writer(std::io::stderr)
        .try_init();
    match *args {
        ["inside", arguments] => supervisor::run(&supervisor::Plan::of(arguments)),
        ["service", directory, number, peer] => {
            service::run(directory.as_ref(), number.parse().expect("a node's number"), peer);
        }
        ["publisher", directory] => publisher::run(directory.as_ref()),
        ["reader", directory] => reader::run(directory.as_ref()),
        ["attack", user, name, ref target @ ..] => attacks::run(user, name, target),
        ["member", name, directory] => members::run(name, directory.as_ref()),
        _ => panic!("unknown role {args:?}"),
    }
}

fn main() -> ExitCode {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut plan = supervisor::Plan {
        seconds: 10,
        seed: now.as_nanos() as u64 % 1_000_000_000,
        only: String::new(),
    };
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    for pair in arguments.chunks(2) {
        let number = || pair.get(1).and_then(|value| value.parse().ok()).filter(|it| *it > 0);
        match (pair[0].as_str(), number(), pair.get(1)) {
            ("--seconds", Some(value), _) => plan.seconds = value,
            ("--seed", Some(value), _) => plan.seed = value,
            ("--only", _, Some(name)) => plan.only.clone_from(name),
            _ => {
                eprintln!("topic_hostile [--seconds N] [--seed N] [--only PHASE]");
                return ExitCode::from(2);
            }
        }
    }
    println!("seed {}, {} s for each phase", plan.seed, plan.seconds);
    let phases = phases::all().len() as u64 + 1;
    let timeout = Duration::from_secs(phases * (plan.seconds + 30) + 120);
    user::run_inside_for(&plan.argument(), timeout);
    ExitCode::SUCCESS
}

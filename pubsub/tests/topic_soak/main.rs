//! The soak test of topics: two nodes, three topics of each reliability, twelve processes. Processes
//! are killed and stopped, the link between the nodes is cut, and services end in order. Every
//! published message is read, or counted as missed by its reader.
//!
//! A supervisor starts a service, two publishers and three readers for each node, in two network
//! namespaces. A publisher publishes numbered messages on all topics. A reader subscribes to all
//! topics. It checks every byte and the order of each publisher, and compares the missing numbers
//! with the count of its subscriber. The supervisor knows what each publisher published, also if it
//! was killed: for each reader and topic, published = received + missed. At the end all processes
//! must be idle, and hold no more descriptors and memory than at the beginning.
//!
//! ```text
//! topic_soak [--held] [--seconds N] [--seed N]
//! ```
//!
//! With `--held` twenty readers of one node hold samples for up to 20 s, stall, are stopped, evicted
//! and killed, and so are publishers and the service. Each compares its samples with what it read
//! first, every 10 ms.
#![allow(missing_docs, unreachable_pub)]

mod account;
mod holder;
mod holders;
mod message;
#[path = "../namespaces/network.rs"]
#[allow(dead_code)]
mod network;
mod progress;
mod publisher;
mod random;
mod reader;
mod service;
mod supervisor;
mod topics;

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

testkit::child_entry!(enter);

/// The roles of child processes.
fn enter(args: &[&str]) {
    if std::env::var_os("TEST_LOG").is_some() {
        let _ = tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
            .with_writer(std::io::stderr)
            .try_init();
    }
    match *args {
        ["inside", arguments] => {
            let (seconds, seed) = arguments.split_once(':').expect("seconds and seed");
            let seconds = Duration::from_secs(seconds.parse().expect("seconds"));
            supervisor::run(seconds, seed.parse().expect("a seed"));
        }
        ["service", directory, number] => {
            service::run(directory.as_ref(), number.parse().expect("a node's number"));
        }
        ["publisher", directory] => publisher::run(directory.as_ref()),
        ["reader", directory] => reader::run(directory.as_ref()),
        ["local-service", directory, _] => service::run_alone(directory.as_ref()),
        ["holder", directory, seed] => {
            holder::run(directory.as_ref(), seed.parse().expect("a seed"));
        }
        ["held-publisher", directory, id] => {
            publisher::run_for_holders(directory.as_ref(), id.parse().expect("an id"));
        }
        _ => panic!("unknown role {args:?}"),
    }
}

fn main() -> ExitCode {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (mut seconds, mut seed) = (60_u64, now.as_nanos() as u64 % 1_000_000_000);
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_held = arguments.iter().any(|argument| argument == "--held");
    arguments.retain(|argument| argument != "--held");
    for pair in arguments.chunks(2) {
        let value = pair.get(1).and_then(|value| value.parse().ok());
        match (pair[0].as_str(), value) {
            ("--seconds", Some(value)) => seconds = value,
            ("--seed", Some(value)) => seed = value,
            _ => {
                eprintln!("topic_soak [--held] [--seconds N] [--seed N]");
                return ExitCode::from(2);
            }
        }
    }
    println!("seed {seed}, {seconds} s");
    if is_held {
        holders::run(Duration::from_secs(seconds), seed);
        return ExitCode::SUCCESS;
    }
    let timeout = Duration::from_secs(seconds + 300);
    network::run_inside_for(&format!("{seconds}:{seed}"), timeout);
    ExitCode::SUCCESS
}

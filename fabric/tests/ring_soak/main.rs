//! Soak test of the ring: its processes are killed, restarted and reconnected, and each message
//! must arrive exactly once, in order and unchanged.
//!
//! Three processes of this program take part. A *supervisor* starts a *writer* and a *reader*, and
//! controls each through a socket. The writer writes messages 0, 1, 2, …, whose lengths and bytes
//! follow from a seed and their numbers. The reader compares every byte, and reports a message to
//! the supervisor before it releases the last chunk. A message counts as delivered exactly when
//! that report has arrived: a message without report is written again. Only the supervisor keeps
//! its state. It kills writer, reader or both at random moments, informs the survivor, and
//! continues the ring with the first message not delivered: in a new epoch of the same ring, or as
//! a new ring, on the same endpoints or on new ones. It also makes both abandon intact connections.
//!
//! Failures are: a message lost, duplicated or changed; a process that exits by itself; an error
//! without a fault; and half a minute without progress.
//!
//! ```text
//! ring_soak [--seconds N] [--seed N] [--provider NAME]…
//! ```
//!
//! Providers run one after the other with equal shares of the time. At the end of each run the ring
//! is closed, and one line of JSON reports the result.
#![allow(missing_docs, unreachable_pub)]

mod child;
mod child_context;
mod control_channel;
mod failure;
mod fault_injection;
mod message;
mod message_check;
mod reader;
mod soak_result;
mod supervisor;
mod writer;

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use failure::Failure;

struct Arguments {
    seconds: u64,
    seed: u64,
    providers: Vec<String>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["writer", provider, seed] => number(seed).and_then(|seed| writer::run(provider, seed)),
        ["reader", provider, seed] => number(seed).and_then(|seed| reader::run(provider, seed)),
        _ => parse(&words).and_then(|arguments| soak(&arguments)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("ring_soak: {failure}");
            ExitCode::from(if matches!(failure, Failure::Usage(_)) { 2 } else { 1 })
        }
    }
}

fn parse(words: &[&str]) -> Result<Arguments, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seed = now.as_nanos() as u64 % 1_000_000_000;
    let mut arguments = Arguments { seconds: 60, seed, providers: Vec::new() };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| Failure::Usage(format!("{word} needs a value")))?;
        match *word {
            "--seconds" => arguments.seconds = number(value)?,
            "--seed" => arguments.seed = number(value)?,
            "--provider" => arguments.providers.push((*value).to_owned()),
            other => return Err(Failure::Usage(format!("\"{other}\"; see the top of main.rs"))),
        }
    }
    Ok(arguments)
}

fn number(text: &str) -> Result<u64, Failure> {
    text.parse().map_err(|_| Failure::Usage(format!("\"{text}\" is not a number")))
}

/// Runs all providers; a failing one does not stop the others.
fn soak(arguments: &Arguments) -> Result<(), Failure> {
    let providers = child_context::providers(&arguments.providers);
    if providers.is_empty() {
        return Err(Failure::Usage("no provider supports rings".to_owned()));
    }
    println!("seed {}, {} s on {}", arguments.seed, arguments.seconds, providers.join(", "));
    let time = Duration::from_secs(arguments.seconds) / providers.len() as u32;
    let mut failed = Vec::new();
    for provider in &providers {
        let (result, failure) = supervisor::run(provider, arguments.seed, time)?;
        println!("{result}");
        if let Some(failure) = failure {
            eprintln!("ring_soak: {provider}: {failure}");
            failed.push(provider.as_str());
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    let (failed, seed) = (failed.join(", "), arguments.seed);
    Err(Failure::Defect(format!(
        "failed on {failed}. To repeat the messages and faults: --seed {seed}"
    )))
}

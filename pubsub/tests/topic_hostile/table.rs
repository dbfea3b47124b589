//! The report: a line for each phase, and notes below it.

use crate::phases::{Actors, Cause, DocumentedEffect, User};
use crate::user;
use crate::verdict::PhaseResult;
use crate::window::Counts;

pub fn print_header() {
    println!(
        "{:<20} {:<6} {:>7} {:>9} {:>8} {:>7} {:>14} {:>6} {:>9} {:>11} {:<8}",
        "phase",
        "user",
        "rate",
        "pause",
        "min/s",
        "missed",
        "descriptors",
        "lines",
        "distinct",
        "max repeats",
        "verdict"
    );
}

/// Prints the line of a phase, and notes below it.
pub fn print(result: &PhaseResult, baseline: &PhaseResult) {
    let flows = result.flows(baseline);
    let rate = flows.iter().map(|flow| flow.rate).fold(f64::INFINITY, f64::min);
    let pause = flows.iter().map(|flow| flow.pause).max().unwrap_or_default();
    let min = flows.iter().map(|flow| flow.min_per_second).min().unwrap_or(0);
    let missed: u64 = flows.iter().map(|flow| flow.missed).sum();
    let faults = result.faults(baseline);
    let services = result.of_services();
    let (count, ..) = result.most_frequent();
    let [before, max, after] = result.descriptors;
    println!(
        "{:<20} {:<6} {:>5.1} % {:>6} ms {:>8} {:>7} {:>14} {:>6} {:>9} {:>11} {:<8}",
        result.phase.name,
        user(result),
        100.0 * rate,
        pause.as_millis(),
        min,
        missed,
        format!("{before}/{max}/{after}"),
        services.lines(),
        services.distinct(),
        format!("{count} ({})", result.max_allowed()),
        if faults.is_empty() { "ok" } else { "FAILED" }
    );
    notes(result, &faults);
}

fn notes(result: &PhaseResult, faults: &[String]) {
    let note = |text: &str| println!("    {text}");
    if !result.outcome.text.is_empty() {
        note(&format!("attack: {}", result.outcome.text));
    }
    if result.phase.documented != DocumentedEffect::Nothing {
        note(&format!("documented effect: {:?}", result.phase.documented));
    }
    if !faults.is_empty() || result.phase.documented != DocumentedEffect::Nothing {
        for (reader, counts) in result.during.iter().enumerate() {
            counts.iter().for_each(|counts| note(&distribution(reader + 1, counts)));
        }
    }
    let others = result.of_others();
    if others.lines() > 0 {
        note(&format!("other processes: {} lines, {} distinct", others.lines(), others.distinct()));
    }
    let (count, name, message) = result.most_frequent();
    if count > 0 {
        note(&format!("logged most often, {count} times by {name}: {message}"));
    }
    if let (0, Cause::NotLogged(reason)) = (result.of_services().lines(), result.phase.cause) {
        note(&format!("services logged nothing: {reason}"));
    }
    faults.iter().for_each(|fault| note(&format!("FAULT: {fault}")));
}

/// The distribution of a reader's messages over the phase.
fn distribution(node: usize, counts: &Counts) -> String {
    let Counts { topic, messages, missed, seconds, .. } = counts;
    let (time, pause) = (counts.elapsed.as_secs_f64(), counts.longest.as_millis());
    format!(
        "{topic} on node {node}: {messages} messages in {time:.1} s, {missed} missed, longest pause \
         {pause} ms, by second: {seconds:?}"
    )
}

fn user(result: &PhaseResult) -> &'static str {
    match (&result.phase.actors, result.phase.user) {
        (Actors::None, _) => "-",
        (_, User::Other) if user::has_other() => "other",
        // The test cannot change to another user.
        (_, User::Other) => "same!",
        (_, User::Same) => "same",
    }
}

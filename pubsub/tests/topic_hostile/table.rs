//! The report: a line for each phase, and what stands behind it.

use crate::phases::{Actors, Cause, DocumentedEffect, User};
use crate::user;
use crate::verdict::PhaseResult;
use crate::window::Counts;

/// The heads of the columns.
pub fn print_head() {
    println!(
        "{:<20} {:<6} {:>7} {:>9} {:>8} {:>7} {:>14} {:>6} {:>9} {:>11} {:<8}",
        "phase",
        "user",
        "rate",
        "pause",
        "least/s",
        "missed",
        "descriptors",
        "lines",
        "distinct",
        "most of one",
        "verdict"
    );
}

/// The line of a phase, and notes below it.
pub fn print(seen: &PhaseResult, baseline: &PhaseResult) {
    let flows = seen.flows(baseline);
    let rate = flows.iter().map(|flow| flow.rate).fold(f64::INFINITY, f64::min);
    let pause = flows.iter().map(|flow| flow.pause).max().unwrap_or_default();
    let least = flows.iter().map(|flow| flow.min_per_second).min().unwrap_or(0);
    let missed: u64 = flows.iter().map(|flow| flow.missed).sum();
    let faults = seen.faults(baseline);
    let services = seen.of_services();
    let (count, ..) = seen.most_frequent();
    let [before, most, after] = seen.descriptors;
    println!(
        "{:<20} {:<6} {:>5.1} % {:>6} ms {:>8} {:>7} {:>14} {:>6} {:>9} {:>11} {:<8}",
        seen.phase.name,
        user(seen),
        100.0 * rate,
        pause.as_millis(),
        least,
        missed,
        format!("{before}/{most}/{after}"),
        services.lines(),
        services.distinct(),
        format!("{count} ({})", seen.max_allowed()),
        if faults.is_empty() { "ok" } else { "FAILED" }
    );
    notes(seen, &faults);
}

fn notes(seen: &PhaseResult, faults: &[String]) {
    let note = |text: &str| println!("    {text}");
    if !seen.outcome.text.is_empty() {
        note(&format!("attack: {}", seen.outcome.text));
    }
    if seen.phase.documented != DocumentedEffect::Nothing {
        note(&format!("documented effect: {:?}", seen.phase.documented));
    }
    // Where it matters how messages were spread.
    if !faults.is_empty() || seen.phase.documented != DocumentedEffect::Nothing {
        for (reader, counts) in seen.during.iter().enumerate() {
            counts.iter().for_each(|counts| note(&spread(reader + 1, counts)));
        }
    }
    let others = seen.of_others();
    if others.lines() > 0 {
        note(&format!("other processes: {} lines, {} distinct", others.lines(), others.distinct()));
    }
    let (count, name, message) = seen.most_frequent();
    if count > 0 {
        note(&format!("logged most often, {count} times by {name}: {message}"));
    }
    if let (0, Cause::NotLogged(why)) = (seen.of_services().lines(), seen.phase.cause) {
        note(&format!("services logged nothing: {why}"));
    }
    faults.iter().for_each(|fault| note(&format!("FAULT: {fault}")));
}

/// How the messages of a reader were spread over the phase.
fn spread(node: usize, counts: &Counts) -> String {
    let Counts { topic, messages, missed, seconds, .. } = counts;
    let (time, pause) = (counts.elapsed.as_secs_f64(), counts.longest.as_millis());
    format!(
        "{topic} at node {node}: {messages} messages in {time:.1} s, {missed} missed, longest pause \
         {pause} ms, each second: {seconds:?}"
    )
}

fn user(seen: &PhaseResult) -> &'static str {
    match (&seen.phase.actors, seen.phase.user) {
        (Actors::None, _) => "-",
        (_, User::Other) if user::has_other() => "other",
        // Another one was meant, and cannot be had here.
        (_, User::Other) => "same!",
        (_, User::Same) => "same",
    }
}

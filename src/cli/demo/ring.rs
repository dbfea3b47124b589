//! `fabricast demo --ring`: a ring between two processes, over the providers of this machine.

use std::time::Duration;

use fabric::{Capabilities, Need, Policy, Reach, rank};

use super::ring_ends::{self, Shown};
use crate::cli::exit::{Exit, Failure};
use crate::cli::{choices, text};
use command::local::{self, Local};

/// How long each of three parts takes, for each provider.
const TIME: Duration = Duration::from_millis(800);

/// Of a latency within a machine that tells of other things than the machine, in microseconds.
const LATE: f64 = 200.0;

/// Two processes on this machine: one writes into a ring in the other's memory,
/// over the best provider and over the best network provider. All data is
/// checked.
pub(super) fn run(policy: &Policy) -> Result<(), Failure> {
    let mut need = Need::ring(Reach::SameMachine);
    // The demonstration reads the ring in the order in which it was written.
    need.ordered = true;
    let offers = local::offers(&ring_ends::query(), None)?;
    let providers = offers.iter().map(|local| local.offer.capabilities().provider.as_str());
    choices::complain_of_strangers(policy, providers);
    let everything: Vec<&Local> = offers.iter().collect();
    text::print(&text::wrapped(
        "",
        &format!(
            "Two processes on this machine. One writes into a ring of {} MiB in the other's memory, by \
             one-sided writes whose immediates tell of them; libfabric {} carries them.",
            ring_ends::CAPACITY >> 20,
            fabric::Version::running()
        ),
    ))?;
    text::print(&format!(
        "\n{}\n",
        text::heading("Providers that could do it, and the one that is taken:")
    ))?;
    let best = show(&everything, &need, policy)?;

    let networks: Vec<&Local> = offers.iter().filter(|local| local.is_network).collect();
    if best.is_network {
        text::print(
            "\nThat is a network provider already: there is no other to compare it with.\n",
        )?;
    } else if networks.is_empty() {
        text::print("\nNo network provider is here to compare it with.\n")?;
    } else {
        text::print(&format!(
            "\n{}\n",
            text::heading("For comparison, the best network provider, on the loopback address:")
        ))?;
        // A policy that requires the first one would leave nothing to compare.
        let elsewhere = Policy { require: Vec::new(), ..policy.clone() };
        show(&networks, &need, &elsewhere)?;
    }
    text::print("\ndemo: ok\n")
}

/// Prints the choice and runs the demonstration over what was taken; over the
/// next best, if that turns out not to work here. Returns what it ran over.
fn show<'a>(offers: &[&'a Local], need: &Need, policy: &Policy) -> Result<&'a Local, Failure> {
    let facts: Vec<&Capabilities> = offers.iter().map(|local| local.offer.capabilities()).collect();
    let (choice, order) = rank(&facts, need, policy);
    text::print(&choices::print(&choice))?;
    if choice.taken().is_none() {
        return Err(Failure::new(
            Exit::NoProvider,
            "no provider can carry the demonstration; the reasons stand above",
        ));
    }
    let mut last = None;
    for (index, candidate) in order.into_iter().zip(&choice.candidates) {
        if candidate.verdict == fabric::Verdict::Refused {
            break;
        }
        match demonstrate(facts[index]) {
            Ok(shown) => {
                report(facts[index], &shown)?;
                return Ok(offers[index]);
            }
            Err(failure) if failure.exit() == Exit::Corrupt => return Err(failure),
            Err(failure) => {
                eprintln!("fabricast: {} does not work here: {failure}", candidate.provider);
                last = Some(failure);
            }
        }
    }
    Err(last.unwrap_or_else(|| Failure::failed("nothing was tried")))
}

fn demonstrate(facts: &Capabilities) -> Result<Shown, Failure> {
    let _progress = Progress::start(&format!("measuring over {} …", facts.provider));
    ring_ends::show(&facts.provider, &facts.domain, TIME)
}

fn report(facts: &Capabilities, shown: &Shown) -> Result<(), Failure> {
    let Shown { round_trips, gb_per_s, checked_gb_per_s, checked, bad, wraps } = shown;
    let one_way = |quantile| round_trips.microseconds(quantile).unwrap_or_default() / 2.0;
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(one_way);
    let rows = [
        (
            format!("latency of {} B", ring_ends::SMALL),
            format!(
                "{p50:.2} µs one way (p50; p99 {p99:.2}, p99.9 {p999:.2}; {} round trips)",
                round_trips.samples()
            ),
        ),
        (
            format!("bandwidth of {} MiB", ring_ends::LARGE >> 20),
            format!("{gb_per_s:.2} GB/s; {checked_gb_per_s:.2} while every byte is compared"),
        ),
        (
            "data checked".to_owned(),
            format!(
                "{} MiB, {}; the ring wrapped {}",
                checked >> 20,
                text::counted(*bad, "error"),
                text::counted(*wraps, "time")
            ),
        ),
    ];
    text::print(&format!("over {}:\n", text::heading(&facts.provider)))?;
    for (what, value) in rows {
        text::print(&format!("  {what}: {value}\n"))?;
    }
    if !facts.reaches_other_machines && p50 > LATE {
        let why = "within a machine that takes a few µs where both processes have a core: these were busy";
        text::print(&format!("  so slow: {why}\n"))?;
    }
    if *bad > 0 {
        let bad = text::counted(*bad, "message");
        return Err(Failure::new(Exit::Corrupt, format!("{bad} arrived altered")));
    }
    Ok(())
}

/// A line that says what is going on, where somebody looks; gone afterwards.
struct Progress {
    shown: bool,
}

impl Progress {
    fn start(what: &str) -> Self {
        use std::io::IsTerminal;
        let shown = std::io::stderr().is_terminal();
        if shown {
            eprint!("{what}");
        }
        Self { shown }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}

//! What is seen while it runs: a table that is drawn anew where it stands, or a line now and
//! then where nobody looks.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::cast::TOPICS;
use super::company::{Member, Part, Said};
use crate::cli::exit::Failure;
use crate::cli::stages::{ALL_TOGETHER, Stage};
use crate::cli::statistics::Latency;
use crate::cli::{progress, size, text};

/// Between two drawings of the table, and two lines.
const REDRAW: Duration = Duration::from_millis(500);
const LINE: Duration = Duration::from_secs(3);

/// How it is shown.
pub(super) struct Show {
    is_terminal: bool,
    began: Instant,
    next: Instant,
    /// Lines of the table that stand there.
    lines: usize,
}

impl Show {
    pub(super) fn begin() -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        let began = Instant::now();
        let next = began + if is_terminal { Duration::ZERO } else { LINE };
        Self { is_terminal, began, next, lines: 0 }
    }

    /// Shows how it is, if it is time.
    pub(super) fn look(&mut self, members: &[Member]) -> Result<(), Failure> {
        if Instant::now() < self.next {
            return Ok(());
        }
        if !self.is_terminal {
            self.next = Instant::now() + LINE;
            return text::print(&self.line(members));
        }
        self.next = Instant::now() + REDRAW;
        let table = table(members, false);
        self.wipe()?;
        self.lines = table.lines().count();
        // What is wider than the terminal is cut off: lines that wrap would be more than were counted.
        text::print(&format!("\x1b[?7l{table}\x1b[?7h"))
    }

    /// Removes the table, so that something else can stand there.
    pub(super) fn wipe(&mut self) -> Result<(), Failure> {
        if self.lines == 0 {
            return Ok(());
        }
        let up = format!("\x1b[{}A\x1b[J", self.lines);
        self.lines = 0;
        let mut out = std::io::stdout().lock();
        let written = out.write_all(up.as_bytes());
        written.map_err(|error| Failure::failed(format!("writing the output: {error}")))
    }

    fn line(&self, members: &[Member]) -> String {
        let readings = || members.iter().filter_map(reading).map(|(_, said)| said);
        let sum = |of: fn(&Said) -> u64| readings().map(of).sum::<u64>();
        let rate: f64 = readings().map(|said| said.bytes_per_s).sum();
        format!(
            "{:4.0} s: {} read and compared, {}, {}/s; {} altered, {} missed\n",
            self.began.elapsed().as_secs_f64(),
            text::counted(sum(|said| said.messages), "message"),
            progress::amount(sum(|said| said.bytes) as f64),
            progress::amount(rate),
            sum(|said| said.altered),
            sum(|said| said.missed.unwrap_or(0)),
        )
    }
}

/// Of one that reads: its topic, and what it has read.
pub(super) fn reading(member: &Member) -> Option<(usize, &Said)> {
    match member.part {
        Part::Read(topic) => Some((topic, &member.said)),
        _ => None,
    }
}

/// How long each stage takes of the messages that one reads: those that only the publisher knows, and
/// those that the reader does.
pub(super) fn stages<'a>(members: &'a [Member], topic: usize, said: &'a Said) -> Vec<&'a Latency> {
    let publisher = members.iter().find(|member| member.part == Part::Publish(topic));
    let of_publisher = publisher.into_iter().flat_map(|member| &member.said.latencies);
    let known: Vec<_> = of_publisher.chain(&said.latencies).collect();
    let names = Stage::ALL.into_iter().map(Stage::name).chain([ALL_TOGETHER]);
    names.filter_map(|name| known.iter().find(|one| one.stage == name).copied()).collect()
}

/// A time, to three digits at most: there are many of them in a line.
pub(super) fn time(microseconds: f64) -> String {
    let (value, unit) = match microseconds {
        ..1e3 => (microseconds, "µs"),
        1e3..1e6 => (microseconds / 1e3, "ms"),
        _ => (microseconds / 1e6, "s"),
    };
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// A line for each subscriber; at the end with all that was read.
pub(super) fn table(members: &[Member], is_over: bool) -> String {
    let mut head = vec!["topic", "size", "read by", "messages"];
    if !is_over {
        head.extend(["per s", "GB/s"]);
    }
    let readings = || members.iter().filter_map(|member| Some((member, reading(member)?)));
    let all: Vec<_> = readings().map(|(_, (topic, said))| stages(members, topic, said)).collect();
    // One that nobody's messages have is left out: without devices nothing is copied out.
    let names = Stage::ALL.into_iter().map(Stage::name).chain([ALL_TOGETHER]);
    let names = names.filter(|name| all.iter().flatten().any(|one| one.stage == *name));
    let names: Vec<_> = names.collect();
    head.extend(&names);
    head.extend(["path", "data"]);
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    for ((member, (topic, said)), stages) in readings().zip(&all) {
        let mut row = vec![
            TOPICS[topic].name.to_owned(),
            size::print(TOPICS[topic].size),
            member.label.clone(),
            said.messages.to_string(),
        ];
        if !is_over {
            row.push(format!("{:.1}", said.messages_per_s));
            row.push(format!("{:.2}", said.bytes_per_s / 1e9));
        }
        row.extend(names.iter().map(|name| {
            let one = stages.iter().find(|one| one.stage == *name);
            one.map_or_else(String::new, |one| time(one.p50_us))
        }));
        row.push(said.paths.join(", "));
        row.push(match (said.messages, said.altered, said.missed.unwrap_or(0)) {
            (0, 0, 0) => String::new(),
            (_, 0, 0) => "right".to_owned(),
            (_, altered, missed) => format!("{altered} ALTERED, {missed} MISSED"),
        });
        rows.push(row);
    }
    text::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        for (microseconds, shown) in [(1.5, "1.5 µs"), (578_840.0, "579 ms"), (3e6, "3.0 s")] {
            assert_eq!(time(microseconds), shown);
        }
    }
}

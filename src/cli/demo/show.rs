//! What is seen while it runs: a table that is drawn anew where it stands, or a line now and
//! then where nobody looks.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::cast::{Part, Reading, STAGES, TIMES, TOPICS};
use super::company::{Company, Member};
use crate::cli::exit::Failure;
use crate::cli::stages::ALL_TOGETHER;
use crate::cli::{progress, size, text};

/// Between two drawings of the table, and two lines.
const REDRAW: Duration = Duration::from_millis(500);
const LINE: Duration = Duration::from_secs(3);

/// How it is shown.
pub(super) struct Show {
    is_silent: bool,
    is_terminal: bool,
    began: Instant,
    next: Instant,
    /// Lines of the table that stand there.
    lines: usize,
}

impl Show {
    pub(super) fn begin(is_silent: bool) -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        let began = Instant::now();
        let next = began + if is_terminal { Duration::ZERO } else { LINE };
        Self { is_silent, is_terminal, began, next, lines: 0 }
    }

    /// Shows how it is, if it is time.
    pub(super) fn look(&mut self, company: &Company) -> Result<(), Failure> {
        if self.is_silent || Instant::now() < self.next {
            return Ok(());
        }
        if !self.is_terminal {
            self.next = Instant::now() + LINE;
            return text::print(&self.line(company));
        }
        self.next = Instant::now() + REDRAW;
        let table = table(company, false);
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

    fn line(&self, company: &Company) -> String {
        let readings = || company.members.iter().filter_map(reading);
        let sum = |of: fn(&Reading) -> u64| readings().map(|(_, reading)| of(reading)).sum::<u64>();
        let bytes = sum(|reading| reading.bytes) as f64;
        let rate: f64 = company.members.iter().map(bytes_per_second).sum();
        format!(
            "{:4.0} s: {} read and compared, {}; now {}/s; {} altered, {} missed\n",
            self.began.elapsed().as_secs_f64(),
            text::counted(sum(|reading| reading.messages), "message"),
            progress::amount(bytes),
            progress::amount(rate),
            sum(|reading| reading.altered),
            sum(|reading| reading.missed),
        )
    }
}

/// Of one that reads: its topic, and what it has read.
pub(super) fn reading(member: &Member) -> Option<(usize, &Reading)> {
    match member.role.part {
        Part::Read { topic, .. } => Some((topic, &member.reading)),
        _ => None,
    }
}

fn bytes_per_second(member: &Member) -> f64 {
    reading(member).map_or(0.0, |(topic, _)| member.rate() * TOPICS[topic].size as f64)
}

/// A time, to three digits at most: there are many of them in a line.
pub(super) fn time(nanoseconds: u64) -> String {
    let (value, unit) = match nanoseconds {
        0 => return String::new(),
        1..1_000_000 => (nanoseconds as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (nanoseconds as f64 / 1e6, "ms"),
        _ => (nanoseconds as f64 / 1e9, "s"),
    };
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// The medians of all messages, once they are known.
pub(super) fn medians(reading: &Reading) -> [u64; TIMES] {
    std::array::from_fn(|stage| match reading.samples.get(stage) {
        Some(samples) => samples.quantile(0.5).unwrap_or(0),
        None => reading.latest[stage],
    })
}

/// A line for each subscriber; at the end with all that was read.
pub(super) fn table(company: &Company, is_over: bool) -> String {
    let mut head = vec!["topic", "size", "read by", "messages"];
    if !is_over {
        head.extend(["per s", "GB/s"]);
    }
    // One that nobody's messages have is left out: without devices nothing is copied out.
    let readings =
        || company.members.iter().filter_map(reading).map(|(_, reading)| medians(reading));
    let is_there: [bool; TIMES] =
        std::array::from_fn(|at| at == STAGES.len() || readings().any(|times| times[at] > 0));
    let stages = STAGES.into_iter().zip(is_there).filter(|(_, is_there)| *is_there);
    head.extend(stages.map(|(stage, _)| stage.name()));
    head.extend([ALL_TOGETHER, "path", "data"]);
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    for member in &company.members {
        let Some((topic, reading)) = reading(member) else { continue };
        let mut row = vec![
            TOPICS[topic].name.to_owned(),
            size::print(TOPICS[topic].size),
            member.role.label.clone(),
            reading.messages.to_string(),
        ];
        if !is_over {
            row.push(format!("{:.1}", member.rate()));
            row.push(format!("{:.2}", bytes_per_second(member) / 1e9));
        }
        let times = medians(reading).into_iter().zip(is_there);
        row.extend(times.filter(|(_, is_there)| *is_there).map(|(took, _)| time(took)));
        row.push(reading.paths.join(", "));
        row.push(match (reading.messages, reading.altered, reading.missed) {
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
        for (nanoseconds, shown) in
            [(0, ""), (1500, "1.5 µs"), (578_840_000, "579 ms"), (3_000_000_000, "3.0 s")]
        {
            assert_eq!(time(nanoseconds), shown);
        }
    }
}

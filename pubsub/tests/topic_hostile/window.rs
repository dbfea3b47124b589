//! The messages that a reader received of one topic within a phase.

use std::time::{Duration, Instant};

/// Counts of a reader since the last report.
#[derive(Debug, Clone)]
pub struct Window {
    begin: Instant,
    /// Time of the last message, which may be before this window.
    last: Instant,
    counts: Counts,
    /// Missed messages before the window.
    missed_before: u64,
    missed: u64,
}

/// Messages within a window.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub topic: String,
    pub elapsed: Duration,
    pub messages: u64,
    /// The longest time between two messages.
    pub longest: Duration,
    pub missed: u64,
    pub evictions: u64,
    /// Messages by second.
    pub seconds: Vec<u64>,
}

impl Window {
    pub fn new(topic: &str) -> Self {
        let now = Instant::now();
        let counts = Counts { topic: topic.to_owned(), ..Counts::default() };
        Self { begin: now, last: now, counts, missed_before: 0, missed: 0 }
    }

    /// Counts a message.
    pub fn message(&mut self) {
        let now = Instant::now();
        let second = now.duration_since(self.begin).as_secs() as usize;
        let seconds = &mut self.counts.seconds;
        if seconds.len() <= second {
            seconds.resize(second + 1, 0);
        }
        seconds[second] += 1;
        self.counts.messages += 1;
        self.counts.longest = self.counts.longest.max(now - self.last);
        self.last = now;
    }

    /// Sets the number of missed messages since the start of the process.
    pub fn set_missed(&mut self, missed: u64) {
        self.missed = missed;
    }

    pub fn evicted(&mut self) {
        self.counts.evictions += 1;
    }

    /// Returns the counts and begins another window.
    pub fn next(&mut self) -> Counts {
        let now = Instant::now();
        let mut counts = self.counts.clone();
        counts.elapsed = now - self.begin;
        counts.longest = counts.longest.max(now - self.last);
        counts.missed = self.missed - self.missed_before;
        self.counts = Counts { topic: counts.topic.clone(), ..Counts::default() };
        (self.begin, self.missed_before) = (now, self.missed);
        counts
    }
}

impl Counts {
    pub fn rate(&self) -> f64 {
        self.messages as f64 / self.elapsed.as_secs_f64().max(0.001)
    }

    /// Messages by second, without the last, incomplete one.
    fn whole_seconds(&self) -> impl Iterator<Item = u64> {
        let whole = self.elapsed.as_secs() as usize;
        (0..whole).map(|second| self.seconds.get(second).copied().unwrap_or(0))
    }

    pub fn min_per_second(&self) -> u64 {
        self.whole_seconds().min().unwrap_or(0)
    }

    /// The longest run of seconds with fewer messages than this.
    pub fn seconds_below(&self, messages: u64) -> usize {
        let (mut longest, mut current) = (0, 0);
        for second in self.whole_seconds() {
            current = if second < messages { current + 1 } else { 0 };
            longest = longest.max(current);
        }
        longest
    }

    pub fn line(&self) -> String {
        let seconds: Vec<_> = self.seconds.iter().map(u64::to_string).collect();
        format!(
            "{} {} {} {} {} {} {}",
            self.topic,
            self.elapsed.as_micros(),
            self.messages,
            self.longest.as_micros(),
            self.missed,
            self.evictions,
            seconds.join(",")
        )
    }

    pub fn of(line: &str) -> Self {
        let number = |text: &str| text.parse::<u64>().expect("a number");
        let fields: Vec<_> = line.split(' ').collect();
        let [topic, elapsed, messages, longest, missed, evictions, seconds] = fields[..] else {
            panic!("malformed counts of a reader: {line:?}");
        };
        Self {
            topic: topic.to_owned(),
            elapsed: Duration::from_micros(number(elapsed)),
            messages: number(messages),
            longest: Duration::from_micros(number(longest)),
            missed: number(missed),
            evictions: number(evictions),
            seconds: seconds.split(',').filter(|text| !text.is_empty()).map(number).collect(),
        }
    }
}

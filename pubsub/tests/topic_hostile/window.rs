//! What a reader got of one topic within a phase.

use std::time::{Duration, Instant};

/// Counts of a reader, since it was asked for them last.
#[derive(Debug, Clone)]
pub struct Window {
    begin: Instant,
    /// When the last message came, also if that was before this window.
    last: Instant,
    counted: Counts,
    /// What the subscriber had counted as missed when the window began.
    missed_before: u64,
    missed: u64,
}

/// What came within a window.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub topic: String,
    pub elapsed: Duration,
    pub messages: u64,
    /// The longest time between two messages.
    pub longest: Duration,
    pub missed: u64,
    pub evictions: u64,
    /// Messages of each second.
    pub seconds: Vec<u64>,
}

impl Window {
    pub fn new(topic: &str) -> Self {
        let now = Instant::now();
        let counted = Counts { topic: topic.to_owned(), ..Counts::default() };
        Self { begin: now, last: now, counted, missed_before: 0, missed: 0 }
    }

    /// A message came.
    pub fn message(&mut self) {
        let now = Instant::now();
        let second = now.duration_since(self.begin).as_secs() as usize;
        let seconds = &mut self.counted.seconds;
        if seconds.len() <= second {
            seconds.resize(second + 1, 0);
        }
        seconds[second] += 1;
        self.counted.messages += 1;
        self.counted.longest = self.counted.longest.max(now - self.last);
        self.last = now;
    }

    /// What the subscribers of the topic counted as missed, since the process began.
    pub fn missed(&mut self, all: u64) {
        self.missed = all;
    }

    pub fn evicted(&mut self) {
        self.counted.evictions += 1;
    }

    /// The counts until now; another window begins.
    pub fn next(&mut self) -> Counts {
        let now = Instant::now();
        let mut counts = self.counted.clone();
        counts.elapsed = now - self.begin;
        counts.longest = counts.longest.max(now - self.last);
        counts.missed = self.missed - self.missed_before;
        self.counted = Counts { topic: counts.topic.clone(), ..Counts::default() };
        (self.begin, self.missed_before) = (now, self.missed);
        counts
    }
}

impl Counts {
    pub fn rate(&self) -> f64 {
        self.messages as f64 / self.elapsed.as_secs_f64().max(0.001)
    }

    /// Messages of the whole seconds.
    fn whole_seconds(&self) -> impl Iterator<Item = u64> {
        let whole = self.elapsed.as_secs() as usize;
        (0..whole).map(|at| self.seconds.get(at).copied().unwrap_or(0))
    }

    /// The least of the whole seconds.
    pub fn min_per_second(&self) -> u64 {
        self.whole_seconds().min().unwrap_or(0)
    }

    /// How many seconds on end had fewer messages than this.
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
        let words: Vec<_> = line.split(' ').collect();
        let [topic, elapsed, messages, longest, missed, evictions, seconds] = words[..] else {
            panic!("not the counts of a reader: {line:?}");
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

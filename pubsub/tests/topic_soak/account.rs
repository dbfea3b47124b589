//! What a reader got of each publisher, as lines between the processes.

use std::collections::BTreeMap;

/// What a reader got of one publisher on one topic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// The number of the first message.
    pub first: u64,
    /// The number of the last one.
    pub last: u64,
    /// How many came.
    pub count: u64,
}

impl Received {
    /// Takes the next message; false if it came before, or too late.
    pub fn take(&mut self, number: u64) -> bool {
        if self.count == 0 {
            self.first = number;
        } else if number <= self.last {
            return false;
        }
        (self.last, self.count) = (number, self.count + 1);
        true
    }

    /// Messages that did not come between the first and the last.
    pub fn gaps(self) -> u64 {
        self.last - self.first + 1 - self.count
    }
}

/// What a reader got on one topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    pub topic: String,
    /// What its subscribers counted as missed.
    pub missed: u64,
    /// How often it was evicted.
    pub evictions: u64,
    pub publishers: BTreeMap<u64, Received>,
}

impl Account {
    pub fn line(&self) -> String {
        let each = self
            .publishers
            .iter()
            .map(|(publisher, it)| format!(" {publisher}:{}:{}:{}", it.first, it.last, it.count));
        let each: String = each.collect();
        format!("{} {} {}{each}", self.topic, self.missed, self.evictions)
    }

    pub fn of(line: &str) -> Self {
        let mut words = line.split(' ');
        let mut next = || words.next().expect("a word");
        let mut account = Self {
            topic: next().to_owned(),
            missed: number(next()),
            evictions: number(next()),
            ..Self::default()
        };
        for word in words {
            let [publisher, first, last, count] =
                word.split(':').map(number).collect::<Vec<_>>().try_into().expect("four numbers");
            account.publishers.insert(publisher, Received { first, last, count });
        }
        account
    }
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

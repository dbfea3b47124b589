//! The messages that a reader received of each publisher, as a line that it sends to the supervisor.

use std::collections::BTreeMap;

/// Messages received of one publisher on one topic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// The number of the first message.
    pub first: u64,
    /// The number of the last message.
    pub last: u64,
    pub count: u64,
}

impl Received {
    /// Counts the next message; false for a duplicate or a message out of order.
    pub fn add(&mut self, number: u64) -> bool {
        if self.count == 0 {
            self.first = number;
        } else if number <= self.last {
            return false;
        }
        (self.last, self.count) = (number, self.count + 1);
        true
    }

    /// Messages missing between the first and the last.
    pub fn gaps(self) -> u64 {
        self.last - self.first + 1 - self.count
    }
}

/// Messages received on one topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    pub topic: String,
    /// Messages that its subscribers counted as missed.
    pub missed: u64,
    pub evictions: u64,
    pub publishers: BTreeMap<u64, Received>,
}

impl Account {
    pub fn line(&self) -> String {
        let publishers = self
            .publishers
            .iter()
            .map(|(publisher, it)| format!(" {publisher}:{}:{}:{}", it.first, it.last, it.count));
        let publishers: String = publishers.collect();
        format!("{} {} {}{publishers}", self.topic, self.missed, self.evictions)
    }

    pub fn of(line: &str) -> Self {
        let mut fields = line.split(' ');
        let mut next = || fields.next().expect("a field");
        let mut account = Self {
            topic: next().to_owned(),
            missed: number(next()),
            evictions: number(next()),
            ..Self::default()
        };
        for field in fields {
            let [publisher, first, last, count] =
                field.split(':').map(number).collect::<Vec<_>>().try_into().expect("four numbers");
            account.publishers.insert(publisher, Received { first, last, count });
        }
        account
    }
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

//! What came of an attack, as a line from the attacker to the supervisor.

/// What an attacker, or a hostile member, saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Connections and requests that the node refused or closed.
    pub refused: u64,
    /// What happened that may not happen, such as a connection that permissions should prevent.
    pub breach: bool,
    pub text: String,
}

impl Outcome {
    pub fn new(refused: u64, text: impl Into<String>) -> Self {
        Self { refused, breach: false, text: text.into() }
    }

    pub fn line(&self) -> String {
        format!("{} {} {}", self.refused, self.breach, self.text.replace('\n', " "))
    }

    pub fn of(line: &str) -> Self {
        let mut words = line.splitn(3, ' ');
        let mut next = || words.next().expect("three words");
        Self {
            refused: next().parse().expect("a number"),
            breach: next().parse().expect("true or false"),
            text: next().to_owned(),
        }
    }

    /// The sum of those of several processes of one phase; texts that repeat are named once.
    pub fn sum(all: &[Self]) -> Self {
        let mut texts: Vec<&str> = all.iter().map(|it| it.text.as_str()).collect();
        texts.sort_unstable();
        texts.dedup();
        Self {
            refused: all.iter().map(|it| it.refused).sum(),
            breach: all.iter().any(|it| it.breach),
            text: texts.join("; "),
        }
    }
}

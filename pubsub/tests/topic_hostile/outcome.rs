//! The outcome of an attack, as a line from the attacker to the supervisor.

/// The observations of an attacker or a hostile member.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Connections and requests that the node refused or closed.
    pub refused: u64,
    pub text: String,
    /// A violated expectation, such as a connection that permissions should prevent.
    pub fault: Option<String>,
}

const SEPARATOR: char = '\t';

impl Outcome {
    pub fn new(refused: u64, text: impl Into<String>) -> Self {
        Self { refused, text: text.into(), fault: None }
    }

    pub fn line(&self) -> String {
        let plain = |text: &str| text.replace(['\n', SEPARATOR], " ");
        let fault = plain(self.fault.as_deref().unwrap_or_default());
        format!("{}{SEPARATOR}{}{SEPARATOR}{fault}", self.refused, plain(&self.text))
    }

    pub fn of(line: &str) -> Self {
        let fields: Vec<_> = line.split(SEPARATOR).collect();
        let [refused, text, fault] = fields[..] else { panic!("malformed outcome: {line:?}") };
        Self {
            refused: refused.parse().expect("a number"),
            text: text.to_owned(),
            fault: Some(fault.to_owned()).filter(|fault| !fault.is_empty()),
        }
    }

    /// The sum of the outcomes of several processes of one phase; equal texts are named once.
    pub fn sum(all: &[Self]) -> Self {
        let distinct = |texts: Vec<&str>| {
            let mut texts = texts;
            texts.sort_unstable();
            texts.dedup();
            texts.join("; ")
        };
        let fault = distinct(all.iter().filter_map(|it| it.fault.as_deref()).collect());
        Self {
            refused: all.iter().map(|it| it.refused).sum(),
            text: distinct(all.iter().map(|it| it.text.as_str()).collect()),
            fault: Some(fault).filter(|fault| !fault.is_empty()),
        }
    }
}

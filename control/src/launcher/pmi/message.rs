//! A message of either protocol: a command and named values.

use std::str::FromStr;

use super::failure::Failure;

/// Longest message that is accepted. Servers limit theirs to this length, too.
pub(super) const MAX_MESSAGE: usize = 64 << 10;

/// A command with its fields. Of fields with the same name the first counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    command: String,
    fields: Vec<(String, String)>,
}

impl Message {
    /// The message of these fields, of which the first must be `cmd`.
    pub(super) fn of_fields(mut fields: Vec<(String, String)>) -> Result<Self, Failure> {
        match fields.first() {
            Some((name, command)) if name == "cmd" && !command.is_empty() => {
                let (_, command) = fields.remove(0);
                Ok(Self { command, fields })
            }
            _ => Err(Failure::Malformed("the launcher sent a message without a command".into())),
        }
    }

    pub(super) fn command(&self) -> &str {
        &self.command
    }

    /// The value of a field.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|field| field.0 == name).map(|field| field.1.as_str())
    }

    /// The value of a field that must be a number.
    pub(super) fn number<T: FromStr>(&self, name: &str) -> Result<T, Failure> {
        let text = self.text(name).unwrap_or_default();
        text.parse().map_err(|_| {
            let value = shortened(text);
            let command = shortened(&self.command);
            Failure::Malformed(format!("the launcher sent \"{command}\" with {name}=\"{value}\""))
        })
    }

    /// The message if it is this answer, and reports success.
    pub(super) fn expect(self, answer: &str) -> Result<Self, Failure> {
        if self.command != answer {
            let found = shortened(&self.command);
            let detail = format!("the launcher sent \"{found}\" instead of \"{answer}\"");
            return Err(Failure::Malformed(detail));
        }
        match self.text("rc") {
            None | Some("0") => Ok(self),
            Some(code) => {
                let reason = self.text("errmsg").or(self.text("msg")).unwrap_or("no reason");
                let (code, reason) = (shortened(code), shortened(reason));
                Err(Failure::Refused(format!("the launcher sent {answer}: {reason} ({code})")))
            }
        }
    }
}

/// The text of received bytes. Both protocols are of visible ASCII characters.
pub(super) fn visible(bytes: &[u8]) -> Result<&str, Failure> {
    match std::str::from_utf8(bytes) {
        Ok(text) if bytes.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\t')) => Ok(text),
        _ => {
            let begin = bytes[..bytes.len().min(64)].escape_ascii();
            Err(Failure::Malformed(format!("the launcher sent no text: \"{begin}\"")))
        }
    }
}

/// The beginning of a text that the launcher sent, for an error. It is ASCII.
pub(super) fn shortened(text: &str) -> &str {
    text.get(..128).unwrap_or(text)
}

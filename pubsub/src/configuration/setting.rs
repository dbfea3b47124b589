//! The type of a declaration.
//!
//! Import cycle with `configuration`, `variables`: a declaration says how a text changes the
//! settings, which are read from the variables that declarations name.

use super::Settings;
use super::value::{Read, UNSET};

/// Prefix of variables.
pub(super) const PREFIX: &str = "FABRICAST_";
/// Prefix of the names of settings of topics.
const TOPIC: &str = "topic.";

/// How the values of a setting are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A text, with what it is: `PATH`.
    Text(&'static str),
    /// `true` or `false`.
    Flag,
    /// A whole number.
    Number,
    /// A number of bytes.
    Size,
    /// A number of seconds.
    Seconds,
    /// Texts, separated by commas.
    List,
}

/// The declaration of a setting.
#[derive(Debug)]
pub struct Setting {
    /// The unique name, with the table in a file: `topic.depth`.
    pub name: &'static str,
    /// How its values are written.
    pub form: Form,
    /// The default, in words.
    pub default: &'static str,
    /// The meaning, in a sentence.
    pub about: &'static str,
    /// The environment variable.
    pub variable: String,
    /// The option on the command line, without the dashes.
    pub option: String,
    pub(super) read: fn(&mut Settings, &str) -> Read<()>,
    pub(super) write: fn(&Settings) -> Option<String>,
}

impl Setting {
    /// The name without the table.
    #[must_use]
    pub fn key(&self) -> &'static str {
        self.name.strip_prefix(TOPIC).unwrap_or(self.name)
    }

    /// Does the setting apply to new topics, and not to the node?
    #[must_use]
    pub fn is_of_topics(&self) -> bool {
        self.name.starts_with(TOPIC)
    }

    /// The value, as it is read; None if the setting is unset.
    #[must_use]
    pub fn value(&self, settings: &Settings) -> Option<String> {
        (self.write)(settings)
    }

    /// The value, as it is read.
    #[must_use]
    pub fn text(&self, settings: &Settings) -> String {
        self.value(settings).unwrap_or_else(|| UNSET.to_owned())
    }

    /// A declaration whose meaning and access follow.
    pub(super) fn new(name: &'static str, form: Form, default: &'static str) -> Self {
        let variable = format!("{PREFIX}{}", name.replace('.', "_").to_uppercase());
        let option = name.strip_prefix(TOPIC).unwrap_or(name).replace('_', "-");
        let (about, read, write) = ("", |_: &mut Settings, _: &str| Ok(()), |_: &Settings| None);
        Self { name, form, default, about, variable, option, read, write }
    }

    pub(super) fn about(self, about: &'static str) -> Self {
        Self { about, ..self }
    }

    pub(super) fn read(self, read: fn(&mut Settings, &str) -> Read<()>) -> Self {
        Self { read, ..self }
    }

    /// The value, as it is read; None if it is unset.
    pub(super) fn write(self, write: fn(&Settings) -> Option<String>) -> Self {
        Self { write, ..self }
    }
}

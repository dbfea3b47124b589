//! The types of settings, and how their values are read and written.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use pubsub::{MemoryLocation, NetworkOptions, Reliability, TopicSettings};
use serde_json::{Value as Json, json};
use toml::de::DeValue;

use crate::cli::size;

/// The text that unsets a setting.
const UNSET: &str = "none";

/// How a type is written in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueForm {
    Text,
    Flag,
    Number,
    Size,
    Seconds,
    List,
}

/// A type of settings.
pub(crate) trait Value: Sized {
    /// The type's name in help and documentation: `SECONDS`.
    const KIND: &'static str;
    const FORM: ValueForm;

    fn read(text: &str) -> Result<Self, String>;

    /// The text that [`read`](Self::read) accepts.
    fn write(&self) -> String;

    /// The value as JSON.
    fn json(&self) -> Json {
        let text = self.write();
        match Self::FORM {
            ValueForm::Text => text.into(),
            ValueForm::Flag => json!(text.parse::<bool>().ok()),
            ValueForm::Number => json!(text.parse::<u64>().ok()),
            ValueForm::Size => json!(size::parse(&text).ok()),
            ValueForm::Seconds => json!(text.parse::<f64>().ok()),
            ValueForm::List => json!(list(&text).unwrap_or_default()),
        }
    }
}

/// The text of a value in a file of this form, for [`Value::read`]; `kind` is for errors.
pub(super) fn text_for_form(
    form: ValueForm,
    kind: &str,
    value: &DeValue<'_>,
) -> Result<String, String> {
    let expected = match (form, value) {
        (ValueForm::Flag, DeValue::Boolean(value)) => return Ok(value.to_string()),
        (ValueForm::Number | ValueForm::Size | ValueForm::Seconds, DeValue::Integer(number)) => {
            let digits = number.as_str().replace('_', "");
            return match u64::from_str_radix(&digits, number.radix()) {
                Ok(number) => Ok(number.to_string()),
                Err(_) => Err(format!("{digits}: a number from 0 to 2^64 - 1 is expected")),
            };
        }
        (ValueForm::Seconds, DeValue::Float(number)) => {
            return Ok(number.as_str().replace('_', ""));
        }
        (ValueForm::Text | ValueForm::Size, DeValue::String(text)) => return Ok(text.to_string()),
        (ValueForm::Number | ValueForm::Seconds, DeValue::String(text)) if text == UNSET => {
            return Ok(text.to_string());
        }
        (ValueForm::List, DeValue::Array(all)) => {
            let element = |value: &toml::Spanned<DeValue<'_>>| match value.get_ref() {
                DeValue::String(text) => element(text),
                other => Err(format!("a string is expected, not {}", type_name_of(other))),
            };
            let all: Vec<_> = all.iter().map(element).collect::<Result<_, _>>()?;
            return Ok(all.join(","));
        }
        (ValueForm::Text, _) => kind,
        (ValueForm::Flag, _) => "true or false",
        (ValueForm::Number, _) => "a whole number",
        (ValueForm::Size, _) => "a size like 4096 or \"64M\"",
        (ValueForm::Seconds, _) => "a number of seconds",
        (ValueForm::List, _) => "a list of strings",
    };
    Err(format!("{expected} is expected, not {}", type_name_of(value)))
}

fn type_name_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// A number from 1 to a maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count<const MOST: u32>(pub(crate) u32);

pub(crate) type Depth = Count<{ TopicSettings::MAX_DEPTH }>;
pub(crate) type Loans = Count<{ TopicSettings::MAX_LOANS }>;
pub(crate) type Lanes = Count<{ NetworkOptions::MAX_LANES }>;
pub(crate) type Workers = Count<{ NetworkOptions::MAX_WORKERS }>;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

/// Which process serves the node: this one, or always another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Service {
    Embedded,
    External,
}

/// `Type [generic parameters]: KIND, FORM, read, write;`
macro_rules! values {
    ($($type:ty $([$($generic:tt)*])?: $kind:expr, $form:expr, $read:expr, $write:expr;)*) => {$(
        impl $(<$($generic)*>)? Value for $type {
            const KIND: &'static str = $kind;
            const FORM: ValueForm = $form;

            fn read(text: &str) -> Result<Self, String> {
                $read(text)
            }

            fn write(&self) -> String {
                $write(self)
            }
        }
    )*};
}

values! {
    PathBuf: "PATH", ValueForm::Text, path, |path: &Self| path.display().to_string();
    String: "TEXT", ValueForm::Text, without_control, Self::clone;
    bool: "true|false", ValueForm::Flag, |text| parse(text, "true or false is expected"), Self::to_string;
    Service: "embedded|external", ValueForm::Text,
        |text| <Self as ValueEnum>::from_str(text, false).map_err(|_| format!("\"{text}\" is not embedded or external")),
        |service| format!("{service:?}").to_lowercase();
    Count<MOST> [const MOST: u32]: "NUMBER", ValueForm::Number, count, |count: &Self| count.0.to_string();
    Size: "SIZE", ValueForm::Size, |text| size::parse(text).map(Self), |bytes: &Self| match size::print(bytes.0) {
        // Larger than any unit.
        named if named == UNSET => bytes.0.to_string(),
        named => named,
    };
    Duration: "SECONDS", ValueForm::Seconds, seconds, |time: &Self| time.as_secs_f64().to_string();
    SocketAddr: "ADDRESS:PORT", ValueForm::Text,
        |text| parse(text, "an address with a port, like 10.0.0.1:7700, is expected"), Self::to_string;
    IpAddr: "ADDRESS|SUBNET|INTERFACE", ValueForm::Text,
        |text| fabric::local_address(text)
            .map_err(|error| error.detail().unwrap_or_default().to_owned()), Self::to_string;
    MemoryLocation: "PLACE", ValueForm::Text,
        |text: &str| text.parse().map_err(|error: pubsub::Error| error.detail().to_owned()), Self::to_string;
    Reliability: "reliable|drop-oldest|drop-newest", ValueForm::Text,
        |text: &str| text.parse().map_err(|error: pubsub::Error| error.detail().to_owned()), Self::to_string;
    Vec<String>: "LIST", ValueForm::List, list, |all: &Self| match all.is_empty() {
        true => UNSET.to_owned(),
        false => all.join(","),
    };
}

fn parse<T: FromStr>(text: &str, expected: &str) -> Result<T, String> {
    text.parse().map_err(|_| expected.to_owned())
}

fn path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("a path cannot be empty".to_owned()) } else { Ok(text.into()) }
}

fn without_control(text: &str) -> Result<String, String> {
    match text.contains(char::is_control) {
        true => Err("control characters are not allowed".to_owned()),
        false => Ok(text.to_owned()),
    }
}

fn count<const MOST: u32>(text: &str) -> Result<Count<MOST>, String> {
    // `parse` of u32 accepts "+5".
    let number = text.parse().ok().filter(|_| !text.starts_with('+'));
    let number = number.filter(|number| (1..=MOST).contains(number));
    number.map(Count).ok_or_else(|| format!("use 1 to {MOST}"))
}

/// Reads a number of seconds, which may have a fraction; more than a month is a mistake.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=30.0 * 86_400.0).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err("not a number of seconds, or more than a month".to_owned()),
    }
}

/// A list, separated by commas.
fn list(text: &str) -> Result<Vec<String>, String> {
    match text {
        "" | UNSET => Ok(Vec::new()),
        _ => text.split(',').map(|one| element(one.trim())).collect(),
    }
}

fn element(text: &str) -> Result<String, String> {
    if text.is_empty() {
        Err("an element of the list is empty".to_owned())
    } else {
        without_control(text)
    }
}

/// A setting that can be unset.
impl<T: Value> Value for Option<T> {
    const KIND: &'static str = T::KIND;
    const FORM: ValueForm = T::FORM;

    fn read(text: &str) -> Result<Self, String> {
        if text == UNSET { Ok(None) } else { T::read(text).map(Some) }
    }

    fn write(&self) -> String {
        self.as_ref().map_or_else(|| UNSET.to_owned(), T::write)
    }

    fn json(&self) -> Json {
        self.as_ref().map_or(Json::Null, T::json)
    }
}

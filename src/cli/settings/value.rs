//! What a setting can be, and how it is read from text and from a file.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use pubsub::{MemoryPlace, NetworkOptions, Reliability, TopicSettings};
use serde_json::{Value as Json, json};
use toml::de::DeValue;

use crate::cli::size;

/// What is said for a setting that is to be left out.
const NOTHING: &str = "none";

/// A type that settings can have.
pub(crate) trait Value: Sized + fmt::Debug {
    /// What the type is called where it has to be written: `SECONDS`.
    const KIND: &'static str;

    /// From the environment or the command line.
    fn read(text: &str) -> Result<Self, String>;

    /// As [`read`](Self::read) would read it.
    fn write(&self) -> String;

    /// From a file: a string is read as in the environment.
    fn from_toml(value: &DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some(text) => Self::read(text),
            None => Err(format!("{} is expected, not {}", Self::KIND, called(value))),
        }
    }

    fn to_json(&self) -> Json {
        self.write().into()
    }

    /// May it stand alone on the command line, and what does it mean then?
    fn alone() -> Option<&'static str> {
        None
    }
}

/// What a value of a file is, for those who wrote another.
fn called(value: &DeValue<'_>) -> &'static str {
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

/// A whole number as it stands in a file, in any of its notations.
fn whole(value: &DeValue<'_>) -> Option<Result<u64, String>> {
    let number = value.as_integer()?;
    let digits = number.as_str().replace('_', "");
    Some(u64::from_str_radix(&digits, number.radix()).map_err(|_| format!("{digits}: {RANGE}")))
}

const RANGE: &str = "a number from 0 to 2^64 - 1 is expected";

impl Value for PathBuf {
    const KIND: &'static str = "PATH";

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("a path cannot be empty".to_owned()),
            _ => Ok(text.into()),
        }
    }

    fn write(&self) -> String {
        self.display().to_string()
    }
}

impl Value for String {
    const KIND: &'static str = "TEXT";

    fn read(text: &str) -> Result<Self, String> {
        match text.chars().any(char::is_control) {
            true => Err("control characters are not allowed".to_owned()),
            false => Ok(text.to_owned()),
        }
    }

    fn write(&self) -> String {
        self.clone()
    }
}

impl Value for bool {
    const KIND: &'static str = "true|false";

    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| "true or false is expected".to_owned())
    }

    fn write(&self) -> String {
        self.to_string()
    }

    fn from_toml(value: &DeValue<'_>) -> Result<Self, String> {
        value.as_bool().ok_or_else(|| format!("true or false is expected, not {}", called(value)))
    }

    fn to_json(&self) -> Json {
        (*self).into()
    }

    fn alone() -> Option<&'static str> {
        Some("true")
    }
}

/// A number from 1 to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count<const MOST: u32>(pub(crate) u32);

/// How many messages may wait.
pub(crate) type Depth = Count<{ TopicSettings::MOST_DEPTH }>;

/// How many messages a publisher may have borrowed memory for.
pub(crate) type Loans = Count<{ TopicSettings::MOST_LOANS }>;

/// How many lanes carry large messages.
pub(crate) type Lanes = Count<{ NetworkOptions::MOST_LANES }>;

/// How many threads carry messages.
pub(crate) type Workers = Count<{ NetworkOptions::MOST_WORKERS }>;

impl<const MOST: u32> Value for Count<MOST> {
    const KIND: &'static str = "NUMBER";

    fn read(text: &str) -> Result<Self, String> {
        // `parse` alone would also take "+5".
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number: Option<u32> = is_number.then(|| text.parse().ok()).flatten();
        let number = number.filter(|number| (1..=MOST).contains(number));
        number.map(Self).ok_or_else(|| format!("1 to {MOST} is possible"))
    }

    fn write(&self) -> String {
        self.0.to_string()
    }

    fn from_toml(value: &DeValue<'_>) -> Result<Self, String> {
        match whole(value) {
            Some(number) => Self::read(&number?.to_string()),
            None => Err(format!("a whole number is expected, not {}", called(value))),
        }
    }

    fn to_json(&self) -> Json {
        self.0.into()
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl Value for Size {
    const KIND: &'static str = "SIZE";

    fn read(text: &str) -> Result<Self, String> {
        size::parse(text).map(Self)
    }

    fn write(&self) -> String {
        match size::print(self.0).as_str() {
            // Larger than what has a name.
            "none" => self.0.to_string(),
            named => named.to_owned(),
        }
    }

    fn from_toml(value: &DeValue<'_>) -> Result<Self, String> {
        match (whole(value), value.as_str()) {
            (Some(bytes), _) => bytes.map(Self),
            (None, Some(text)) => Self::read(text),
            _ => Err(format!("a size like 4096 or \"64M\" is expected, not {}", called(value))),
        }
    }

    fn to_json(&self) -> Json {
        self.0.into()
    }
}

/// The longest time that can be set, in seconds: more is a mistake.
const LONGEST: f64 = 30.0 * 86_400.0;

/// Reads a number of seconds, which may have a fraction.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=LONGEST).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("not a number of seconds, or more than a month".to_owned()),
    }
}

impl Value for Duration {
    const KIND: &'static str = "SECONDS";

    fn read(text: &str) -> Result<Self, String> {
        seconds(text)
    }

    fn write(&self) -> String {
        self.as_secs_f64().to_string()
    }

    fn from_toml(value: &DeValue<'_>) -> Result<Self, String> {
        match value {
            DeValue::Integer(_) => whole(value).unwrap_or(Ok(0))?.to_string(),
            DeValue::Float(number) => number.as_str().replace('_', ""),
            _ => return Err(format!("a number of seconds is expected, not {}", called(value))),
        }
        .parse::<f64>()
        .map_err(|error| error.to_string())
        .and_then(|number| seconds(&number.to_string()))
    }

    fn to_json(&self) -> Json {
        json!(self.as_secs_f64())
    }
}

impl Value for SocketAddr {
    const KIND: &'static str = "ADDRESS:PORT";

    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| "an address with a port, like 10.0.0.1:7700, is expected".into())
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl Value for IpAddr {
    const KIND: &'static str = "ADDRESS";

    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| "an address, like 10.0.0.1, is expected".to_owned())
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl Value for MemoryPlace {
    const KIND: &'static str = "PLACE";

    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error: pubsub::Error| error.detail().to_owned())
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl Value for Reliability {
    const KIND: &'static str = "reliable|drop-oldest|drop-newest";

    fn read(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error: pubsub::Error| error.detail().to_owned())
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

/// Several, separated by commas; in a file, a list.
impl Value for Vec<String> {
    const KIND: &'static str = "LIST";

    fn read(text: &str) -> Result<Self, String> {
        if text.is_empty() || text == NOTHING {
            return Ok(Self::new());
        }
        text.split(',').map(|one| element(one.trim())).collect()
    }

    fn write(&self) -> String {
        if self.is_empty() { NOTHING.to_owned() } else { self.join(",") }
    }

    fn from_toml(value: &DeValue<'_>) -> Result<Self, String> {
        let Some(all) = value.as_array() else {
            return Err(format!("a list of strings is expected, not {}", called(value)));
        };
        let element = |one: &toml::Spanned<DeValue<'_>>| match one.get_ref().as_str() {
            Some(text) => element(text),
            None => Err(format!("a string is expected, not {}", called(one.get_ref()))),
        };
        all.iter().map(element).collect()
    }

    fn to_json(&self) -> Json {
        json!(self)
    }
}

fn element(text: &str) -> Result<String, String> {
    match text {
        "" => Err("an empty one among several".to_owned()),
        _ => String::read(text),
    }
}

/// What need not be set at all.
impl<T: Value> Value for Option<T> {
    const KIND: &'static str = T::KIND;

    fn read(text: &str) -> Result<Self, String> {
        if text == NOTHING { Ok(None) } else { T::read(text).map(Some) }
    }

    fn write(&self) -> String {
        self.as_ref().map_or_else(|| NOTHING.to_owned(), T::write)
    }

    fn from_toml(value: &DeValue<'_>) -> Result<Self, String> {
        if value.as_str() == Some(NOTHING) { Ok(None) } else { T::from_toml(value).map(Some) }
    }

    fn to_json(&self) -> Json {
        self.as_ref().map_or(Json::Null, T::to_json)
    }

    fn alone() -> Option<&'static str> {
        T::alone()
    }
}

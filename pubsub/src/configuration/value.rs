//! Values of settings as texts: one function for each type. Errors say what is expected.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::budgets::Budgets;
use crate::error::Error;
use crate::node_options::ServiceMode;
use crate::peers;
use crate::settings::TopicSettings;

/// The text that unsets an optional setting.
pub(super) const UNSET: &str = "none";

/// A value, or what is expected instead.
pub(super) type Read<T> = Result<T, String>;

pub(super) fn parse<T: FromStr>(text: &str, expected: &str) -> Read<T> {
    text.parse().map_err(|_| expected.to_owned())
}

/// Parses a type of this crate, whose error says what is expected.
pub(super) fn own<T: FromStr<Err = Error>>(text: &str) -> Read<T> {
    text.parse().map_err(|error: Error| error.detail().to_owned())
}

/// The value of a setting that can be unset.
pub(super) fn optional<T>(text: &str, read: impl FnOnce(&str) -> Read<T>) -> Read<Option<T>> {
    if text == UNSET { Ok(None) } else { read(text).map(Some) }
}

pub(super) fn within<T: PartialOrd>(value: T, range: RangeInclusive<T>, why: &str) -> Read<T> {
    if range.contains(&value) { Ok(value) } else { Err(why.to_owned()) }
}

pub(super) fn path(text: &str) -> Read<PathBuf> {
    if text.is_empty() { Err("a path cannot be empty".to_owned()) } else { Ok(text.into()) }
}

fn without_control(text: &str) -> Read<String> {
    match text.contains(char::is_control) {
        true => Err("control characters are not allowed".to_owned()),
        false => Ok(text.to_owned()),
    }
}

/// A name in reports or of a provider.
pub(super) fn name(text: &str) -> Read<String> {
    const LONGEST: usize = 64;
    match text.len() {
        0 => Err("it cannot be empty".to_owned()),
        1..=LONGEST => without_control(text),
        _ => Err(format!("at most {LONGEST} bytes")),
    }
}

pub(super) fn address(text: &str) -> Read<String> {
    match peers::is_address(text) {
        true => without_control(text),
        false => Err(format!("\"{}\" is not of the form host:port", text.escape_debug())),
    }
}

pub(super) fn addresses(text: &str) -> Read<Vec<String>> {
    let element = |one: &str| match one.trim() {
        "" => Err("an element of the list is empty".to_owned()),
        one => address(one),
    };
    match text {
        "" | UNSET => Ok(Vec::new()),
        _ => text.split(',').map(element).collect(),
    }
}

/// An address of this machine: itself, its subnet or its interface.
pub(super) fn source(text: &str) -> Read<IpAddr> {
    fabric::local_address(text).map_err(|error| error.detail().unwrap_or_default().to_owned())
}

pub(super) fn service(text: &str) -> Read<ServiceMode> {
    match text {
        "embedded" => Ok(ServiceMode::Embedded),
        "external" => Ok(ServiceMode::External),
        _ => Err(format!("\"{}\" is not embedded or external", text.escape_debug())),
    }
}

/// A number from 1 to a maximum.
pub(super) fn count(text: &str, most: u32) -> Read<u32> {
    // `parse` accepts "+5".
    let number = text.parse().ok().filter(|_| !text.starts_with('+'));
    let number = number.filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| format!("use 1 to {most}"))
}

/// Parses a number of seconds, which may have a fraction; more than a month is a mistake.
///
/// ```
/// use std::time::Duration;
/// assert_eq!(pubsub::parse_seconds("0.25"), Ok(Duration::from_millis(250)));
/// assert!(pubsub::parse_seconds("soon").is_err());
/// ```
///
/// # Errors
/// What is expected.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    const MONTH: f64 = 30.0 * 86_400.0;
    let seconds = text.parse().ok().filter(|seconds| (0.0..=MONTH).contains(seconds));
    let expected = "not a number of seconds, or more than a month";
    seconds.map(Duration::from_secs_f64).ok_or_else(|| expected.to_owned())
}

/// Memory for the messages of all topics, in bytes.
pub(super) fn budget(text: &str) -> Read<u64> {
    let (least, usual) = (Budgets::MIN, TopicSettings::default());
    let reserve = usual.reserves(1);
    let expected = format!(
        "at least {least} bytes, which the smallest topic reserves; a topic with default settings \
         reserves {} ({} messages of {} bytes)",
        reserve.bytes, reserve.blocks, usual.largest
    );
    within(parse_size(text)?, least..=u64::MAX, &expected)
}

const UNITS: [(u32, char); 3] = [(30, 'G'), (20, 'M'), (10, 'K')];

/// Parses a number with an optional K, M or G, or KiB, MiB, GiB: 2^10, 2^20, 2^30.
///
/// ```
/// assert_eq!(pubsub::parse_size("64K"), Ok(64 << 10));
/// assert_eq!(pubsub::parse_size("64KiB"), Ok(64 << 10));
/// ```
///
/// # Errors
/// What is expected.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let short = text.strip_suffix("iB").filter(|short| short.ends_with(['K', 'M', 'G']));
    let short = short.unwrap_or(text);
    let scaled = |(shift, unit): (u32, char)| {
        Some((short.strip_suffix([unit, unit.to_ascii_lowercase()])?, shift))
    };
    let (digits, shift) = UNITS.into_iter().find_map(scaled).unwrap_or((text, 0));
    // `parse` accepts "+5".
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("not a number with an optional K, M or G".to_owned());
    }
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    bytes.ok_or_else(|| "too large".to_owned())
}

/// A number of bytes in the largest unit that divides it, as [`parse_size`] accepts it.
///
/// ```
/// assert_eq!(pubsub::print_size(64 << 10), "64KiB");
/// ```
#[must_use]
pub fn print_size(bytes: u64) -> String {
    let divides =
        |(shift, _): &(u32, char)| bytes >= 1 << shift && bytes.is_multiple_of(1 << shift);
    match UNITS.into_iter().find(divides) {
        Some((shift, unit)) => format!("{}{unit}iB", bytes >> shift),
        None => bytes.to_string(),
    }
}

//! Formatting of texts.

use std::time::Duration;

/// A number of things: `1 message`, `2 messages`.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A time, to the millisecond if it has one: `301ms`, `2.5s`.
pub(crate) fn format_duration(time: Duration) -> String {
    match u64::try_from(time.as_millis()) {
        Ok(milliseconds @ 1..) => format!("{:?}", Duration::from_millis(milliseconds)),
        _ => format!("{time:?}"),
    }
}

/// The beginning of a text, at most this many bytes.
pub(crate) fn shortened(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_in_milliseconds() {
        let plain = |nanoseconds| format_duration(Duration::from_nanos(nanoseconds));
        assert_eq!(plain(301_230_049), "301ms");
        assert_eq!([plain(2_500_000_001), plain(60_000_999_999)], ["2.5s", "60s"]);
        assert_eq!([plain(0), plain(1500)], ["0ns", "1.5µs"]);
    }
}

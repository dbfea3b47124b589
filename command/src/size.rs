//! Sizes and counts as people write them: `64`, `4K`, `16M`, `1G`.

/// Reads a number with an optional K, M or G: 2^10, 2^20, 2^30.
pub fn parse(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    // `parse` alone would also take "+5".
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("not a number with an optional K, M or G".to_owned());
    }
    digits
        .parse::<u64>()
        .ok()
        .and_then(|value| value.checked_mul(1 << shift))
        .ok_or_else(|| "too large".to_owned())
}

/// As [`parse`], for what has to be at least 1.
pub fn parse_positive(text: &str) -> Result<u64, String> {
    match parse(text)? {
        0 => Err("has to be at least 1".to_owned()),
        value => Ok(value),
    }
}

/// The other way round, in the largest unit that divides the value; for what is
/// beyond all of them, `none`.
pub fn print(bytes: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    if bytes >= 1 << 60 {
        return "none".to_owned();
    }
    UNITS
        .iter()
        .find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit))
        .map_or_else(|| bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_units() {
        for (text, value) in [
            ("0", 0),
            ("64", 64),
            ("4K", 4096),
            ("4k", 4096),
            ("16M", 16 << 20),
            ("3G", 3 << 30),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let all = ["", "K", "-1", "+1", "1.5K", "1KB", "0x10", " 1", "1 ", "K1", "١", "1é"];
        for text in all {
            assert!(parse(text).is_err(), "{text}");
        }
        for text in ["18446744073709551616", "18446744073709551615K", "17179869184G"] {
            assert_eq!(parse(text), Err("too large".to_owned()), "{text}");
        }
        assert!(parse_positive("0").is_err());
        assert_eq!(parse_positive("1K"), Ok(1024));
    }

    #[test]
    fn sizes_are_printed_as_they_are_read() {
        for text in ["1", "64", "1000", "4K", "1025", "16M", "3G"] {
            assert_eq!(print(parse(text).unwrap()), text);
        }
        assert_eq!(print(u64::MAX), "none");
    }
}

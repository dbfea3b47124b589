//! Sizes and counts: read as `64`, `4K`, `16M` or `1G`, and printed as `64`, `4KiB`, `16MiB` or
//! `1GiB`, which are read, too. All units are powers of two.

pub use pubsub::parse_size as parse;

const UNITS: [(u32, &str); 3] = [(30, "GiB"), (20, "MiB"), (10, "KiB")];

/// Like [`parse`], but at least 1.
pub fn parse_positive(text: &str) -> Result<u64, String> {
    match parse(text)? {
        0 => Err("has to be at least 1".to_owned()),
        value => Ok(value),
    }
}

/// The reverse of [`parse`], in the largest unit that divides the value; `none` for `u64::MAX`.
pub fn print(bytes: u64) -> String {
    if bytes >= 1 << 60 { "none".to_owned() } else { pubsub::print_size(bytes) }
}

/// An amount of bytes, to about three digits.
pub fn amount(bytes: f64) -> String {
    let unit = |shift: u32| (1_u64 << shift) as f64;
    match UNITS.iter().find(|(shift, _)| bytes >= unit(*shift)) {
        Some((shift, name)) => format!("{:.2} {name}", bytes / unit(*shift)),
        None => format!("{} B", bytes as u64),
    }
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
            ("4KiB", 4096),
            ("16MiB", 16 << 20),
            ("3GiB", 3 << 30),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(value), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_errors() {
        let all = [
            "", "K", "-1", "+1", "1.5K", "1KB", "0x10", " 1", "1 ", "K1", "١", "1é", "iB", "KiB",
            "1iB", "1kiB", "1KIB",
        ];
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
        for text in ["1", "64", "1000", "4KiB", "1025", "16MiB", "3GiB"] {
            assert_eq!(print(parse(text).unwrap()), text);
        }
        assert_eq!(print(u64::MAX), "none");
    }

    #[test]
    fn amounts_are_short() {
        for (bytes, text) in [
            (0.0, "0 B"),
            (1023.0, "1023 B"),
            (1024.0, "1.00 KiB"),
            (1.5 * 1048576.0, "1.50 MiB"),
            (2e12, "1862.65 GiB"),
        ] {
            assert_eq!(amount(bytes), text);
        }
    }
}

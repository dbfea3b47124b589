//! The messages of PMI-2: a length of six characters, then `name=value;` repeatedly.
//!
//! ```text
//!     31cmd=kvs-get;srcid=-1;key=card;
//! 42    cmd=kvs-get-response;rc=0;found=TRUE;value=AAEC;
//! ```
//!
//! A semicolon in a value is doubled. The length is padded on either side.

use super::failure::Failure;
use super::message::{MAX_MESSAGE, Message, visible};

/// Length of the length.
pub(super) const PREFIX: usize = 6;

/// A command with these fields, behind its length.
pub(super) fn encode(command: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body = format!("cmd={command};");
    for (name, value) in fields {
        body.extend([name, "=", value.replace(';', ";;").as_str(), ";"]);
    }
    format!("{:>PREFIX$}{body}", body.len()).into_bytes()
}

/// The length of the message that follows this prefix.
pub(super) fn length(prefix: &[u8]) -> Result<usize, Failure> {
    let length = visible(prefix)?.trim_matches(' ').parse().ok();
    length.filter(|length| (1..=MAX_MESSAGE).contains(length)).ok_or_else(|| {
        let prefix = prefix.escape_ascii();
        Failure::Malformed(format!("the launcher sent \"{prefix}\" as the length of a message"))
    })
}

/// The message of these bytes, which are given without the length.
pub(super) fn parse(body: &[u8]) -> Result<Message, Failure> {
    let mut rest = visible(body)?;
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let Some((name, behind)) = rest.split_once('=') else {
            return Err(Failure::Malformed("the launcher sent a field without a value".into()));
        };
        let (value, behind) = split_value(behind);
        fields.push((name.to_owned(), value));
        rest = behind;
    }
    Message::of_fields(fields)
}

/// The value up to the next single semicolon, and what follows it.
fn split_value(mut rest: &str) -> (String, &str) {
    let mut value = String::new();
    while let Some((part, behind)) = rest.split_once(';') {
        value.push_str(part);
        match behind.strip_prefix(';') {
            Some(behind) => {
                value.push(';');
                rest = behind;
            }
            None => return (value, behind),
        }
    }
    value.push_str(rest);
    (value, "")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn recorded_messages_of_slurm_are_parsed() {
        let message = parse(b"cmd=kvs-get-response;rc=0;found=TRUE;value=a;;b=c;").unwrap();
        let message = message.expect("kvs-get-response").unwrap();
        assert_eq!((message.text("found"), message.text("value")), (Some("TRUE"), Some("a;b=c")));
        let error = parse(b"cmd=x-response;rc=14;errmsg=no space;").unwrap().expect("x-response");
        let expected = "the launcher sent x-response: no space (14)";
        assert!(matches!(error, Err(Failure::Refused(text)) if text == expected));
    }

    #[test]
    fn lengths_are_padded_on_either_side() {
        assert_eq!(encode("finalize", &[]), b"    13cmd=finalize;");
        assert_eq!([&b"13    "[..], b"    13", b"000013"].map(|it| length(it).unwrap()), [13; 3]);
        for prefix in [&b"0     "[..], b"-1    ", b"999999", b"1 3   ", b"cmd=in", b"\0\0\0\0\0\0"]
        {
            assert!(matches!(length(prefix), Err(Failure::Malformed(_))));
        }
    }

    #[test]
    fn bodies_without_a_command_are_refused() {
        for body in [&b""[..], b";", b"cmd", b"rc=0;cmd=x;", b"cmd=;", b"cmd=x;y;", b"cmd=x\n;"] {
            assert!(matches!(parse(body), Err(Failure::Malformed(_))), "{}", body.escape_ascii());
        }
    }

    proptest! {
        #[test]
        fn messages_are_restored_from_their_bytes(
            command in "[a-z-]{1,12}",
            fields in prop::collection::vec(("[a-z]{1,8}", "[ -~]{0,40}"), 0..6),
        ) {
            let borrowed: Vec<_> =
                fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let bytes = encode(&command, &borrowed);
            let (prefix, body) = bytes.split_at(PREFIX);
            prop_assert_eq!(length(prefix).unwrap(), body.len());
            let message = parse(body).unwrap();
            prop_assert_eq!(message.command(), command);
            for (name, _) in &fields {
                let first = fields.iter().find(|field| field.0 == *name).unwrap();
                prop_assert_eq!(message.text(name), Some(first.1.as_str()));
            }
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes: Vec<u8>, text in "(cmd=)?[ -~]{0,80}") {
            let _ = length(&bytes);
            let _ = parse(&bytes);
            let _ = parse(text.as_bytes());
        }
    }
}

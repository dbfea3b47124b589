//! The messages of PMI-1: a line of `name=value`, separated by spaces.
//!
//! ```text
//! cmd=get kvsname=kvs_17 key=card
//! cmd=get_result rc=0 msg=success value=AAEC
//! ```
//!
//! A value has no spaces, except for the text of an error: words without `=` belong to the value
//! before them.

use super::failure::Failure;
use super::message::{Message, visible};

/// The line of a command with these fields.
pub(super) fn encode(command: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut line = format!("cmd={command}");
    for (name, value) in fields {
        line.extend([" ", name, "=", value]);
    }
    line.push('\n');
    line.into_bytes()
}

/// The message of a line, which is given without its end.
pub(super) fn parse(line: &[u8]) -> Result<Message, Failure> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for word in visible(line)?.split([' ', '\t']).filter(|word| !word.is_empty()) {
        match (word.split_once('='), fields.last_mut()) {
            (Some((name, value)), _) => fields.push((name.to_owned(), value.to_owned())),
            (None, Some((_, value))) => value.extend([" ", word]),
            (None, None) => {
                let detail = "the launcher sent a line that does not begin with a command";
                return Err(Failure::Malformed(detail.into()));
            }
        }
    }
    Message::of_fields(fields)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn recorded_lines_of_hydra_are_parsed() {
        let line = b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0";
        let message = parse(line).unwrap().expect("response_to_init").unwrap();
        assert_eq!(message.number::<u32>("pmi_version").unwrap(), 1);
        let line = b"cmd=get_result rc=-1 msg=key_x_not_found value=unknown";
        let error = parse(line).unwrap().expect("get_result").unwrap_err();
        let expected = "the launcher sent get_result: key_x_not_found (-1)";
        assert!(matches!(error, Failure::Refused(text) if text == expected));
        assert_eq!(parse(b"cmd=set size=4").unwrap().text("size"), Some("4"));
    }

    #[test]
    fn values_may_contain_equal_signs_and_messages_spaces() {
        let message = parse(b"cmd=x  value=a=b== msg=no such key rc=1").unwrap();
        assert_eq!(message.text("value"), Some("a=b=="));
        assert_eq!(message.text("msg"), Some("no such key"));
        assert_eq!(message.text("rc"), Some("1"));
    }

    #[test]
    fn lines_without_a_command_are_refused() {
        for line in [&b""[..], b" ", b"word", b"rc=0 cmd=x", b"cmd=", b"cmd=x\0", b"cmd=\xff"] {
            assert!(matches!(parse(line), Err(Failure::Malformed(_))), "{}", line.escape_ascii());
        }
    }

    proptest! {
        #[test]
        fn messages_are_restored_from_their_line(
            command in "[a-z_]{1,12}",
            fields in prop::collection::vec(("[a-z_]{1,8}", "[!-~]{0,40}"), 0..6),
        ) {
            let borrowed: Vec<_> =
                fields.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let line = encode(&command, &borrowed);
            let message = parse(line.strip_suffix(b"\n").unwrap()).unwrap();
            prop_assert_eq!(message.command(), command);
            for (name, _) in &fields {
                let first = fields.iter().find(|field| field.0 == *name).unwrap();
                prop_assert_eq!(message.text(name), Some(first.1.as_str()));
            }
        }

        #[test]
        fn any_line_is_parsed_or_refused(line: Vec<u8>, text in "(cmd=)?[ -~]{0,80}") {
            let _ = parse(&line);
            let _ = parse(text.as_bytes());
        }
    }
}

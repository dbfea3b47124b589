//! What a client and a service say to each other.
//!
//! ```text
//! request  "FcRQ"  version (2)  number (8)               the name
//! answer   "FcAN"  version (2)  verdict (1)  number (8)  a handle, if there is one
//! ```
//!
//! Numbers are little endian. An answer has the number of its request, so that one which
//! comes too late is not taken for that of the next; 0 stands for the connection as a whole.

/// The longest name, in bytes.
pub const LONGEST_NAME: usize = 255;

const REQUEST: &[u8; 4] = b"FcRQ";
const ANSWER: &[u8; 4] = b"FcAN";
const VERSION: u16 = 2;

/// The number of answers that belong to no request.
pub(super) const OF_THE_CONNECTION: u64 = 0;

/// What an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Here = 0,
    Unknown = 1,
    Denied = 2,
    Malformed = 3,
    Full = 4,
    Failed = 5,
}

/// An answer, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer<'a> {
    pub(super) verdict: u8,
    pub(super) number: u64,
    pub(super) rest: &'a [u8],
}

impl Answer<'_> {
    pub(super) fn says(&self, verdict: Verdict) -> bool {
        self.verdict == verdict as u8
    }

    /// Is it meant for who sent the request with this number?
    pub(super) fn is_for(&self, number: u64) -> bool {
        [number, OF_THE_CONNECTION].contains(&self.number)
    }
}

/// Why bytes are no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    Malformed,
    OfVersion(u16),
}

/// Can something be shared under this name?
pub(super) fn is_name(name: &str) -> bool {
    (1..=LONGEST_NAME).contains(&name.len())
}

pub(super) fn request(number: u64, name: &str) -> Vec<u8> {
    [&REQUEST[..], &VERSION.to_le_bytes(), &number.to_le_bytes(), name.as_bytes()].concat()
}

pub(super) fn answer(verdict: Verdict, number: u64, rest: &[u8]) -> Vec<u8> {
    let number = number.to_le_bytes();
    [&ANSWER[..], &VERSION.to_le_bytes(), &[verdict as u8], &number, rest].concat()
}

/// The number of a request, and the name that it asks for.
pub(super) fn read_request(bytes: &[u8]) -> Option<(u64, &str)> {
    let rest = bytes.strip_prefix(REQUEST)?;
    let (version, rest) = rest.split_first_chunk()?;
    let (number, name) = rest.split_first_chunk()?;
    let name = std::str::from_utf8(name).ok()?;
    let is_good = u16::from_le_bytes(*version) == VERSION && is_name(name);
    is_good.then_some((u64::from_le_bytes(*number), name))
}

pub(super) fn read_answer(bytes: &[u8]) -> Result<Answer<'_>, NoAnswer> {
    let take = || bytes.strip_prefix(ANSWER)?.split_first_chunk();
    let (version, rest) = take().ok_or(NoAnswer::Malformed)?;
    match u16::from_le_bytes(*version) {
        VERSION => {}
        other => return Err(NoAnswer::OfVersion(other)),
    }
    let take = || {
        let ([verdict], rest) = rest.split_first_chunk()?;
        let (number, rest) = rest.split_first_chunk()?;
        Some(Answer { verdict: *verdict, number: u64::from_le_bytes(*number), rest })
    };
    take().ok_or(NoAnswer::Malformed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_read_has_one_way_to_be_written(
            magic in prop_oneof![Just(REQUEST), Just(ANSWER)],
            version in 0_u16..4,
            rest in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let bytes = [&magic[..], &version.to_le_bytes(), &rest].concat();
            if let Some((number, name)) = read_request(&bytes) {
                prop_assert_eq!(&request(number, name), &bytes);
            }
            if let Ok(read) = read_answer(&bytes) {
                let mut written = answer(Verdict::Here, read.number, read.rest);
                written[6] = read.verdict;
                prop_assert_eq!(written, bytes);
            }
        }
    }

    #[test]
    fn a_request_is_a_number_and_a_name_and_nothing_else() {
        let raw = |name: &[u8]| [&request(7, "")[..], name].concat();
        assert_eq!(read_request(&request(7, "weights")), Some((7, "weights")));
        assert_eq!(read_request(&raw(b"weights")), Some((7, "weights")));
        assert_eq!(read_request(&raw(b"")), None);
        assert_eq!(read_request(&raw(&[b'x'; 256])), None);
        assert_eq!(read_request(&raw(&[0xff, 0xfe])), None, "no text");
        assert_eq!(read_request(b"FcRQ\x01\x00weights, and more"), None, "another version");
        assert_eq!(read_request(b"FcRQ\x02\x00weight"), None, "cut off");
        assert_eq!(read_request(b"GET / HTTP/1.1"), None);
    }

    #[test]
    fn an_answer_says_which_request_it_is_for() {
        let bytes = answer(Verdict::Denied, 9, b"x");
        let read = read_answer(&bytes).unwrap();
        assert_eq!(read, Answer { verdict: 2, number: 9, rest: b"x" });
        assert!(read.says(Verdict::Denied) && read.is_for(9) && !read.is_for(8));
        let bytes = answer(Verdict::Full, OF_THE_CONNECTION, b"");
        assert!(read_answer(&bytes).unwrap().is_for(8));
        for cut in [&b""[..], b"FcAN", b"FcAN\x02\x00", b"FcAN\x02\x00\x00\x01", b"FcRQ\x02\x00"] {
            assert_eq!(read_answer(cut), Err(NoAnswer::Malformed));
        }
        assert_eq!(read_answer(b"FcAN\x01\x00\x02"), Err(NoAnswer::OfVersion(1)));
    }
}

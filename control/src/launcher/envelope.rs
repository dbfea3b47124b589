//! What each rank contributes to an exchange: its version, and its bytes or its failure.
//!
//! ```text
//! offset  size  field
//!      0     4  magic: these two fields never change
//!      4     1  n, length of the version
//!      5     n  version of the library: only equal versions interoperate
//!    5+n     1  0: bytes follow; 1: an error text follows
//!    6+n     …  bytes or text
//! ```

use std::time::Duration;

use super::error::{Error, ErrorKind, GATHER, Result, list};
use super::exchange::Exchange;

const MAGIC: &[u8] = b"FcLX";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const IS_BYTES: u8 = 0;
const IS_FAILURE: u8 = 1;
/// Longest error text.
const MAX_FAILURE: usize = 1024;

/// What a rank contributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Contribution<'a> {
    /// The rank's bytes.
    Bytes(&'a [u8]),
    /// The rank could not start, for this reason: all ranks fail with it.
    Failed(&'a str),
}

/// Gathers the bytes of all ranks, in the order of the ranks. If a rank contributes its failure, or
/// uses another version, all ranks get the same error.
///
/// ```
/// use std::time::Duration;
/// use control::launcher::{Contribution, ErrorKind, Single, gather};
/// let (mut job, timeout) = (Single::new(), Duration::from_secs(1));
/// assert_eq!(gather(&mut job, Contribution::Bytes(b"card"), timeout)?, [b"card"]);
/// let error = gather(&mut job, Contribution::Failed("no provider"), timeout).unwrap_err();
/// assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[0][..]));
/// # Ok::<(), control::launcher::Error>(())
/// ```
///
/// # Errors
/// [`RankFailed`](ErrorKind::RankFailed), [`VersionMismatch`](ErrorKind::VersionMismatch),
/// [`Malformed`](ErrorKind::Malformed), each with the ranks; errors of the exchange.
pub fn gather(
    exchange: &mut dyn Exchange,
    own: Contribution<'_>,
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    let gathered = exchange.all_gather(&encode(own, VERSION), timeout)?;
    open_all(gathered, exchange.size()).map_err(|error| error.by(exchange.name()))
}

fn encode(own: Contribution<'_>, version: &str) -> Vec<u8> {
    let (tag, content) = match own {
        Contribution::Bytes(bytes) => (IS_BYTES, bytes),
        Contribution::Failed(text) => {
            let ends = text.char_indices().map(|(at, character)| at + character.len_utf8());
            let length = ends.take_while(|end| *end <= MAX_FAILURE).last().unwrap_or(0);
            (IS_FAILURE, &text.as_bytes()[..length])
        }
    };
    let mut bytes = Vec::with_capacity(MAGIC.len() + 2 + version.len() + content.len());
    bytes.extend(MAGIC);
    bytes.push(version.len() as u8);
    bytes.extend(version.as_bytes());
    bytes.push(tag);
    bytes.extend(content);
    bytes
}

/// The version of a rank, and what follows it; None if the bytes are no envelope.
fn open(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = bytes.strip_prefix(MAGIC)?.split_first()?;
    let (version, rest) = rest.split_at_checked(usize::from(*length))?;
    Some((std::str::from_utf8(version).ok()?, rest))
}

fn open_all(gathered: Vec<Vec<u8>>, size: u32) -> Result<Vec<Vec<u8>>> {
    let fail = |kind, ranks: Vec<u32>, detail: String| {
        Err(Error::new(GATHER, kind, detail).of_ranks(ranks))
    };
    if gathered.len() != size as usize {
        let detail = format!("{} contributions from {size} ranks", gathered.len());
        return fail(ErrorKind::Malformed, Vec::new(), detail);
    }
    let ranks_with = |matches: &dyn Fn(usize) -> bool| -> Vec<u32> {
        (0..size).filter(|rank| matches(*rank as usize)).collect()
    };
    let malformed = ranks_with(&|rank| open(&gathered[rank]).is_none());
    if !malformed.is_empty() {
        let detail = format!("{} sent something else", list(&malformed));
        return fail(ErrorKind::Malformed, malformed, detail);
    }
    let (versions, contents): (Vec<_>, Vec<_>) =
        gathered.iter().filter_map(|bytes| open(bytes)).unzip();
    // The same text on all ranks: each names the ranks that differ from rank 0.
    let other = ranks_with(&|rank| versions[rank] != versions[0]);
    if let Some(first) = other.first() {
        let detail = format!(
            "{} of version {}, rank 0 is of version {}. Start the same build on all ranks",
            if other.len() == 1 {
                format!("rank {first} is")
            } else {
                format!("{} are", list(&other))
            },
            versions[*first as usize].escape_debug(),
            versions[0].escape_debug(),
        );
        return fail(ErrorKind::VersionMismatch, other, detail);
    }
    if versions[0] != VERSION {
        let detail = format!("all ranks are of version {}", versions[0].escape_debug());
        return fail(ErrorKind::VersionMismatch, vec![0], detail);
    }
    let failed = ranks_with(&|rank| contents[rank].first() == Some(&IS_FAILURE));
    if let Some(first) = failed.first() {
        let text = String::from_utf8_lossy(&contents[*first as usize][1..]);
        let others = match failed.len() - 1 {
            0 => String::new(),
            _ => format!(" (also {})", list(&failed[1..])),
        };
        let detail = format!("rank {first}{others}: {text}");
        return fail(ErrorKind::RankFailed, failed, detail);
    }
    let bytes = contents.iter().zip(0..).map(|(content, rank)| match content {
        [IS_BYTES, bytes @ ..] => Ok(bytes.to_vec()),
        _ => {
            let detail = format!("rank {rank} sent neither bytes nor an error");
            Err(Error::new(GATHER, ErrorKind::Malformed, detail).of_ranks([rank]))
        }
    });
    bytes.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes_of(version: &str) -> Vec<u8> {
        encode(Contribution::Bytes(b"x"), version)
    }

    #[test]
    fn bytes_are_returned_in_the_order_of_ranks() {
        let sent = [&b"a"[..], b"", b"ccc"];
        let gathered = sent.map(|bytes| encode(Contribution::Bytes(bytes), VERSION)).to_vec();
        assert_eq!(open_all(gathered, 3).unwrap(), sent);
    }

    #[test]
    fn ranks_of_another_version_are_named() {
        let gathered = vec![bytes_of("0.1.0"), bytes_of("0.2.0"), bytes_of("0.1.0")];
        let error = open_all(gathered, 3).unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::VersionMismatch, &[1][..]));
        let text = "exchange among ranks failed: version mismatch: rank 1 is of version 0.2.0, \
                    rank 0 is of version 0.1.0. Start the same build on all ranks";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn failure_of_a_rank_is_reported_with_its_text() {
        let failed = |text| encode(Contribution::Failed(text), VERSION);
        let gathered = vec![bytes_of(VERSION), failed("no provider"), failed("no memory")];
        let error = open_all(gathered, 3).unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::RankFailed, &[1, 2][..]));
        assert!(error.to_string().ends_with("rank 1 (also rank 2): no provider"), "{error}");
    }

    #[test]
    fn long_failure_is_shortened_at_a_character() {
        let text = "ä".repeat(2000);
        let bytes = encode(Contribution::Failed(&text), VERSION);
        let error = open_all(vec![bytes], 1).unwrap_err();
        assert!(error.to_string().ends_with('ä'));
    }

    #[test]
    fn wrong_number_of_contributions_is_refused() {
        assert_eq!(open_all(vec![bytes_of(VERSION)], 2).unwrap_err().kind(), ErrorKind::Malformed);
    }

    proptest! {
        #[test]
        fn any_bytes_are_opened_or_refused(bytes: Vec<u8>, cut in 0usize..20) {
            let _ = open_all(vec![bytes.clone()], 1);
            let mut envelope = bytes_of(VERSION);
            envelope.truncate(cut);
            envelope.extend(bytes);
            let _ = open_all(vec![envelope], 1);
        }
    }
}

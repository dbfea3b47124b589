//! Region descriptors come from peers: no bytes may make the decoder panic, and
//! what it accepts has one encoding only.
#![no_main]

use fabric::RemoteRegion;
use libfuzzer_sys::fuzz_target;

/// Where a descriptor says how long it is.
const LENGTH: std::ops::Range<usize> = 6..8;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(forged) = forge(bytes) {
        check(&forged);
    }
});

fn check(bytes: &[u8]) {
    if let Ok(region) = RemoteRegion::decode(bytes) {
        assert_eq!(region.encode(), bytes, "{region:?} is encoded otherwise");
    }
}

/// Almost every change is found by its length or its checksum. Whoever means harm
/// would make both right, and so get at the checks behind them.
fn forge(bytes: &[u8]) -> Option<Vec<u8>> {
    let (body, _) = bytes.split_last_chunk::<4>()?;
    let length = u16::try_from(bytes.len()).ok()?;
    let mut forged = body.to_vec();
    forged.get_mut(LENGTH)?.copy_from_slice(&length.to_le_bytes());
    forged.extend(crc32fast::hash(&forged).to_le_bytes());
    Some(forged)
}

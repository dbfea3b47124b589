//! Handles of shared memory come from other processes: no bytes may make the decoder
//! panic, and what it accepts has one encoding only and describes what lies inside.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::Facts;

/// Where a handle says how long it is.
const LENGTH: std::ops::Range<usize> = 6..8;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(forged) = forge(bytes) {
        check(&forged);
    }
});

fn check(bytes: &[u8]) {
    if let Ok(facts) = Facts::decode(bytes) {
        assert_eq!(facts.encode(), bytes, "{facts:?} is encoded otherwise");
        let (first, end) = facts.tensor.extent().expect("it was checked");
        assert!(first <= end && end <= facts.length);
    }
}

/// Makes length and checksum right, as somebody would who means harm.
fn forge(bytes: &[u8]) -> Option<Vec<u8>> {
    let (body, _) = bytes.split_last_chunk::<4>()?;
    let length = u16::try_from(bytes.len()).ok()?;
    let mut forged = body.to_vec();
    forged.get_mut(LENGTH)?.copy_from_slice(&length.to_le_bytes());
    forged.extend(crc32fast::hash(&forged).to_le_bytes());
    Some(forged)
}

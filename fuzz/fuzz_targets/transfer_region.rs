//! Descriptors of regions come from other processes and machines: no bytes may make the
//! decoder panic, and what it accepts has one encoding only.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::{AgentCard, RegionDescriptor};

/// Where a descriptor says how long it is.
const LENGTH: std::ops::Range<usize> = 6..8;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(forged) = forge(bytes) {
        check(&forged);
    }
});

fn check(bytes: &[u8]) {
    if let Ok(region) = RegionDescriptor::decode(bytes) {
        let again = region.encode().expect("it was as long before");
        assert_eq!(again, bytes, "{region:?} is encoded otherwise");
        assert!(region.offset.checked_add(region.length).is_some());
    }
    if let Ok(card) = AgentCard::decode(bytes) {
        assert_eq!(card.encode().expect("it was as long before"), bytes);
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

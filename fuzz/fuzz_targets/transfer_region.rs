//! Descriptors of regions come from other processes and machines: no bytes may make the
//! decoder panic, and what it accepts has one encoding only.
#![no_main]

use fabricast_fuzz::forge;
use libfuzzer_sys::fuzz_target;
use transfer::{AgentCard, RegionDescriptor};

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(forged) = forge(bytes) {
        check(&forged);
    }
});

fn check(bytes: &[u8]) {
    if let Ok(region) = RegionDescriptor::decode(bytes) {
        let again = region.encode().expect("the length is unchanged");
        assert_eq!(again, bytes, "{region:?} is encoded differently");
        assert!(region.offset.checked_add(region.length).is_some());
    }
    if let Ok(card) = AgentCard::decode(bytes) {
        assert_eq!(card.encode().expect("the length is unchanged"), bytes);
    }
}

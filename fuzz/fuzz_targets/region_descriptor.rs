//! Region descriptors come from peers: no bytes may make the decoder panic, and
//! what it accepts has one encoding only.
#![no_main]

use fabric::RemoteRegion;
use fabricast_fuzz::forge;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(forged) = forge(bytes) {
        check(&forged);
    }
});

fn check(bytes: &[u8]) {
    if let Ok(region) = RemoteRegion::decode(bytes) {
        assert_eq!(region.encode(), bytes, "{region:?} is encoded differently");
    }
}

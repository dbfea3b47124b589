//! Handles of shared memory come from other processes: no bytes may make the decoder panic. What it
//! accepts has one encoding only, and describes a range inside its memory.
#![no_main]

use fabricast_fuzz::forge;
use libfuzzer_sys::fuzz_target;
use transfer::HandleMetadata;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(forged) = forge(bytes) {
        check(&forged);
    }
});

fn check(bytes: &[u8]) {
    if let Ok(metadata) = HandleMetadata::decode(bytes) {
        assert_eq!(metadata.encode(), bytes, "{metadata:?} is encoded differently");
        let (first, end) = metadata.tensor.extent().expect("the extent was checked");
        assert!(first <= end && end <= metadata.length);
    }
}

//! Control messages and message headers come from other machines: no bytes may make the decoders
//! panic, and what they accept has one encoding only.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::fuzzing::reencode_control_message;
use pubsub::replication::{MAX_PREFIX_LENGTH, MessageHeader};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(again) = reencode_control_message(bytes) {
        assert_eq!(again, bytes);
    }
    if let Ok((header, has_trailer)) = MessageHeader::decode(bytes) {
        let mut again = [0; MAX_PREFIX_LENGTH];
        let length = header.encode(has_trailer, &mut again);
        assert_eq!(again[..length], bytes[..length], "{header:?}");
    }
});

//! What nodes tell each other in letters, and what stands before messages, comes from other
//! machines: no bytes may make the decoders panic, and what they accept has one encoding only.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::bridge::{LONGEST_PREFIX, MessageHeader};
use pubsub::fuzzing::read_letter;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(again) = read_letter(bytes) {
        assert_eq!(again, bytes);
    }
    if let Ok((header, has_trailer)) = MessageHeader::decode(bytes) {
        let mut again = [0; LONGEST_PREFIX];
        let length = header.encode(has_trailer, &mut again);
        assert_eq!(again[..length], bytes[..length], "{header:?}");
    }
});

//! What nodes tell each other of topics, and what stands before messages, comes from other
//! machines: no bytes may make the decoders panic, and what they accept has one encoding only.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::bridge::{LONGEST_PREFIX, MessageHeader, Terms};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(terms) = Terms::decode(bytes) {
        assert_eq!(terms.encode().expect("it was as long before"), bytes, "{terms:?}");
    }
    if let Ok((header, has_trailer)) = MessageHeader::decode(bytes) {
        let mut again = [0; LONGEST_PREFIX];
        let length = header.encode(has_trailer, &mut again);
        assert_eq!(again[..length], bytes[..length], "{header:?}");
    }
});

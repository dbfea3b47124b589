//! Interests of other nodes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::fuzzing::fuzz_interests;

fuzz_target!(|bytes: &[u8]| {
    let _ = fuzz_interests(bytes);
});

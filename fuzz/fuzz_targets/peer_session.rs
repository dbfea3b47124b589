//! A node believes nothing that comes over a connection.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::fuzzing::{hear, valid_handshake};

fuzz_target!(|bytes: &[u8]| {
    let _ = hear(bytes);
    let mut introduced = valid_handshake();
    introduced.extend(bytes);
    let _ = hear(&introduced);
});

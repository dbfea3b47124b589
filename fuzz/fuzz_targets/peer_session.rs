//! A node trusts no bytes of a connection.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::fuzzing::{fuzz_session, valid_handshake};

fuzz_target!(|bytes: &[u8]| {
    let _ = fuzz_session(bytes);
    let mut session = valid_handshake();
    session.extend(bytes);
    let _ = fuzz_session(&session);
});

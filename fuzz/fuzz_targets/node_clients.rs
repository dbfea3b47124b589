//! Processes at a node's socket may send any bytes and any descriptors: other clients are served
//! all the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::fuzzing::run_clients;

fuzz_target!(|script: &[u8]| {
    // What the system refuses, such as too many descriptors, is no fault of the node.
    let _ = run_clients(script);
});

//! Processes that come to a node's socket may say whatever they like, and bring whatever
//! descriptors: others are served all the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pubsub::fuzzing::run_clients;

fuzz_target!(|script: &[u8]| {
    // What the system refuses, as more descriptors than there may be, says nothing of the node.
    let _ = run_clients(script);
});

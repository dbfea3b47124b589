//! What a ring's reader is told and finds comes from the writer: headers, notices, flags.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    fabricast_fuzz::ring::play(script);
});

//! Headers and notifications come from the writer of a ring.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    fabricast_fuzz::ring::play(script);
});

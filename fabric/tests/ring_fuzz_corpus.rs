//! Replays the seeds of the reader's fuzz target, and some random scripts.
#![allow(missing_docs)]

use proptest::prelude::*;

#[path = "../../fuzz/src/ring.rs"]
mod ring;

#[test]
fn the_fuzzers_corpus_does_not_panic() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/ring_reader");
    let mut seen = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus is part of the repository") {
        let entry = entry.unwrap();
        let taken = ring::play(&std::fs::read(entry.path()).unwrap());
        if entry.file_name().to_string_lossy().starts_with("honest") {
            assert_eq!(taken, 1, "{entry:?}: the script does not do what its name says");
        }
        seen += 1;
    }
    assert!(seen > 0, "the corpus is empty");
}

proptest! {
    #[test]
    fn no_script_makes_the_reader_panic(
        script in proptest::collection::vec(any::<u8>(), 0..600),
    ) {
        ring::play(&script);
    }
}

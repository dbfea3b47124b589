//! Policies come from command lines and environment variables: no text may make
//! the parser panic, and what it accepts keeps its meaning when written out again.
#![no_main]

use fabric::Policy;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(policy) = text.parse::<Policy>() else {
        return;
    };
    policy.check().expect("an accepted policy does not contradict itself");
    let again = written_out(&policy).parse();
    assert_eq!(again.as_ref().ok(), Some(&policy), "{again:?}");
});

fn written_out(policy: &Policy) -> String {
    let marked = |mark: &str, names: &[String]| {
        names.iter().map(|name| format!("{mark}{name}")).collect::<Vec<_>>()
    };
    let lists =
        [marked("", &policy.prefer), marked("=", &policy.require), marked("^", &policy.deny)];
    lists.concat().join(",")
}

//! The number of random cases of a test.

/// This many cases, unless PROPTEST_CASES says another number.
#[must_use]
pub fn cases(usual: u32) -> u32 {
    let configured = std::env::var("PROPTEST_CASES").ok();
    configured.and_then(|text| text.parse().ok()).unwrap_or(usual)
}

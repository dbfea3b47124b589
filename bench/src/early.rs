//! What this program does before any library is there.
#![allow(unsafe_code)]

/// Called before the constructors of any library; not where tests have a `main` of their own, which
/// would never let go of what is held back.
// SAFETY: what lies there is called as a C function while nothing else runs, with three words that
// it need not look at.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".preinit_array")]
static BEFORE_LIBRARIES: extern "C" fn() = command::process::hold_back;

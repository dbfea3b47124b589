//! Sleeping on a word that other processes change.
//!
//! Not the private kind of futex: the kernel finds the sleepers by the page, so that
//! processes that map it at different addresses meet.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The 32 bits of the word that the kernel compares.
fn lower_half(word: &AtomicU64) -> *const u32 {
    let halves: *const u32 = word.as_ptr().cast();
    let at = if cfg!(target_endian = "little") { 0 } else { 1 };
    halves.wrapping_add(at)
}

/// Sleeps while the lower half of the word is `low`, at most this long.
pub(crate) fn sleep(word: &AtomicU64, low: u32, longest: Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(longest.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(longest.subsec_nanos().cast_signed()),
    };
    // SAFETY: the word and the time are valid for the call; the kernel only reads.
    // Whether it slept, found another value or was interrupted: the caller looks again.
    unsafe {
        libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAIT, low, &raw const time);
    }
}

/// Wakes so many of those that sleep on the word.
pub(crate) fn wake(word: &AtomicU64, how_many: u32) {
    let how_many = i32::try_from(how_many).unwrap_or(i32::MAX);
    // SAFETY: the address is only a name to the kernel here.
    unsafe {
        libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAKE, how_many);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_changed_word_is_not_slept_on_and_a_sleep_ends_in_time() {
        let word = AtomicU64::new(0xffff_ffff_0000_0005);
        let start = Instant::now();
        sleep(&word, 4, Duration::from_secs(30));
        assert!(start.elapsed() < Duration::from_secs(20));
        sleep(&word, 5, Duration::from_millis(5));
        assert!(start.elapsed() >= Duration::from_millis(5));
    }

    #[test]
    fn a_sleeper_is_woken() {
        let word = Arc::new(AtomicU64::new(0));
        let sleeper = std::thread::spawn({
            let word = Arc::clone(&word);
            move || {
                let end = Instant::now() + Duration::from_secs(30);
                while word.load(Ordering::Acquire) == 0 {
                    assert!(Instant::now() < end, "nobody woke the sleeper");
                    sleep(&word, 0, Duration::from_secs(10));
                }
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        word.store(1, Ordering::Release);
        wake(&word, 1);
        sleeper.join().unwrap();
    }
}

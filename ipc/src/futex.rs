//! Sleeping on a word that other processes change.
//!
//! Not a private futex: the kernel finds the sleepers by the page, so that processes can map it
//! at different addresses.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

thread_local! {
    static INTERRUPTED_SLEEPS: Cell<u64> = const { Cell::new(0) };
}

/// How many sleeps of the calling thread ended because a signal handler had run.
pub(crate) fn interrupted_sleeps() -> u64 {
    INTERRUPTED_SLEEPS.get()
}

/// The 32 bits of the word that the kernel compares.
fn lower_half(word: &AtomicU64) -> *const u32 {
    let halves: *const u32 = word.as_ptr().cast();
    let at = if cfg!(target_endian = "little") { 0 } else { 1 };
    halves.wrapping_add(at)
}

/// Sleeps while the lower half of the word is `low`, up to the timeout.
pub(crate) fn sleep(word: &AtomicU64, low: u32, timeout: Duration) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(timeout.subsec_nanos().cast_signed()),
    };
    // SAFETY: the word and the time are valid for the call; the kernel only reads. In all cases
    // (woken, another value, interrupted) the caller checks its condition again.
    let answer = unsafe {
        libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAIT, low, &raw const time)
    };
    // With a timeout, the kernel reports EINTR whenever a handler has run, even with
    // SA_RESTART. After a signal without a handler it resumes the sleep itself.
    if answer == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
        INTERRUPTED_SLEEPS.set(INTERRUPTED_SLEEPS.get().wrapping_add(1));
    }
}

/// Wakes up to this many threads that sleep on the word.
pub(crate) fn wake(word: &AtomicU64, how_many: u32) {
    let how_many = i32::try_from(how_many).unwrap_or(i32::MAX);
    // SAFETY: the kernel uses the address only as a key here.
    unsafe {
        libc::syscall(libc::SYS_futex, lower_half(word), libc::FUTEX_WAKE, how_many);
    }
}

/// The largest number of words to sleep on at once.
pub(crate) const MAX_WORDS: usize = libc::FUTEX_WAITV_MAX as usize;

/// A word as the kernel takes it, with the value of the lower half during which the thread
/// sleeps.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FutexWaiter {
    low: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// The kernel's timespec, whose seconds have 64 bits on every processor.
#[repr(C)]
struct Timespec64 {
    seconds: i64,
    nanoseconds: i64,
}

/// Does the kernel support sleeping on several words? Since Linux 5.16, unless a filter blocks
/// it.
pub(crate) fn supports_waitv() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        // SAFETY: no words, so nothing is read; a kernel with the call refuses that.
        let answer = unsafe {
            libc::syscall(libc::SYS_futex_waitv, ptr::null::<FutexWaiter>(), 0_usize, 0, 0_usize, 0)
        };
        answer == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
    })
}

/// Sleeps while the lower halves of all these words, at most [`MAX_WORDS`], have the given
/// values, up to the timeout. May return early.
///
/// # Errors
/// The system's error, if it did not sleep although no word changed.
pub(crate) fn wait_any<'a>(
    words: impl IntoIterator<Item = (&'a AtomicU64, u32)>,
    timeout: Duration,
) -> io::Result<()> {
    let mut waiters = [FutexWaiter::default(); MAX_WORDS];
    let mut count = 0;
    for (waiter, (word, low)) in waiters.iter_mut().zip(words) {
        let address = lower_half(word).expose_provenance() as u64;
        let flags = libc::FUTEX2_SIZE_U32 as u32;
        *waiter = FutexWaiter { low: low.into(), address, flags, reserved: 0 };
        count += 1;
    }
    let clock = libc::CLOCK_MONOTONIC;
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: space for the time.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
    let end = now.saturating_add(timeout);
    let seconds = i64::try_from(end.as_secs()).unwrap_or(i64::MAX);
    let end = Timespec64 { seconds, nanoseconds: end.subsec_nanos().into() };
    // SAFETY: the array is valid for the call, and the words as long as the borrows; the kernel
    // only reads.
    let answer = unsafe {
        libc::syscall(libc::SYS_futex_waitv, waiters.as_ptr(), count, 0, &raw const end, clock)
    };
    if answer >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ETIMEDOUT | libc::EINTR) => Ok(()),
        _ => Err(error),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use super::*;

    #[test]
    fn changed_word_does_not_sleep_and_sleep_times_out() {
        let word = AtomicU64::new(0xffff_ffff_0000_0005);
        let start = Instant::now();
        sleep(&word, 4, Duration::from_secs(30));
        assert!(start.elapsed() < Duration::from_secs(20));
        sleep(&word, 5, Duration::from_millis(5));
        assert!(start.elapsed() >= Duration::from_millis(5));
    }

    #[test]
    fn one_of_several_words_wakes() {
        if !supports_waitv() {
            println!("this kernel cannot sleep on several words");
            return;
        }
        let words: Vec<_> =
            (0..MAX_WORDS as u64).map(|low| AtomicU64::new(7 << 32 | low)).collect();
        let lows = || words.iter().zip(0..);
        let start = Instant::now();
        wait_any(lows(), Duration::from_millis(5)).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(5));
        // One word has changed already.
        words[100].store(0, Ordering::Release);
        wait_any(lows(), Duration::from_secs(30)).unwrap();
        words[100].store(100, Ordering::Release);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                while words[MAX_WORDS - 1].load(Ordering::Acquire) != 0 {
                    wait_any(lows(), Duration::from_secs(30)).unwrap();
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            words[MAX_WORDS - 1].store(0, Ordering::Release);
            wake(&words[MAX_WORDS - 1], 1);
            sleeper.join().unwrap();
        });
        assert!(start.elapsed() < Duration::from_secs(20));
        // No words, so the call fails.
        wait_any([], Duration::from_secs(30)).unwrap_err();
    }

    #[test]
    fn sleeper_is_woken() {
        let word = Arc::new(AtomicU64::new(0));
        let sleeper = std::thread::spawn({
            let word = Arc::clone(&word);
            move || {
                let end = Instant::now() + Duration::from_secs(30);
                while word.load(Ordering::Acquire) == 0 {
                    assert!(Instant::now() < end, "the sleeper was not woken");
                    sleep(&word, 0, Duration::from_secs(10));
                }
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        word.store(1, Ordering::Release);
        wake(&word, 1);
        sleeper.join().unwrap();
    }

    extern "C" fn does_nothing(_: libc::c_int) {}

    /// Installs a handler for the signal, with these flags.
    fn handle(signal: libc::c_int, flags: libc::c_int) {
        // SAFETY: all zero is a valid set of flags and signals; the handler does nothing.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = does_nothing as *const () as usize;
        action.sa_flags = flags;
        // SAFETY: a valid action for a signal that no other code of this program uses.
        assert_eq!(unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) }, 0);
    }

    #[test]
    fn signal_handler_ends_a_sleep_with_or_without_restart() {
        for (signal, flags) in [(libc::SIGUSR1, 0), (libc::SIGUSR2, libc::SA_RESTART)] {
            handle(signal, flags);
            let (sender, receiver) = std::sync::mpsc::channel();
            let sleeper = std::thread::spawn(move || {
                // SAFETY: returns the calling thread's own id.
                sender.send(unsafe { libc::pthread_self() }).unwrap();
                let (interruption, start) = (crate::Interruption::watch(), Instant::now());
                while !interruption.occurred() && start.elapsed() < Duration::from_secs(20) {
                    crate::sleep_interruptible(Duration::from_secs(20));
                }
                (interruption.occurred(), start.elapsed())
            });
            let thread = receiver.recv().unwrap();
            let other = crate::Interruption::watch();
            while !sleeper.is_finished() {
                // SAFETY: the thread was not joined yet.
                unsafe { libc::pthread_kill(thread, signal) };
                std::thread::sleep(Duration::from_millis(5));
            }
            let (occurred, took) = sleeper.join().unwrap();
            assert!(occurred && took < Duration::from_secs(20), "{signal}: {took:?}");
            assert!(!other.occurred());
        }
    }
}

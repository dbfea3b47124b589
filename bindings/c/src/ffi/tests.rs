//! Errors that C programs make, and their results.

use std::ffi::{CStr, c_char, c_void};

use super::*;

fn refused<T: std::fmt::Debug>(result: Result<T>) {
    assert_eq!(result.unwrap_err().status, Status::InvalidArgument);
}

fn text(raw: *const c_char) -> Text<'static> {
    // SAFETY: the tests pass static texts, or NULL.
    unsafe { Text::from_c((c"test", "name"), raw, 0) }.unwrap()
}

#[test]
fn panic_becomes_a_status() {
    let status: i32 = call(c"test", || panic!("at {}", "once"));
    assert_eq!(status, Status::Panicked as i32);
    assert_eq!(failure::fabricast_error_status(), Status::Panicked as i32);
    // SAFETY: the text is valid until the next failure.
    let message = unsafe { CStr::from_ptr(failure::fabricast_error_message()) };
    assert_eq!(message, c"test failed: internal error: at once");
    let pointer: *mut u8 = call(c"test", || panic!("again"));
    assert!(pointer.is_null());
}

#[test]
fn success_keeps_the_last_error() {
    let _: i32 = call(c"test", || Err(Failure::invalid(c"test", "wrong")));
    let status: i32 = call(c"test", || Ok(()));
    assert_eq!(status, 0);
    assert_eq!(failure::fabricast_error_status(), Status::InvalidArgument as i32);
}

#[test]
fn texts_are_limited_and_utf_8() {
    assert_eq!(text(c"name".as_ptr()).required(c"test", "name").unwrap(), "name");
    assert_eq!(text(ptr::null()).get(c"test", "name").unwrap(), None);
    refused(text(ptr::null()).required(c"test", "name"));
    refused(text(c"\xc3(".as_ptr()).get(c"test", "name"));
    let (longest, longer) = ("x".repeat(4096) + "\0", "x".repeat(4097) + "\0");
    let (longest, longer): (&'static str, &'static str) = (longest.leak(), longer.leak());
    assert_eq!(text(longest.as_ptr().cast()).required(c"test", "name").unwrap().len(), 4096);
    refused(text(longer.as_ptr().cast()).get(c"test", "name"));
}

#[test]
fn impossible_bytes_are_errors() {
    let something = 7_u8;
    let valid = (&raw const something).cast::<c_void>();
    // SAFETY: nothing is read of invalid ranges, and one byte is valid.
    unsafe {
        refused(<&[u8]>::from_c((c"test", "data"), ptr::null(), 1));
        refused(<&[u8]>::from_c((c"test", "data"), valid, usize::MAX));
        refused(<&mut [u8]>::from_c((c"test", "into"), ptr::null_mut(), 1));
        refused(CallerRange::from_c((c"test", "pointer"), ptr::null(), 1));
        refused(CallerRange::from_c((c"test", "pointer"), ptr::without_provenance(usize::MAX), 2));
        assert_eq!(<&[u8]>::from_c((c"test", "data"), valid, 1).unwrap(), [7]);
        assert!(<&[u8]>::from_c((c"test", "data"), ptr::null(), 0).unwrap().is_empty());
        assert!(<&mut [u8]>::from_c((c"test", "into"), ptr::null_mut(), 0).unwrap().is_empty());
    }
}

#[test]
fn output_is_cleared_then_filled() {
    let mut target = [u64::MAX; 2];
    // SAFETY: valid for one value; the other pointers are not dereferenced.
    unsafe {
        refused(Out::<u64>::from_c((c"test", "count"), ptr::null_mut(), 0));
        refused(Out::<u64>::from_c((c"test", "count"), target.as_mut_ptr().byte_add(1), 0));
        Out::<u64>::clear(ptr::null_mut(), 0);
        Out::<u64>::clear(target.as_mut_ptr(), 0);
        assert_eq!(target, [0, u64::MAX]);
        let out = Out::<u64>::from_c((c"test", "count"), target.as_mut_ptr(), 0).unwrap();
        out.put(5).unwrap();
    }
    assert_eq!(target, [5, u64::MAX]);
}

/// Functions as C sees them.
mod seen {
    use crate::ffi::OutStruct;
    use crate::handle::Handle;
    use crate::layout::{RawCounters, RawSent};
    use crate::topic::OpenTopic;

    export! {
        /// Takes two structures, and the topic is invalid.
        fn test_that_structures_are_cleared(
            topic: Handle<OpenTopic>,
            counters: OutStruct<'_, RawCounters>[size],
            sent: Option<OutStruct<'_, RawSent>>[other_size],
        ) -> i32, c"test" {
            let _ = (topic, counters, sent);
            Ok(())
        }
    }
}

#[test]
fn structures_are_zero_after_any_failure() {
    let (mut counters, mut sent) = ([u64::MAX; 5], [u64::MAX; 4]);
    let fill = |counters: &mut [u64; 5], size, sent: *mut u64| {
        let (no_topic, counters) = (ptr::null_mut(), counters.as_mut_ptr().cast());
        // SAFETY: valid for the sizes of both.
        unsafe { seen::test_that_structures_are_cleared(no_topic, counters, size, sent.cast(), 24) }
    };
    let status = fill(&mut counters, 32, sent.as_mut_ptr());
    assert_eq!(status, Status::BadHandle as i32);
    assert_eq!((counters, sent), ([0, 0, 0, 0, u64::MAX], [0, 0, 0, u64::MAX]));
    // An impossible size is not used.
    let mut untouched = [7; 5];
    fill(&mut untouched, 8, ptr::null_mut());
    fill(&mut untouched, 1 << 20, ptr::null_mut());
    assert_eq!(untouched, [7; 5]);
}

//! What C may do wrong, and what becomes of it.

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;

use super::*;
use crate::layout::{Layout, RawNodeOptions, RawSent, RawTopicSettings, WithDefaults};

fn refused<T: std::fmt::Debug>(result: Result<T>) {
    assert_eq!(result.unwrap_err().status, Status::InvalidArgument);
}

fn text(raw: *const c_char) -> Text<'static> {
    // SAFETY: the tests give texts that live for ever, or NULL.
    unsafe { Text::from_c(c"test", "name", raw) }.unwrap()
}

#[test]
fn a_panic_becomes_a_status() {
    let status: i32 = call(c"test", || panic!("at {}", "once"));
    assert_eq!(status, Status::Panicked as i32);
    assert_eq!(failure::last_status(), Status::Panicked);
    // SAFETY: the text stays until the next failure.
    let message = unsafe { CStr::from_ptr(failure::last_message()) };
    assert_eq!(message, c"test failed: internal error: at once");
    let pointer: *mut u8 = call(c"test", || panic!("again"));
    assert!(pointer.is_null());
}

#[test]
fn what_is_done_leaves_the_last_error_alone() {
    let _: i32 = call(c"test", || Err(Failure::invalid(c"test", "wrong")));
    let status: i32 = call(c"test", || Ok(()));
    assert_eq!(status, 0);
    assert_eq!(failure::last_status(), Status::InvalidArgument);
}

#[test]
fn texts_are_bounded_and_utf_8() {
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
fn bytes_that_cannot_be_are_refused() {
    let something = 7_u8;
    let here = (&raw const something).cast::<c_void>();
    // SAFETY: nothing is read of what cannot be, and one byte is there.
    unsafe {
        refused(Bytes::from_c(c"test", "data", ptr::null(), 1));
        refused(Bytes::from_c(c"test", "data", here, usize::MAX));
        refused(OutBytes::from_c(c"test", "into", ptr::null_mut(), 1));
        refused(CallerRange::from_c(c"test", "pointer", ptr::null(), 1));
        refused(CallerRange::from_c(c"test", "pointer", ptr::without_provenance(usize::MAX), 2));
        assert_eq!(Bytes::from_c(c"test", "data", here, 1).unwrap().0, [7]);
        assert!(Bytes::from_c(c"test", "data", ptr::null(), 0).unwrap().0.is_empty());
        assert!(OutBytes::from_c(c"test", "into", ptr::null_mut(), 0).unwrap().0.is_empty());
    }
}

#[test]
fn a_place_for_a_value_is_cleared_then_filled() {
    let mut place = [u64::MAX; 2];
    // SAFETY: room for one value; the other pointers are not followed.
    unsafe {
        refused(Out::<u64>::from_c(c"test", "count", ptr::null_mut()));
        refused(Out::<u64>::from_c(c"test", "count", place.as_mut_ptr().byte_add(1)));
        Out::<u64>::clear(ptr::null_mut(), 0);
        Out::<u64>::clear(place.as_mut_ptr(), 0);
        assert_eq!(place, [0, u64::MAX]);
        let out = Out::<u64>::from_c(c"test", "count", place.as_mut_ptr()).unwrap();
        out.put(5).unwrap();
    }
    assert_eq!(place, [5, u64::MAX]);
}

#[test]
fn a_structure_is_filled_as_far_as_the_caller_knows_it() {
    let sent = RawSent { position: 1, subscribers: 2, dropped: 3 };
    // A later program, whose structure has two words more.
    let mut later = [u64::MAX; 6];
    // SAFETY: room for six words.
    unsafe {
        OutStruct::<RawSent>::clear(later.as_mut_ptr().cast(), 40);
        let filled = OutStruct::<RawSent>::from_c(c"test", "sent", later.as_mut_ptr().cast(), 40);
        filled.unwrap().put(sent).unwrap();
        refused(OutStruct::<RawSent>::from_c(c"test", "sent", later.as_mut_ptr().cast(), 16));
        refused(OutStruct::<RawSent>::from_c(c"test", "sent", later.as_mut_ptr().cast(), 1 << 20));
        refused(OutStruct::<RawSent>::from_c(c"test", "sent", ptr::null_mut(), 24));
        let none = OptionalOutStruct::<RawSent>::from_c(c"test", "sent", ptr::null_mut(), 0);
        assert!(none.unwrap().0.is_none());
    }
    assert_eq!(later, [1, 2, 3, 0, 0, u64::MAX]);
}

/// As C sees them.
mod seen {
    use crate::ffi::{OptionalOutStruct, OutStruct};
    use crate::handle::Handle;
    use crate::layout::{RawCounters, RawSent};
    use crate::topic::OpenTopic;

    export! {
        /// Wants structures of what is no topic.
        fn test_that_structures_are_cleared(
            topic: Handle<OpenTopic>,
            counters: OutStruct<'_, RawCounters>[size],
            sent: OptionalOutStruct<'_, RawSent>[other_size],
        ) -> i32, c"test" {
            let _ = (topic, counters, sent);
            Ok(())
        }
    }
}

#[test]
fn structures_are_zeros_whatever_fails() {
    let (mut counters, mut sent) = ([u64::MAX; 5], [u64::MAX; 4]);
    let fill = |counters: &mut [u64; 5], size, sent: *mut u64| {
        let (no_topic, counters) = (ptr::null_mut(), counters.as_mut_ptr().cast());
        // SAFETY: there is room for what is known of both.
        unsafe { seen::test_that_structures_are_cleared(no_topic, counters, size, sent.cast(), 24) }
    };
    let status = fill(&mut counters, 32, sent.as_mut_ptr());
    assert_eq!(status, Status::BadHandle as i32);
    assert_eq!((counters, sent), ([0, 0, 0, 0, u64::MAX], [0, 0, 0, u64::MAX]));
    // A size that cannot be is none that would be believed.
    let mut untouched = [7; 5];
    fill(&mut untouched, 8, ptr::null_mut());
    fill(&mut untouched, 1 << 20, ptr::null_mut());
    assert_eq!(untouched, [7; 5]);
}

#[test]
fn what_was_filled_in_by_an_older_library_is_refused_if_it_says_more() {
    #[repr(C)]
    struct Later {
        known: RawNodeOptions,
        new: u64,
    }
    let mut later = Later { known: RawNodeOptions::defaults(), new: 7 };
    let (place, size) = ((&raw mut later).cast(), size_of::<Later>());
    // SAFETY: there is room for so much.
    let status = unsafe { crate::node::fabricast_node_options_init(place, size) };
    assert_eq!((status, later.known.size, later.new), (0, size, 0));
    assert!(options((&raw const later).cast()).unwrap().0.is_some());
    later.new = 1;
    refused(options((&raw const later).cast()));
}

fn options(raw: *const RawNodeOptions) -> Result<OptionalStruct<RawNodeOptions>> {
    // SAFETY: the tests give structures that are as long as they say, or NULL.
    unsafe { OptionalStruct::from_c(c"test", "options", raw) }
}

#[test]
fn a_structure_may_be_longer_if_it_says_nothing_new() {
    #[repr(C)]
    struct Later {
        known: RawNodeOptions,
        new: u64,
    }
    let known = RawNodeOptions {
        size: size_of::<Later>(),
        service_timeout: 77,
        ..RawNodeOptions::defaults()
    };
    let mut later = Later { known, new: 0 };
    let taken = options((&raw const later).cast()).unwrap().0.unwrap();
    assert_eq!(taken.service_timeout, 77);
    later.new = 1;
    refused(options((&raw const later).cast()));
}

#[test]
fn a_structure_without_its_size_is_refused() {
    assert!(options(ptr::null()).unwrap().0.is_none());
    for size in [0, RawNodeOptions::MIN_SIZE - 1, 1 << 40] {
        let raw = RawNodeOptions { size, ..RawNodeOptions::defaults() };
        refused(options(&raw const raw));
    }
    let zeroed = MaybeUninit::<RawTopicSettings<'_>>::zeroed();
    // SAFETY: a structure of zeros.
    refused(unsafe { OptionalStruct::from_c(c"test", "settings", zeroed.as_ptr()) });
}

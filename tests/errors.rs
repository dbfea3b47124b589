//! Errors returned from `main`, which are printed with `{:?}`.

use std::fmt::{Debug, Display};

/// `{:?}` is the text of `Display`; `{:#?}` has all fields.
#[track_caller]
fn is_readable(error: &(impl Debug + Display), field: &str) {
    assert_eq!(format!("{error:?}"), error.to_string());
    let all = format!("{error:#?}");
    assert!(all.lines().count() > 1 && all.contains(field), "{all}");
}

#[test]
fn error_returned_from_main_is_readable() {
    let device = || gpu::Device::open("emulated:99".parse().unwrap()).unwrap_err();
    is_readable(&fabric::RemoteRegion::decode(b"nonsense").unwrap_err(), "MalformedDescriptor");
    is_readable(&device(), "NoSuchDevice");
    is_readable(&transfer::RegionDescriptor::decode(b"nonsense").unwrap_err(), "Malformed");
    is_readable(&"drum".parse::<pubsub::MemoryLocation>().unwrap_err(), "InvalidArgument");
    is_readable(&ipc::ChannelError::TooLong { length: 3, max: 2 }, "length: 3");
    is_readable(&ipc::SegmentError::NotASegment { why: "cut off" }, "why: \"cut off\"");
    is_readable(&ipc::AllocatorError::InvalidExtent { offset: 1, length: 2 }, "offset: 1");
    is_readable(&ipc::QueueError::NotAQueue { why: "cut off" }, "why: \"cut off\"");
    // As in a `main` that returns several types of errors.
    let boxed: Box<dyn std::error::Error> = device().into();
    assert_eq!(format!("{boxed:?}"), device().to_string());
}

//! Errors as a program shows them whose `main` returns them: by `{:?}`, which is for people here.

use std::fmt::{Debug, Display};

/// The same to people either way, and all fields to who asks for more.
#[track_caller]
fn is_for_people(error: &(impl Debug + Display), field: &str) {
    assert_eq!(format!("{error:?}"), error.to_string());
    let all = format!("{error:#?}");
    assert!(all.lines().count() > 1 && all.contains(field), "{all}");
}

#[test]
fn what_main_returns_is_for_people() {
    let device = || gpu::Device::open("emulated:99".parse().unwrap()).unwrap_err();
    is_for_people(&fabric::RemoteRegion::decode(b"nonsense").unwrap_err(), "MalformedDescriptor");
    is_for_people(&device(), "NoSuchDevice");
    is_for_people(&transfer::RegionDescriptor::decode(b"nonsense").unwrap_err(), "Malformed");
    is_for_people(&"drum".parse::<pubsub::MemoryLocation>().unwrap_err(), "InvalidArgument");
    is_for_people(&ipc::ChannelError::TooLong { length: 3, max: 2 }, "length: 3");
    is_for_people(&ipc::SegmentError::NotASegment { why: "cut off" }, "why: \"cut off\"");
    is_for_people(&ipc::AllocatorError::InvalidExtent { offset: 1, length: 2 }, "offset: 1");
    is_for_people(&ipc::QueueError::NotAQueue { why: "cut off" }, "why: \"cut off\"");
    // As `main` has it that returns several kinds of them.
    let boxed: Box<dyn std::error::Error> = device().into();
    assert_eq!(format!("{boxed:?}"), device().to_string());
}

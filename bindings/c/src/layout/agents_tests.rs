//! Sizes and offsets that C programs rely on, and the conversion of fields.

use std::mem::offset_of;

use super::*;
use crate::ffi::Argument as _;
use crate::ffi::Layout as _;
use crate::status::Status;

/// `tests/programs/layout.c` has the same numbers.
#[test]
fn structures_have_the_layout_of_c() {
    assert_eq!(size_of::<RawAgentOptions>(), 72);
    assert_eq!(offset_of!(RawAgentOptions, lost_after), 40);
    assert_eq!(offset_of!(RawAgentOptions, cached_count), 56);
    assert_eq!(offset_of!(RawAgentOptions, force_remote), 68);
    assert_eq!(size_of::<RawNotice<'_>>(), 32);
    assert_eq!(offset_of!(RawNotice<'_>, data), 16);
    assert_eq!(offset_of!(RawNotice<'_>, length), 24);
    assert_eq!(size_of::<RawPart<'_>>(), 24);
    assert_eq!(offset_of!(RawPart<'_>, blocks), 8);
    assert_eq!(offset_of!(RawPart<'_>, count), 16);
    assert_eq!(size_of::<RawStrided>(), 104);
    assert_eq!(offset_of!(RawStrided, to), 16);
    assert_eq!(offset_of!(RawStrided, count), 32);
    assert_eq!(offset_of!(RawStrided, to_stride), 80);
    assert_eq!(size_of::<RawCardInfo>(), 112);
    assert_eq!(offset_of!(RawCardInfo, is_same_machine), 88);
    assert_eq!(size_of::<RawAgentEvent>(), 4480);
    assert_eq!(offset_of!(RawAgentEvent, from), 40);
    assert_eq!(offset_of!(RawAgentEvent, data), 56);
    assert_eq!(offset_of!(RawAgentEvent, label), 4152);
    assert_eq!(offset_of!(RawAgentEvent, reason), 4224);
}

#[test]
fn first_version_of_each_structure_is_accepted() {
    assert_eq!(RawAgentOptions::MIN_SIZE, size_of::<RawAgentOptions>());
    assert_eq!(RawNotice::MIN_SIZE, size_of::<RawNotice<'_>>());
    assert_eq!(RawStrided::MIN_SIZE, size_of::<RawStrided>());
    assert_eq!(RawCardInfo::MIN_SIZE, size_of::<RawCardInfo>());
    assert_eq!(RawAgentEvent::MIN_SIZE, size_of::<RawAgentEvent>());
}

#[test]
fn invalid_options_are_errors() {
    let raw = RawAgentOptions::defaults(size_of::<RawAgentOptions>());
    raw.to_options(c"test").unwrap();
    assert_eq!(raw.fabric(c"test").unwrap(), None);
    assert_eq!(raw.rails(c"test").unwrap(), 1);
    let named = RawAgentOptions { fabric: Text::of(c"tcp"), source: Text::of(c"::1"), ..raw };
    assert_eq!(named.fabric(c"test").unwrap(), Some(("tcp", Some("::1"))));
    let long = c"12345678901234567890123456789012345678901234567890123456789012345";
    let refused = [
        RawAgentOptions { waiting: 3, ..raw },
        RawAgentOptions { force_remote: 2, ..raw },
        RawAgentOptions { lost_after: -1, ..raw },
        RawAgentOptions { lost_after: 0, ..raw },
        RawAgentOptions { lost_after: i64::MAX, ..raw },
        RawAgentOptions { label: Text::of(long), ..raw },
    ];
    let invalid = |failure: Failure| assert_eq!(failure.status, Status::InvalidArgument);
    for options in refused {
        invalid(options.to_options(c"test").unwrap_err());
    }
    for rails in [0, 9, u32::MAX] {
        invalid(RawAgentOptions { rails, ..raw }.rails(c"test").unwrap_err());
    }
    let source = RawAgentOptions { source: Text::of(c"::1"), ..raw };
    invalid(source.fabric(c"test").unwrap_err());
}

fn array(list: &[u64]) -> Array<'_, u64> {
    // SAFETY: read as long as the list exists.
    unsafe { Array::from_c((c"test", "list"), list.as_ptr(), 0) }.unwrap()
}

#[test]
fn strided_rows_survive_conversion() {
    let rows = Strided::rows(9, 8, 100, 64).unwrap().repeat(3, 5000, 1000).unwrap();
    let rows = rows.repeat(2, 50000, 9000).unwrap().shifted(16, 24).unwrap();
    for rows in [Strided::row(1).unwrap(), rows] {
        let raw = RawStrided::of(104, &rows);
        assert_eq!(raw.to_strided(c"test").unwrap(), rows);
    }
    let raw = RawStrided::defaults(104);
    let refused = [
        raw,
        RawStrided { length: 8, count: [0, 1, 1], ..raw },
        RawStrided { length: 8, count: [2, 1, 1], ..raw },
        RawStrided { length: u64::MAX, from: 1, ..raw },
    ];
    for raw in refused {
        assert_eq!(raw.to_strided(c"test").unwrap_err().status, Status::InvalidArgument);
    }
}

/// In Fortran's order all lists are reversed.
#[test]
fn tile_has_the_order_of_its_language() {
    let rows = |order, lists: [[u64; 3]; 5]| {
        let lists = lists.each_ref().map(|list| ("list", array(list)));
        RawStrided::tile(c"test", 104, order, 8, 3, lists)
    };
    let lists = [[2, 3, 4], [10, 11, 12], [1, 2, 3], [20, 21, 22], [4, 5, 6]];
    let tile = rows(0, lists).unwrap();
    assert_eq!(tile, rows(1, lists.map(|[a, b, c]| [c, b, a])).unwrap());
    assert_eq!((tile.length, tile.count), (32, [3, 2, 1]));
    assert_eq!(tile.from, 8 * ((11 + 2) * 12 + 3));
    assert_eq!(tile.to, 8 * ((4 * 21 + 5) * 22 + 6));
    let refused = |order, lists| rows(order, lists).unwrap_err().status;
    assert_eq!(refused(2, lists), Status::InvalidArgument);
    assert_eq!(
        refused(0, [[2, 3, 0], lists[1], lists[2], lists[3], lists[4]]),
        Status::InvalidArgument
    );
    assert_eq!(
        refused(1, [[2, 3, 40], lists[1], lists[2], lists[3], lists[4]]),
        Status::InvalidArgument
    );
    for dimensions in [0, 16, usize::MAX] {
        let lists = [("list", array(&[1])); 5];
        let failure = RawStrided::tile(c"test", 104, 0, 8, dimensions, lists).unwrap_err();
        assert_eq!(failure.status, Status::InvalidArgument);
    }
}

#[test]
fn notice_is_limited_before_its_data_is_read() {
    let data = [7; transfer::MAX_NOTICE_LENGTH];
    // SAFETY: read as long as the data exists.
    let bytes = unsafe { Array::from_c((c"test", "data"), data.as_ptr(), 0) }.unwrap();
    let raw = RawNotice { tag: 5, data: bytes, length: data.len(), ..RawNotice::default() };
    let notice = raw.to_notice(c"test").unwrap();
    assert_eq!((notice.tag, notice.data()), (5, &data[..]));
    let empty = RawNotice { data: Array::default(), length: 0, ..raw };
    assert!(empty.to_notice(c"test").unwrap().data().is_empty());
    let length = data.len() + 1;
    for invalid in [RawNotice { length, ..raw }, RawNotice { data: Array::default(), ..raw }] {
        assert_eq!(invalid.to_notice(c"test").unwrap_err().status, Status::InvalidArgument);
    }
}

#[test]
fn long_text_is_cut_between_characters() {
    assert_eq!(fixed_text::<4>("abc"), *b"abc\0");
    assert_eq!(fixed_text::<4>("abcd"), *b"abc\0");
    assert_eq!(fixed_text::<4>("ab\u{e9}"), *b"ab\0\0");
    assert_eq!(fixed_text::<4>(""), [0; 4]);
}

#[test]
fn events_have_numbers() {
    let (from, label) = ([9; 16], "there".to_owned());
    let notice = Notice::new(7, b"data").unwrap();
    let found = RawAgentEvent::of(&Event::Notice { from, notice });
    assert_eq!((found.kind, found.tag, found.length, found.from), (2, 7, 4, from));
    assert_eq!(found.data[..5], *b"data\0");
    let joined = RawAgentEvent::of(&Event::Joined { from, label: label.clone() });
    assert_eq!((joined.kind, &joined.label[..6]), (1, &b"there\0"[..]));
    let left = RawAgentEvent::of(&Event::Left { from, label: label.clone(), is_dead: true });
    assert_eq!((left.kind, left.is_dead), (3, 1));
    let reason = "x".repeat(300);
    let lost = Event::RailLost { with: from, label: label.clone(), rail: 3, reason };
    let lost = RawAgentEvent::of(&lost);
    assert_eq!((lost.kind, lost.rail, lost.reason[254], lost.reason[255]), (4, 3, b'x', 0));
    let restored = RawAgentEvent::of(&Event::RailRestored { with: from, label, rail: 2 });
    assert_eq!((restored.kind, restored.rail), (5, 2));
}

//! Strided rows compared with an element-wise model.

use proptest::prelude::*;

use super::*;

type Pairs = Vec<(u64, u64)>;

/// For each byte its target and source offset, by loops over all elements.
fn model(row: u64, (from, to): (u64, u64), strides: &[(u64, u64, u64)]) -> Pairs {
    let mut bytes: Pairs = (0..row).map(|at| (to + at, from + at)).collect();
    for (count, from, to) in strides {
        let again = |n: u64| move |(b, a): &(u64, u64)| (b + n * to, a + n * from);
        bytes = (0..*count).flat_map(|n| bytes.iter().map(again(n)).collect::<Pairs>()).collect();
    }
    bytes.sort_unstable();
    bytes
}

fn bytes_of(strided: &Strided) -> Pairs {
    let each = |block: Block| (0..block.length).map(move |at| (block.to + at, block.from + at));
    let mut bytes: Pairs = strided.iter().flat_map(each).collect();
    bytes.sort_unstable();
    bytes
}

fn overlaps(bytes: &Pairs) -> bool {
    bytes.windows(2).any(|two| two[0].0 == two[1].0)
}

/// Does each stride at the target span all rows of the shorter strides?
fn is_nested(row: u64, strides: &[(u64, u64, u64)]) -> bool {
    let mut strides: Vec<_> = strides.iter().filter(|(count, ..)| *count > 1).collect();
    strides.sort_unstable_by_key(|(_, _, to)| to);
    let mut extent = row;
    strides.into_iter().all(|(count, _, to)| {
        let is_beyond = *to >= extent;
        extent += to * (count - 1);
        is_beyond
    })
}

fn kind(result: Result<Strided>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn rows_are_in_target_order() {
    let two = Strided::rows(2, 4, 10, 100).unwrap().repeat(3, 1000, 7).unwrap();
    let two = two.shifted(1, 2).unwrap();
    let expected = [0, 1, 2].into_iter().flat_map(|n| [(n, 0), (n, 1)]);
    let mut expected: Vec<_> = expected
        .map(|(n, k)| Block { to: 2 + 7 * n + 100 * k, from: 1 + 1000 * n + 10 * k, length: 4 })
        .collect();
    expected.sort_unstable_by_key(|block| block.to);
    assert_eq!(two.iter().collect::<Vec<_>>(), expected);
    assert_eq!((two.count(), two.bytes()), (6, 24));
    assert_eq!((two.to_end(), two.from_end()), (2 + 14 + 100 + 4, 1 + 2000 + 10 + 4));
    assert_eq!(two.iter().size_hint(), (6, Some(6)));
    assert_eq!((&two).into_iter().skip(4).size_hint(), (2, Some(2)));
}

#[test]
fn runs_have_the_rows_in_order() {
    let rows = Strided::rows(5, 4, 10, 100).unwrap().repeat(3, 1000, 700).unwrap();
    let rows = rows.repeat(2, 9000, 9000).unwrap();
    for most in [0, 1, 2, 3, 4, 5, 6, 100] {
        for start in [0, 1, 4, 5, 29] {
            let mut left = rows.rows_in(start..28);
            let mut found = Vec::new();
            while let Some(run) = left.next_run(most) {
                assert!((1..=most.max(1)).contains(&run.count), "{run:?}");
                found.extend((0..run.count).map(|row| Block {
                    to: run.first.to + row * run.to_stride,
                    from: run.first.from + row * run.from_stride,
                    length: 4,
                }));
            }
            assert_eq!(found, rows.rows_in(start..28).collect::<Vec<_>>());
        }
    }
    let mut one = Strided::row(9).unwrap().iter();
    let block = Block { to: 0, from: 0, length: 9 };
    assert_eq!(one.next_run(8).map(|run| (run.first, run.count)), Some((block, 1)));
    assert_eq!(one.next_run(8), None);
}

#[test]
fn contiguous_rows_are_merged() {
    let row = Strided::row(24).unwrap();
    assert_eq!(Strided::rows(3, 8, 8, 8).unwrap(), row);
    // Also if a later repetition makes them contiguous.
    let late = Strided::rows(3, 4, 8, 8).unwrap().repeat(2, 4, 4).unwrap();
    assert_eq!(late, row);
    // Contiguous at one end only: not merged.
    assert_eq!(Strided::rows(3, 8, 8, 9).unwrap().count(), 3);
    assert_eq!(Strided::rows(3, 8, 9, 8).unwrap().count(), 3);
    // A stride that continues another one is merged with it and needs no slot.
    let mut long = Strided::rows(2, 1, 2, 2).unwrap();
    for times in 1..20 {
        long = long.repeat(2, 2 << times, 2 << times).unwrap();
    }
    assert_eq!(long, Strided::rows(1 << 20, 1, 2, 2).unwrap());
}

#[test]
fn zero_bytes_or_repetitions_are_refused() {
    assert_eq!(kind(Strided::row(0)), ErrorKind::Malformed);
    assert_eq!(kind(Strided::rows(0, 8, 8, 8)), ErrorKind::Malformed);
    assert_eq!(kind(Strided::rows(3, 0, 8, 8)), ErrorKind::Malformed);
    assert_eq!(kind(Strided::row(8).unwrap().repeat(0, 1, 1)), ErrorKind::Malformed);
}

#[test]
fn overlapping_rows_are_refused() {
    for (rows, repeat) in [
        ((2, 8, 8, 7), (1, 0, 0)),
        ((2, 8, 8, 0), (1, 0, 0)),
        // The same stride twice, or a stride that ends within another one.
        ((3, 4, 4, 10), (2, 99, 10)),
        ((3, 4, 99, 10), (2, 99, 20)),
        ((3, 4, 99, 10), (2, 99, 23)),
        ((3, 4, 99, 10), (2, 99, 17)),
    ] {
        let described = Strided::rows(rows.0, rows.1, rows.2, rows.3);
        let described = described.and_then(|rows| rows.repeat(repeat.0, repeat.1, repeat.2));
        assert_eq!(kind(described), ErrorKind::Malformed, "{rows:?} {repeat:?}");
    }
    // Interleaved rows do not overlap, and sources may.
    Strided::rows(3, 4, 0, 10).unwrap().repeat(2, 0, 5).unwrap();
    // Interleaved rows that reach beyond the repeated ones are refused although they do not
    // overlap.
    let crossed = Strided::rows(3, 4, 0, 10).unwrap().repeat(2, 0, 15);
    assert_eq!(kind(crossed), ErrorKind::Malformed);
}

#[test]
fn ends_beyond_64_bits_are_refused() {
    let most = u64::MAX;
    let row = Strided::row(8).unwrap();
    assert_eq!(Strided::row(most).unwrap().to_end(), most);
    assert_eq!(kind(Strided::row(most).unwrap().shifted(0, 1)), ErrorKind::OutOfBounds);
    assert_eq!(kind(Strided::row(most).unwrap().shifted(1, 0)), ErrorKind::OutOfBounds);
    assert_eq!(kind(row.shifted(1, 1).unwrap().shifted(most, 0)), ErrorKind::OutOfBounds);
    for (count, from, to) in
        [(2, most, 8), (2, 8, most), (most, 8, 8), (most, 0, 9), (2, most - 7, 8), (2, 8, most - 7)]
    {
        assert_eq!(
            kind(row.repeat(count, from, to)),
            ErrorKind::OutOfBounds,
            "{count} {from} {to}"
        );
    }
    // The total length, too, even if the source is short.
    let scattered = row.repeat(1 << 30, 0, 16).unwrap().repeat(1 << 28, 0, 1 << 34).unwrap();
    assert_eq!(kind(scattered.repeat(8, 0, 1 << 62)), ErrorKind::OutOfBounds);
    let end = row.repeat(2, most - 15, 8).unwrap();
    assert_eq!(end.from_end(), most - 7);
    let last = end.iter().last();
    assert_eq!(last, Some(Block { to: 8, from: most - 15, length: 8 }));
}

#[test]
fn more_than_three_strides_are_refused() {
    let mut rows = Strided::row(1).unwrap();
    for times in 0..MAX_STRIDES as u32 {
        rows = rows.repeat(2, 10_u64.pow(times + 1), 100_u64.pow(times + 1)).unwrap();
    }
    assert_eq!(kind(rows.repeat(2, 1 << 40, 1 << 50)), ErrorKind::TooMany);
    // A merged stride does not count.
    assert_eq!(rows.repeat(3, 1, 1).unwrap().bytes(), 24);
}

#[test]
fn tile_beyond_its_array_is_refused() {
    let array = Subarray { extents: &[4, 6], origin: &[1, 2] };
    let tile = |size: &[u64], to| Strided::tile(8, size, array, to);
    assert!(tile(&[3, 4], array).is_ok());
    assert_eq!(kind(tile(&[4, 4], array)), ErrorKind::OutOfBounds);
    assert_eq!(kind(tile(&[3, 5], array)), ErrorKind::OutOfBounds);
    assert_eq!(kind(tile(&[3, 0], array)), ErrorKind::Malformed);
    assert_eq!(kind(tile(&[3], array)), ErrorKind::Malformed);
    assert_eq!(kind(tile(&[3, 1, 1], array)), ErrorKind::Malformed);
    let distant = Subarray { extents: &[4, 6], origin: &[u64::MAX, 0] };
    assert_eq!(kind(tile(&[1, 1], distant)), ErrorKind::OutOfBounds);
    let long = Subarray { extents: &[u64::MAX, u64::MAX], origin: &[0, 0] };
    assert_eq!(kind(tile(&[1, 1], long)), ErrorKind::OutOfBounds);
    let none = Subarray { extents: &[], origin: &[] };
    assert_eq!(Strided::tile(8, &[], none, none).unwrap(), Strided::row(8).unwrap());
}

#[test]
fn face_has_the_least_number_of_rows() {
    let n = 34;
    let extents = [n; 3];
    let all = [n - 2; 3];
    for (dimension, count) in [(0, 32), (1, 32), (2, 1024)] {
        let (mut size, mut from, mut to) = (all, [1; 3], [1; 3]);
        (size[dimension], from[dimension], to[dimension]) = (1, 32, 0);
        let (from, to) = (
            Subarray { extents: &extents, origin: &from },
            Subarray { extents: &extents, origin: &to },
        );
        let face = Strided::tile(8, &size, from, to).unwrap();
        assert_eq!((face.count(), face.bytes()), (count, 8 * 1024));
    }
}

fn strides() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    proptest::collection::vec((0_u64..5, 0_u64..40, 0_u64..60), 0..5)
}

/// A dimension of a tile: its size, and the margins before and after it at both ends.
type Dimension = (u64, (u64, u64), (u64, u64));

fn tiles() -> impl Strategy<Value = Vec<Dimension>> {
    let room = || (0_u64..3, 0_u64..3);
    proptest::collection::vec((1_u64..4, room(), room()), 0..4)
}

proptest! {
    #[test]
    fn strided_rows_match_the_model(
        row in 1_u64..9,
        at in (0_u64..50, 0_u64..50),
        strides in strides(),
    ) {
        let expected = model(row, at, &strides);
        let described = strides.iter().try_fold(Strided::row(row).unwrap(), |all, s| {
            all.repeat(s.0, s.1, s.2)
        });
        match described.and_then(|all| all.shifted(at.0, at.1)) {
            Ok(strided) => {
                prop_assert_eq!(bytes_of(&strided), expected.clone());
                prop_assert_eq!(strided.iter().count() as u64, strided.count());
                prop_assert_eq!(strided.bytes(), expected.len() as u64);
                prop_assert_eq!(strided.to_end(), expected.iter().map(|b| b.0).max().unwrap() + 1);
                prop_assert_eq!(strided.from_end(), expected.iter().map(|b| b.1).max().unwrap() + 1);
                prop_assert!(!overlaps(&expected), "overlap not detected");
            }
            Err(error) => match error.kind() {
                ErrorKind::Malformed => {
                    let has_none = strides.iter().any(|stride| stride.0 == 0);
                    prop_assert!(has_none || !is_nested(row, &strides), "{}", error);
                }
                ErrorKind::TooMany => {
                    let needed = strides.iter().filter(|stride| stride.0 > 1).count();
                    prop_assert!(needed > MAX_STRIDES, "{}", error);
                }
                other => prop_assert!(false, "{:?}: {}", other, error),
            },
        }
    }

    #[test]
    fn tile_matches_the_model(element in 1_u64..5, dimensions in tiles()) {
        let size: Vec<_> = dimensions.iter().map(|d| d.0).collect();
        let array = |room: fn(&Dimension) -> (u64, u64)| {
            let rooms: Vec<_> = dimensions.iter().map(room).collect();
            let extents: Vec<_> =
                rooms.iter().zip(&size).map(|(room, size)| room.0 + size + room.1).collect();
            let origin: Vec<_> = rooms.iter().map(|room| room.0).collect();
            (extents, origin)
        };
        let (from, to) = (array(|d| d.1), array(|d| d.2));
        let tile = Strided::tile(
            element,
            &size,
            Subarray { extents: &from.0, origin: &from.1 },
            Subarray { extents: &to.0, origin: &to.1 },
        ).unwrap();
        // Each element by its indices.
        let mut expected = Pairs::new();
        let count: u64 = size.iter().product();
        for number in 0..count {
            let mut left = number;
            let (mut a, mut b, mut line_a, mut line_b) = (0, 0, element, element);
            for dimension in (0..size.len()).rev() {
                let index = left % size[dimension];
                left /= size[dimension];
                a += (from.1[dimension] + index) * line_a;
                b += (to.1[dimension] + index) * line_b;
                line_a *= from.0[dimension];
                line_b *= to.0[dimension];
            }
            expected.extend((0..element).map(|at| (b + at, a + at)));
        }
        expected.sort_unstable();
        prop_assert_eq!(bytes_of(&tile), expected);
    }
}

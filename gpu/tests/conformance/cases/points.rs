//! Points of streams: queried, waited for, dropped at any time.

use std::time::Duration;

use gpu::{DEFAULT_TIMEOUT, ErrorKind, Point};

use super::Skip;
use super::streams::slow;
use crate::fixture::Fixture;

pub fn point_is_reached_after_all_earlier_operations(fixture: &Fixture) -> Result<(), Skip> {
    let length = if fixture.is_emulated() { 1 << 20 } else { 1 << 30 };
    let (from, to) =
        (fixture.first.allocate(length).unwrap(), fixture.first.allocate(length).unwrap());
    let stream = fixture.first.stream().unwrap();
    let nothing = stream.point().unwrap();
    nothing.wait(DEFAULT_TIMEOUT).unwrap();
    slow(fixture, Duration::from_millis(10));
    let points: Vec<Point> = (0..8)
        .map(|_| {
            stream.copy(&to.whole(), &from.whole()).unwrap();
            stream.point().unwrap()
        })
        .collect();
    let (last, others) = points.split_last().unwrap();
    assert!(!last.is_done().unwrap());
    let error = last.wait(Duration::from_micros(200)).unwrap_err();
    assert_eq!(
        (error.kind(), error.device()),
        (ErrorKind::DeadlineExceeded, Some(fixture.first.name()))
    );
    // Any thread may query, while the stream runs.
    std::thread::scope(|scope| {
        for point in &points {
            scope.spawn(move || point.wait(DEFAULT_TIMEOUT).unwrap());
        }
        stream.fill(&to.slice(0, 4096).unwrap(), 1).unwrap();
    });
    assert!(last.is_done().unwrap() && others.iter().all(|point| point.is_done().unwrap()));
    slow(fixture, Duration::ZERO);
    stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    assert!(nothing.is_done().unwrap(), "a reached point stays reached");
    Ok(())
}

pub fn point_may_be_dropped_at_any_time(fixture: &Fixture) -> Result<(), Skip> {
    let length = 1 << 20;
    let (from, to) =
        (fixture.first.allocate(length).unwrap(), fixture.first.allocate(length).unwrap());
    let stream = fixture.first.stream().unwrap();
    fixture.fill(&from.whole(), 1);
    slow(fixture, Duration::from_micros(500));
    let mut last = None;
    for number in 0..200 {
        stream.copy(&to.whole(), &from.whole()).unwrap();
        let point = stream.point().unwrap();
        // Most are dropped before they are reached; their events must not be taken for others.
        if number % 10 == 0 {
            last = Some(point);
        }
    }
    let last = last.unwrap();
    last.wait(DEFAULT_TIMEOUT).unwrap();
    // Also after the stream is dropped.
    let end = stream.point().unwrap();
    drop(stream);
    assert!(end.is_done().unwrap() && last.is_done().unwrap());
    slow(fixture, Duration::ZERO);
    fixture.check(&to.whole(), 1);
    Ok(())
}

pub fn memory_is_released_by_point_queries_alone(fixture: &Fixture) -> Result<(), Skip> {
    let length = 8 << 20;
    let to = fixture.first.allocate(length).unwrap();
    let stream = fixture.first.stream().unwrap();
    let (_, used) = fixture.first.budget();
    for _ in 0..5 {
        let from = fixture.first.allocate_shared(length, &[]).unwrap();
        stream.copy(&to.whole(), &from.whole()).unwrap();
        drop(from);
        stream.point().unwrap().wait(DEFAULT_TIMEOUT).unwrap();
        // The next mark finds the previous point reached.
        drop(stream.point().unwrap());
        assert_eq!(fixture.first.budget().1, used);
    }
    Ok(())
}

pub fn time_passes_from_one_event_to_a_later_one(fixture: &Fixture) -> Result<(), Skip> {
    let length = if fixture.is_emulated() { 1 << 20 } else { 1 << 30 };
    let (from, to) =
        (fixture.first.allocate(length).unwrap(), fixture.first.allocate(length).unwrap());
    let stream = fixture.first.stream().unwrap();
    assert!(!stream.is_capturing().unwrap());
    let [begin, end, last] = [(); 3].map(|()| fixture.first.event_with_time().unwrap());
    slow(fixture, Duration::from_millis(10));
    stream.record(&begin).unwrap();
    for _ in 0..4 {
        stream.copy(&to.whole(), &from.whole()).unwrap();
    }
    stream.record(&end).unwrap();
    assert_eq!(end.time_since(&begin).unwrap(), None, "it is not reached yet");
    stream.record(&last).unwrap();
    last.wait(DEFAULT_TIMEOUT).unwrap();
    slow(fixture, Duration::ZERO);
    let copies = end.time_since(&begin).unwrap().unwrap();
    let all = last.time_since(&begin).unwrap().unwrap();
    assert!(copies > Duration::from_micros(100) && copies <= all, "{copies:?} of {all:?}");
    Ok(())
}

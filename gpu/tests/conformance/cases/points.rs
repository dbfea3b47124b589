//! Points of streams: asked about, waited for, dropped whenever.

use std::time::Duration;

use gpu::{ErrorKind, PATIENCE, Point};

use super::Skip;
use super::streams::slow;
use crate::house::House;

pub fn a_point_is_reached_when_all_before_it_is_done(house: &House) -> Result<(), Skip> {
    let length = if house.is_stand_in() { 1 << 20 } else { 1 << 30 };
    let (from, to) = (house.first.allocate(length).unwrap(), house.first.allocate(length).unwrap());
    let stream = house.first.stream().unwrap();
    let nothing = stream.point().unwrap();
    nothing.wait(PATIENCE).unwrap();
    slow(house, Duration::from_millis(10));
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
        (ErrorKind::DeadlineExceeded, Some(house.first.name()))
    );
    // Any thread may ask, while the stream goes on.
    std::thread::scope(|scope| {
        for point in &points {
            scope.spawn(move || point.wait(PATIENCE).unwrap());
        }
        stream.fill(&to.slice(0, 4096).unwrap(), 1).unwrap();
    });
    assert!(last.is_done().unwrap() && others.iter().all(|point| point.is_done().unwrap()));
    slow(house, Duration::ZERO);
    stream.synchronize(PATIENCE).unwrap();
    assert!(nothing.is_done().unwrap(), "what was reached stays so");
    Ok(())
}

pub fn a_point_is_dropped_at_any_time(house: &House) -> Result<(), Skip> {
    let length = 1 << 20;
    let (from, to) = (house.first.allocate(length).unwrap(), house.first.allocate(length).unwrap());
    let stream = house.first.stream().unwrap();
    house.fill(&from.whole(), 1);
    slow(house, Duration::from_micros(500));
    let mut last = None;
    for number in 0..200 {
        stream.copy(&to.whole(), &from.whole()).unwrap();
        let point = stream.point().unwrap();
        // Most are dropped before they are reached; their events must not be taken for those
        // of others.
        if number % 10 == 0 {
            last = Some(point);
        }
    }
    let last = last.unwrap();
    last.wait(PATIENCE).unwrap();
    // Also when the stream is gone.
    let end = stream.point().unwrap();
    drop(stream);
    assert!(end.is_done().unwrap() && last.is_done().unwrap());
    slow(house, Duration::ZERO);
    house.check(&to.whole(), 1);
    Ok(())
}

pub fn memory_goes_when_only_points_are_asked(house: &House) -> Result<(), Skip> {
    let length = 8 << 20;
    let to = house.first.allocate(length).unwrap();
    let stream = house.first.stream().unwrap();
    let (_, used) = house.first.budget();
    for _ in 0..5 {
        let from = house.first.allocate_shared(length, &[]).unwrap();
        stream.copy(&to.whole(), &from.whole()).unwrap();
        drop(from);
        stream.point().unwrap().wait(PATIENCE).unwrap();
        // The next mark finds the one before it reached.
        drop(stream.point().unwrap());
        assert_eq!(house.first.budget().1, used);
    }
    Ok(())
}

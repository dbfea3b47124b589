//! Waiting: deadlines hold, and no core is busy during the wait.

use std::time::{Duration, Instant};

use fabric::{CompletionKind, ErrorKind, QueueOptions, WaitStrategy};

use super::Case;
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, Setup, get, nonblocking, put};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    waiting_ends_with_its_deadline,
    waiting_does_not_burn_a_core,
    sleeping_queue_is_woken_by_a_peer,
    abandoned_operation_is_quarantined,
    many_abandoned_operations_complete_at_once,
    closing_reports_all_operations_in_flight,
    full_queue_is_reported,
    busy_queue_works,
];

fn with_waiting(cell: &Cell, waiting: WaitStrategy) -> CaseResult<Pair> {
    let queue = QueueOptions { size: 0, waiting };
    Pair::with(cell, Setup { queue, ..Setup::default() })
}

fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = text.rsplit(')').next().unwrap_or_default().to_owned();
    let ticks: u64 =
        after.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

fn waiting_ends_with_its_deadline(cell: &Cell) -> CaseResult {
    for waiting in [WaitStrategy::default(), WaitStrategy::Block, WaitStrategy::Busy] {
        let mut pair = with_waiting(cell, waiting)?;
        for milliseconds in [0, 5, 100] {
            let timeout = Duration::from_millis(milliseconds);
            let started = Instant::now();
            let failure = pair.sides[A]
                .queue
                .wait(timeout)
                .err()
                .ok_or("a completion without an operation")?;
            let took = started.elapsed();
            ensure!(failure.error.kind() == ErrorKind::DeadlineExceeded, "{failure}");
            ensure!(took >= timeout, "returned after {took:?} of {timeout:?}");
            let slack = Duration::from_millis(150);
            ensure!(took < timeout + slack, "{timeout:?} took {took:?} ({waiting:?})");
        }
    }
    Ok(())
}

fn waiting_does_not_burn_a_core(cell: &Cell) -> CaseResult {
    let mut pair = with_waiting(cell, WaitStrategy::Block)?;
    let before = processor_time();
    let _ = pair.sides[A].queue.wait(Duration::from_millis(1000));
    let used = processor_time() - before;
    ensure!(
        used < Duration::from_millis(250),
        "{used:?} of processor time in one second of waiting (by {})",
        pair.sides[A].queue.wait_method()
    );
    Ok(())
}

/// B sleeps in one thread; A writes from another. (In a single thread nothing would wake B.)
fn sleeping_queue_is_woken_by_a_peer(cell: &Cell) -> CaseResult {
    let mut pair = with_waiting(cell, WaitStrategy::Block)?;
    let (from, into) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    put(&from, 0, &[7; 64])?;
    let receive =
        pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(3)))?;
    let [mut a, mut b] = pair.sides;
    let waiter = std::thread::spawn(move || {
        let outcome = b.queue.complete(receive, Duration::from_secs(10));
        (outcome, Instant::now(), b)
    });
    std::thread::sleep(Duration::from_millis(100));
    let before = Instant::now();
    let send = a.endpoint.send(&mut a.queue, a.peer, &from.all(), 1)?;
    a.queue.complete(send, Duration::from_secs(10))?;
    // Providers with manual progress complete the rest only when polled.
    let end = Instant::now() + Duration::from_secs(10);
    while !waiter.is_finished() && Instant::now() < end {
        let _ = a.queue.wait(Duration::from_millis(5));
    }
    let (outcome, woken, b) = waiter.join().map_err(|_| "the waiting thread panicked")?;
    let completion = outcome?;
    ensure!(completion.kind == CompletionKind::Receive && completion.token == 3, "{completion:?}");
    ensure!(woken >= before, "completed before it was sent");
    let took = woken - before;
    ensure!(took < Duration::from_secs(2), "woken after {took:?}");
    ensure!(get(&into, 0, 64)? == [7; 64], "wrong data");
    drop(b);
    Ok(())
}

fn abandoned_operation_is_quarantined(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let into = pair.sides[B].region(64)?;
    let receive =
        pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(4)))?;
    let error = pair.sides[B].queue.complete(receive, Duration::from_millis(20)).unwrap_err();
    ensure!(error.kind() == ErrorKind::DeadlineExceeded, "{error}");
    // Its result is never reported; another wait returns the reason.
    let again = pair.sides[B].queue.complete(receive, Duration::from_millis(20)).unwrap_err();
    ensure!(
        matches!(again.kind(), ErrorKind::InvalidArgument | ErrorKind::DeadlineExceeded),
        "{again}"
    );
    pair.pump_for(Duration::from_millis(20));
    let left = pair.sides[B].queue.quarantined();
    ensure!(left <= 1, "{left} in quarantine");
    let crate::pair::Side { endpoint, mut queue, .. } = {
        let Pair { sides: [_a, b], .. } = pair;
        b
    };
    drop(endpoint);
    while queue.poll().is_some() {}
    ensure!(queue.quarantined() == 0 && queue.in_flight() == 0, "not released with its endpoint");
    Ok(())
}

/// Thousands of abandoned operations may complete at once. They must be skipped silently, and
/// without deep recursion.
fn many_abandoned_operations_complete_at_once(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let into = pair.sides[A].region(64)?;
    let side = &mut pair.sides[A];
    let mut abandoned = Vec::new();
    while abandoned.len() < 4000 {
        match side.endpoint.receive(&mut side.queue, &into.all(), nonblocking(0)) {
            Ok(id) => abandoned.push(id),
            Err(error) => {
                let full = [ErrorKind::WouldBlock, ErrorKind::ResourceExhausted];
                ensure!(full.contains(&error.kind()), "{error}");
                break;
            }
        }
    }
    ensure!(!abandoned.is_empty(), "no operation could be posted");
    for id in &abandoned {
        side.queue.abandon(*id);
    }
    let queue = &mut side.queue;
    let outcome = std::thread::scope(|scope| {
        let small = std::thread::Builder::new().stack_size(64 << 10);
        let thread = small.spawn_scoped(scope, || {
            let end = Instant::now() + Duration::from_millis(200);
            while Instant::now() < end {
                if let Some(outcome) = queue.poll() {
                    return Some(format!("{outcome:?}"));
                }
            }
            None
        })?;
        thread.join().map_err(|_| std::io::Error::other("the thread panicked"))
    })?;
    ensure!(outcome.is_none(), "{} abandoned, then {outcome:?}", abandoned.len());
    Ok(())
}

fn closing_reports_all_operations_in_flight(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let into = pair.sides[A].region(64)?;
    let post = |pair: &mut Pair| {
        pair.post(A, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(0)))
    };
    let (first, second) = (post(&mut pair)?, post(&mut pair)?);
    let [side, other] = pair.sides;
    let crate::pair::Side { endpoint, mut queue, .. } = side;
    drop(endpoint);
    let started = Instant::now();
    for id in [second, first] {
        let error = queue.complete(id, Duration::from_secs(10)).unwrap_err();
        let closed_kinds = [ErrorKind::Closed, ErrorKind::Cancelled];
        ensure!(closed_kinds.contains(&error.kind()), "{error}");
    }
    ensure!(started.elapsed() < Duration::from_secs(5), "took {:?}", started.elapsed());
    drop(other);
    Ok(())
}

/// The target is not driven: the initiator's queue fills up, and a post fails within its
/// timeout, instead of waiting for ever.
fn full_queue_is_reported(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(64)?;
    let side = &mut pair.sides[A];
    for _ in 0..200_000 {
        let options = fabric::PostOptions::token(0).timeout(Duration::from_millis(20));
        match side.endpoint.send(&mut side.queue, side.peer, &from.all(), options) {
            Ok(_) => {}
            Err(error) => {
                ensure!(
                    matches!(
                        error.kind(),
                        ErrorKind::DeadlineExceeded | ErrorKind::ResourceExhausted
                    ),
                    "{error}"
                );
                return Ok(());
            }
        }
    }
    Err("200 000 messages were taken and none received".into())
}

fn busy_queue_works(cell: &Cell) -> CaseResult {
    let mut pair = with_waiting(cell, WaitStrategy::Busy)?;
    ensure!(pair.sides[A].queue.wait_method() == "busy", "{}", pair.sides[A].queue.wait_method());
    let (from, into) = (pair.sides[A].region(64)?, pair.sides[B].region(64)?);
    let receive =
        pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(0)))?;
    pair.post(A, |s| s.endpoint.send(&mut s.queue, s.peer, &from.all(), nonblocking(0)))?;
    pair.complete(B, receive)?;
    Ok(())
}

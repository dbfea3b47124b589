//! Opening and closing, in every order, repeatedly.

use fabric::{
    Access, AddressVector, Caps, CompletionQueue, Domain, Endpoint, EndpointKind, EventQueue,
    HostMemory, Listener, failed_closes,
};

use super::Case;
use super::registration::page_size;
use crate::cells::Cell;
use crate::pair::{A, B, CaseResult, Pair, nonblocking};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    open_and_close,
    close_reports_success,
    repeated_opening_leaks_nothing,
    queue_dropped_before_endpoint,
    endpoint_dropped_with_operations_in_flight,
];

/// The target of each open file descriptor.
fn open_files() -> CaseResult<Vec<String>> {
    let mut targets = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let target = std::fs::read_link(entry?.path()).unwrap_or_default();
        targets.push(target.display().to_string());
    }
    targets.sort();
    Ok(targets)
}

fn resident_bytes() -> CaseResult<usize> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_whitespace().nth(1).ok_or("statm")?;
    Ok(pages.parse::<usize>()? * page_size())
}

fn open_and_close(cell: &Cell) -> CaseResult {
    drop(Pair::new(cell)?);
    ensure!(failed_closes() == 0, "{} closes failed", failed_closes());
    Ok(())
}

fn close_reports_success(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    for side in pair.sides {
        side.endpoint.close()?;
    }
    Ok(())
}

fn repeated_opening_leaks_nothing(cell: &Cell) -> CaseResult {
    let once = || -> CaseResult {
        let offer = cell.offer(Caps::empty())?;
        let domain = Domain::open(&offer)?;
        let mut queue = CompletionQueue::open(&domain)?;
        let mut builder = Endpoint::builder(&domain).queue(&mut queue);
        if cell.kind == EndpointKind::Msg {
            let events = EventQueue::open(domain.fabric())?;
            let listener = Listener::open(domain.fabric(), &offer, &events)?;
            builder = builder.events(&events).towards(&listener.address()?);
        } else {
            builder = builder.addresses(&AddressVector::open(&domain)?);
        }
        let endpoint = builder.open()?;
        let region = domain.register(HostMemory::zeroed(64 << 10)?, Access::ALL)?;
        region.write(0, b"touched")?;
        drop(region);
        drop(endpoint);
        Ok(())
    };
    // Allocators and providers keep memory after the first use.
    for _ in 0..5 {
        once()?;
    }
    let (files, memory) = (open_files()?, resident_bytes()?);
    for _ in 0..40 {
        once()?;
    }
    let (files_after, memory_after) = (open_files()?, resident_bytes()?);
    ensure!(
        files_after.len() <= files.len(),
        "open files grew from {} to {}: {files_after:?}",
        files.len(),
        files_after.len()
    );
    let grown = memory_after.saturating_sub(memory);
    ensure!(grown < 8 << 20, "resident memory grew by {grown} bytes in 40 rounds");
    Ok(())
}

fn queue_dropped_before_endpoint(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let into = pair.sides[B].region(4096)?;
    // A receive is in flight when the queue is dropped: its memory must live until the endpoint
    // is closed.
    pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(1)))?;
    drop(into);
    let Pair { sides: [a, b], .. } = pair;
    let crate::pair::Side { endpoint, queue, .. } = b;
    drop(queue);
    drop(endpoint);
    drop(a);
    ensure!(failed_closes() == 0, "{} closes failed", failed_closes());
    Ok(())
}

fn endpoint_dropped_with_operations_in_flight(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let into = pair.sides[B].region(4096)?;
    let mut posted = Vec::new();
    for token in 0..8 {
        let id =
            pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(token)))?;
        posted.push(id);
    }
    ensure!(pair.sides[B].queue.in_flight() == 8, "{} in flight", pair.sides[B].queue.in_flight());
    let Pair { sides: [_a, b], .. } = pair;
    let crate::pair::Side { endpoint, mut queue, .. } = b;
    drop(endpoint);
    // Every operation is accounted for: flushed by the provider, or reported as closed by the
    // queue.
    let mut ended = 0;
    while let Some(outcome) = queue.poll() {
        if let Err(failure) = outcome
            && failure.operation.is_some_and(|id| posted.contains(&id))
        {
            ended += 1;
        }
    }
    ensure!(ended == 8, "{ended} of 8 receives were reported");
    ensure!(queue.in_flight() == 0, "{} still in flight", queue.in_flight());
    let _ = A;
    Ok(())
}

//! Operations between the start and the end of a group, of one thread.

use std::cell::RefCell;
use std::sync::Arc;

use collective::Choice;

use crate::communicator::{Begin, Communicator};
use crate::error::{Error, Result};
use crate::request::{PointToPoint, Request, StreamHandle};

/// An operation of a group that has a number.
#[derive(Debug)]
pub(crate) struct Entry {
    communicator: Arc<Communicator>,
    choice: Choice,
    stream: StreamHandle,
    /// None if the library carries it out.
    request: Option<Request>,
    begin: Option<Begin>,
}

impl Entry {
    pub(crate) fn ours(
        communicator: &Arc<Communicator>,
        choice: Choice,
        stream: StreamHandle,
        request: Request,
    ) -> Self {
        let communicator = Arc::clone(communicator);
        Self { communicator, choice, stream, request: Some(request), begin: None }
    }

    pub(crate) fn of_library(
        communicator: &Arc<Communicator>,
        choice: Choice,
        stream: StreamHandle,
        begin: Option<Begin>,
    ) -> Self {
        let communicator = Arc::clone(communicator);
        Self { communicator, choice, stream, request: None, begin }
    }
}

/// Sends and receives of a communicator, by its handle.
pub(crate) type PointsToPoints = (usize, Arc<Communicator>, Vec<PointToPoint>);

/// The group of a thread.
#[derive(Debug, Default)]
struct Group {
    depth: u32,
    entries: Vec<Entry>,
    point_to_point: Vec<PointsToPoints>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Returns whether the next end is that of the outermost group.
pub(crate) fn is_outermost() -> bool {
    GROUP.with_borrow(|group| group.depth == 1)
}

pub(crate) fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

pub(crate) fn add(entry: Entry) {
    GROUP.with_borrow_mut(|group| group.entries.push(entry));
}

pub(crate) fn add_point_to_point(handle: usize, of: &Arc<Communicator>, one: PointToPoint) {
    GROUP.with_borrow_mut(|group| {
        let found = group.point_to_point.iter_mut().find(|(known, ..)| *known == handle);
        match found {
            Some((.., all)) => all.push(one),
            None => group.point_to_point.push((handle, Arc::clone(of), vec![one])),
        }
    });
}

pub(crate) fn take_point_to_point() -> Vec<PointsToPoints> {
    GROUP.with_borrow_mut(|group| std::mem::take(&mut group.point_to_point))
}

/// Ends the innermost group. Returns the operations, if it was the outermost one.
fn end() -> Vec<Entry> {
    GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.saturating_sub(1);
        if group.depth > 0 { Vec::new() } else { std::mem::take(&mut group.entries) }
    })
}

/// Ends a group whose operations are not carried out; `error` if those of the others are.
pub(crate) fn discard(error: Option<&Error>) {
    for Entry { communicator, choice, request, .. } in end() {
        communicator.discard(&choice);
        if let (Some(error), Some(_)) = (error, request) {
            communicator.give_up(error.clone());
        }
    }
}

/// Ends a group whose operations of the library have been started: starts those of this project, in their order.
pub(crate) fn run() -> Result<()> {
    let mut entries = end();
    // Of several operations that begin together, none has a time of its own.
    let of_library = |entry: &&Entry| entry.request.is_none();
    let mut alone: Vec<bool> = Vec::with_capacity(entries.len());
    for Entry { communicator, .. } in &entries {
        let is_same = |other: &&Entry| Arc::ptr_eq(&other.communicator, communicator);
        alone.push(entries.iter().filter(of_library).filter(is_same).count() == 1);
    }
    for (entry, is_alone) in entries.iter_mut().zip(alone) {
        if entry.request.is_none() {
            let begin = entry.begin.take().filter(|_| is_alone);
            entry.communicator.end(&entry.choice, entry.stream, begin);
        }
    }
    // All are tried: a failed communicator does not keep others waiting.
    let run = |Entry { communicator, choice, stream, request, .. }: &Entry| match request {
        Some(request) => communicator.run(choice, request, *stream),
        None => Ok(()),
    };
    entries.iter().map(run).fold(Ok(()), Result::and)
}

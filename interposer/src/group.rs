//! Operations between the start and the end of a group, of one thread.

use std::cell::RefCell;
use std::sync::Arc;

use collective::Choice;

use crate::communicator::Communicator;
use crate::engine::Mark;
use crate::request::{PointToPoint, Request, StreamHandle};

/// An operation of a group that has a number.
#[derive(Debug)]
pub(crate) struct Entry {
    communicator: Arc<Communicator>,
    choice: Choice,
    stream: StreamHandle,
    /// None if the library carries it out.
    request: Option<Request>,
    begin: Option<Mark>,
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
        begin: Option<Mark>,
    ) -> Self {
        let communicator = Arc::clone(communicator);
        Self { communicator, choice, stream, request: None, begin }
    }

    pub(crate) fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    pub(crate) fn choice(&self) -> &Choice {
        &self.choice
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        self.stream
    }

    pub(crate) fn request(&self) -> Option<&Request> {
        self.request.as_ref()
    }

    pub(crate) fn take_begin(&mut self) -> Option<Mark> {
        self.begin.take()
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
pub(crate) fn end() -> Vec<Entry> {
    GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.saturating_sub(1);
        if group.depth > 0 { Vec::new() } else { std::mem::take(&mut group.entries) }
    })
}

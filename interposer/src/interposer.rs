//! The functions of a library, as this one replaces them, apart from their names and types.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use collective::ReduceOp;
use threads::lock;

use crate::communicator::{Communicator, Decision, Identity};
use crate::engine::Join;
use crate::error::{Error, Result};
use crate::group::{self, Entry};
use crate::request::{ElementType, PointToPoint, Request, StreamHandle, all_to_all};
use crate::settings::settings;

/// What functions of the library return.
pub(crate) type Code = i32;

/// A library whose operations are replaced.
pub(crate) trait Library: Sized + 'static {
    /// The name in reports.
    const NAME: &'static str;
    const SUCCESS: Code;
    const INTERNAL_ERROR: Code;
    const SYSTEM_ERROR: Code;
    const REMOTE_ERROR: Code;
    /// Operations of this project can replace those of the library.
    const HAS_OPERATIONS: bool;

    /// The type of a number; None for an unknown one.
    fn element(data_type: i32) -> Option<ElementType>;

    /// The reduction of a number; None for one of the program.
    fn reduce_op(op: i32) -> Option<ReduceOp>;

    /// Prepares an engine for a communicator.
    ///
    /// # Errors
    /// The reason why there is none on this rank.
    fn prepare(handle: usize) -> Result<Join>;

    /// Calls the original function of a send or a receive.
    fn send_or_receive(handle: usize, one: &PointToPoint) -> Code;
}

/// The communicators of a library in this process.
#[derive(Debug)]
pub(crate) struct Interposer<L> {
    communicators: LazyLock<Mutex<HashMap<usize, Arc<Communicator>>>>,
    /// The process that reports at its end; 0 if none does.
    reporter: AtomicU32,
    library: PhantomData<fn() -> L>,
}

impl<L: Library> Interposer<L> {
    pub(crate) const fn new() -> Self {
        Self {
            communicators: LazyLock::new(Mutex::default),
            reporter: AtomicU32::new(0),
            library: PhantomData,
        }
    }

    /// Returns whether the caller has to arrange the report at the end of the process.
    pub(crate) fn begins_report(&self) -> bool {
        let this = std::process::id();
        settings().report().is_some() && self.reporter.swap(this, Ordering::Relaxed) != this
    }

    /// A communicator was made. `reason` says why its operations are left to the library.
    pub(crate) fn add(
        &self,
        handle: usize,
        ranks: u32,
        rank: u32,
        seed: u64,
        reason: Option<&str>,
    ) {
        let identity = Identity::new(L::NAME, ranks, rank, seed);
        let communicator = match reason {
            Some(reason) => Communicator::left(&identity, reason),
            None if ranks < 2 => Communicator::left(&identity, "it has one rank"),
            None if local_ranks().is_some_and(|local| local < ranks) => {
                Communicator::left(&identity, "its ranks are on several machines")
            }
            None => Communicator::join(&identity, L::HAS_OPERATIONS, || L::prepare(handle)),
        };
        lock(&self.communicators).insert(handle, Arc::new(communicator));
    }

    pub(crate) fn find(&self, handle: usize) -> Option<Arc<Communicator>> {
        lock(&self.communicators).get(&handle).cloned()
    }

    /// A communicator is about to be destroyed: its operations are waited for, and reported.
    pub(crate) fn remove(&self, handle: usize) {
        let Some(communicator) = lock(&self.communicators).remove(&handle) else { return };
        communicator.drain();
        communicator.report();
    }

    /// A communicator is about to be aborted. Another thread may be starting an operation. The returned one is
    /// dropped when the library has aborted its own operations.
    pub(crate) fn abort(&self, handle: usize, is_removed: bool) -> Option<Arc<Communicator>> {
        let communicator = self.find(handle)?;
        communicator.abort();
        if is_removed {
            lock(&self.communicators).remove(&handle);
            communicator.report();
        }
        Some(communicator)
    }

    /// The code of operations that failed; None if none did.
    pub(crate) fn asynchronous_error(&self, handle: usize) -> Option<Code> {
        self.find(handle)?.failure().map(|error| code_of::<L>(&error))
    }

    /// An operation of the program; `request` may be the reason why it is left to the library.
    pub(crate) fn operation(
        &self,
        handle: usize,
        request: std::result::Result<Request, &'static str>,
        stream: StreamHandle,
        original: impl FnOnce() -> Code,
    ) -> Code {
        let Some(communicator) = self.find(handle) else { return original() };
        match communicator.decide(request, stream) {
            Decision::Failed(error) => code_of::<L>(&error),
            Decision::Left => original(),
            Decision::Ours(choice, request) if group::is_open() => {
                group::add(Entry::ours(&communicator, choice, stream, request));
                L::SUCCESS
            }
            Decision::Ours(choice, request) => match communicator.run(&choice, &request, stream) {
                Ok(()) => L::SUCCESS,
                Err(error) => code_of::<L>(&error),
            },
            Decision::Library(choice) => {
                let begin = communicator.begin(&choice, stream);
                let code = original();
                if code != L::SUCCESS {
                    communicator.discard(&choice);
                } else if group::is_open() {
                    group::add(Entry::of_library(&communicator, choice, stream, begin));
                } else {
                    communicator.end(&choice, stream, begin);
                }
                code
            }
        }
    }

    /// A send or a receive of the program.
    pub(crate) fn point_to_point(&self, handle: usize, one: PointToPoint) -> Code {
        let is_composed = settings().composes_all_to_all() && group::is_open();
        let communicator = if is_composed { self.find(handle) } else { None };
        match communicator.filter(|communicator| communicator.has_domain()) {
            Some(communicator) => {
                group::add_point_to_point(handle, &communicator, one);
                L::SUCCESS
            }
            None => L::send_or_receive(handle, &one),
        }
    }

    /// The end of a group. Operations of this project start after those of the library, in their order.
    pub(crate) fn group_end(&self, original: impl FnOnce() -> Code) -> Code {
        let first_of = |one: Code, other: Code| if one == L::SUCCESS { other } else { one };
        let mut queued = L::SUCCESS;
        let all = if group::is_outermost() { group::take_point_to_point() } else { Vec::new() };
        for (handle, communicator, all) in all {
            let send_all = || {
                let codes = all.iter().map(|one| L::send_or_receive(handle, one));
                codes.fold(L::SUCCESS, first_of)
            };
            let code = match all_to_all(&all, communicator.ranks(), L::element) {
                Some((request, stream)) => self.operation(handle, Ok(request), stream, send_all),
                None => send_all(),
            };
            queued = first_of(queued, code);
        }
        let code = first_of(original(), queued);
        if code != L::SUCCESS {
            group::discard(Some(&Error::Group));
            return code;
        }
        group::run().map_or_else(|error| code_of::<L>(&error), |()| L::SUCCESS)
    }

    /// The end of a group whose operations are not carried out.
    pub(crate) fn group_simulate_end(&self, original: impl FnOnce() -> Code) -> Code {
        let code = original();
        if group::is_outermost() {
            drop(group::take_point_to_point());
        }
        group::discard(None);
        code
    }

    /// The program has waited for all operations of a stream.
    pub(crate) fn synchronized(&self, stream: StreamHandle) {
        let all: Vec<_> = lock(&self.communicators).values().cloned().collect();
        all.iter().for_each(|communicator| communicator.synchronized(stream));
    }

    /// Reports all communicators, at the end of the process.
    pub(crate) fn report(&self) {
        // In a forked child, a thread that does not exist there may hold the lock.
        if self.reporter.load(Ordering::Relaxed) != std::process::id() {
            return;
        }
        let all: Vec<_> = lock(&self.communicators).values().cloned().collect();
        all.iter().for_each(|communicator| communicator.report());
    }
}

fn code_of<L: Library>(error: &Error) -> Code {
    if error.is_of_another_rank() { L::REMOTE_ERROR } else { L::SYSTEM_ERROR }
}

/// The number of ranks that a launcher has started on this machine, if it says so.
fn local_ranks() -> Option<u32> {
    let names =
        ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"];
    names.into_iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}

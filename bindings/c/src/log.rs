//! The library's log, passed to a callback of the program.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::{Interest, set_global_default};
use tracing::{Event, Id, Metadata, Subscriber, span};

use crate::failure::{Failure, c_text};
use crate::ffi::{IN_CALLBACK, UserData, export, plain};
use crate::registry::{LogCallback, Registry};

/// `fabricast_log_callback`.
type Callback = Option<LogCallback>;

plain!(Callback);

/// Levels in the order of their numbers.
const LEVELS: [LevelFilter; 6] = [
    LevelFilter::OFF,
    LevelFilter::ERROR,
    LevelFilter::WARN,
    LevelFilter::INFO,
    LevelFilter::DEBUG,
    LevelFilter::TRACE,
];

/// Current level: an index of [`LEVELS`].
static LEVEL: AtomicI32 = AtomicI32::new(0);

fn filter() -> LevelFilter {
    LEVELS.get(LEVEL.load(Ordering::Relaxed) as usize).copied().unwrap_or(LevelFilter::OFF)
}

struct Log;

impl Subscriber for Log {
    fn register_callsite(&self, of: &'static Metadata<'static>) -> Interest {
        if of.is_event() { Interest::sometimes() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(filter())
    }

    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.is_event() && *of.level() <= filter()
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let level = LEVELS.iter().position(|filter| filter == event.metadata().level());
        log_line(level.unwrap_or(0) as i32, &c_text(line.message + &line.fields));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message, followed by `name=value` of each field.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// Calls the callback. Lines logged by the callback itself are dropped.
fn log_line(level: i32, text: &CStr) {
    if IN_CALLBACK.replace(true) {
        return;
    }
    let log = &Registry::current().log;
    // Held meanwhile: removing the callback waits for the end of its call. The level may have
    // changed since the line was begun.
    let sink = log.lock().unwrap_or_else(PoisonError::into_inner);
    let sink_now = sink.filter(|_| level <= LEVEL.load(Ordering::Relaxed));
    if let Some((callback, user_data)) = sink_now {
        // SAFETY: the header states the rules of the callback; it and its data are valid until it
        // is removed.
        unsafe { callback(level, text.as_ptr(), user_data.pointer()) };
    }
    drop(sink);
    IN_CALLBACK.set(false);
}

export! {
    /// Sets the log callback, or removes it.
    fn fabricast_set_log(
        level: i32,
        callback: Callback,
        user_data: UserData,
    ) -> i32, c"set log" {
        static STARTED: Once = Once::new();
        if !usize::try_from(level).is_ok_and(|level| level < LEVELS.len()) {
            return Err(Failure::invalid(OPERATION, format_args!("{level} is not a level")));
        }
        let sink = callback.filter(|_| level != 0).map(|callback| (callback, user_data));
        let mut current = Registry::current().log.lock().unwrap_or_else(PoisonError::into_inner);
        LEVEL.store(if sink.is_some() { level } else { 0 }, Ordering::Relaxed);
        *current = sink;
        drop(current);
        STARTED.call_once(|| {
            // No other code of this library has a log destination.
            let _ = set_global_default(Log);
        });
        tracing::callsite::rebuild_interest_cache();
        Ok(())
    }
}

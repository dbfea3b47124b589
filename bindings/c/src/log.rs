//! The library's log: passed to a callback of the program, or written to standard error at the level
//! of `FABRICAST_LOG`.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fmt::{self, Write};
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Once, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::{Interest, set_global_default};
use tracing::{Event, Id, Metadata, Subscriber, span};

use crate::failure::{Failure, Operation, Result, c_text};
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

/// Current level of the callback: an index of [`LEVELS`].
static LEVEL: AtomicI32 = AtomicI32::new(0);

/// Current level of standard error: an index of [`LEVELS`], 0 once the program has set the log.
static ERROR_OUTPUT_LEVEL: AtomicI32 = AtomicI32::new(0);

/// True once the program has set the log: the environment does not matter any more.
static IS_SET_BY_PROGRAM: AtomicBool = AtomicBool::new(false);

fn filter() -> LevelFilter {
    let level = LEVEL.load(Ordering::Relaxed).max(ERROR_OUTPUT_LEVEL.load(Ordering::Relaxed));
    LEVELS.get(level as usize).copied().unwrap_or(LevelFilter::OFF)
}

/// Makes the log of this library that of the process.
fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // No other code of this library has a log destination.
        let _ = set_global_default(Log);
    });
    tracing::callsite::rebuild_interest_cache();
}

/// Writes the log to standard error at the level of `FABRICAST_LOG`, if that is set and the program
/// has not set the log itself.
pub(crate) fn start_from_environment(operation: Operation) -> Result<()> {
    const VARIABLE: &str = "FABRICAST_LOG";
    static READ: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let read = READ.get_or_init(|| {
        let named = std::env::var_os(VARIABLE).unwrap_or_default();
        let named = named.to_string_lossy();
        let level = match &*named {
            "" => LevelFilter::OFF,
            named => named.parse().map_err(|_| {
                let named = named.escape_debug();
                let levels = "off, error, warn, info, debug or trace";
                format!("environment {VARIABLE} is \"{named}\". Use one of {levels}")
            })?,
        };
        let level = LEVELS.iter().position(|one| *one == level).unwrap_or(0) as i32;
        let is_shown = level > 0 && !IS_SET_BY_PROGRAM.load(Ordering::Relaxed);
        if is_shown {
            ERROR_OUTPUT_LEVEL.store(level, Ordering::Relaxed);
            start();
        }
        Ok(())
    });
    read.clone().map_err(|why| Failure::invalid(operation, why))
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

/// Calls the callback, or writes the line to standard error. Lines logged by the callback itself
/// are dropped.
fn log_line(level: i32, text: &CStr) {
    if IN_CALLBACK.replace(true) {
        return;
    }
    if level <= ERROR_OUTPUT_LEVEL.load(Ordering::Relaxed) {
        let name = ["", "error", "warning", "info", "debug", "trace"][level as usize];
        let line = format!("fabricast: {name}: {}\n", text.to_string_lossy());
        // The program goes on without a place for its log.
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
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
        if !usize::try_from(level).is_ok_and(|level| level < LEVELS.len()) {
            return Err(Failure::invalid(OPERATION, format_args!("{level} is not a level")));
        }
        let sink = callback.filter(|_| level != 0).map(|callback| (callback, user_data));
        let mut current = Registry::current().log.lock().unwrap_or_else(PoisonError::into_inner);
        IS_SET_BY_PROGRAM.store(true, Ordering::Relaxed);
        ERROR_OUTPUT_LEVEL.store(0, Ordering::Relaxed);
        LEVEL.store(if sink.is_some() { level } else { 0 }, Ordering::Relaxed);
        *current = sink;
        drop(current);
        start();
        Ok(())
    }
}

//! The log of the library, for the loggers of Python.

use std::fmt::{self, Write};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, Sender};
use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Metadata, Subscriber, span};

use crate::failure::{Failure, Result};

const OPERATION: &str = "forward log";
/// More records than this are lost while no thread of Python takes them.
const CAPACITY: usize = 4096;
/// How often a thread that waits for a record looks whether the interpreter ends.
const SLICE: Duration = Duration::from_millis(200);

/// Level, module, message, and seconds since 1970.
type Record = (u32, String, String, f64);

static RECORDS: OnceLock<Receiver<Record>> = OnceLock::new();

/// Sends events to a thread of Python: a thread of the library must not wait for the interpreter.
struct ToPython {
    level: LevelFilter,
    records: Sender<Record>,
}

/// The message of an event, with its fields behind it.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

impl Subscriber for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn new_span(&self, _attributes: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let level = match *event.metadata().level() {
            tracing::Level::ERROR => 40,
            tracing::Level::WARN => 30,
            tracing::Level::INFO => 20,
            tracing::Level::DEBUG => 10,
            tracing::Level::TRACE => 5,
        };
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let message = text.message + &text.fields;
        let module = format!("fabricast.{}", event.metadata().target().replace("::", "."));
        // Without room it is lost.
        let _ = self.records.try_send((level, module, message, time.as_secs_f64()));
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// Keeps events of this level of `logging` and above for `_next_record`.
#[pyfunction]
pub(crate) fn _start_log(level: u32) -> Result<()> {
    let level = match level {
        41.. => LevelFilter::OFF,
        31.. => LevelFilter::ERROR,
        21.. => LevelFilter::WARN,
        11.. => LevelFilter::INFO,
        6.. => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let (records, received) = crossbeam_channel::bounded(CAPACITY);
    let cause = "the log of this process is forwarded already";
    tracing::subscriber::set_global_default(ToPython { level, records })
        .map_err(|_| Failure::invalid(OPERATION, cause))?;
    let _ = RECORDS.set(received);
    Ok(())
}

/// The next record, or None after some time.
#[pyfunction]
pub(crate) fn _next_record(py: Python<'_>) -> Option<Record> {
    let records = RECORDS.get()?;
    py.detach(|| records.recv_timeout(SLICE)).ok()
}

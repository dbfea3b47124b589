//! The report of all measurements.

use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::output;
use serde::Serialize;

/// The keys that every report begins with, in this order, which scripts rely on.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Common {
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    pub(crate) p999_us: Option<f64>,
    pub(crate) gb_per_s: f64,
    pub(crate) bytes: u64,
    pub(crate) iterations: u64,
    pub(crate) provider: String,
    pub(crate) waiting: String,
    /// Processor time of an operation, of this process and of the other one or all others.
    pub(crate) cpu_us: Option<f64>,
    pub(crate) peer_cpu_us: Option<f64>,
    pub(crate) cores: Option<Vec<usize>>,
    pub(crate) verified: bool,
}

impl Common {
    /// Percentiles of samples in nanoseconds, each multiplied by a share.
    pub(crate) fn of(samples: &Histogram, share: f64) -> Self {
        let at = |quantile| Some(rounded(samples.microseconds(quantile)? * share));
        Self { p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999), ..Self::default() }
    }

    /// How both sides waited, and what that cost, as a line.
    pub(crate) fn waiting_line(&self, peer: &str) -> String {
        let microseconds =
            |time: Option<f64>| time.map_or("?".to_owned(), |time| format!("{time:.2} us"));
        format!(
            "waiting: {}; processor time of an operation: {} here, {} of {peer}\n",
            self.waiting,
            microseconds(self.cpu_us),
            microseconds(self.peer_cpu_us)
        )
    }

    /// The percentiles; 0 without samples.
    pub(crate) fn percentiles(&self) -> [f64; 3] {
        [self.p50_us, self.p99_us, self.p999_us].map(Option::unwrap_or_default)
    }
}

/// Rounded to six digits after the point; the rest is noise.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// The metrics of one kind of measurement.
pub(crate) trait Metrics: Serialize {
    /// The message of the failure if the data was not verified.
    const FAILURE_TEXT: &str = "received data is corrupted";

    /// The report as text.
    fn to_text(&self, common: &Common) -> String;
}

/// A report.
#[derive(Debug, Serialize)]
pub(crate) struct Report<F> {
    #[serde(flatten)]
    pub(crate) common: Common,
    #[serde(flatten)]
    pub(crate) metrics: F,
    program: &'static str,
}

impl<F: Metrics> Report<F> {
    pub(crate) fn new(common: Common, metrics: F) -> Self {
        Self { common, metrics, program: command::VERSION_LINE }
    }

    /// The report as one line of JSON.
    pub(crate) fn line(&self) -> Result<String, Failure> {
        serde_json::to_string(self).map_err(Failure::of)
    }

    /// Prints the report as text, unless only JSON is requested, and as one line of JSON. Fails if
    /// the data was not verified.
    pub(crate) fn conclude(&self, is_json_only: bool) -> Result<(), Failure> {
        let wrong = || Err(Failure::new(Exit::DataCorrupted, F::FAILURE_TEXT));
        let done = if self.common.verified { Ok(()) } else { wrong() };
        if is_json_only {
            return output::report_as_json(done, self);
        }
        output::print(&self.metrics.to_text(&self.common))?;
        output::print(&format!("{}\n", self.line()?))?;
        done
    }
}

/// The median; None without values.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// A number, for text.
pub(crate) fn format_figure(value: Option<f64>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| format!("{value:.3}"))
}

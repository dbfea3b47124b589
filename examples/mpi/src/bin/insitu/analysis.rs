//! The analysis: receives the field, and checks it against a serial run.

use std::collections::BTreeMap;
use std::time::Duration;

use fabricast::gpu;
use fabricast::pubsub::{ErrorKind, Node, Row, Subscriber};
use mpi_examples::heat::{Slab, rows_of};
use mpi_examples::{Result, numbers};

use crate::frame::{FIELD, Frame};

/// What an analysis found.
#[derive(Debug, Default)]
pub(crate) struct Analysed {
    /// Fields of which all parts were received.
    pub(crate) fields: u64,
    /// Messages that were received, and missed.
    pub(crate) messages: u64,
    pub(crate) missed: u64,
    /// Messages that are not those of a serial run.
    pub(crate) mistakes: u64,
    /// Heat of the last field.
    pub(crate) heat: f64,
    /// The last field was received.
    pub(crate) is_complete: bool,
}

/// Waits until a rank of the simulation has published this number of messages, with or without
/// subscribers.
pub(crate) fn wait_for_fields(node: &Node, count: u64, timeout: Duration) -> Result<()> {
    let is_late = |row: &Row| match row {
        Row::Publisher { topic, messages, .. } => topic == FIELD && *messages >= count,
        _ => false,
    };
    wait_for_rows(node, 1, timeout, "fields", is_late)
}

/// Waits until the node of this machine sends the field to so many other machines, whose
/// subscribers it learns of shortly after they subscribe.
pub(crate) fn wait_for_machines(node: &Node, count: usize, timeout: Duration) -> Result<()> {
    let is_sent = |row: &Row| matches!(row, Row::Sent { topic, .. } if topic == FIELD);
    wait_for_rows(node, count, timeout, "subscribers of other machines", is_sent)
}

/// Waits until the node's report has this number of such rows.
fn wait_for_rows(
    node: &Node,
    count: usize,
    timeout: Duration,
    what: &str,
    is_wanted: impl Fn(&Row) -> bool,
) -> Result<()> {
    const PAUSE: Duration = Duration::from_millis(5);
    for _ in 0..timeout.as_micros() / PAUSE.as_micros() {
        if node.report()?.iter().filter(|row| is_wanted(row)).count() >= count {
            return Ok(());
        }
        std::thread::sleep(PAUSE);
    }
    Err(format!("wait for {what} failed: too few after {timeout:?}").into())
}

/// Analyses fields to the last one, or as many as `leaves_after`. `takes` is the time to analyse a
/// message, which stays in the memory of the topic meanwhile.
pub(crate) fn analyse(
    mut subscriber: Subscriber,
    leaves_after: Option<u64>,
    takes: Duration,
    timeout: Duration,
) -> Result<Analysed> {
    let mut analysed = Analysed::default();
    let mut serial: Option<Serial> = None;
    // Parts and heat of the fields that are not complete.
    let mut partial: BTreeMap<u64, (u64, f64)> = BTreeMap::new();
    while leaves_after.is_none_or(|count| analysed.fields < count) {
        let sample = subscriber.pull(timeout)?;
        let frame = Frame::from_bytes(&sample.metadata())?;
        std::thread::sleep(takes);
        let bytes = match sample.to_vec() {
            Ok(bytes) => bytes,
            // Too late: the memory was needed for newer messages.
            Err(error) if error.kind() == ErrorKind::Evicted => {
                return Err(format!("analyse field failed: step {}: {error}", frame.step).into());
            }
            Err(error) => return Err(error.into()),
        };
        drop(sample);
        analysed.messages += 1;
        let serial = serial.get_or_insert_with(|| Serial::of(&frame));
        let is_right = frame.length() == bytes.len() as u64
            && frame.checksum == gpu::checksum(&bytes)
            && serial.checksum(&frame) == Some(frame.checksum);
        analysed.mistakes += u64::from(!is_right);
        let mut numbers = vec![0.0; bytes.len() / size_of::<f64>()];
        numbers::from_bytes(&bytes, &mut numbers);
        let (parts, heat) = partial.entry(frame.step).or_default();
        (*parts, *heat) = (*parts + 1, *heat + numbers.iter().sum::<f64>());
        if *parts < frame.parts {
            continue;
        }
        (analysed.fields, analysed.heat) = (analysed.fields + 1, *heat);
        // Parts of older fields were dropped: each publisher's messages are in order.
        partial.retain(|step, _| *step > frame.step);
        if frame.step == frame.last {
            analysed.is_complete = true;
            break;
        }
    }
    analysed.missed = subscriber.missed();
    Ok(analysed)
}

/// The checksums of a serial run, by step and part.
struct Serial(BTreeMap<(u64, u64), u64>);

impl Serial {
    fn of(frame: &Frame) -> Self {
        let (grid, parts) = (frame.grid as usize, frame.parts as usize);
        let mut field = Slab::new(grid, 0..grid);
        let mut checksums = BTreeMap::new();
        for step in 1..=frame.last {
            field.advance();
            if step.is_multiple_of(frame.every) {
                for part in 0..parts {
                    let rows = rows_of(part, parts, grid);
                    let cells = &field.rows()[rows.start * grid..rows.end * grid];
                    let checksum = gpu::checksum(&numbers::to_bytes(cells));
                    checksums.insert((step, part as u64), checksum);
                }
            }
        }
        Self(checksums)
    }

    fn checksum(&self, frame: &Frame) -> Option<u64> {
        self.0.get(&(frame.step, frame.part)).copied()
    }
}

//! The process that reads, compares and reports.

use std::collections::VecDeque;
use std::time::Duration;

use fabric::ErrorKind;
use fabric::ring::{ReceiverId, RingOptions, View};

use crate::check::Check;
use crate::failure::Failure;
use crate::line::{Look, Order, Reading, Report, RingPlan};
use crate::message::{Dice, Message};
use crate::station::{Berth, SLICE, Station, gone, is_late};

/// How long to wait for another chunk while some are held: the writer may need their room.
const BRIEF: Duration = Duration::from_micros(200);

/// A reader.
struct Reader {
    station: Station,
    seed: u64,
    berth: Option<Berth>,
    ring: Option<ReceiverId>,
    /// The attempt to connect that the ring is of.
    attempt: u64,
    is_flowing: bool,
    /// The message that is next: all before it are reported.
    check: Option<Check>,
    /// Chunks that were taken and not compared, with so many behind the one that is: a credit
    /// that is told too early is found out when the writer has written over one.
    held: VecDeque<View>,
    most_held: usize,
    /// One that was compared and is let go of after a later one.
    late: Option<View>,
    dice: Dice,
}

pub fn run(provider: &str, seed: u64) -> Result<(), Failure> {
    let station = Station::new(provider)?;
    let mut reader = Reader {
        station,
        seed,
        berth: None,
        ring: None,
        attempt: 0,
        is_flowing: false,
        check: None,
        held: VecDeque::new(),
        most_held: 0,
        late: None,
        dice: Dice::new(seed, 0),
    };
    let result = reader.live();
    if let Err(failure) = &result {
        let is_wrong_data = matches!(failure, Failure::Found(_));
        let text = format!("{failure}; {}", reader.stands());
        let _ = reader.station.report(&Report::Failed { is_wrong_data, text });
    }
    result
}

impl Reader {
    /// Reads and does as it is told, until it is told to end.
    fn live(&mut self) -> Result<(), Failure> {
        loop {
            match self.station.order(self.berth.as_mut(), self.is_flowing)? {
                Look::Frame(Order::End) => break,
                Look::Frame(order) => self.obey(order)?,
                Look::Closed => return Err(gone()),
                Look::Nothing => {}
            }
            if self.is_flowing {
                self.read()?;
            }
        }
        self.berth.take().map_or(Ok(()), Berth::close)
    }

    fn obey(&mut self, order: Order) -> Result<(), Failure> {
        match order {
            Order::Offer { attempt, ring, manner } => self.offer(attempt, &ring, manner),
            Order::Connect { attempt, peer, answer } if attempt == self.attempt => {
                let (Some(berth), Some(ring)) = (&mut self.berth, self.ring) else {
                    return Err(Failure::Line("an answer without an offer".to_owned()));
                };
                let peer = berth.meet(&peer)?;
                // The writer may have died since; then there will be another one.
                let connected = berth.port.connect(ring, peer, &answer);
                self.is_flowing = self.heal(connected)?.is_some();
                self.station.report(&Report::Connected { attempt })
            }
            Order::Connect { .. } => Ok(()),
            Order::Stand => {
                let text = self.stands();
                self.station.report(&Report::Stands { text })
            }
            order => Err(Failure::Line(format!("a reader was told {order:?}"))),
        }
    }

    fn offer(&mut self, attempt: u64, plan: &RingPlan, manner: Reading) -> Result<(), Failure> {
        (self.attempt, self.is_flowing) = (attempt, false);
        // What is whole for the ring is then reported.
        self.compare_all()?;
        self.dice = Dice::new(self.seed, attempt);
        self.most_held = self.dice.below(5) as usize;
        let whole = self.check.as_ref().map_or(plan.whole, |check| check.message().number);
        if manner == Reading::Anew {
            if let Some(old) = self.berth.take() {
                old.close()?;
            }
            self.berth = Some(self.station.open_port()?);
        }
        let Some(berth) = &mut self.berth else {
            return Err(Failure::Line(
                "a ring that is not there was to be opened again".to_owned(),
            ));
        };
        if let (Reading::Again, Some(ring)) = (manner, self.ring) {
            berth.port.forget(ring);
        }
        let RingPlan { capacity, watermark, notify, .. } = *plan;
        let options = RingOptions { capacity, watermark, notify, whole };
        self.ring = Some(berth.port.offer(&options)?);
        let message = Message::new(self.seed, whole);
        self.check.get_or_insert_with(|| Check::new(message)).begin(message);
        if let Some(ring) = self.ring {
            let offer = berth.port.terms(ring)?;
            let address = berth.address()?;
            self.station.report(&Report::Offered { attempt, address, offer })?;
        }
        Ok(())
    }

    /// Takes what is there, or comes within a while.
    fn read(&mut self) -> Result<(), Failure> {
        let (Some(berth), Some(ring)) = (&mut self.berth, self.ring) else { return Ok(()) };
        let is_holding = self.late.is_some() || !self.held.is_empty();
        match berth.port.receive(ring, if is_holding { BRIEF } else { SLICE }) {
            Ok(view) => {
                self.held.push_back(view);
                if self.held.len() > self.most_held { self.compare_first() } else { Ok(()) }
            }
            Err(error) if is_late(&error) => self.compare_all(),
            Err(error) if error.kind() == ErrorKind::Closed => {
                self.is_flowing = false;
                let messages = berth.port.receiver(ring)?.reader().whole();
                self.compare_all()?;
                self.station.report(&Report::Over { messages })
            }
            Err(error) => self.heal::<()>(Err(error)).map(drop),
        }
    }

    fn compare_all(&mut self) -> Result<(), Failure> {
        while !self.held.is_empty() {
            self.compare_first()?;
        }
        self.late = None;
        Ok(())
    }

    /// Compares the chunk that is next, and lets go of it, or of one before it.
    fn compare_first(&mut self) -> Result<(), Failure> {
        let (Some(check), Some(view)) = (&mut self.check, self.held.pop_front()) else {
            return Ok(());
        };
        check.take(&view)?;
        if view.is_last() {
            let Message { number, length, .. } = check.message();
            let report = Report::Delivered { number, length, sum: check.sum() };
            check.begin(Message::new(self.seed, number + 1));
            // Before the writer may learn that it was read: what that one forgets, the
            // supervisor knows.
            self.station.report(&report)?;
        }
        if self.most_held > 0 && self.dice.percent(25) {
            self.late = Some(view);
        }
        Ok(())
    }

    /// What the ring cannot go on with is the supervisor's to judge: it knows who died.
    fn heal<T>(&mut self, result: fabric::Result<T>) -> Result<Option<T>, Failure> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                self.is_flowing = false;
                let (attempt, text) = (self.attempt, format!("{error}; {}", self.stands()));
                self.station.report(&Report::Broken { attempt, text })?;
                Ok(None)
            }
        }
    }

    fn stands(&self) -> String {
        let (Some(berth), Some(ring)) = (&self.berth, self.ring) else {
            return "the reader has no ring".to_owned();
        };
        match berth.port.receiver(ring) {
            Err(error) => format!("the reader's ring: {error}"),
            Ok(receiver) => {
                let reader = receiver.reader();
                format!(
                    "the reader: flowing: {}, epoch {}, {} whole, {} bytes of {:?}, head {}, told {}, \
                     untold: {}, unreleased {:?}, broken: {:?}, strangers {}, {:?}",
                    self.is_flowing,
                    reader.epoch(),
                    reader.whole(),
                    reader.received(),
                    self.check.as_ref().map(Check::message),
                    reader.head(),
                    reader.told(),
                    receiver.has_untold(),
                    reader.unreleased(),
                    receiver.broken().map(ToString::to_string),
                    berth.port.strangers(),
                    receiver.statistics(),
                )
            }
        }
    }
}

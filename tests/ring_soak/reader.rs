//! The process that reads, compares and reports.

use fabric::ErrorKind;
use fabric::ring::{ReceiverId, RingOptions, View};

use crate::check::Check;
use crate::failure::Failure;
use crate::line::{Look, Order, Reading, Report, RingPlan};
use crate::message::Message;
use crate::station::{Berth, SLICE, Station, gone, is_late};

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
        match (manner, self.ring) {
            (Reading::Again, Some(ring)) => berth.port.reopen(ring)?,
            _ => {
                let RingPlan { capacity, watermark, notify, .. } = *plan;
                let options = RingOptions { capacity, watermark, notify, whole };
                self.ring = Some(berth.port.offer(&options)?);
            }
        }
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
        match berth.port.receive(ring, SLICE) {
            Ok(view) => self.take(view),
            Err(error) if is_late(&error) => Ok(()),
            Err(error) if error.kind() == ErrorKind::Closed => {
                self.is_flowing = false;
                let messages = berth.port.receiver(ring)?.reader().whole();
                self.station.report(&Report::Over { messages })
            }
            Err(error) => self.heal::<()>(Err(error)).map(drop),
        }
    }

    fn take(&mut self, view: View) -> Result<(), Failure> {
        let Some(check) = &mut self.check else { return Ok(()) };
        check.take(&view)?;
        if !view.is_last {
            return Ok(());
        }
        let Message { number, length, .. } = check.message();
        let report = Report::Delivered { number, length, sum: check.sum() };
        check.begin(Message::new(self.seed, number + 1));
        // Before the writer may learn that it was read: what it forgets, the supervisor knows.
        self.station.report(&report)?;
        drop(view);
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

//! The process that starts the others, kills them, and knows what was delivered.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use fabric::Address;
use fabric::ring::{Notify, RingAnswer, RingOffer};

use crate::child::Child;
use crate::events::{self, Event};
use crate::failure::Failure;
use crate::judge::Judge;
use crate::line::{Order, Reading, Report, RingPlan, Writing, is_readable};
use crate::message::Dice;
use crate::station;

/// How long it may take until anything is reported, whoever is connecting or writing what.
pub const STALL: Duration = Duration::from_secs(30);
/// Longest wait for a report between two looks at the clock.
const LOOK: Duration = Duration::from_millis(50);
/// How often in a row a side may keep its endpoint. What an endpoint holds of earlier epochs is
/// let go of when it is closed, so memory would grow by this much, and no more.
const MOST_KEPT: u32 = 3;

/// How far the two are with connecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Resting,
    Offering,
    Answering,
    Connecting,
    Flowing,
    Closed,
}

/// A connection that is made or there.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    number: u64,
    stage: Stage,
    ring: RingPlan,
    reading: Reading,
    writing: Writing,
    /// How the reader is told, once it has offered a ring.
    form: Option<Notify>,
    /// Messages since it was there.
    delivered: u64,
    /// By whose count there are how many, once the ring is closed.
    finished: Option<u64>,
    over: Option<u64>,
}

/// One of the two, and what of the last attempts it still has.
#[derive(Debug)]
struct Side {
    child: Child,
    /// Does it have an endpoint, or was it told to open one?
    has_berth: bool,
    /// Attempts in a row after which it had still the same one.
    kept: u32,
}

impl Side {
    fn start(role: &'static str, provider: &str, seed: u64) -> Result<Self, Failure> {
        Ok(Self { child: Child::start(role, provider, seed)?, has_berth: false, kept: 0 })
    }

    /// Is it to keep its endpoint, if it has one?
    fn keeps(&mut self, wants: bool) -> bool {
        let keeps = wants && self.has_berth && self.kept < MOST_KEPT;
        self.kept = if keeps { self.kept + 1 } else { 0 };
        keeps
    }
}

/// The supervisor of one provider's turn.
#[derive(Debug)]
pub struct Supervisor {
    provider: String,
    seed: u64,
    dice: Dice,
    forms: Vec<Notify>,
    judge: Judge,
    reader: Side,
    writer: Side,
    attempt: Attempt,
    /// Does the writer have the ring that the reader would open again?
    is_tied: bool,
    /// When something was reported last.
    moved: Instant,
}

/// A turn of one provider: what came of it, and what went wrong.
pub fn run(provider: &str, seed: u64, time: Duration) -> Result<(Judge, Option<Failure>), Failure> {
    let begin = Instant::now();
    let mut supervisor = Supervisor::new(provider, seed)?;
    let mut dice = Dice::new(seed, 2);
    let result = supervisor
        .connect(false, false)
        .and_then(|()| events::happen(&mut supervisor, &mut dice, time))
        .and_then(|()| supervisor.close());
    let failure = result.err().map(|failure| match failure {
        Failure::Stuck(_) => Failure::Stuck(format!("{failure}\n{}", supervisor.stands())),
        other => other,
    });
    let Supervisor { mut judge, reader, writer, .. } = supervisor;
    judge.remember(false, reader.child.memory());
    judge.remember(true, writer.child.memory());
    judge.seconds = begin.elapsed().as_secs();
    let failure = failure.or_else(|| {
        let text = "a process's memory grew".to_owned();
        (!judge.is_memory_flat).then_some(Failure::Found(text))
    });
    judge.is_good = failure.is_none();
    Ok((judge, failure))
}

impl Supervisor {
    fn new(provider: &str, seed: u64) -> Result<Self, Failure> {
        let forms = station::forms(provider)?;
        let Some(best) = forms.first().copied() else {
            return Err(Failure::Usage(format!("{provider} cannot do rings")));
        };
        Ok(Self {
            provider: provider.to_owned(),
            seed,
            dice: Dice::new(seed, 1),
            forms,
            judge: Judge::new(provider, seed),
            reader: Side::start("reader", provider, seed)?,
            writer: Side::start("writer", provider, seed)?,
            attempt: Attempt {
                number: 0,
                stage: Stage::Closed,
                ring: RingPlan { capacity: 1 << 20, watermark: 0, notify: best, whole: 0 },
                reading: Reading::Anew,
                writing: Writing::Anew,
                form: None,
                delivered: 0,
                finished: None,
                over: None,
            },
            is_tied: false,
            moved: Instant::now(),
        })
    }

    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Something happens to them.
    pub fn befall(&mut self, event: Event) -> Result<(), Failure> {
        let (writer_dies, reader_dies) = match event {
            Event::KillWriter => (true, false),
            Event::KillReader => (false, true),
            Event::KillBoth => (true, true),
            Event::Reconnect => (false, false),
        };
        let count = match event {
            Event::KillWriter => &mut self.judge.killed_writers,
            Event::KillReader => &mut self.judge.killed_readers,
            Event::KillBoth => &mut self.judge.killed_both,
            Event::Reconnect => &mut self.judge.reconnects,
        };
        *count += 1;
        // Both at once, before anything else is done.
        if writer_dies {
            self.writer.child.kill()?;
        }
        if reader_dies {
            self.reader.child.kill()?;
            for report in self.reader.child.last_words()? {
                // What it reported counts, whatever came after it.
                if let Report::Delivered { number, length, sum } = report {
                    self.judge.deliver(number, length, sum)?;
                }
            }
            self.judge.remember(false, self.reader.child.memory());
            self.reader = Side::start("reader", &self.provider, self.seed)?;
        }
        if writer_dies {
            self.writer.child.last_words()?;
            self.judge.remember(true, self.writer.child.memory());
            self.writer = Side::start("writer", &self.provider, self.seed)?;
            self.is_tied = false;
        }
        self.connect(!writer_dies && !reader_dies, false)
    }

    /// Begins another attempt to connect the two. The last one of all is a ring whose reader
    /// can be told of its end.
    fn connect(&mut self, have_lived: bool, is_last: bool) -> Result<(), Failure> {
        let reading = match self.reader.keeps(!is_last && self.dice.percent(60)) {
            true => Reading::Again,
            false => Reading::Anew,
        };
        let may_go_on = self.is_tied && reading == Reading::Again;
        let writing = match self.writer.keeps(self.dice.percent(70)) {
            true if may_go_on && self.dice.percent(80) => Writing::Again,
            true => Writing::Beside,
            false => Writing::Anew,
        };
        let ring = if reading == Reading::Anew { self.draw(is_last) } else { self.attempt.ring };
        let number = self.attempt.number + 1;
        let stage = Stage::Resting;
        let (finished, over) = (None, None);
        self.attempt = Attempt {
            number,
            stage,
            ring,
            reading,
            writing,
            form: None,
            delivered: 0,
            finished,
            over,
        };
        self.moved = Instant::now();
        // Who closes an endpoint while its peer lives and writes asks for trouble inside of
        // libfabric; one that goes on may leave the connection in the middle of anything.
        if have_lived && (reading, writing) != (Reading::Again, Writing::Again) {
            return self.writer.child.tell(&Order::Rest { attempt: number });
        }
        self.ask_for_offer()
    }

    /// A ring of whatever size.
    fn draw(&mut self, is_last: bool) -> RingPlan {
        let capacity = self.dice.between_powers(16, 23) / 1024 * 1024;
        let watermark = match self.dice.below(3) {
            0 => 0,
            1 => capacity / 4,
            _ => self.dice.below(capacity),
        };
        let notify = if is_last { self.forms[0] } else { self.dice.one_of(&self.forms) };
        RingPlan { capacity, watermark, notify, whole: self.judge.messages() }
    }

    fn ask_for_offer(&mut self) -> Result<(), Failure> {
        let Attempt { number, ring, reading, .. } = self.attempt;
        self.attempt.stage = Stage::Offering;
        self.reader.has_berth = true;
        self.is_tied &= reading == Reading::Again;
        let ring = RingPlan { whole: self.judge.messages(), ..ring };
        self.reader.child.tell(&Order::Offer { attempt: number, ring, manner: reading })
    }

    fn offered(&mut self, address: Address, offer: RingOffer) -> Result<(), Failure> {
        self.judge.compare("reader", offer.whole)?;
        // Mostly a good part of the ring, sometimes hardly more than a header.
        let low = if self.dice.percent(10) { 8 } else { 13 };
        let chunk = self.dice.between_powers(low, 22);
        let Attempt { number: attempt, writing: manner, .. } = self.attempt;
        (self.attempt.stage, self.attempt.form) = (Stage::Answering, Some(offer.notify));
        (self.writer.has_berth, self.is_tied) = (true, true);
        self.writer.child.tell(&Order::Write { attempt, peer: address, offer, chunk, manner })
    }

    fn answered(&mut self, address: Address, answer: RingAnswer) -> Result<(), Failure> {
        self.attempt.stage = Stage::Connecting;
        let attempt = self.attempt.number;
        self.reader.child.tell(&Order::Connect { attempt, peer: address, answer })
    }

    fn connected(&mut self) {
        self.attempt.stage = Stage::Flowing;
        self.judge.connected(self.attempt.form, self.attempt.reading == Reading::Again);
        self.reader.child.epochs += 1;
        self.writer.child.epochs += 1;
    }

    fn hear(&mut self, report: Report) -> Result<(), Failure> {
        let current = self.attempt.number;
        match report {
            Report::Delivered { number, length, sum } => {
                self.judge.deliver(number, length, sum)?;
                if self.attempt.delivered > 0 {
                    self.judge.waited(self.moved.elapsed());
                }
                self.attempt.delivered += u64::from(self.attempt.stage == Stage::Flowing);
            }
            Report::Rested { attempt, unfinished } if attempt == current => {
                self.judge.undrained += u64::from(unfinished > 0);
                self.ask_for_offer()?;
            }
            Report::Offered { attempt, address, offer } if attempt == current => {
                self.offered(address, offer)?;
            }
            Report::Answered { attempt, address, answer } if attempt == current => {
                self.answered(address, answer)?;
            }
            Report::Connected { attempt } if attempt == current => self.connected(),
            Report::Broken { attempt, text } if attempt == current => {
                let text = format!("the ring broke, though both live: {text}; {:?}", self.attempt);
                return Err(Failure::Found(text));
            }
            Report::Failed { is_wrong_data, text } => {
                self.judge.bad += u64::from(is_wrong_data);
                return Err(Failure::Found(text));
            }
            Report::Finished { messages } => self.attempt.finished = Some(messages),
            Report::Over { messages } => self.attempt.over = Some(messages),
            Report::Stands { text } => eprintln!("{text}"),
            // Of an attempt that is over: who was left may well have seen its ring break.
            Report::Rested { .. }
            | Report::Offered { .. }
            | Report::Answered { .. }
            | Report::Connected { .. }
            | Report::Broken { .. } => return Ok(()),
        }
        self.moved = Instant::now();
        Ok(())
    }

    /// Hears what is reported, for so long, or until something is so.
    fn listen(&mut self, time: Duration, is_so: impl Fn(&Self) -> bool) -> Result<(), Failure> {
        let end = Instant::now() + time;
        while !is_so(self) {
            let now = Instant::now();
            if now >= end {
                return Ok(());
            }
            if now - self.moved > STALL {
                let text = format!("nothing for {STALL:?}, though both live");
                return Err(Failure::Stuck(text));
            }
            let lines = [self.reader.child.line().as_fd(), self.writer.child.line().as_fd()];
            is_readable(&lines, LOOK.min(end - now))?;
            // The reader first: what it delivered is known when the writer says its last word.
            while let Some(report) = self.reader.child.report()? {
                self.hear(report)?;
                if is_so(self) {
                    break;
                }
            }
            if let Some(report) = self.writer.child.report()? {
                self.hear(report)?;
            }
            self.reader.child.sample();
            self.writer.child.sample();
        }
        Ok(())
    }

    /// Lets time pass.
    pub fn pass(&mut self, time: Duration) -> Result<(), Failure> {
        self.listen(time, |_| false)
    }

    /// Waits until so many messages came by this connection, or for so long.
    pub fn until_delivered(&mut self, messages: u64, time: Duration) -> Result<(), Failure> {
        self.listen(time, |supervisor| supervisor.attempt.delivered >= messages)
    }

    /// The end: the ring is closed by its writer, and all of it is read.
    fn close(&mut self) -> Result<(), Failure> {
        self.connect(true, true)?;
        self.until_delivered(1, STALL * 2)?;
        self.writer.child.tell(&Order::Finish)?;
        let count = |supervisor: &Self| supervisor.attempt.finished.zip(supervisor.attempt.over);
        self.listen(STALL * 2, |supervisor| count(supervisor).is_some())?;
        let Some((finished, over)) = count(self) else {
            return Err(Failure::Stuck("the ring was not closed".to_owned()));
        };
        self.judge.compare("writer", finished)?;
        self.judge.compare("reader", over)?;
        self.attempt.stage = Stage::Closed;
        self.writer.child.end()?;
        self.reader.child.end()
    }

    /// Where everybody is.
    fn stands(&mut self) -> String {
        eprintln!("{}\n{}", self.writer.child.whereabouts(), self.reader.child.whereabouts());
        self.moved = Instant::now();
        for side in [&mut self.reader, &mut self.writer] {
            let _ = side.child.tell(&Order::Stand);
        }
        // Who does not answer is stuck in a call.
        let _ = self.pass(Duration::from_secs(2));
        format!("{:?}", self.attempt)
    }
}

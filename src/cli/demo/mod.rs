//! `fabricast demo`: two nodes, three topics and eight subscribers on this machine, in a few
//! seconds, with all data compared.

mod cast;
mod company;
mod directory;
mod memory;
mod network;
mod outcome;
mod show;

use std::time::{Duration, Instant};

use pubsub::{MemoryPlace, Row};

use self::cast::{NODES, TOPICS, budget};
use self::company::{Company, Member, Part};
use self::network::{Between, Ground};
use self::outcome::Outcome;
use self::show::Show;
use super::exit::{Exit, Failure};
use super::settings::seconds;
use super::{progress, text};

/// Until all are there, and until all is read when nothing more is published.
const GATHERING: Duration = Duration::from_secs(18);
const FINISHING: Duration = Duration::from_secs(10);
/// Until all have said what they know, and goodbye.
const LEAVING: Duration = Duration::from_secs(5);
/// Machines with more cores than this can compare more.
const CORES: usize = 4;

/// Two nodes on this machine, with a cable between them: three topics, three publishers, eight
/// subscribers, each a process; every byte is compared.
///
/// Ends by itself within 50 seconds (with --time, 35 seconds after it). Shows a table that changes
/// on a terminal, or else a line now and then; at the end what was carried by which path, and
/// which stage took longest. The exit code is 0 if all was right and nothing was lost.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How long messages are published
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "12")]
    time: Duration,
    /// Where the two nodes are
    #[arg(long, value_enum, default_value_t = Between::Auto)]
    between: Between,
    /// In whose memory messages lie: host, or a device [default: cuda:0, and cuda:1 for the second
    /// node; the host's if there is none]
    #[arg(long, value_name = "PLACE")]
    memory: Option<MemoryPlace>,
    /// Only a JSON line
    #[arg(long)]
    json: bool,
    /// Only try whether network namespaces can be made
    #[arg(long, hide = true)]
    probe: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.time > Duration::from_secs(3600) || arguments.time < Duration::from_secs(1) {
        return Err(Failure::new(Exit::Usage, "--time: 1 to 3600 seconds"));
    }
    if arguments.probe {
        return network::probe();
    }
    memory::check()?;
    // In this order: into a namespace goes who has one thread, and devices and signals have more.
    let ground = Ground::prepare(arguments.between)?;
    let limit = GATHERING + arguments.time + FINISHING + LEAVING * 2;
    let company = Company::gather(ground, limit)?;
    let places = memory::places(arguments.memory);
    memory::check_places(&places)?;
    let memory = places.map(|place| place.to_string());
    let mut all = Demonstration { arguments, memory, company, begun: None, rows: Vec::new() };
    all.introduce()?;
    let played = all.play();
    if let Some(show) = &mut all.company.show {
        show.wipe()?;
    }
    let outcome = Outcome::of(&all, played.is_ok());
    let is_interrupted = played.as_ref().is_err_and(|it| it.exit() == Exit::Interrupted);
    let printed = match is_interrupted && !arguments.json {
        true => Ok(()),
        false => outcome.print(arguments.json),
    };
    let judged = outcome.judge();
    // What is wrong with the data is worse than that it ended too early.
    match (played, judged) {
        (Ok(()), judged) => judged?,
        (Err(_), Err(judged)) if judged.exit() == Exit::Corrupt => return Err(judged),
        (Err(failure), _) => return Err(failure),
    }
    printed?;
    if arguments.json { Ok(()) } else { text::print("demo: ok\n") }
}

struct Demonstration<'a> {
    arguments: &'a Arguments,
    memory: [String; NODES],
    company: Company,
    /// When all had begun.
    begun: Option<Instant>,
    /// What the nodes told: while messages were published, and when all were read.
    rows: Vec<(usize, Row)>,
}

/// Has every subscriber all that was published?
fn has_all(members: &[Member]) -> bool {
    let published = |wanted: usize| {
        let publisher = members.iter().find(|member| member.part == Part::Publish(wanted));
        publisher.map(|member| member.said.messages)
    };
    members.iter().all(|member| match member.part {
        Part::Read(topic) => published(topic) == Some(member.said.messages),
        _ => true,
    })
}

fn options(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

impl Demonstration<'_> {
    fn introduce(&self) -> Result<(), Failure> {
        if self.arguments.json {
            return Ok(());
        }
        let between = match &self.company.ground {
            Ground::Namespaces(_) => {
                "in two network namespaces with a cable between them".to_owned()
            }
            Ground::Loopback { why: None } => "on the loopback address".to_owned(),
            Ground::Loopback { why: Some(why) } => {
                format!("on the loopback address (no network namespaces: {why})")
            }
        };
        let [first, second] = &self.memory;
        let memory = match first == second {
            true => format!("in the memory of {first}"),
            false => format!("in the memory of {first} and {second}"),
        };
        let about = format!(
            "Two nodes of this machine, {between}. 3 topics, 3 publishers and 8 subscribers, each a process. \
             Messages lie {memory}. It takes up to {}, and {:.0} seconds and a few more.",
            progress::amount(cast::MEMORY as f64),
            self.arguments.time.as_secs_f64()
        );
        text::print(&(text::wrapped("", &about) + "\n"))
    }

    fn play(&mut self) -> Result<(), Failure> {
        let gathered = Instant::now() + GATHERING;
        self.start_services(gathered)?;
        for (topic, subject) in TOPICS.iter().enumerate() {
            for (node, readers) in subject.readers.into_iter().enumerate() {
                for reader in 0..readers {
                    let letter = char::from(b'a' + reader as u8);
                    let label = format!("node {}, {letter}", node + 1);
                    let words = format!("sub {} --check --stats --every 0.25", subject.name);
                    self.start_at(topic, (Part::Read(topic), node, label), &words)?;
                }
            }
        }
        self.company.until("all subscribers were there", gathered, |members| {
            members.iter().all(|member| member.has_said || !member.part.reads())
        })?;
        // Cores that are there beyond a few can compare more.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let speed = (cores / CORES).clamp(1, 8) as f64;
        for (topic, subject) in TOPICS.iter().enumerate() {
            let label = format!("publisher of {}", subject.name);
            let words = format!(
                "pub {} --pattern --size {} --rate {} --steady --wait-for {} --every 0.25",
                subject.name,
                subject.size,
                subject.rate * speed,
                subject.expected()
            );
            self.start_at(topic, (Part::Publish(topic), subject.from, label), &words)?;
        }
        self.company.until("all subscribers had a message", gathered, |members| {
            members.iter().all(|member| member.said.messages > 0 || !member.part.reads())
        })?;
        let begun = Instant::now();
        self.begun = Some(begun);
        self.company.show = (!self.arguments.json).then(Show::begin);
        let end = begun + self.arguments.time;
        self.company.until("it was over", end + LEAVING, |_| Instant::now() >= end)?;
        let copied = |(node, row): (usize, &Row)| (node, row.clone());
        self.rows = self.company.report().map(copied).collect();
        let finished = Instant::now() + FINISHING;
        self.company.end(Part::publishes, finished)?;
        self.company.until("all that was published was read", finished, has_all)?;
        let left = Instant::now() + LEAVING;
        // What came from the other node: said of topics that are there. An answer may be on its way that
        // knows less.
        let known: Vec<u64> = self.company.rows.iter().map(|(_, reports)| *reports).collect();
        self.company.until_all("the nodes had told what they carried", left, |it| {
            it.rows.iter().zip(&known).all(|((_, reports), known)| *reports > known + 1)
        })?;
        self.rows.retain(|(_, row)| matches!(row, Row::Received { .. }));
        self.rows.extend(self.company.report().map(copied));
        self.company.end(Part::reads, left)?;
        self.company.end(|part| part == Part::Serve, left)
    }

    /// Starts one that publishes or reads in a topic.
    fn start_at(
        &mut self,
        topic: usize,
        who: (Part, usize, String),
        words: &str,
    ) -> Result<(), Failure> {
        let memory = format!("--json --service outside --memory {}", self.memory[who.1]);
        let all = [options(words), options(&memory), TOPICS[topic].options()].concat();
        self.company.start(who, all)
    }

    fn start_services(&mut self, gathered: Instant) -> Result<(), Failure> {
        let mut peer: Option<String> = None;
        for node in 0..NODES {
            let (label, address, budget) =
                (format!("node {}", node + 1), self.company.ground.address(node), budget());
            let words = format!(
                "node --insecure --listen {address}:0 --lost-after 20 --budget-host {budget} --budget-device {budget}"
            );
            let mut all = options(&words);
            all.extend(peer.take().map(|peer| format!("--peers={peer}")));
            self.company.start((Part::Serve, node, label), all)?;
            self.company.ask(node)?;
            let listens = |it: &Company| {
                it.rows[node].0.iter().find_map(|row| match row {
                    Row::Node { listens, .. } => listens.clone(),
                    _ => None,
                })
            };
            self.company
                .until_all("the nodes were served", gathered, |it| listens(it).is_some())?;
            peer = listens(&self.company);
        }
        Ok(())
    }
}

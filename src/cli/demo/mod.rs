//! `fabricast demo`: two nodes, three topics and eight subscribers on this machine, in a few
//! seconds, with all data compared.

mod cast;
mod company;
mod memory;
mod network;
mod outcome;
mod ring;
mod ring_ends;
mod show;
mod worker;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fabric::Policy;
use pubsub::MemoryPlace;

use self::cast::{NODES, Part, Role, TOPICS, budget};
use self::company::{Company, Member};
use self::network::{Between, Ground, Place};
use self::outcome::Outcome;
use self::show::Show;
use self::worker::{END, GO};
use super::exit::{Exit, Failure};
use super::settings::seconds;
use super::{progress, text};

pub(crate) use self::worker::work;

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
    /// Instead, show a ring between two processes, over the best providers
    #[arg(long, conflicts_with_all = ["time", "between", "memory", "json"])]
    ring: bool,
    /// With --ring, what to take: names to prefer, =NAME to require, ^NAME to deny; comma-separated
    #[arg(long, value_name = "POLICY", default_value = "", requires = "ring")]
    policy: Policy,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.ring {
        return ring::run(&arguments.policy);
    }
    if arguments.time > Duration::from_secs(3600) || arguments.time < Duration::from_secs(1) {
        return Err(Failure::new(Exit::Usage, "--time: 1 to 3600 seconds"));
    }
    memory::check()?;
    // In this order: into a namespace goes who has one thread, and devices and signals have more.
    let ground = Ground::prepare(arguments.between)?;
    let company = Company::gather()?;
    let places = memory::places(arguments.memory);
    memory::check_places(&places)?;
    let mut demonstration = Demonstration {
        arguments,
        ground,
        memory: places.map(|place| place.to_string()),
        company,
        run: std::process::id().into(),
        show: Show::begin(arguments.json),
        begun: None,
    };
    demonstration.introduce()?;
    let played = demonstration.play();
    demonstration.show.wipe()?;
    let seconds = demonstration.begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
    let about = (demonstration.ground.name(), &demonstration.memory);
    let outcome = Outcome::of(&demonstration.company, about, seconds, played.is_ok());
    let is_interrupted = played.as_ref().is_err_and(|it| it.exit() == Exit::Interrupted);
    let printed = match is_interrupted && !arguments.json {
        true => Ok(()),
        false => outcome.print(&demonstration.company, arguments.json),
    };
    let judged = outcome.judge(&demonstration.company);
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
    ground: Ground,
    memory: [String; NODES],
    company: Company,
    /// Names the messages of this run.
    run: u64,
    show: Show,
    begun: Option<Instant>,
}

fn serves(part: &Part) -> bool {
    matches!(part, Part::Serve { .. })
}

fn publishes(part: &Part) -> bool {
    matches!(part, Part::Publish { .. })
}

fn reads(part: &Part) -> bool {
    matches!(part, Part::Read { .. })
}

impl Company {
    fn directory_of(&self, node: usize) -> PathBuf {
        self.directory().join(format!("node-{}", node + 1))
    }

    fn all(&self, is_meant: fn(&Part) -> bool, is_so: impl Fn(&Member) -> bool) -> bool {
        self.members.iter().filter(|member| is_meant(&member.role.part)).all(is_so)
    }

    /// Has every subscriber all that was published?
    fn has_all(&self) -> bool {
        let published = |wanted: usize| {
            self.members.iter().find_map(|member| match member.role.part {
                Part::Publish { topic, .. } if topic == wanted => Some(member.published.messages),
                _ => None,
            })
        };
        self.all(reads, |member| match member.role.part {
            Part::Read { topic, .. } => published(topic) == Some(member.reading.messages),
            _ => false,
        })
    }
}

impl Demonstration<'_> {
    fn introduce(&self) -> Result<(), Failure> {
        if self.arguments.json {
            return Ok(());
        }
        let between = match &self.ground {
            Ground::Namespaces => "in two network namespaces with a cable between them".to_owned(),
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

    fn role(&self, node: usize, label: String, part: Part) -> Role {
        let service = self.company.members.get(node).map(Member::process);
        Role {
            parent: std::process::id(),
            place: self.ground.place(node, service),
            directory: self.company.directory_of(node),
            label,
            limit: GATHERING + self.arguments.time + FINISHING + LEAVING * 2,
            part,
        }
    }

    fn until(
        &mut self,
        what: &str,
        longest: Duration,
        is_so: impl Fn(&Company) -> bool,
    ) -> Result<(), Failure> {
        let Self { company, show, .. } = self;
        let begun = self.begun.is_some();
        let look = |company: &Company| if begun { show.look(company) } else { Ok(()) };
        company.until(what, Instant::now() + longest, look, is_so)
    }

    fn play(&mut self) -> Result<(), Failure> {
        let gathered = Instant::now() + GATHERING;
        let left = || gathered.saturating_duration_since(Instant::now());
        self.start_services(left)?;
        for (topic, subject) in TOPICS.iter().enumerate() {
            for (node, readers) in subject.readers.into_iter().enumerate() {
                for reader in 0..readers {
                    let letter = char::from(b'a' + reader as u8);
                    let label = format!("node {}, {letter}", node + 1);
                    let memory = self.memory[node].clone();
                    let part = Part::Read { topic, memory, run: self.run + topic as u64 };
                    self.company.start(self.role(node, label, part))?;
                }
            }
        }
        self.until("all subscribers were there", left(), |it| it.all(reads, |it| it.is_ready))?;
        // Cores that are there beyond a few can compare more.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let speed = (cores / CORES).clamp(1, 8) as f64;
        for (topic, subject) in TOPICS.iter().enumerate() {
            let part = Part::Publish {
                topic,
                memory: self.memory[subject.from].clone(),
                run: self.run + topic as u64,
                time: self.arguments.time,
                rate: subject.rate * speed,
            };
            let label = format!("publisher of {}", subject.name);
            self.company.start(self.role(subject.from, label, part))?;
        }
        let is_ready = |it: &Company| it.all(publishes, |it| it.is_ready);
        self.until("all publishers had their subscribers", left(), is_ready)?;
        self.begun = Some(Instant::now());
        self.company.tell(GO, publishes);
        let longest = self.arguments.time + FINISHING;
        self.until("all that was published was read", longest, |it| {
            it.all(publishes, |it| it.published.is_released) && it.has_all()
        })?;
        let left_by = Instant::now() + LEAVING;
        let left = || left_by.saturating_duration_since(Instant::now());
        // What they carried: said of topics that are there.
        let known: Vec<u64> = self.company.members.iter().map(|it| it.reports).collect();
        self.until("the nodes had told what they carried", left(), |it| {
            it.members
                .iter()
                .zip(&known)
                .all(|(it, known)| !serves(&it.role.part) || it.reports > known + 1)
        })?;
        for part in [publishes, reads, serves] {
            self.company.tell(END, part);
            self.until("all had ended", left(), |it| it.all(part, |it| it.is_done))?;
        }
        Ok(())
    }

    fn start_services(&mut self, left: impl Fn() -> Duration) -> Result<(), Failure> {
        for node in 0..NODES {
            let peers = self.company.members.iter().filter_map(|it| it.listens.clone()).collect();
            let part = Part::Serve { listen: self.ground.listen(node), peers, budget: budget() };
            let place = self.ground.place(node, None);
            let label = format!("node {}", node + 1);
            let role = Role { place: place.clone(), ..self.role(node, label, part) };
            self.company.start(role)?;
            if matches!(place, Place::Separate) {
                let is_separate = |it: &Company| it.members.iter().any(|it| it.is_separate);
                self.until("the second network was made", left(), is_separate)?;
                self.ground.connect(self.company.members[node].process())?;
                self.company.tell(GO, serves);
            }
            let is_ready = |it: &Company| it.all(serves, |it| it.is_ready);
            self.until("the nodes were served", left(), is_ready)?;
        }
        Ok(())
    }
}

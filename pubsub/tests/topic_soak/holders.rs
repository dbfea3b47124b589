//! Twenty holders of samples of one node: they stall, are stopped, evicted and killed, and so are
//! publishers and the service. No sample that is held may change.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use testkit::children::{self, Child};
use testkit::temp_dir::TempDir;

use crate::holder::Counts;
use crate::random::Random;
use crate::topics::TIMEOUT;

const HOLDERS: usize = 20;
const PUBLISHERS: usize = 2;

struct Process {
    args: [String; 3],
    child: Child,
    resumes: Option<Instant>,
}

impl Process {
    fn start(role: &str, directory: &Path, number: u64) -> Self {
        let directory = directory.to_str().expect("a path in UTF-8").to_owned();
        Self::of([role.to_owned(), directory, number.to_string()])
    }

    fn of(args: [String; 3]) -> Self {
        let mut command = children::respawn(args.each_ref().map(String::as_str));
        command.stdout(Stdio::piped());
        let mut child = Child::start(&mut command);
        if args[0] != "local-service" {
            child.line(TIMEOUT).expect("a line when the child is ready");
        }
        Self { args, child, resumes: None }
    }

    fn resume(&mut self) {
        if self.resumes.take().is_some() {
            self.child.resume();
        }
    }
}

pub fn run(time: Duration, seed: u64) {
    let directory = TempDir::new("fabricast-soak-held");
    let (mut random, mut next_seed) = (Random::new(seed), seed);
    let mut start = |role: &str, count: usize| -> Vec<Process> {
        (0..count)
            .map(|_| {
                next_seed += 1;
                Process::start(role, &directory.join("node"), next_seed)
            })
            .collect()
    };
    let mut services = start("local-service", 1);
    let mut others = start("holder", HOLDERS);
    others.extend(start("held-publisher", PUBLISHERS));
    let end = Instant::now() + time;
    let mut failures = std::collections::BTreeMap::<String, u64>::new();
    let mut next = Instant::now();
    while Instant::now() < end {
        for process in services.iter_mut().chain(&mut others) {
            let status = process.child.try_wait();
            assert!(status.is_none(), "a {} ended: {status:?}", process.args[0]);
            if process.resumes.is_some_and(|resumes| resumes <= Instant::now()) {
                process.resume();
            }
        }
        if Instant::now() >= next {
            let kind = random.below(10);
            let which = random.below(others.len() as u64) as usize;
            let process = if kind == 0 { &mut services[0] } else { &mut others[which] };
            let failure = if kind < 5 {
                // Others join, and leave, only while the service runs.
                process.resume();
                process.child.kill();
                *process = Process::of(process.args.clone());
                "killed"
            } else if process.resumes.is_none() {
                process.child.stop(TIMEOUT);
                process.resumes =
                    Some(Instant::now() + Duration::from_millis(100 + random.below(4000)));
                "stopped"
            } else {
                continue;
            };
            *failures.entry(format!("{} {failure}", process.args[0])).or_default() += 1;
            next = Instant::now() + Duration::from_millis(100 + random.below(900));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut counts = Counts::default();
    for process in &mut others {
        process.resume();
        process.child.say("stop");
        if process.args[0] == "holder" {
            let line = process.child.line(TIMEOUT).expect("the counts of a holder");
            counts.add(&Counts::of(&line));
        }
    }
    println!("failures: {failures:?}");
    println!(
        "held samples: {} comparisons by the last holders, none changed; {} evictions, {} samples \
         held then; {} pulls refused as too many",
        counts.comparisons, counts.evictions, counts.outlived, counts.full
    );
    assert!(counts.comparisons > 0 && counts.evictions > 0 && counts.outlived > 0);
}

//! Runs one phase after the other, and judges them.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::attacks::Target;
use crate::limits;
use crate::outcome::Outcome;
use crate::phases::{self, Phase, SupervisorAction};
use crate::table;
use crate::topics::LONGEST;
use crate::user;
use crate::verdict::PhaseResult;
use crate::world::{Process, World};

/// From the start until descriptors and connections stay as they are.
const SETTLING: Duration = Duration::from_secs(3);
/// After each attack.
const REST: Duration = Duration::from_secs(2);
/// Processes that are stopped hold different messages.
const BETWEEN_STOPS: Duration = Duration::from_millis(30);
const LOOK: Duration = Duration::from_millis(100);

/// What a run is to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Of each phase.
    pub seconds: u64,
    pub seed: u64,
    /// Only phases whose name has this in it.
    pub only: String,
}

impl Plan {
    pub fn word(&self) -> String {
        format!("{}:{}:{}", self.seconds, self.seed, self.only)
    }

    pub fn of(word: &str) -> Self {
        let words: Vec<_> = word.splitn(3, ':').collect();
        let [seconds, seed, only] = words[..] else { panic!("no plan: {word}") };
        Self {
            seconds: seconds.parse().expect("seconds"),
            seed: seed.parse().expect("a seed"),
            only: only.to_owned(),
        }
    }
}

pub fn run(plan: &Plan) {
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("topic_hostile");
    let _ = std::fs::remove_dir_all(&logs);
    std::fs::create_dir_all(&logs).expect("a directory for logs");
    println!("logs: {}", logs.display());
    let mut world = World::start(&logs);
    let (target, provider) = (world.target(plan.seed), world.provider());
    println!("provider {provider}; attackers run as {}", user::of_attackers());
    std::thread::sleep(SETTLING);
    world.logged();
    let time = Duration::from_secs(plan.seconds);
    let baseline = phase(&mut world, &Phase::baseline(), &target, time);
    table::print_head();
    table::print(&baseline, &baseline);
    let mut failed = Vec::new();
    if !baseline.faults(&baseline).is_empty() {
        failed.push(baseline.phase.name);
    }
    for next in phases::all().iter().filter(|phase| phase.name.contains(&plan.only)) {
        if !next.applies_to(&provider) {
            println!("{:<20} skipped: the bytes of provider {provider} are not known", next.name);
            continue;
        }
        let seen = phase(&mut world, next, &target, time);
        table::print(&seen, &baseline);
        if !seen.faults(&baseline).is_empty() {
            failed.push(next.name);
        }
    }
    drop(world);
    assert!(failed.is_empty(), "out of bounds: {}", failed.join(", "));
}

/// Runs an attack for so long, and a rest behind it.
fn phase(world: &mut World, phase: &Phase, target: &Target, time: Duration) -> PhaseResult {
    let service = world.services[0].child.id();
    let before = world.services[0].child.descriptors();
    let begin = Instant::now();
    world.windows();
    if let SupervisorAction::ShortFilesOfService(bytes) = phase.supervisor_action {
        limits::set_file_length_of(service, Some(bytes));
    }
    let mut actors = world.attack(phase, target);
    let stopped = match phase.supervisor_action {
        SupervisorAction::Stop(count) => count,
        _ => 0,
    };
    for actor in actors.iter().take(stopped) {
        actor.child.stop(LONGEST);
        std::thread::sleep(BETWEEN_STOPS);
    }
    let mut most = before;
    let end = Instant::now() + time;
    while Instant::now() < end {
        world.look();
        most = most.max(world.services[0].child.descriptors());
        std::thread::sleep(LOOK);
    }
    let during = world.windows();
    actors.iter().take(stopped).for_each(|actor| actor.child.resume());
    let outcomes: Vec<_> = actors.iter_mut().map(finish).collect();
    if let SupervisorAction::ShortFilesOfService(_) = phase.supervisor_action {
        limits::set_file_length_of(service, None);
    }
    std::thread::sleep(REST);
    world.look();
    let after = world.windows();
    let mut logged = world.logged();
    logged.extend(actors.iter_mut().map(|actor| (actor.name.clone(), actor.log.take())));
    PhaseResult {
        phase: phase.clone(),
        during,
        after,
        logged,
        outcome: Outcome::sum(&outcomes),
        descriptors: [before, most, world.services[0].child.descriptors()],
        elapsed: begin.elapsed(),
    }
}

/// Ends a process of an attack, and has what came of it.
fn finish(actor: &mut Process) -> Outcome {
    actor.child.end(LONGEST);
    match actor.child.line(LONGEST) {
        Some(line) => Outcome::of(&line),
        None => panic!("{} did not say what came of it: {}", actor.name, actor.log.text()),
    }
}

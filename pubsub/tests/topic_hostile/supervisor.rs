//! Runs the phases and checks their results.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::attacks::Target;
use crate::limits;
use crate::outcome::Outcome;
use crate::phases::{self, Phase, SupervisorAction};
use crate::table;
use crate::topics::TIMEOUT;
use crate::user;
use crate::verdict::PhaseResult;
use crate::world::{Process, World};

/// From the start until the numbers of descriptors and connections are constant.
const SETTLING: Duration = Duration::from_secs(3);
/// After each attack.
const RECOVERY: Duration = Duration::from_secs(2);
/// Between two stops, so that the stopped processes hold different messages.
const BETWEEN_STOPS: Duration = Duration::from_millis(30);
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The arguments of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Duration of each phase.
    pub seconds: u64,
    pub seed: u64,
    /// Only phases whose name contains this text.
    pub only: String,
}

impl Plan {
    pub fn argument(&self) -> String {
        format!("{}:{}:{}", self.seconds, self.seed, self.only)
    }

    pub fn of(argument: &str) -> Self {
        let fields: Vec<_> = argument.splitn(3, ':').collect();
        let [seconds, seed, only] = fields[..] else { panic!("malformed plan: {argument}") };
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
    std::fs::create_dir_all(&logs).expect("create the directory for logs");
    println!("logs: {}", logs.display());
    let mut world = World::start(&logs);
    let (target, provider) = (world.target(plan.seed), world.provider());
    println!("provider {provider}; attackers run as {}", user::of_attackers());
    std::thread::sleep(SETTLING);
    world.take_logs();
    let time = Duration::from_secs(plan.seconds);
    let baseline = run_phase(&mut world, &Phase::baseline(), &target, time);
    table::print_header();
    table::print(&baseline, &baseline);
    let mut failed = Vec::new();
    if !baseline.faults(&baseline).is_empty() {
        failed.push(baseline.phase.name);
    }
    for next in phases::all().iter().filter(|phase| phase.name.contains(&plan.only)) {
        if !next.applies_to(&provider) {
            println!("{:<20} skipped: needs provider net, this is {provider}", next.name);
            continue;
        }
        let result = run_phase(&mut world, next, &target, time);
        table::print(&result, &baseline);
        if !result.faults(&baseline).is_empty() {
            failed.push(next.name);
        }
    }
    drop(world);
    assert!(failed.is_empty(), "out of bounds: {}", failed.join(", "));
}

/// Runs an attack, and waits for the recovery after it.
fn run_phase(world: &mut World, phase: &Phase, target: &Target, time: Duration) -> PhaseResult {
    let service = world.services[0].child.id();
    let before = world.services[0].child.descriptors();
    let start = Instant::now();
    world.take_windows();
    if let SupervisorAction::ShortFilesOfService(bytes) = phase.supervisor_action {
        limits::set_file_length_of(service, Some(bytes));
    }
    let mut actors = world.attack(phase, target);
    let stopped = match phase.supervisor_action {
        SupervisorAction::Stop(count) => count,
        _ => 0,
    };
    for actor in actors.iter().take(stopped) {
        actor.child.stop(TIMEOUT);
        std::thread::sleep(BETWEEN_STOPS);
    }
    let mut max = before;
    let end = Instant::now() + time;
    while Instant::now() < end {
        world.check_running();
        max = max.max(world.services[0].child.descriptors());
        std::thread::sleep(CHECK_INTERVAL);
    }
    let during = world.take_windows();
    actors.iter().take(stopped).for_each(|actor| actor.child.resume());
    let outcomes: Vec<_> = actors.iter_mut().map(finish).collect();
    if let SupervisorAction::ShortFilesOfService(_) = phase.supervisor_action {
        limits::set_file_length_of(service, None);
    }
    std::thread::sleep(RECOVERY);
    world.check_running();
    let after = world.take_windows();
    let mut logged = world.take_logs();
    logged.extend(actors.iter_mut().map(|actor| (actor.name.clone(), actor.log.take())));
    PhaseResult {
        phase: phase.clone(),
        during,
        after,
        logged,
        outcome: Outcome::sum(&outcomes),
        descriptors: [before, max, world.services[0].child.descriptors()],
        elapsed: start.elapsed(),
    }
}

/// Ends a process of an attack, and returns its outcome.
fn finish(actor: &mut Process) -> Outcome {
    actor.child.end(TIMEOUT);
    match actor.child.line(TIMEOUT) {
        Some(line) => Outcome::of(&line),
        None => panic!("{} ended without an outcome: {}", actor.name, actor.log.text()),
    }
}

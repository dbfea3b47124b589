//! Controllers on simulated paths.

use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;

use crate::controller::{Choices, Controller};
use crate::operation::{OpKey, Operation, SizeClass};
use crate::parameters::Parameters;
use crate::parameters::tests::any_parameters;
use crate::statistics::ExecStat;
use crate::statistics::tests::any_stat;
use reduction::DataType;

const GRANULE: u64 = 16;
/// Calls after a change of parameters that still have the ones before.
const WINDOW: usize = 2;
/// Calls until the parameters are final, with one candidate.
const CONVERGED: usize = 20;
/// Calls until the parameters are final, with three candidates.
const CONVERGED_OF_3: usize = 30;

/// Xorshift generator.
struct Random(u64);

impl Random {
    fn of_seed(seed: u64) -> Self {
        let mut new = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        (0..8).for_each(|_| _ = new.next());
        new
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below_1(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Factor of noise of ±3 %.
    fn noise(&mut self) -> f64 {
        0.97 + 0.06 * self.below_1()
    }
}

#[derive(Debug, Clone, Copy)]
struct Path {
    /// In nanoseconds.
    latency: f64,
    /// In GB/s, which are bytes per nanosecond.
    rate: f64,
}

impl Path {
    fn time(self, bytes: u64) -> f64 {
        if bytes == 0 { 0.0 } else { self.latency + bytes as f64 / self.rate }
    }
}

#[derive(Debug, Clone, Copy)]
struct Machine {
    fast: Path,
    second: Path,
    /// Factor of the time of the fast path while the second one is used.
    slowdown: f64,
    /// Factor of the time of the first execution with new parameters.
    cold: f64,
    first_alpha: u16,
}

impl Machine {
    fn new(fast: (f64, f64), second: (f64, f64)) -> Self {
        let path = |(latency, rate)| Path { latency, rate };
        Self { fast: path(fast), second: path(second), slowdown: 1.0, cold: 1.0, first_alpha: 900 }
    }

    /// Times without noise.
    fn run(&self, bytes: u64, parameters: Parameters) -> ExecStat {
        let fast_bytes = parameters.fast_bytes(bytes, GRANULE);
        let second_bytes = bytes - fast_bytes;
        let slowdown = if second_bytes > 0 { self.slowdown } else { 1.0 };
        // The second candidate is slow, the third one is fast.
        let chunk = [1.0, 1.5, 0.9][usize::from(parameters.chunk_bits % 3)];
        ExecStat {
            fast_time: nanoseconds(self.fast.time(fast_bytes) * slowdown * chunk),
            second_time: nanoseconds(self.second.time(second_bytes) * chunk),
            fast_bytes,
            second_bytes,
            success: true,
        }
    }

    fn run_with_noise(
        &self,
        bytes: u64,
        parameters: Parameters,
        is_first: bool,
        random: &mut Random,
    ) -> ExecStat {
        let mut stat = self.run(bytes, parameters);
        let cold = if is_first { self.cold } else { 1.0 };
        let disturbed = if random.below_1() < 0.02 { 1 + random.next() % 3 } else { 0 };
        for (bit, time) in [(1, &mut stat.fast_time), (2, &mut stat.second_time)] {
            let disturbance = if disturbed & bit == bit { 1.5 } else { 1.0 };
            *time = time.mul_f64(random.noise() * disturbance * cold);
        }
        stat
    }

    /// Shortest time without noise, with any alpha and candidate.
    fn best_time(&self, bytes: u64, candidates: &[Parameters]) -> Duration {
        let all = candidates.iter().flat_map(|candidate| {
            (0..=Parameters::FAST_ONLY).map(|alpha| Parameters { alpha, ..*candidate })
        });
        all.map(|parameters| self.run(bytes, parameters).time()).min().unwrap()
    }
}

fn nanoseconds(time: f64) -> Duration {
    Duration::from_nanos(time as u64)
}

fn key_of(bytes: u64) -> OpKey {
    OpKey {
        operation: Operation::AllReduce,
        size_class: SizeClass::of(bytes),
        data_type: DataType::F32,
    }
}

fn candidates(count: u8) -> Vec<Parameters> {
    (0..count).map(|chunk_bits| Parameters { chunk_bits, ..Parameters::default() }).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Call of a simulation.
struct Call {
    used: Parameters,
    /// Time without noise above the best one, relative to it.
    excess: f64,
}

/// Controller and a machine, whose calls have parameters that were decided some calls before.
struct Simulation {
    machine: Machine,
    bytes: u64,
    controller: Controller,
    pending: VecDeque<Parameters>,
    last: Option<Parameters>,
    best: Duration,
    random: Random,
}

impl Simulation {
    fn new(machine: Machine, bytes: u64, count: u8, seed: u64) -> Self {
        let candidates = candidates(count);
        let best = machine.best_time(bytes, &candidates);
        let choices = Choices { candidates, first_alpha: Some(machine.first_alpha) };
        let controller = Controller::new(move |_| choices.clone());
        let pending = [controller.parameters(key_of(bytes)); WINDOW].into();
        let random = Random::of_seed(seed);
        Self { machine, bytes, controller, pending, last: None, best, random }
    }

    fn decided(&self) -> Parameters {
        self.controller.parameters(key_of(self.bytes))
    }

    fn call(&mut self) -> Call {
        self.pending.push_back(self.decided());
        let used = self.pending.pop_front().unwrap();
        let is_first = self.last != Some(used);
        self.last = Some(used);
        let stat = self.machine.run_with_noise(self.bytes, used, is_first, &mut self.random);
        self.controller.update(key_of(self.bytes), used, &stat);
        let time = self.machine.run(self.bytes, used).time();
        let excess = time.as_nanos() as f64 / self.best.as_nanos() as f64 - 1.0;
        Call { used, excess }
    }

    fn calls(&mut self, count: usize) -> Vec<Call> {
        (0..count).map(|_| self.call()).collect()
    }

    fn change(&mut self, machine: Machine) {
        self.machine = machine;
        self.best = machine.best_time(self.bytes, &candidates(1));
    }
}

/// Results of a scenario with several seeds.
#[derive(Default)]
struct Outcome {
    alphas: Vec<u16>,
    /// Number of calls until the parameters were final, in each run.
    converged: Vec<usize>,
    /// Mean excess of the calls after learning, in each run.
    regrets: Vec<f64>,
    /// Sum of the excess of the calls of learning, in each run.
    costs: Vec<f64>,
}

impl Outcome {
    fn of(machine: Machine, bytes: u64, count: u8, learning: usize, seeds: u64) -> Self {
        let mut outcome = Self::default();
        for seed in 0..seeds {
            let calls = Simulation::new(machine, bytes, count, seed).calls(2 * learning);
            let last = calls.last().unwrap().used;
            let before = calls.iter().rposition(|call| call.used != last);
            let excess: Vec<f64> = calls.iter().map(|call| call.excess).collect();
            outcome.alphas.push(last.alpha);
            outcome.converged.push(before.map_or(0, |call| call + 1));
            outcome.regrets.push(mean(&excess[learning..]));
            outcome.costs.push(excess[..learning].iter().sum());
        }
        outcome
    }

    fn print(&self, name: &str, bytes: u64) {
        let worst = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        println!(
            "{name:28} {bytes:>10} B: alpha {:>4} to {:>4}, final after {:>2} calls, \
             regret {:.2} % (worst run {:.2} %), learning costs {:.1} calls (worst run {:.1})",
            self.alphas.iter().min().unwrap(),
            self.alphas.iter().max().unwrap(),
            self.converged.iter().max().unwrap(),
            mean(&self.regrets) * 100.0,
            worst(&self.regrets) * 100.0,
            mean(&self.costs),
            worst(&self.costs),
        );
    }
}

const SIZES: [u64; 9] =
    [8, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

fn usual() -> Machine {
    Machine::new((5_000.0, 380.0), (20_000.0, 50.0))
}

fn scenarios() -> Vec<(&'static str, Machine)> {
    let nvlink = (5_000.0, 380.0);
    let faster = Machine::new((5_000.0, 40.0), (5_000.0, 200.0));
    vec![
        ("second path 40 GB/s", Machine::new(nvlink, (20_000.0, 40.0))),
        ("second path 50 GB/s", usual()),
        ("second path 60 GB/s", Machine::new(nvlink, (20_000.0, 60.0))),
        ("second path 10 GB/s", Machine::new(nvlink, (20_000.0, 10.0))),
        ("second path 1 GB/s", Machine::new(nvlink, (20_000.0, 1.0))),
        ("second path latency 1 ms", Machine::new(nvlink, (1_000_000.0, 50.0))),
        ("equal paths", Machine { first_alpha: 500, ..Machine::new(nvlink, nvlink) }),
        ("second path faster", Machine { first_alpha: 200, ..faster }),
        ("shared bottleneck 4 %", Machine { slowdown: 1.04, ..usual() }),
        ("shared bottleneck 30 %", Machine { slowdown: 1.3, ..usual() }),
        ("first execution +50 %", Machine { cold: 1.5, ..usual() }),
        ("first execution x 10", Machine { cold: 10.0, ..usual() }),
    ]
}

#[test]
fn parameters_are_final_and_near_the_best_after_20_calls() {
    for (name, machine) in scenarios() {
        for bytes in SIZES {
            let outcome = Outcome::of(machine, bytes, 1, CONVERGED, 20);
            outcome.print(name, bytes);
            assert!(outcome.converged.iter().all(|calls| *calls <= CONVERGED));
            assert!(mean(&outcome.regrets) <= 0.02);
            // The worst of all: 1 ms for an operation of 5 µs, in 5 calls.
            assert!(outcome.costs.iter().all(|cost| *cost <= 2_000.0));
        }
    }
}

#[test]
fn three_candidates_take_30_calls() {
    for (name, machine) in scenarios() {
        for bytes in [8, 1 << 20, 16 << 20, 1 << 30] {
            let outcome = Outcome::of(machine, bytes, 3, CONVERGED_OF_3, 10);
            outcome.print(name, bytes);
            assert!(outcome.converged.iter().all(|calls| *calls <= CONVERGED_OF_3));
            assert!(mean(&outcome.regrets) <= 0.02);
        }
    }
}

#[test]
fn parameters_stay_for_10_000_calls_with_noise() {
    let machines = scenarios().into_iter().filter(|(name, _)| name.starts_with("second"));
    for (seed, (name, machine)) in machines.enumerate() {
        for bytes in [64 << 10, 16 << 20, 1 << 30] {
            let mut simulation = Simulation::new(machine, bytes, 1, seed as u64);
            simulation.calls(CONVERGED);
            let learnt = simulation.decided();
            let calls = simulation.calls(10_000);
            assert!(calls.iter().all(|call| call.used == learnt), "{name}, {bytes} B");
        }
    }
}

#[test]
fn a_change_of_load_is_learnt_within_60_calls() {
    let second_halves = Machine { second: Path { latency: 20_000.0, rate: 25.0 }, ..usual() };
    let fast_drops = Machine { fast: Path { latency: 5_000.0, rate: 228.0 }, ..usual() };
    let loads = [second_halves, usual(), fast_drops, usual(), Machine { slowdown: 1.3, ..usual() }];
    for bytes in [16 << 20, 64 << 20, 1 << 30] {
        let mut regrets = vec![Vec::new(); loads.len()];
        for seed in 0..10 {
            let mut simulation = Simulation::new(usual(), bytes, 1, seed);
            simulation.calls(1000);
            for (load, regrets) in loads.iter().zip(&mut regrets) {
                simulation.change(*load);
                simulation.calls(60);
                let excess: Vec<f64> =
                    simulation.calls(200).iter().map(|call| call.excess).collect();
                regrets.push(mean(&excess));
            }
        }
        let regrets = regrets.iter().map(|regrets| mean(regrets)).collect::<Vec<_>>();
        println!("{bytes} B: regrets {regrets:.4?}");
        assert!(regrets.iter().all(|regret| *regret <= 0.02));
    }
}

#[test]
fn noise_of_half_the_time_starts_learning_rarely() {
    let mut starts = 0;
    for seed in 0..5 {
        let mut random = Random::of_seed(seed);
        let key = key_of(1 << 30);
        let mut controller =
            Controller::new(|_| Choices { candidates: candidates(1), first_alpha: Some(900) });
        let mut settled = false;
        for _ in 0..2_000 {
            let used = controller.parameters(key);
            let mut stat = usual().run(1 << 30, used);
            stat.fast_time = stat.fast_time.mul_f64(0.5 + random.below_1());
            stat.second_time = stat.second_time.mul_f64(0.5 + random.below_1());
            controller.update(key, used, &stat);
            starts += u32::from(settled && !controller.is_settled(key));
            settled = controller.is_settled(key);
        }
    }
    println!("{starts} starts in 10 000 executions");
    assert!(starts <= 40);
}

#[test]
fn sizes_within_a_class_are_no_change_of_load() {
    for largest in [64 << 10, 1 << 20, 64 << 20, 1 << 30] {
        let mut simulation = Simulation::new(usual(), largest, 1, 3);
        simulation.calls(CONVERGED);
        let learnt = simulation.decided();
        for call in 0..400 {
            simulation.bytes = if call / 50 % 2 == 0 { largest / 2 + 16 } else { largest };
            assert_eq!(simulation.call().used, learnt, "up to {largest} B");
        }
    }
}

#[test]
fn the_fastest_candidate_is_learnt() {
    let mut simulation = Simulation::new(usual(), 256 << 20, 3, 1);
    simulation.calls(CONVERGED_OF_3);
    assert_eq!(simulation.decided().chunk_bits, 2);
    // Without a second path, too.
    let mut controller =
        Controller::new(|_| Choices { candidates: candidates(3), first_alpha: None });
    let key = key_of(8);
    for _ in 0..9 {
        let used = controller.parameters(key);
        controller.update(key, used, &usual().run(8, used));
    }
    assert!(controller.is_settled(key));
    assert_eq!(controller.parameters(key), Parameters { chunk_bits: 2, ..Parameters::default() });
}

#[test]
fn candidate_that_becomes_faster_is_found_at_little_cost() {
    let mut controller =
        Controller::new(|_| Choices { candidates: candidates(3), first_alpha: None });
    let key = key_of(1 << 20);
    let mut run = |fastest: u8, executions: usize| {
        let time = |used: Parameters| {
            Duration::from_micros(if used.chunk_bits == fastest { 100 } else { 200 })
        };
        let times = (0..executions).map(|_| {
            let used = controller.parameters(key);
            let stat = ExecStat {
                fast_time: time(used),
                fast_bytes: 1 << 20,
                success: true,
                ..ExecStat::default()
            };
            controller.update(key, used, &stat);
            stat.fast_time
        });
        times.sum::<Duration>().as_secs_f64() / (executions as f64 * 100e-6)
    };
    run(2, 9);
    // Candidate 2 takes as long as before: only the other one has changed.
    let excess = run(2, 10_000) - 1.0;
    assert!(excess <= 0.01, "{excess}");
    let mut controller =
        Controller::new(|_| Choices { candidates: candidates(2), first_alpha: None });
    let first = controller.parameters(key);
    let mut used_first = Vec::new();
    for number in 0..6000 {
        let used = controller.parameters(key);
        let slower = if number < 1000 { 200 } else { 50 };
        let micros = if used == first { slower } else { 100 };
        let fast_time = Duration::from_micros(micros);
        let stat =
            ExecStat { fast_time, fast_bytes: 1 << 20, success: true, ..ExecStat::default() };
        controller.update(key, used, &stat);
        used_first.push(used == first);
    }
    assert!(!used_first[500] && used_first[2100..3900].iter().all(|is_first| *is_first));
}

#[test]
fn frozen_parameters_stay_and_are_those_learnt_before() {
    let mut simulation = Simulation::new(usual(), 1 << 30, 1, 1);
    let initial = simulation.decided();
    simulation.calls(6);
    assert_ne!(simulation.decided(), initial);
    simulation.controller.freeze(true);
    assert_eq!(simulation.decided(), initial, "a split that is measured is not what was learnt");
    simulation.controller.freeze(false);
    simulation.calls(CONVERGED + 2);
    let learnt = simulation.decided();
    assert!((875..895).contains(&learnt.alpha), "{learnt}");

    simulation.controller.freeze(true);
    assert!(simulation.controller.is_frozen());
    simulation.change(Machine { slowdown: 3.0, ..usual() });
    assert!(simulation.calls(100).iter().all(|call| call.used == learnt));
    simulation.controller.freeze(false);
    simulation.calls(60);
    assert_eq!(simulation.decided().alpha, Parameters::FAST_ONLY);
}

#[test]
fn loaded_parameters_are_used_until_the_load_changes() {
    let mut simulation = Simulation::new(usual(), 1 << 30, 1, 1);
    simulation.calls(CONVERGED);
    let learnt: Vec<_> = simulation.controller.learnt().collect();
    assert_eq!(learnt, [(key_of(1 << 30), simulation.decided())]);

    let mut loaded = Simulation::new(usual(), 1 << 30, 1, 2);
    loaded.controller.load(learnt[0].0, learnt[0].1);
    loaded.calls(WINDOW);
    assert!(loaded.calls(1000).iter().all(|call| call.used == learnt[0].1));
    loaded.change(Machine { second: Path { latency: 20_000.0, rate: 25.0 }, ..usual() });
    loaded.calls(60);
    assert!((925..945).contains(&loaded.decided().alpha), "{}", loaded.decided());

    loaded.controller.forget(learnt[0].0);
    assert_eq!(loaded.controller.learnt().count(), 0);
    assert_eq!(loaded.decided().alpha, Parameters::FAST_ONLY);
}

#[test]
fn history_has_the_last_16_changes() {
    let mut simulation = Simulation::new(usual(), 1 << 30, 1, 1);
    simulation.calls(CONVERGED);
    let key = key_of(1 << 30);
    let history: Vec<_> = simulation.controller.history(key).copied().collect();
    assert_eq!(history.first().unwrap().parameters, simulation.decided());
    assert!(history.is_sorted_by(|later, earlier| later.update > earlier.update));
    let first = history.last().unwrap();
    assert_eq!((first.update, first.parameters.alpha), (3, 900));
    let alone = usual().run(1 << 30, Parameters::default()).time();
    assert!(first.time_before > alone / 2 && first.time_before < alone * 2);
    for load in 0..8 {
        let slowdown = if load % 2 == 0 { 1.3 } else { 1.0 };
        simulation.change(Machine { slowdown, ..usual() });
        simulation.calls(60);
    }
    assert!(simulation.controller.history(key).count() <= 16);
    assert_eq!(simulation.controller.history(key).next().unwrap().parameters, simulation.decided());
}

#[test]
fn failed_and_superseded_executions_are_ignored() {
    let choices = || Choices { candidates: candidates(3), first_alpha: Some(900) };
    let mut controller = Controller::new(move |_| choices());
    let key = key_of(1 << 20);
    let used = controller.parameters(key);
    let stat = usual().run(1 << 20, used);
    for _ in 0..100 {
        controller.update(key, used, &ExecStat { success: false, ..stat });
        controller.update(key, Parameters { alpha: 1, ..used }, &stat);
    }
    assert_eq!(controller.parameters(key), used);
    assert_eq!(controller.history(key).count(), 0);
    for _ in 0..3 {
        controller.update(key, used, &stat);
    }
    assert_ne!(controller.parameters(key), used);
}

#[test]
fn keys_without_choices_keep_their_parameters() {
    for candidates in [Vec::new(), candidates(1)] {
        let choices = Choices { candidates, first_alpha: None };
        let mut controller = Controller::new(move |_| choices.clone());
        let key = key_of(1 << 20);
        for time in 1..1000 {
            let mut stat = usual().run(1 << 20, Parameters::default());
            stat.fast_time *= time;
            controller.update(key, Parameters::default(), &stat);
            assert_eq!(controller.parameters(key), Parameters::default());
        }
    }
}

fn random_choices() -> impl Strategy<Value = Choices> {
    let candidates = prop::collection::vec(any_parameters(), 0..4);
    let first_alpha = prop::option::of(prop_oneof![0..=Parameters::FAST_ONLY, any::<u16>()]);
    (candidates, first_alpha)
        .prop_map(|(candidates, first_alpha)| Choices { candidates, first_alpha })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_statistics_give_equal_and_valid_parameters(
        choices in random_choices(),
        loaded in prop::option::of(any_parameters()),
        stats in prop::collection::vec((any_stat(), 0_u8..20, 0_u64..2), 1..150),
    ) {
        let new = || {
            let choices = choices.clone();
            Controller::new(move |_| choices.clone())
        };
        let mut controllers = [new(), new()];
        if let Some(parameters) = loaded {
            controllers.iter_mut().for_each(|controller| controller.load(key_of(8), parameters));
        }
        for (stat, action, key) in stats {
            let key = key_of(8 << key);
            let [first, second] = &mut controllers;
            for controller in [&mut *first, &mut *second] {
                let used = controller.parameters(key);
                match action {
                    0 => controller.freeze(true),
                    1 => controller.freeze(false),
                    2 => controller.update(key, Parameters::default(), &stat),
                    _ => controller.update(key, used, &ExecStat { success: true, ..stat }),
                }
                let current = controller.parameters(key);
                prop_assert_eq!(Parameters::decode(current.encode()), Some(current));
            }
            prop_assert_eq!(first.parameters(key), second.parameters(key));
            prop_assert_eq!(first.is_settled(key), second.is_settled(key));
        }
        // Expected times and scores, too.
        prop_assert_eq!(format!("{:?}", controllers[0]), format!("{:?}", controllers[1]));
    }
}

//! Learns the parameters of each operation and size class from the time of its executions.
//!
//! Deterministic: the same calls in the same order give the same parameters, on every rank and machine.
//!
//! A key has three stages:
//!
//! 1. Candidates: each is measured on the fast path alone.
//! 2. Splits of the fastest candidate: both paths should finish at the same time. Lines through the
//!    splits give the latency and the rate of each path, and so the next split.
//! 3. Settled: the parameters stay. If most executions differ from what the lines predict, the load has
//!    changed, and learning starts again. So it does, with several candidates, after many executions: another
//!    one may be faster now.
//!
//! While the second path is unused, its changes are not noticed: [`Controller::forget`] is for them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use crate::operation::OpKey;
use crate::parameters::Parameters;
use crate::statistics::ExecStat;

/// Parameters that a controller can choose from for a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choices {
    /// Parameters to try, with any `alpha`; the default ones if there are none. The first is used until
    /// something was learnt.
    pub candidates: Vec<Parameters>,
    /// First split between the paths to try, in proportion to their nominal rates. None if there is no
    /// second path, or if the operations are so small that its latency outweighs its rate.
    pub first_alpha: Option<u16>,
}

impl Choices {
    fn initial(&self) -> Parameters {
        self.candidate(0).unwrap_or_default()
    }

    /// Candidate of this index, on the fast path alone.
    fn candidate(&self, index: usize) -> Option<Parameters> {
        let candidate = *self.candidates.get(index)?;
        Some(Parameters { alpha: Parameters::FAST_ONLY, ..candidate })
    }
}

/// Change of the parameters of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Number of statistics of the key that the controller had been given.
    pub update: u64,
    /// Parameters after the change.
    pub parameters: Parameters,
    /// Time of an execution with the parameters before the change.
    pub time_before: Duration,
}

/// Changes that are kept for reports: those of about three times of learning.
const HISTORY: usize = 16;
/// Executions that measure parameters, by the shortest time of each path. One may be slower because
/// memory is mapped or caches are cold, and one may be disturbed.
const BATCH: usize = 3;
/// Splits that are measured at most. With one candidate, and two executions lost at each change, the
/// parameters are final after 20 executions.
const MAX_SPLITS: usize = 3;
/// Gain that is worth a further measurement, or the use of the second path: less would be noise.
const MIN_GAIN: f64 = 0.01;
/// Weight of the assumption that a path has no latency, relative to the measurements. It decides only
/// where the splits are so close to each other that their difference is noise.
const NO_LATENCY: f64 = 0.001;
/// Part of the time by which the path with the smaller share is to finish earlier: a time that it is
/// late is lost, of one that it is early only its share.
const EARLY: f64 = 0.01;
/// Size in bytes from which the time is assumed proportional to the size, which varies by a factor of
/// two within a class. For smaller ones it is assumed constant.
const PROPORTIONAL: f64 = (256 << 10) as f64;
/// Ratio of a time to the expected one that is a change of load: above noise and errors of prediction.
const TOLERANCE: f64 = 1.1;
/// An execution as expected outweighs so many that are not. Noise, however large, puts less than four
/// fifths of the executions on the same side of the tolerance.
const AS_EXPECTED: u32 = 4;
/// Executions after which several candidates are measured again. That costs about a hundredth, if the others are
/// half as fast.
const MEASURED_AGAIN: u32 = 2000;
/// Unexpected executions that start learning again, which ends 36 executions after a change of load.
const CHANGED: u32 = 16;

/// Time of an execution, or that of several.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Measurement {
    bytes: f64,
    /// Share of the bytes that each path moved.
    share: [f64; 2],
    /// Nanoseconds that each path took.
    time: [f64; 2],
}

impl Measurement {
    fn of(stat: &ExecStat) -> Self {
        let [fast, second] = [stat.fast_bytes, stat.second_bytes].map(|bytes| bytes as f64);
        let bytes = (fast + second).max(1.0);
        let time = [stat.fast_time, stat.second_time].map(|time| time.as_nanos() as f64);
        Self { bytes, share: [fast / bytes, second / bytes], time }
    }

    /// Size that times are divided by to compare them with those of other sizes.
    fn unit(&self) -> f64 {
        if self.bytes >= PROPORTIONAL { self.bytes } else { 1.0 }
    }

    fn cost(&self) -> f64 {
        self.time[0].max(self.time[1]) / self.unit()
    }

    fn is_gain_over(&self, other: &Self) -> bool {
        self.cost() < other.cost() * (1.0 - MIN_GAIN)
    }

    /// Shorter time of each path, for the size of the later one.
    fn shorter(self, later: Self) -> Self {
        let size = later.unit() / self.unit();
        let time = [0, 1].map(|path| later.time[path].min(self.time[path] * size));
        Self { time, ..later }
    }
}

/// Cost of a path by its share of the bytes.
#[derive(Debug, Clone, Copy)]
struct Line {
    latency: f64,
    slope: f64,
}

impl Line {
    /// Line with the least squares of relative errors. None if the path moved nothing.
    fn fit(path: usize, splits: &[Measurement]) -> Option<Self> {
        let (mut sum_1, mut sum_x, mut sum_xx, mut sum_y, mut sum_xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for split in splits.iter().filter(|split| split.share[path] > 0.0) {
            let inverse = split.unit() / split.time[path].max(1.0);
            let x = split.share[path] * inverse;
            sum_1 += inverse * inverse;
            sum_x += x * inverse;
            sum_xx += x * x;
            sum_y += inverse;
            sum_xy += x;
        }
        sum_1 *= 1.0 + NO_LATENCY;
        let determinant = sum_1 * sum_xx - sum_x * sum_x;
        (determinant > 0.0).then(|| Self {
            latency: (sum_y * sum_xx - sum_x * sum_xy) / determinant,
            slope: (sum_1 * sum_xy - sum_x * sum_y) / determinant,
        })
    }

    /// Cost of a share; none for no bytes.
    fn at(self, share: f64) -> f64 {
        if share > 0.0 { self.latency + self.slope * share } else { 0.0 }
    }
}

/// Alpha with which both paths finish at about the same time, and the measurement that is expected then.
fn balance(splits: &[Measurement]) -> Option<(u16, Measurement)> {
    let (fast, second) = (Line::fit(0, splits)?, Line::fit(1, splits)?);
    let slope = Some(fast.slope + second.slope).filter(|slope| *slope > 0.0)?;
    let share = (second.latency + second.slope - fast.latency) / slope;
    let share = share + (2.0 * share - 1.0) * EARLY * fast.at(share) / slope;
    let thousandths = share * f64::from(Parameters::FAST_ONLY) + 0.5;
    let alpha = thousandths.clamp(0.0, f64::from(Parameters::FAST_ONLY)) as u16;
    let share = f64::from(alpha) / f64::from(Parameters::FAST_ONLY);
    let last = splits.last()?;
    let time = [fast.at(share), second.at(1.0 - share)].map(|cost| cost * last.unit());
    Some((alpha, Measurement { share: [share, 1.0 - share], time, ..*last }))
}

/// Fastest candidate so far.
#[derive(Debug, Clone, Copy)]
struct Fastest {
    parameters: Parameters,
    alone: Measurement,
}

#[derive(Debug, Clone)]
enum Stage {
    /// Candidate of this index is measured.
    Candidate { index: usize, fastest: Option<Fastest> },
    /// A split is measured, after these.
    Split { alone: Measurement, splits: Vec<Measurement> },
    /// The parameters stay. The measurement that is expected, which loaded parameters do not have yet,
    /// a score of each path being slower and faster, and the number of executions since then.
    Settled { expected: Option<Measurement>, scores: [[u32; 2]; 2], executions: u32 },
}

/// Knowledge about one key.
#[derive(Debug, Clone)]
struct Learner {
    choices: Choices,
    current: Parameters,
    learnt: Option<Parameters>,
    stage: Stage,
    batch: Vec<Measurement>,
    updates: u64,
    time: Duration,
    history: VecDeque<Change>,
    /// What was used, and the history, before candidates were measured again.
    before: Option<(Parameters, VecDeque<Change>)>,
}

impl Learner {
    fn new(choices: Choices) -> Self {
        Self {
            current: choices.initial(),
            choices,
            learnt: None,
            stage: Stage::Candidate { index: 0, fastest: None },
            batch: Vec::new(),
            updates: 0,
            time: Duration::ZERO,
            history: VecDeque::new(),
            before: None,
        }
    }

    fn change(&mut self, parameters: Parameters, stage: Stage) {
        self.batch.clear();
        self.stage = stage;
        if self.current == parameters {
            return;
        }
        self.current = parameters;
        self.history.truncate(HISTORY - 1);
        let change = Change { update: self.updates, parameters, time_before: self.time };
        self.history.push_front(change);
    }

    fn start(&mut self) {
        self.change(self.choices.initial(), Stage::Candidate { index: 0, fastest: None });
    }

    fn settle(&mut self, parameters: Parameters, expected: Option<Measurement>) {
        self.learnt = Some(parameters);
        let before = self.before.take().filter(|(used, _)| *used == parameters);
        self.change(parameters, Stage::Settled { expected, scores: [[0; 2]; 2], executions: 0 });
        if let Some((_, history)) = before {
            // Only measurements that changed nothing have been added.
            self.history = history;
        }
    }

    fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Settled { .. })
    }

    /// Returns to what was learnt last.
    fn pause(&mut self) {
        let parameters = self.learnt.unwrap_or(self.choices.initial());
        self.change(parameters, self.stage.clone());
    }

    fn add(&mut self, stat: &ExecStat) {
        let execution = Measurement::of(stat);
        self.time = stat.time();
        if let Stage::Settled { expected: Some(expected), scores, executions } = &mut self.stage {
            *executions += 1;
            let is_due = *executions >= MEASURED_AGAIN && self.choices.candidates.len() > 1;
            let is_changed = is_changed(&execution, expected, scores);
            if is_changed || is_due {
                self.before = (!is_changed).then(|| (self.current, self.history.clone()));
                self.start();
            }
            return;
        }
        self.batch.push(execution);
        if self.batch.len() < BATCH {
            return;
        }
        let Some(measured) = self.batch.drain(..).reduce(Measurement::shorter) else { return };
        match self.stage.clone() {
            Stage::Candidate { index, fastest } => self.after_candidate(index, fastest, measured),
            Stage::Split { alone, mut splits } => {
                splits.push(measured);
                self.after_split(alone, splits);
            }
            Stage::Settled { .. } => self.settle(self.current, Some(measured)),
        }
    }

    fn after_candidate(&mut self, index: usize, best: Option<Fastest>, measured: Measurement) {
        let this = Fastest { parameters: self.current, alone: measured };
        let best = best.filter(|best| best.alone.cost() <= measured.cost()).unwrap_or(this);
        if let Some(next) = self.choices.candidate(index + 1) {
            let stage = Stage::Candidate { index: index + 1, fastest: Some(best) };
            return self.change(next, stage);
        }
        // After a change of load the last split is nearer than the first of all.
        let is_split = |alpha: &u16| (1..Parameters::FAST_ONLY).contains(alpha);
        let last = self.learnt.map(|learnt| learnt.alpha).filter(is_split);
        let first = self.choices.first_alpha.filter(is_split);
        match first.map(|first| last.unwrap_or(first)) {
            Some(alpha) => self.change(
                Parameters { alpha, ..best.parameters },
                Stage::Split { alone: best.alone, splits: Vec::new() },
            ),
            None => self.settle(best.parameters, Some(best.alone)),
        }
    }

    fn after_split(&mut self, alone: Measurement, splits: Vec<Measurement>) {
        let fast_only = Parameters { alpha: Parameters::FAST_ONLY, ..self.current };
        let balanced = balance(&splits).filter(|(alpha, _)| *alpha != Parameters::FAST_ONLY);
        let (Some((alpha, expected)), Some(measured)) = (balanced, splits.last()) else {
            return self.settle(fast_only, Some(alone));
        };
        let balanced = Parameters { alpha, ..self.current };
        // One split alone tells nothing about latencies.
        let is_final = splits.len() == MAX_SPLITS
            || alpha == self.current.alpha
            || splits.len() > 1 && !expected.is_gain_over(measured);
        if !is_final {
            self.change(balanced, Stage::Split { alone, splits });
        } else if expected.is_gain_over(&alone) {
            self.settle(balanced, Some(expected));
        } else {
            self.settle(fast_only, Some(alone));
        }
    }
}

/// Returns true if most executions of late took another time than expected.
fn is_changed(seen: &Measurement, expected: &Measurement, scores: &mut [[u32; 2]; 2]) -> bool {
    // Time between constant and proportional to the size is as expected.
    let size = seen.bytes / expected.bytes;
    for (path, scores) in scores.iter_mut().enumerate() {
        let (time, expected) = (seen.time[path], expected.time[path]);
        let is_slower = time > expected * size.max(1.0) * TOLERANCE;
        let is_faster = time * TOLERANCE < expected * size.min(1.0);
        for (score, is_off) in scores.iter_mut().zip([is_slower, is_faster]) {
            *score = if is_off { *score + 1 } else { score.saturating_sub(AS_EXPECTED) };
        }
    }
    scores.iter().flatten().any(|score| *score >= CHANGED)
}

/// Learns the parameters of all keys.
pub struct Controller {
    learners: BTreeMap<OpKey, Learner>,
    choices: Box<dyn Fn(OpKey) -> Choices + Send>,
    is_frozen: bool,
    /// The number of times that a key was settled, or began to be learnt again.
    stage_changes: u64,
}

impl Controller {
    /// Controller that chooses from these for each key. The choices of a key are always the same, on
    /// all ranks.
    #[must_use]
    pub fn new(choices: impl Fn(OpKey) -> Choices + Send + 'static) -> Self {
        Self {
            learners: BTreeMap::new(),
            choices: Box::new(choices),
            is_frozen: false,
            stage_changes: 0,
        }
    }

    /// Stops or continues learning. A key that is being learnt returns to the parameters learnt before,
    /// and starts again when learning continues.
    pub fn freeze(&mut self, is_frozen: bool) {
        if self.is_frozen == is_frozen {
            return;
        }
        self.is_frozen = is_frozen;
        self.stage_changes += 1;
        let being_learnt = self.learners.values_mut().filter(|learner| !learner.is_settled());
        being_learnt.for_each(if is_frozen { Learner::pause } else { Learner::start });
    }

    /// Returns true if learning is stopped.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.is_frozen
    }

    /// Sets parameters that were learnt before.
    pub fn load(&mut self, key: OpKey, parameters: Parameters) {
        let alpha = parameters.alpha.min(Parameters::FAST_ONLY);
        let mut learner = Learner::new((self.choices)(key));
        learner.settle(Parameters { alpha, ..parameters }, None);
        self.learners.insert(key, learner);
        self.stage_changes += 1;
    }

    /// Forgets what was learnt of a key: it is learnt anew.
    pub fn forget(&mut self, key: OpKey) {
        self.learners.remove(&key);
        self.stage_changes += 1;
    }

    /// Parameters of a key for executions to come.
    #[must_use]
    pub fn parameters(&self, key: OpKey) -> Parameters {
        let initial = || (self.choices)(key).initial();
        self.learners.get(&key).map_or_else(initial, |learner| learner.current)
    }

    /// Returns true if parameters of the key are settled, until its load changes.
    #[must_use]
    pub fn is_settled(&self, key: OpKey) -> bool {
        self.learners.get(&key).is_some_and(Learner::is_settled)
    }

    /// Parameters to save: of each key the last ones that were settled.
    pub fn learnt(&self) -> impl Iterator<Item = (OpKey, Parameters)> {
        self.learners.iter().filter_map(|(key, learner)| Some((*key, learner.learnt?)))
    }

    /// The keys that were learnt or loaded, or are being learnt.
    pub(crate) fn keys(&self) -> impl Iterator<Item = OpKey> {
        self.learners.keys().copied()
    }

    /// A number that changes when a key is settled, or begins to be learnt again.
    pub(crate) fn stage_changes(&self) -> u64 {
        self.stage_changes
    }

    /// Last changes of the parameters of a key, the latest first.
    pub fn history(&self, key: OpKey) -> impl Iterator<Item = &Change> {
        self.learners.get(&key).into_iter().flat_map(|learner| &learner.history)
    }

    /// Learns from an execution with these parameters. Executions that failed, and those with other
    /// parameters than the current ones, are ignored.
    pub fn update(&mut self, key: OpKey, used: Parameters, stat: &ExecStat) {
        if self.is_frozen {
            return;
        }
        let new = || Learner::new((self.choices)(key));
        let learner = self.learners.entry(key).or_insert_with(new);
        learner.updates += 1;
        if stat.success && used == learner.current {
            let was_settled = learner.is_settled();
            learner.add(stat);
            self.stage_changes += u64::from(learner.is_settled() != was_settled);
        }
    }
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller")
            .field("learners", &self.learners)
            .field("is_frozen", &self.is_frozen)
            .finish_non_exhaustive()
    }
}

//! The parameter table of a domain, of which all ranks use the same parameters in the same operation.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ipc::{AgreedTable, AgreedTableSetup, ChangeRefused, MappedWords, WaitStrategy, WordRange};

use crate::call::Call;
use crate::controller::{Choices, Controller};
use crate::members::{Failure, Members, Outcome, Wait};
use crate::operation::OpKey;
use crate::parameters::Parameters;
use crate::saved_parameters::SavedParameters;
use crate::statistics::{Aggregation, ExecStat};
use crate::status_file::StatusFile;

/// When rank 0 aggregates the statistics of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AggregationPoint {
    /// At its entrance into a later operation, as soon as all ranks have reported. No rank waits for it.
    #[default]
    NextEntrance,
    /// When it records its own statistics: it waits until all ranks have reported, or this long.
    CountedRounds {
        /// The longest wait.
        timeout: Duration,
    },
}

/// How parameters are learnt and agreed on: equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LearningOptions {
    /// How the times of the ranks become that of the operation.
    pub aggregation: Aggregation,
    /// When rank 0 aggregates.
    pub aggregation_point: AggregationPoint,
    /// How many operations a rank may be ahead of another one, at least 1. New parameters take effect
    /// so many operations later.
    pub window: u32,
}

impl Default for LearningOptions {
    fn default() -> Self {
        Self {
            aggregation: Aggregation::Max,
            aggregation_point: AggregationPoint::default(),
            window: 2,
        }
    }
}

impl LearningOptions {
    pub(crate) fn table_setup(&self, ranks: u32) -> AgreedTableSetup {
        AgreedTableSetup { ranks, rows: OpKey::COUNT, window: self.window }
    }
}

/// The writer's part: only rank 0 has it.
#[derive(Debug)]
struct Writer {
    controller: Controller,
    /// Operations that this rank has recorded, whose statistics are not aggregated yet.
    pending: VecDeque<u64>,
    /// Space for the statistics of an operation.
    stats: Vec<ExecStat>,
    /// Operations whose statistics were not complete in time.
    skipped: u64,
    /// Words that were published last.
    published: BTreeMap<OpKey, u64>,
    /// Keys whose parameters are not in the table yet.
    unpublished: BTreeSet<OpKey>,
    status: Option<StatusFile>,
}

/// The parameter table, as one rank sees it.
#[derive(Debug)]
pub(crate) struct ParamTable {
    members: Arc<Members>,
    table: AgreedTable<WordRange<MappedWords>>,
    options: LearningOptions,
    writer: Option<Writer>,
    strategy: WaitStrategy,
    /// Dead ranks are left behind, instead of ending the operations of the domain.
    continues_without_dead: bool,
}

impl ParamTable {
    /// The table in the part of the segment from `first` on. Rank 0 chooses from `choices`.
    pub(crate) fn new(
        members: Arc<Members>,
        first: usize,
        options: LearningOptions,
        choices: impl Fn(OpKey) -> Choices + Send + 'static,
        status: Option<StatusFile>,
        continues_without_dead: bool,
    ) -> Option<Self> {
        let setup = options.table_setup(members.count());
        let words = members.part(first, setup.required_words()?)?;
        let table = AgreedTable::join(words, setup, members.rank())?;
        let writer = (members.rank() == 0).then(|| Writer {
            controller: Controller::new(choices),
            pending: VecDeque::new(),
            stats: Vec::new(),
            skipped: 0,
            published: BTreeMap::new(),
            unpublished: BTreeSet::new(),
            status,
        });
        let strategy = WaitStrategy::default();
        Some(Self { members, table, options, writer, strategy, continues_without_dead })
    }

    /// The number of the operation that this rank has entered.
    pub(crate) fn step(&self) -> u64 {
        self.table.step()
    }

    /// What a rank announced for an operation.
    pub(crate) fn announcement(&self, rank: u32, step: u64) -> Option<ipc::Announcement> {
        self.table.announcement(rank, step)
    }

    /// The parameters of a key in the operation that this rank has entered.
    pub(crate) fn parameters(&self, key: OpKey) -> Parameters {
        Parameters::decode(self.table.value(key.row())).unwrap_or_default()
    }

    /// Enters the next operation, unless another rank is too far behind.
    pub(crate) fn try_enter(&mut self, call: &Call) -> Option<u64> {
        self.aggregate();
        let Self { members, table, continues_without_dead, .. } = self;
        let is_gone = |rank| *continues_without_dead && members.has_ended(rank);
        table.enter(call.encode(), is_gone).ok()
    }

    /// Enters the next operation. Waits for a rank that is too far behind.
    pub(crate) fn enter(&mut self, call: &Call, deadline: std::time::Instant) -> Outcome<u64> {
        loop {
            if let Some(step) = self.try_enter(call) {
                return Ok(step);
            }
            let Self { members, table, continues_without_dead, .. } = self;
            let is_gone = |rank| *continues_without_dead && members.has_ended(rank);
            let Some(rank) = table.rank_behind(is_gone) else { continue };
            let least = (self.table.step() + 1).saturating_sub(self.options.window.into());
            let (members, table) = (&self.members, &self.table);
            let mut wait = Wait::new(&mut self.strategy, deadline);
            let is_ready = || table.entered(rank) >= least || table.has_left(rank);
            if self.continues_without_dead {
                if !members.poll(&mut wait, rank, is_ready) && !members.has_ended(rank) {
                    let [rank, waiting] = [rank, members.rank()].map(|rank| members.name(rank));
                    return Err(Failure::Late { rank, waiting });
                }
            } else if !members.wait(&mut wait, rank, is_ready)? {
                return Err(members.fail(Failure::Ended { rank: members.name(rank) }));
            }
        }
    }

    /// Reports how an operation that this rank has entered went.
    pub(crate) fn record(&mut self, step: u64, key: OpKey, used: Parameters, stat: &ExecStat) {
        self.table.report(step, &stat.encode(key, used));
        if let Some(writer) = &mut self.writer {
            writer.pending.push_back(step);
        }
        let AggregationPoint::CountedRounds { timeout } = self.options.aggregation_point else {
            return;
        };
        if self.writer.is_none() {
            self.members.ring();
            return;
        }
        let deadline = ipc::deadline(timeout);
        for rank in 1..self.members.count() {
            let (members, table) = (&self.members, &self.table);
            let is_ready = || table.reported(rank, step).is_some() || table.has_left(rank);
            let mut wait = Wait::new(&mut self.strategy, deadline);
            if !members.poll(&mut wait, rank, is_ready) {
                break;
            }
        }
        self.aggregate();
    }

    /// Aggregates what all ranks have reported, and publishes what follows from it.
    fn aggregate(&mut self) {
        let Self { members, table, options, writer: Some(writer), continues_without_dead, .. } =
            self
        else {
            return;
        };
        let is_absent = |table: &AgreedTable<_>, rank| {
            table.has_left(rank) || (*continues_without_dead && members.has_ended(rank))
        };
        while let Some(step) = writer.pending.front().copied() {
            let mut missing =
                (0..members.count()).filter(|rank| !table.has_reported(*rank, step)).peekable();
            if missing.peek().is_some() && table.step() - step < u64::from(options.window) {
                break;
            }
            // To ask whether a process has ended takes longer than all else.
            let is_complete = missing.all(|rank| is_absent(table, rank));
            writer.stats.clear();
            let mut execution = None;
            let reports = (0..members.count()).filter_map(|rank| table.reported(rank, step));
            for (key, used, stat) in reports.filter_map(|report| ExecStat::decode(&report)) {
                // All ranks call the same with the same parameters.
                if *execution.get_or_insert((key, used)) == (key, used) {
                    writer.stats.push(stat);
                }
            }
            writer.pending.pop_front();
            writer.skipped += u64::from(!is_complete);
            if let (true, Some((key, used)), Some(stat)) =
                (is_complete, execution, options.aggregation.of(&writer.stats))
            {
                writer.controller.update(key, used, &stat);
                let word = writer.controller.parameters(key).encode();
                if word != writer.published.get(&key).copied().unwrap_or(used.encode()) {
                    writer.unpublished.insert(key);
                }
            }
        }
        writer.unpublished.retain(|key| {
            let word = writer.controller.parameters(*key).encode();
            let is_gone = |rank| *continues_without_dead && members.has_ended(rank);
            let changed = table.change(key.row(), word, is_gone);
            if changed.is_ok() {
                writer.published.insert(*key, word);
            }
            // Tried again at the next entrance.
            matches!(changed, Err(ChangeRefused::Pending { .. }))
        });
        if let Some(status) = &mut writer.status {
            status.update(&writer.controller);
        }
    }

    /// Returns whether a rank has left.
    pub(crate) fn has_left(&self, rank: u32) -> bool {
        self.table.has_left(rank)
    }

    /// The controller of rank 0.
    pub(crate) fn controller(&self) -> Option<&Controller> {
        self.writer.as_ref().map(|writer| &writer.controller)
    }

    /// Changes the controller; False if this is not rank 0. New parameters take effect as those that were
    /// learnt.
    pub(crate) fn with_controller(&mut self, change: impl FnOnce(&mut Controller)) -> bool {
        let Some(writer) = &mut self.writer else { return false };
        change(&mut writer.controller);
        writer.unpublished.extend(writer.controller.learnt().map(|(key, _)| key));
        true
    }

    /// What was learnt: on rank 0 what it settled on, on others what they use.
    pub(crate) fn saved(&self) -> SavedParameters {
        let in_use = || {
            let keys = (0..OpKey::COUNT).filter_map(OpKey::of_row);
            let all = keys.map(|key| (key, self.parameters(key)));
            all.filter(|(_, parameters)| *parameters != Parameters::default()).collect()
        };
        let learnt = self.controller().map(|controller| controller.learnt().collect());
        SavedParameters { parameters: learnt.unwrap_or_else(in_use) }
    }

    /// Leaves: no rank waits for this one any more.
    pub(crate) fn leave(self) {
        self.table.leave();
        self.members.ring();
    }
}

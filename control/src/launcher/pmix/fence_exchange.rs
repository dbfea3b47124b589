//! One exchange: each rank puts its bytes, a fence distributes them, each rank gets all of them.
//!
//! A key is used once, since the library may return the first value of a key forever.

use std::ffi::{CStr, CString};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::abi;
use super::library::{Event, Failure, Value};
use super::process::Job;
use super::survey::{Outcome, Survey};
use crate::launcher::bounded_call;
use crate::launcher::error::{Error, ErrorKind, GATHER, Result, list};

/// How long before the deadline it is asked which ranks are missing: a tenth of the timeout, within
/// these limits.
const SURVEY_TIME: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));
/// How much longer than the exchange its caller waits, so that the exchange reports the cause.
const GRACE: Duration = Duration::from_millis(500);

/// What an exchange waits for: [`PUBLISH`], [`FENCE`], or the bytes of a rank, after [`FETCH`].
type Step = AtomicU32;
const PUBLISH: u32 = 0;
const FENCE: u32 = 1;
const FETCH: u32 = 2;

/// An exchange within a timeout. Its calls of the library run on a thread that is abandoned if they
/// do not return.
pub(super) fn gather(
    job: &Arc<Job>,
    number: u64,
    own: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>> {
    let deadline = bounded_call::deadline(timeout);
    let step = Arc::new(Step::new(PUBLISH));
    let call = {
        let (job, own, step) = (Arc::clone(job), own.to_vec(), Arc::clone(&step));
        move || FenceExchange { job: &job, number, deadline, timeout, step: &step }.run(own)
    };
    match bounded_call::run("fabricast-pmix", deadline + GRACE, call) {
        Ok(Some(Ok(gathered))) => Ok(gathered),
        Ok(Some(Err(Ended::Failed(error)))) => Err(error),
        Ok(Some(Err(Ended::Unanswered)) | None) => {
            Err(unanswered(job, step.load(Ordering::Relaxed), timeout))
        }
        Err(error) => Err(Error::caused_by(GATHER, ErrorKind::Failed, error)),
    }
}

enum Ended {
    Failed(Error),
    /// The server does not answer.
    Unanswered,
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The error if the server does not answer at all. Then only the marks of the ranks are known.
fn unanswered(job: &Job, step: u32, timeout: Duration) -> Error {
    let fail = |detail| Error::new(GATHER, ErrorKind::DeadlineExceeded, detail);
    if let Some(rank) = step.checked_sub(FETCH) {
        let detail = format!("the bytes of rank {rank} did not arrive within {timeout:?}");
        return fail(detail).of_ranks([rank]);
    }
    let others = job.local_ranks.iter().copied().filter(|rank| *rank != job.own.rank);
    let absent = job.presence.absent(others);
    let also = match absent.as_slice() {
        [] => String::new(),
        ranks => format!("; {} of this machine has not started", list(ranks)),
    };
    let detail = format!(
        "the launcher's server did not answer within {timeout:?}{also}. Check that mpirun or srun \
         is not stopped"
    );
    fail(detail).of_ranks(absent)
}

struct FenceExchange<'a> {
    job: &'a Job,
    number: u64,
    deadline: Instant,
    timeout: Duration,
    step: &'a Step,
}

impl FenceExchange<'_> {
    fn run(&self, own: Vec<u8>) -> std::result::Result<Vec<Vec<u8>>, Ended> {
        let library = &self.job.library;
        let key = CString::new(format!("fabricast.{}", self.number)).unwrap_or_default();
        library.put(&key, &own).map_err(|status| self.failed("PMIx_Put", status))?;
        library.commit().map_err(|status| self.failed("PMIx_Commit", status))?;
        self.step.store(FENCE, Ordering::Relaxed);
        let (sender, events) = mpsc::channel();
        library.fence(&sender).map_err(|status| self.failed("PMIx_Fence_nb", status))?;

        let survey_time = (self.timeout / 10).clamp(SURVEY_TIME.0, SURVEY_TIME.1);
        let begin = self.deadline.checked_sub(survey_time).unwrap_or(self.deadline);
        let mut survey = Survey::new(self.job, &key, &sender);
        let status = match fence_status(&events, begin) {
            Some(status) => status,
            None => match survey.until_fence(&events, self.deadline) {
                Outcome::Fence(status) => status,
                Outcome::Absent(ranks) => return Err(self.late(ranks).into()),
                Outcome::Unanswered => return Err(Ended::Unanswered),
            },
        };
        match status {
            abi::SUCCESS => {}
            // A process that leaves ends the fence for the others.
            abi::PARTIAL_SUCCESS | abi::PROCESS_TERMINATED => {
                let failed = self.failed("PMIx_Fence_nb", status);
                return Err(self.left(&mut survey, &events).unwrap_or(failed).into());
            }
            _ => return Err(self.failed("PMIx_Fence_nb", status).into()),
        }
        self.fetch(own, &key, &mut survey, &events).map_err(Ended::Failed)
    }

    /// The bytes of all ranks, after the fence.
    fn fetch(
        &self,
        own: Vec<u8>,
        key: &CStr,
        survey: &mut Survey<'_>,
        events: &Receiver<Event>,
    ) -> Result<Vec<Vec<u8>>> {
        let mut gathered = Vec::new();
        for rank in 0..self.job.size {
            if rank == self.job.own.rank {
                gathered.push(own.clone());
                continue;
            }
            self.step.store(FETCH + rank, Ordering::Relaxed);
            match self.job.library.get(&self.job.own.with_rank(rank), key) {
                Ok(Value::Bytes(bytes)) => gathered.push(bytes),
                Ok(Value::Text(_) | Value::Number(_)) => {
                    return Err(self.malformed(rank, "something else than bytes"));
                }
                Err(Failure::Malformed(detail)) => return Err(self.malformed(rank, &detail)),
                // Between machines, a fence may end with success though a process has left.
                Err(Failure::Status(status @ (abi::NOT_FOUND | abi::TIMEOUT))) => {
                    let failed = self.failed("PMIx_Get", status).of_ranks([rank]);
                    return Err(self.left(survey, events).unwrap_or(failed));
                }
                Err(Failure::Status(status)) => return Err(self.failed("PMIx_Get", status)),
            }
        }
        Ok(gathered)
    }

    /// Ranks did not call.
    fn late(&self, ranks: Vec<u32>) -> Error {
        let timeout = self.timeout;
        let detail = match ranks.as_slice() {
            [] => format!("not all ranks came within {timeout:?}. Check that all ranks call it"),
            _ => format!(
                "{} did not come within {timeout:?}. Check that all ranks call it",
                list(&ranks)
            ),
        };
        Error::new(GATHER, ErrorKind::DeadlineExceeded, detail).of_ranks(ranks)
    }

    /// The error if ranks left the job before they called.
    fn left(&self, survey: &mut Survey<'_>, events: &Receiver<Event>) -> Option<Error> {
        match survey.now(events, self.deadline.min(bounded_call::deadline(SURVEY_TIME.1))) {
            Outcome::Absent(ranks) if !ranks.is_empty() => {
                let detail = format!("{} ended without calling it", list(&ranks));
                Some(Error::new(GATHER, ErrorKind::RankFailed, detail).of_ranks(ranks))
            }
            _ => None,
        }
    }

    fn malformed(&self, rank: u32, detail: &str) -> Error {
        let detail = format!("the launcher returned {detail} for rank {rank}");
        Error::new(GATHER, ErrorKind::Malformed, detail).of_ranks([rank])
    }

    fn failed(&self, function: &str, status: i32) -> Error {
        let cause = format!("{function}: {}", self.job.library.describe(status));
        let (kind, detail) = match status {
            abi::TIMEOUT => (ErrorKind::DeadlineExceeded, cause),
            abi::LOST_CONNECTION | abi::UNREACHABLE | abi::COMMUNICATION_FAILED => {
                let text = "the connection to the launcher is lost";
                (ErrorKind::Closed, format!("{text} ({cause}). See the output of mpirun or srun"))
            }
            _ => (ErrorKind::Failed, cause),
        };
        Error::new(GATHER, kind, detail)
    }
}

/// The status of the fence, if it ends before the deadline.
fn fence_status(events: &Receiver<Event>, deadline: Instant) -> Option<i32> {
    loop {
        if let Event::Fence(status) = events.recv_timeout(bounded_call::left(deadline)).ok()? {
            return Some(status);
        }
    }
}

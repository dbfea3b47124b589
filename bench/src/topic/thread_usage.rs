//! CPU usage of the services' threads during the measurement: a thread that computes all the time
//! is the bottleneck; one that waits for a core lacks one; one with page faults touches memory for
//! the first time.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;

/// Number of threads reported for each process.
const REPORTED_THREADS: usize = 3;
/// Minimum share of the time; less is not reported.
const MIN_SHARE: f64 = 0.005;

/// Usage of one thread of a service.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ThreadUsage {
    service: &'static str,
    thread: String,
    /// Shares of the time in which messages were sent.
    computed: f64,
    run_queue_share: f64,
    /// Page faults per message.
    faults: f64,
}

/// Nanoseconds and faults of a thread, as the system counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    computed: u64,
    waited: u64,
    faults: u64,
}

impl Count {
    fn of(task: &Path) -> Option<Self> {
        let times = std::fs::read_to_string(task.join("schedstat")).ok()?;
        let mut times = times.split_whitespace().map(str::parse);
        let (Some(Ok(computed)), Some(Ok(waited))) = (times.next(), times.next()) else {
            return None;
        };
        let status = std::fs::read_to_string(task.join("stat")).ok()?;
        Some(Self { computed, waited, faults: faults(&status)? })
    }

    fn since(self, before: Self) -> Self {
        Self {
            computed: self.computed.saturating_sub(before.computed),
            waited: self.waited.saturating_sub(before.waited),
            faults: self.faults.saturating_sub(before.faults),
        }
    }
}

/// Minor and major faults of a thread: fields eight and ten after its name, which may contain
/// anything.
fn faults(status: &str) -> Option<u64> {
    let (_, fields) = status.rsplit_once(')')?;
    let fields: Vec<_> = fields.split_whitespace().collect();
    let field = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(field(7)? + field(9)?)
}

type Counts = BTreeMap<(&'static str, u32), (String, Count)>;

/// The threads of two services, at several times.
#[derive(Debug)]
pub(super) struct ThreadUsages {
    processes: [(&'static str, u32); 2],
    before: Option<(Counts, Instant)>,
    sum: Counts,
    nanoseconds: u64,
}

impl ThreadUsages {
    pub(super) fn of(processes: &[u32]) -> Self {
        let number = |at: usize| processes.get(at).copied().unwrap_or(0);
        Self {
            processes: [("writer", number(0)), ("reader", number(1))],
            before: None,
            sum: Counts::new(),
            nanoseconds: 0,
        }
    }

    fn count(&self) -> Counts {
        let mut all = Counts::new();
        for (service, process) in self.processes {
            let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten();
            for task in tasks.flatten() {
                let number = task.file_name().to_str().and_then(|name| name.parse().ok());
                let name = std::fs::read_to_string(task.path().join("comm"));
                let (Some(number), Ok(name), Some(count)) = (number, name, Count::of(&task.path()))
                else {
                    continue;
                };
                all.insert((service, number), (name.trim().to_owned(), count));
            }
        }
        all
    }

    /// Starts counting, before messages are sent.
    pub(super) fn begin(&mut self) {
        self.before = Some((self.count(), Instant::now()));
    }

    /// Stops counting, after messages were sent.
    pub(super) fn end(&mut self) {
        let Some((before, since)) = self.before.take() else { return };
        self.nanoseconds += since.elapsed().as_nanos() as u64;
        for (key, (name, count)) in self.count() {
            let old = before.get(&key).map(|(_, count)| *count).unwrap_or_default();
            let (_, sum) = self.sum.entry(key).or_insert_with(|| (name, Count::default()));
            let more = count.since(old);
            sum.computed += more.computed;
            sum.waited += more.waited;
            sum.faults += more.faults;
        }
    }

    /// The busiest threads of each service, for so many messages.
    pub(super) fn busiest(&self, messages: u64) -> Vec<ThreadUsage> {
        let part = |nanoseconds: u64| nanoseconds as f64 / self.nanoseconds.max(1) as f64;
        let mut reported = Vec::new();
        for (service, _) in self.processes {
            let of_it = self.sum.iter().filter(|((of, _), _)| *of == service);
            let mut all: Vec<_> = of_it
                .map(|(_, (name, count))| ThreadUsage {
                    service,
                    thread: name.clone(),
                    computed: part(count.computed),
                    run_queue_share: part(count.waited),
                    faults: count.faults as f64 / messages.max(1) as f64,
                })
                .filter(|thread| thread.computed >= MIN_SHARE || thread.faults >= 1.0)
                .collect();
            all.sort_by(|one, other| other.computed.total_cmp(&one.computed));
            reported.extend(all.into_iter().take(REPORTED_THREADS));
        }
        reported
    }
}

/// The threads, in a line.
pub(super) fn to_text(threads: &[ThreadUsage]) -> String {
    let each = threads.iter().map(|it| {
        format!(
            "{} {} {:.0} % (waits {:.0} %, {:.1} faults)",
            it.service,
            it.thread,
            it.computed * 100.0,
            it.run_queue_share * 100.0,
            it.faults
        )
    });
    let each = each.collect::<Vec<_>>().join(", ");
    if each.is_empty() {
        String::new()
    } else {
        format!("busiest threads of a core each: {each}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_after_any_thread_name() {
        let status = "7 (a) b ( c) S 1 7 7 0 -1 4194304 120 0 3 0 5 6 0 0 20 0 1";
        assert_eq!(faults(status), Some(123));
        assert_eq!(faults("7 (cut"), None);
        assert_eq!(faults("7 (cut) S 1"), None);
    }

    #[test]
    fn busy_thread_is_reported() {
        let mut threads = ThreadUsages::of(&[std::process::id()]);
        if threads.count().is_empty() {
            testkit::skip!("the system does not count CPU time of threads");
        }
        threads.begin();
        let end = Instant::now() + std::time::Duration::from_millis(50);
        let mut sum = 0_u64;
        while Instant::now() < end {
            sum = std::hint::black_box(sum + 1);
        }
        threads.end();
        let busiest = threads.busiest(1);
        assert!(busiest.first().is_some_and(|it| it.service == "writer"), "{busiest:?}");
        assert!(to_text(&busiest).contains("writer"), "{busiest:?}");
        assert_eq!(to_text(&[]), "");
    }
}

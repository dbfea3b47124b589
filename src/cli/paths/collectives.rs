//! `fabricast paths --collectives`: what domains of ranks use for their operations, and how they learnt it.

use std::path::Path;
use std::time::Duration;

use collective::{
    DomainKind, DomainStatus, FoundDomains, OperationStatus, Parameters, UsedParameters,
};
use serde_json::json;

use super::Arguments;
use crate::cli::exit::{Exit, Failure, Result};
use crate::cli::size;
use crate::cli::{output, text};

pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let directory = arguments.settings.settings()?.node.directory;
    let found = match DomainStatus::of_directory(&directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => FoundDomains::default(),
        found => found.map_err(|error| {
            let why = format!("read domains in {} failed: {error}", directory.display());
            let is_denied = error.kind() == std::io::ErrorKind::PermissionDenied;
            Failure::new(if is_denied { Exit::Denied } else { Exit::Failed }, why)
        })?,
    };
    for (path, error) in &found.unreadable {
        text::print_error(&format!("{} is not the status of a domain: {error}", path.display()));
    }
    match arguments.json {
        true => output::json(&json!({ "domains": found.domains })),
        false => output::print_report(&to_text(&found.domains, &directory)),
    }
}

/// The paths that share the bytes of operations of a domain.
fn share(kind: DomainKind, alpha: u16) -> String {
    let percent = |thousandths: u16| format!("{:.1} %", f64::from(thousandths) / 10.0);
    let second = Parameters::FAST_ONLY.saturating_sub(alpha);
    match (kind, second) {
        (DomainKind::DeviceMemory, 0) => "all by copies between devices".to_owned(),
        (DomainKind::DeviceMemory, _) => {
            format!(
                "{} by copies between devices, {} by host memory",
                percent(alpha),
                percent(second)
            )
        }
        (_, 0) => String::new(),
        _ => format!("{} on the fast path, {} on the second", percent(alpha), percent(second)),
    }
}

fn uses(kind: DomainKind, uses: &UsedParameters) -> String {
    let UsedParameters { algorithm, alpha, chunk_bytes, stripes } = uses;
    let mut parts = vec![text::escape_control(algorithm), share(kind, *alpha)];
    if *chunk_bytes > 0 {
        parts.push(format!("chunks of {}", size::print(*chunk_bytes)));
    }
    if *stripes > 0 {
        parts.push(text::count_of((*stripes).into(), "stream"));
    }
    parts.retain(|part| !part.is_empty());
    parts.join(", ")
}

fn operation(kind: DomainKind, status: &OperationStatus) -> String {
    let OperationStatus { operation, data_type, largest_bytes, .. } = status;
    let [operation, data_type] = [operation, data_type].map(|it| text::escape_control(it));
    let largest = size::print(*largest_bytes);
    let state = if status.is_settled { "" } else { " (being learnt)" };
    let now = uses(kind, &status.uses);
    let mut out = format!("  {operation} of {data_type} up to {largest}: {now}{state}\n");
    for change in &status.history {
        let before = Duration::from_nanos(change.nanoseconds_before);
        let executions = text::count_of(change.executions, "execution");
        let then = uses(kind, &change.uses);
        out.push_str(&format!("    after {executions} ({before:.1?} before): {then}\n"));
    }
    out
}

fn to_text(domains: &[DomainStatus], directory: &Path) -> String {
    if domains.is_empty() {
        return format!(
            "no running domain in {} (--directory). Domains that have ended are not shown\n",
            directory.display()
        );
    }
    let mut out = String::new();
    for domain in domains {
        let kind = domain.kind;
        let ranks = text::count_of(domain.ranks.into(), "rank");
        let job = match domain.job.as_str() {
            "" => String::new(),
            job => format!(", job {}", text::escape_control(job)),
        };
        let processes: Vec<_> = domain.processes.iter().map(u32::to_string).collect();
        out.push_str(&format!("{kind} of {ranks}{job}, processes {}\n", processes.join(" ")));
        if domain.is_fixed {
            out.push_str("  fixed parameters: nothing is learnt\n");
        } else if domain.operations.is_empty() {
            out.push_str("  default parameters: too few operations to learn from so far\n");
        }
        domain.operations.iter().for_each(|it| out.push_str(&operation(kind, it)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use collective::ParameterChange;

    fn used(alpha: u16) -> UsedParameters {
        UsedParameters { algorithm: "automatic".to_owned(), alpha, chunk_bytes: 0, stripes: 0 }
    }

    #[test]
    fn shares_of_paths_are_shown_with_their_history() {
        let change = |executions, alpha| ParameterChange {
            executions,
            uses: used(alpha),
            nanoseconds_before: 2_400_000,
        };
        let operation = OperationStatus {
            operation: "all-gather".to_owned(),
            data_type: "u8".to_owned(),
            largest_bytes: 1 << 30,
            uses: used(911),
            is_settled: true,
            history: vec![change(6, 911), change(3, 930)],
        };
        let domain = DomainStatus {
            kind: DomainKind::DeviceMemory,
            job: "train\n".to_owned(),
            ranks: 2,
            processes: vec![11, 12],
            is_fixed: false,
            operations: vec![operation],
        };
        assert_eq!(
            to_text(&[domain], Path::new("/run")),
            "device memory of 2 ranks, job train\\n, processes 11 12\n  \
             all-gather of u8 up to 1GiB: automatic, 91.1 % by copies between devices, 8.9 % by host memory\n    \
             after 6 executions (2.4ms before): automatic, 91.1 % by copies between devices, 8.9 % by host memory\n    \
             after 3 executions (2.4ms before): automatic, 93.0 % by copies between devices, 7.0 % by host memory\n"
        );
        assert_eq!(
            to_text(&[], Path::new("/run")),
            "no running domain in /run (--directory). Domains that have ended are not shown\n"
        );
    }

    #[test]
    fn algorithm_and_chunks_are_named() {
        let of = |kind, alpha| {
            let uses = UsedParameters {
                algorithm: "direct".to_owned(),
                alpha,
                chunk_bytes: 1 << 17,
                stripes: 2,
            };
            super::uses(kind, &uses)
        };
        assert_eq!(of(DomainKind::HostMemory, 1000), "direct, chunks of 128KiB, 2 streams");
        assert_eq!(
            of(DomainKind::ParameterStore, 900),
            "direct, 90.0 % on the fast path, 10.0 % on the second, chunks of 128KiB, 2 streams"
        );
    }
}

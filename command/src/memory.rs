//! Whether there is enough memory for what is asked of this machine.

use crate::exit::{Exit, Failure};
use crate::size::amount;

/// A limit of memory, and what it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Available {
    /// Bytes that may still be taken.
    pub bytes: u64,
    limit: &'static str,
}

/// What the host has, or the control group that this process is in may still take: the smaller of the
/// two. None if the system does not say.
#[must_use]
pub fn available() -> Option<Available> {
    let of_group = || {
        let number = |name: &str| {
            let text = std::fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok()?;
            text.trim().parse::<u64>().ok()
        };
        Some(number("max")?.saturating_sub(number("current")?))
    };
    let of_host = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kibibytes << 10)
    });
    let host = of_host.map(|bytes| Available { bytes, limit: "on this machine" });
    let group = of_group().map(|bytes| Available { bytes, limit: "to its control group" });
    host.into_iter().chain(group).min_by_key(|available| available.bytes)
}

/// Refuses, before anything is begun, what would take more memory than is available.
///
/// # Errors
/// [`Exit::TooMuch`], with the limit and what to do.
pub fn check(operation: &str, needs: u64, remedy: &str) -> Result<(), Failure> {
    match available() {
        Some(available) => check_against(available, operation, needs, remedy),
        None => Ok(()),
    }
}

fn check_against(
    Available { bytes, limit }: Available,
    operation: &str,
    needs: u64,
    remedy: &str,
) -> Result<(), Failure> {
    if needs <= bytes {
        return Ok(());
    }
    let [needs, has] = [needs, bytes].map(|bytes| amount(bytes as f64));
    let why = format!(
        "{operation} failed: it takes {needs} of memory, and {has} are available {limit}. {remedy}"
    );
    Err(Failure::new(Exit::TooMuch, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_is_available_is_refused_with_the_limit() {
        let available = Available { bytes: 3 << 20, limit: "on this machine" };
        let check = |needs| check_against(available, "measure", needs, "Use a smaller --size");
        assert!(check(3 << 20).is_ok());
        let failure = check((3 << 20) + 1).unwrap_err();
        assert_eq!(failure.exit(), Exit::TooMuch);
        assert_eq!(
            failure.to_string(),
            "measure failed: it takes 3.00 MiB of memory, and 3.00 MiB are available on this machine. Use a smaller \
             --size"
        );
    }
}

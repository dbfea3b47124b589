//! Checks whether there is as much memory as an operation needs.

use errors::memory::{AvailableMemory, available};

use crate::exit::{Exit, Failure, Result};
use crate::size::amount;

/// Fails, before the operation starts, if it needs more memory than is available.
///
/// # Errors
/// [`Exit::LimitExceeded`], with the limit and the remedy.
pub fn check(operation: &str, needs: u64, remedy: &str) -> Result<()> {
    match available() {
        Some(available) => check_limit(&available, operation, needs, remedy),
        None => Ok(()),
    }
}

fn check_limit(
    AvailableMemory { bytes, limit }: &AvailableMemory,
    operation: &str,
    needs: u64,
    remedy: &str,
) -> Result<()> {
    if needs <= *bytes {
        return Ok(());
    }
    let [needs, has] = [needs, *bytes].map(|bytes| amount(bytes as f64));
    let why = format!(
        "{operation} failed: it takes {needs} of memory, and {has} are available {limit}. {remedy}"
    );
    Err(Failure::new(Exit::LimitExceeded, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_of_more_than_available_memory_names_the_limit() {
        let available = AvailableMemory { bytes: 3 << 20, limit: "on this machine".to_owned() };
        let check = |needs| check_limit(&available, "measure", needs, "Use a smaller --size");
        assert!(check(3 << 20).is_ok());
        let failure = check((3 << 20) + 1).unwrap_err();
        assert_eq!(failure.exit(), Exit::LimitExceeded);
        assert_eq!(
            failure.to_string(),
            "measure failed: it takes 3.00 MiB of memory, and 3.00 MiB are available on this machine. Use a smaller \
             --size"
        );
    }
}

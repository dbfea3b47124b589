//! Selects rows of a node's report, and their fields.

use pubsub::Row;
use serde_json::Value;

use super::exit::{Failure, Result};

/// Location of topics in host memory, in reports.
pub(crate) const HOST: &str = "host";

/// The fields of the rows that match.
pub(crate) fn fields_of_kind(
    rows: &[Row],
    is_of_kind: impl Fn(&Row) -> bool,
) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for row in rows.iter().filter(|row| is_of_kind(row)) {
        let row = serde_json::to_value(row).map_err(Failure::of)?;
        // A row is an object with its kind as the only key.
        all.extend(row.as_object().into_iter().flat_map(|row| row.values().cloned()));
    }
    Ok(all)
}

/// The values of all rows that match a pattern.
macro_rules! matching {
    ($rows:expr, $row:pat $(if $condition:expr)? => $value:expr $(,)?) => {
        $rows.iter().filter_map(|row| match row {
            $row $(if $condition)? => Some($value),
            _ => None,
        })
    };
}
pub(crate) use matching;

/// The fields of the rows of a kind.
macro_rules! fields_of {
    ($rows:expr, $kind:ident) => {
        $crate::cli::report_rows::fields_of_kind($rows, |row| {
            matches!(row, pubsub::Row::$kind { .. })
        })
    };
}
pub(crate) use fields_of;

/// Why the node replicates nothing.
pub(crate) fn replication_error(rows: &[Row]) -> Option<&str> {
    matching!(rows, Row::ReplicationError { why, .. } => why.as_str()).next_back()
}

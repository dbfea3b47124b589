//! What the programs `fabricast` and `fabricast-bench` share: exit codes, output, sizes, and
//! queries of the system.
//!
//! Modules, each importing only those before it: `terminal`, `text`, `size`, `exit`, `output`, `arguments`,
//! `histogram`, `stages`, `log`, `memory`, `process`, `temp_dir`.

pub mod arguments;
pub mod exit;
pub mod histogram;
pub mod log;
pub mod memory;
pub mod output;
pub mod process;
pub mod size;
pub mod stages;
pub mod temp_dir;
pub mod terminal;
pub mod text;

/// The version, with the git commit where known.
pub const VERSION_LINE: &str = env!("FABRICAST_VERSION_LINE");
/// The git commit of the sources; empty where unknown.
pub const GIT_COMMIT: &str = env!("FABRICAST_GIT_COMMIT");

//! What the programs `fabricast` and `fabricast-bench` have in common: their exit codes, what they
//! print, how they read sizes, and what they ask of the system.

pub mod arguments;
pub mod exit;
pub mod histogram;
pub mod log;
pub mod memory;
pub mod process;
pub mod size;
pub mod stages;
pub mod temp_dir;
pub mod text;

/// The version, with the git commit where it is known.
pub const VERSION_LINE: &str = env!("FABRICAST_VERSION_LINE");
/// The git commit of the sources; empty where it is not known.
pub const GIT_COMMIT: &str = env!("FABRICAST_GIT_COMMIT");

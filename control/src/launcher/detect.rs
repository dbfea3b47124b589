//! Which launcher started this process.
//!
//! A launcher is recognized by a complete set of its environment variables. Sets of launchers
//! around it may be inherited: `mpirun` within a job of Slurm, `torchrun` started by `srun`.
//! Incomplete sets beside a complete one are ignored. Two complete sets must describe the same rank.

mod sets;
#[cfg(test)]
mod tests;

use self::sets::{Found, Set, VARIABLE, invalid};
use super::environment::Environment;
use super::error::Result;
use super::launchers::Launcher;
use super::pmi::PmiVersion;

/// Finds out from the environment which launcher started this process.
///
/// `FABRICAST_LAUNCHER` chooses one: `pmi1`, `pmi2`, `pmix`, `torchrun`, or `none` for a job of one
/// rank.
///
/// ```
/// use control::launcher::{Environment, ErrorKind, Launcher, detect};
/// assert_eq!(detect(&Environment::default())?, Launcher::Single);
///
/// let hydra = Environment::from_pairs([("PMI_FD", "6"), ("PMI_RANK", "1"), ("PMI_SIZE", "4")]);
/// assert_eq!(detect(&hydra)?.to_string(), "PMI-1");
///
/// let half = Environment::from_pairs([("PMI_RANK", "1"), ("PMI_SIZE", "4")]);
/// assert_eq!(detect(&half).unwrap_err().kind(), ErrorKind::InvalidEnvironment);
/// # Ok::<(), control::launcher::Error>(())
/// ```
///
/// # Errors
/// [`InvalidEnvironment`](super::ErrorKind::InvalidEnvironment): the variables are incomplete, or
/// of two jobs, or the launcher offers no exchange. The detail names the variables and a remedy.
pub fn detect(environment: &Environment) -> Result<Launcher> {
    if let Some(name) = environment.text(VARIABLE) {
        return forced(name, environment);
    }
    // The innermost first: torchrun's processes do not get the descriptors of PMI.
    let found = [sets::torchrun(environment)?, sets::pmix(environment)?, sets::pmi(environment)?];
    let (mut complete, mut unusable) = (Vec::<Set>::new(), None);
    for found in found {
        match found {
            Found::Complete(set) => match complete.iter().find(|other| !other.agrees_with(&set)) {
                None => complete.push(set),
                Some(other) => {
                    return invalid(format!(
                        "two launchers describe different ranks: {}, {}. Set {VARIABLE} to {} or {}",
                        other.shown, set.shown, other.name, set.name,
                    ));
                }
            },
            Found::Unusable(detail) => unusable = unusable.or(Some(detail)),
            Found::Nothing => {}
        }
    }
    if let Some(first) = complete.into_iter().next() {
        return Ok(first.launcher);
    }
    let unusable = unusable.or(sets::open_mpi(environment)?).or(sets::slurm(environment)?);
    match unusable.or(sets::flux(environment)?).or_else(|| sets::pals(environment)) {
        Some(detail) => invalid(detail),
        None => Ok(Launcher::Single),
    }
}

fn forced(name: &str, environment: &Environment) -> Result<Launcher> {
    let found = match name {
        "none" => return Ok(Launcher::Single),
        "pmi1" | "pmi2" => sets::pmi(environment)?,
        "pmix" => sets::pmix(environment)?,
        "torchrun" => sets::torchrun(environment)?,
        other => {
            let other = other.escape_debug();
            let names = "pmi1, pmi2, pmix, torchrun or none";
            return invalid(format!("{VARIABLE}={other} is no launcher. Set it to {names}"));
        }
    };
    let launcher = match found {
        Found::Complete(set) => set.launcher,
        Found::Unusable(detail) => return invalid(format!("{VARIABLE}={name}, but {detail}")),
        Found::Nothing => {
            let variables = match name {
                "pmix" => "PMIX_NAMESPACE",
                "torchrun" => "TORCHELASTIC_RUN_ID",
                _ => "PMI_FD or PMI_PORT",
            };
            return invalid(format!(
                "{VARIABLE}={name}, but {variables} is not set. Start the program by that \
                 launcher, or unset {VARIABLE}"
            ));
        }
    };
    match launcher {
        Launcher::Pmi { server, .. } => {
            let version = if name == "pmi2" { PmiVersion::Two } else { PmiVersion::One };
            Ok(Launcher::Pmi { version, server })
        }
        other => Ok(other),
    }
}

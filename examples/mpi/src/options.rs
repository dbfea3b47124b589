//! Options of all programs.

use std::net::IpAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use fabricast::fabric::Policy;
use fabricast::ipc::WaitStrategy;
use fabricast::launch::{Environment, GroupOptions};
use fabricast::transfer::AgentOptions;
use nix::unistd::{SysconfVar, sysconf};

use crate::Result;

/// How a rank waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Waiting {
    /// Poll if each local rank has a core, else sleep
    #[default]
    Auto,
    /// Poll
    Busy,
    /// Poll for some microseconds, then sleep
    Adaptive,
    /// Sleep
    Block,
}

/// Options of all programs: `#[command(flatten)]` adds them.
#[derive(Debug, Clone, Args)]
#[group(skip)]
pub struct CommonOptions {
    /// Treat ranks of this machine as remote, and reach them by this provider: net, tcp, shm, …
    #[arg(long, value_name = "PROVIDER")]
    pub fabric: Option<String>,
    /// Address of this machine for a fabric, or a subnet (10.1.0.0/16) or an interface (ib0), which suit
    /// all machines [default: FABRICAST_SOURCE, or that with the best provider]
    #[arg(long, value_name = "ADDRESS|SUBNET|INTERFACE", value_parser = parse_source)]
    pub source: Option<IpAddr>,
    /// How a rank waits
    #[arg(long, value_enum, default_value_t)]
    pub waiting: Waiting,
    /// Seconds after which the program fails
    #[arg(long, value_name = "SECONDS", default_value = "120")]
    pub deadline: u64,
}

impl CommonOptions {
    /// The options of the group: those of the environment (`FABRICAST_PROVIDER`, `FABRICAST_SOURCE`, …),
    /// changed by these.
    ///
    /// # Errors
    /// If a variable or the provider is not valid.
    pub fn group(&self) -> Result<GroupOptions> {
        let agent = AgentOptions::new("").wait_strategy(self.wait_strategy());
        let options = GroupOptions::from_environment()?;
        let mut options = options.timeout(self.timeout()).agent(agent).insecure();
        if let Some(provider) = &self.fabric {
            let policy: Policy = format!("={provider}").parse()?;
            options = options.providers(policy).force_remote();
        }
        if let Some(source) = self.source {
            options = options.source(source);
        }
        Ok(options)
    }

    /// The timeout of each wait.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::from_secs((self.deadline / 2).max(1))
    }

    /// The deadline of the whole program.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline)
    }

    /// The wait strategy: `auto` polls only if the ranks of this machine do not share cores.
    #[must_use]
    pub fn wait_strategy(&self) -> WaitStrategy {
        match self.waiting {
            Waiting::Busy => WaitStrategy::Busy,
            Waiting::Adaptive => WaitStrategy::default(),
            Waiting::Block => WaitStrategy::Block,
            Waiting::Auto if cores_suffice() => WaitStrategy::Busy,
            Waiting::Auto => WaitStrategy::Block,
        }
    }
}

fn parse_source(text: &str) -> std::result::Result<IpAddr, String> {
    fabricast::fabric::local_address(text)
        .map_err(|error| error.detail().unwrap_or_default().to_owned())
}

/// Has each rank of this machine a core? Launchers say how many ranks there are.
fn cores_suffice() -> bool {
    /// The last ones count ranks of other machines, too.
    const LOCAL_SIZES: [&str; 5] = [
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "LOCAL_WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
        "PMI_SIZE",
    ];
    let environment = Environment::of_this_process();
    let sizes = LOCAL_SIZES.iter().map(|name| environment.number::<i64>(name).ok().flatten());
    let ranks = sizes.flatten().next().unwrap_or(i64::MAX);
    let cores = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().unwrap_or(1);
    ranks <= cores
}

/// Reads a size: bytes, or with K, M or G units of 2^10, 2^20 or 2^30.
///
/// # Errors
/// If it is none.
pub fn size(text: &str) -> std::result::Result<u64, String> {
    let units = [(['K', 'k'], 10), (['M', 'm'], 20), (['G', 'g'], 30)];
    let unit = units.into_iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    let number: u64 = digits.parse().map_err(|_| "not a number with an optional K, M or G")?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        let sizes = ["7", "4K", "2m", "1G"].map(|text| size(text).unwrap());
        assert_eq!(sizes, [7, 4096, 2 << 20, 1 << 30]);
        for text in ["", "K", "x", "-1", "99999999999G"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}

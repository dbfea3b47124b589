//! The environment variables of each launcher.

use super::super::environment::Environment;
use super::super::error::{Error, ErrorKind, READ, Result};
use super::super::exchange::LocalRank;
use super::super::launchers::Launcher;
use super::super::pmi::{PmiServer, PmiVersion};

/// Chooses a launcher.
pub(super) const VARIABLE: &str = "FABRICAST_LAUNCHER";

/// A complete set of a launcher's variables.
#[derive(Debug)]
pub(super) struct Set {
    pub(super) launcher: Launcher,
    /// The launcher's value of `FABRICAST_LAUNCHER`.
    pub(super) name: &'static str,
    /// For errors: the launcher and its variables of rank and size.
    pub(super) shown: String,
    rank: u32,
    size: Option<u32>,
}

impl Set {
    /// Do both describe the same rank, as far as they are known?
    pub(super) fn agrees_with(&self, other: &Self) -> bool {
        let sizes = self.size.zip(other.size);
        self.rank == other.rank && sizes.is_none_or(|(one, other)| one == other)
    }
}

/// What the environment has of a launcher.
#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    /// Some of its variables, or a launcher that offers no exchange: the detail of an error.
    Unusable(String),
    Complete(Set),
}

/// PMIx. Its server tells the size; what other variables say about it is used to compare.
pub(super) fn pmix(environment: &Environment) -> Result<Found> {
    let has_server = environment.has_prefix("PMIX_SERVER_URI");
    let names = ["PMIX_NAMESPACE", "PMIX_RANK"];
    if names.iter().all(|name| environment.text(name).is_none()) {
        return Ok(Found::Nothing);
    }
    let mut states = states(environment, &names);
    states.push(("PMIX_SERVER_URI*", has_server));
    let Some(rank) = environment.number::<u32>("PMIX_RANK")? else { return Ok(half(&states)) };
    if states.iter().any(|(_, is_set)| !is_set) {
        return Ok(half(&states));
    }
    let mut size = None;
    for (of_rank, of_size) in
        [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    {
        // Of another launcher around this one if the rank differs.
        if size.is_none() && environment.number(of_rank)? == Some(rank) {
            size = environment.number(of_size)?.map(|size| (of_size, size));
        }
    }
    let shown = match size {
        Some((name, size)) => {
            check(("PMIX_RANK", rank), (name, size))?;
            format!("PMIx (PMIX_RANK={rank}, {name}={size})")
        }
        None => format!("PMIx (PMIX_RANK={rank})"),
    };
    let size = size.map(|(_, size)| size);
    Ok(Found::Complete(Set { launcher: Launcher::Pmix, name: "pmix", shown, rank, size }))
}

pub(super) fn pmi(environment: &Environment) -> Result<Found> {
    let (version, name) = match environment.is_started_by_slurm() {
        true => (PmiVersion::Two, "pmi2"),
        false => (PmiVersion::One, "pmi1"),
    };
    let complete = |server, shown, rank, size| {
        let launcher = Launcher::Pmi { version, server };
        Ok(Found::Complete(Set { launcher, name, shown, rank, size }))
    };
    let descriptor = environment.number::<i32>("PMI_FD")?;
    let (rank, size) = (environment.number("PMI_RANK")?, environment.number("PMI_SIZE")?);
    if let (Some(descriptor), Some(rank), Some(size)) = (descriptor, rank, size) {
        if descriptor < 0 {
            return invalid(format!("PMI_FD={descriptor} is no descriptor"));
        }
        check(("PMI_RANK", rank), ("PMI_SIZE", size))?;
        let shown = format!("PMI (PMI_RANK={rank}, PMI_SIZE={size})");
        if size == 1 {
            // Programs that a shell starts one after the other share the connection, which the first
            // one finalizes; one rank needs none.
            let launcher = Launcher::Single;
            return Ok(Found::Complete(Set { launcher, name, shown, rank, size: Some(1) }));
        }
        return complete(PmiServer::Descriptor(descriptor), shown, rank, Some(size));
    }
    let (port, id) = (environment.text("PMI_PORT"), environment.number("PMI_ID")?);
    if let (Some(port), Some(id)) = (port, id) {
        let shown = format!("PMI (PMI_ID={id})");
        return complete(PmiServer::Address(port.to_owned(), id), shown, id, None);
    }
    let of_descriptor = states(environment, &["PMI_FD", "PMI_RANK", "PMI_SIZE"]);
    let of_address = states(environment, &["PMI_PORT", "PMI_ID"]);
    Ok(match (of_descriptor.iter().any(|it| it.1), of_address.iter().any(|it| it.1)) {
        (true, _) => half(&of_descriptor),
        (false, true) => half(&of_address),
        (false, false) => Found::Nothing,
    })
}

/// torchrun. `RANK` and `WORLD_SIZE` are set by others, too.
pub(super) fn torchrun(environment: &Environment) -> Result<Found> {
    let run = environment.text("TORCHELASTIC_RUN_ID");
    let (rank, size) = (environment.text("RANK"), environment.text("WORLD_SIZE"));
    if run.is_none() && (rank.is_none() || size.is_none()) {
        return Ok(Found::Nothing);
    }
    let names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
    let states = states(environment, &names);
    if run.is_some() && states.iter().any(|(_, is_set)| !is_set) {
        return Ok(half(&states));
    }
    let (rank, size) = (environment.number("RANK")?, environment.number("WORLD_SIZE")?);
    let (Some(rank), Some(size)) = (rank, size) else { return Ok(half(&states)) };
    let is_hosted = environment.text("TORCHELASTIC_USE_AGENT_STORE") == Some("True");
    let (Some(run), true) = (run, is_hosted) else {
        // A job of one rank needs no store.
        return Ok(match size {
            0 | 1 => Found::Nothing,
            _ => Found::Unusable(format!(
                "RANK={rank} and WORLD_SIZE={size} are set, but not \
                 TORCHELASTIC_USE_AGENT_STORE=True: rank 0 of the program would host the store. \
                 Start the program by torchrun, or pass an exchange"
            )),
        });
    };
    check(("RANK", rank), ("WORLD_SIZE", size))?;
    let (host, port) = (environment.text("MASTER_ADDR"), environment.number::<u16>("MASTER_PORT")?);
    let (Some(host), Some(port)) = (host, port) else { return Ok(half(&states)) };
    if port == 0 {
        return invalid("MASTER_PORT=0 is no port".into());
    }
    let store = match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    };
    let local = match (environment.number("LOCAL_RANK")?, environment.number("LOCAL_WORLD_SIZE")?) {
        (Some(rank), Some(size)) => {
            check(("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size))?;
            Some(LocalRank { rank, size })
        }
        _ => None,
    };
    let restart = environment.number::<u32>("TORCHELASTIC_RESTART_COUNT")?.unwrap_or_default();
    // The run has the same id in many jobs, for example "none".
    let job = format!("{run}-{host}-{port}-{restart}");
    let shown = format!("torchrun (RANK={rank}, WORLD_SIZE={size})");
    let launcher = Launcher::TorchRun { store, rank, size, local, job };
    Ok(Found::Complete(Set { launcher, name: "torchrun", shown, rank, size: Some(size) }))
}

/// Open MPI without PMIx: the detail of an error.
pub(super) fn open_mpi(environment: &Environment) -> Result<Option<String>> {
    let size = environment.number::<u32>("OMPI_COMM_WORLD_SIZE")?.unwrap_or_default();
    Ok((size > 1).then(|| {
        format!(
            "Open MPI started {size} ranks, but PMIX_NAMESPACE, PMIX_RANK and PMIX_SERVER_URI* are \
             not set. Pass all PMIX_* variables on to the ranks, or set {VARIABLE}=none for jobs \
             of one rank"
        )
    }))
}

/// Slurm without PMI: the detail of an error. A batch script has no step.
pub(super) fn slurm(environment: &Environment) -> Result<Option<String>> {
    if environment.text("SLURM_STEP_ID").is_none() || environment.text("SLURM_PROCID").is_none() {
        return Ok(None);
    }
    let of_step = environment.number::<u32>("SLURM_STEP_NUM_TASKS")?;
    let tasks = of_step.or(environment.number("SLURM_NTASKS")?).unwrap_or_default();
    Ok((tasks > 1).then(|| {
        format!("srun started {tasks} tasks without PMI. Use srun --mpi=pmi2 or --mpi=pmix")
    }))
}

/// Flux without PMI: the detail of an error.
pub(super) fn flux(environment: &Environment) -> Result<Option<String>> {
    if environment.text("FLUX_TASK_RANK").is_none() {
        return Ok(None);
    }
    let tasks = environment.number::<u32>("FLUX_JOB_SIZE")?.unwrap_or_default();
    Ok((tasks > 1).then(|| {
        format!("Flux started {tasks} tasks without PMI. Use flux run -o pmi=simple or -o pmi=pmix")
    }))
}

/// PALS (of HPE Cray) without PMIx: the detail of an error. Its variables do not tell the size.
pub(super) fn pals(environment: &Environment) -> Option<String> {
    environment.text("PALS_RANKID").map(|rank| {
        let rank = rank.escape_debug();
        format!(
            "PALS started rank {rank} without PMIx. Use mpiexec --pmi=pmix, or set {VARIABLE}=none \
             for a job of one rank"
        )
    })
}

fn states<'a>(environment: &Environment, names: &[&'a str]) -> Vec<(&'a str, bool)> {
    names.iter().map(|name| (*name, environment.text(name).is_some())).collect()
}

/// Some variables of a launcher are missing.
fn half(states: &[(&str, bool)]) -> Found {
    let named = |wanted: bool| {
        let names: Vec<_> =
            states.iter().filter(|(_, is_set)| *is_set == wanted).map(|(name, _)| *name).collect();
        let verb = if names.len() == 1 { "is" } else { "are" };
        match names.split_last() {
            Some((last, [])) => format!("{last} {verb}"),
            Some((last, rest)) => format!("{} and {last} {verb}", rest.join(", ")),
            None => format!("nothing {verb}"),
        }
    };
    Found::Unusable(format!(
        "{} set, {} missing. Start the program by a launcher that sets all of them, or set \
         {VARIABLE}=none for a job of one rank",
        named(true),
        named(false),
    ))
}

fn check((rank_name, rank): (&str, u32), (size_name, size): (&str, u32)) -> Result<()> {
    match rank < size {
        true => Ok(()),
        false => invalid(format!("{rank_name}={rank} is not below {size_name}={size}")),
    }
}

pub(super) fn invalid<T>(detail: String) -> Result<T> {
    Err(Error::new(READ, ErrorKind::InvalidEnvironment, detail))
}

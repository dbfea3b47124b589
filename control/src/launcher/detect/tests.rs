//! Environments as launchers set them.

use super::super::error::ErrorKind;
use super::super::exchange::LocalRank;
use super::super::pmi::PmiServer;
use super::*;

type Pairs<'a> = &'a [(&'a str, &'a str)];

/// Recorded: `mpirun -n 2 env` of Open MPI 4.1.4, rank 1.
const OPEN_MPI: Pairs<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_COMM_WORLD_NODE_RANK", "1"),
    ("OMPI_UNIVERSE_SIZE", "2"),
    ("OMPI_MCA_ess_base_jobid", "434503681"),
    ("OMPI_MCA_ess_base_vpid", "1"),
    ("PMIX_BFROP_BUFFER_TYPE", "PMIX_BFROP_BUFFER_NON_DESC"),
    ("PMIX_GDS_MODULE", "ds21,ds12,hash"),
    ("PMIX_HOSTNAME", "node1"),
    ("PMIX_ID", "434503681.1"),
    ("PMIX_NAMESPACE", "434503681"),
    ("PMIX_RANK", "1"),
    ("PMIX_SECURITY_MODE", "native"),
    ("PMIX_SERVER_TMPDIR", "/tmp/ompi.node1.0/pid.29976"),
    ("PMIX_SERVER_URI2", "434503680.0;tcp4://127.0.0.1:35647"),
    ("PMIX_SERVER_URI21", "434503680.0;tcp4://127.0.0.1:35647"),
    ("PMIX_SERVER_URI3", "434503680.0;tcp4://127.0.0.1:35647"),
    ("PMIX_SERVER_URI4", "434503680.0;tcp4://127.0.0.1:35647"),
    ("PMIX_SERVER_URI41", "434503680.0;tcp4://127.0.0.1:35647"),
    ("PMIX_VERSION", "4.2.2rc2"),
];

/// Recorded: `mpirun -n 2 env` of MPICH 4.0.2, rank 1.
const HYDRA: Pairs<'_> = &[
    ("GFORTRAN_UNBUFFERED_PRECONNECTED", "y"),
    ("HYDI_CONTROL_FD", "7"),
    ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "node1"),
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_FD", "8"),
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "2"),
];

/// Recorded: `mpirun -pmi-port -n 2 env` of MPICH 4.0.2, rank 1.
const HYDRA_PORT: Pairs<'_> = &[
    ("HYDI_CONTROL_FD", "7"),
    ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "node1"),
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_ID", "1"),
    ("PMI_PORT", "node1:37707"),
];

/// Variables of `mpirun -n 4` of Intel MPI 2021, which is a hydra, by its documentation.
const INTEL: Pairs<'_> = &[
    ("I_MPI_HYDRA_BOOTSTRAP", "ssh"),
    ("I_MPI_MPIRUN", "mpirun"),
    ("I_MPI_ROOT", "/opt/intel/oneapi/mpi/2021.9.0"),
    ("MPI_LOCALNRANKS", "4"),
    ("MPI_LOCALRANKID", "3"),
    ("PMI_FD", "17"),
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "4"),
];

/// Variables of a task of `srun -n 4`, by its documentation and sources.
const SRUN: Pairs<'_> = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_PROCID", "3"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
];
const PMI2: Pairs<'_> =
    &[("PMI_FD", "10"), ("PMI_JOBID", "4711.0"), ("PMI_RANK", "3"), ("PMI_SIZE", "4")];
const SLURM_PMIX: Pairs<'_> = &[
    ("PMIX_NAMESPACE", "slurm.pmix.4711.0"),
    ("PMIX_RANK", "3"),
    ("PMIX_SERVER_URI2", "pmix-server.99;tcp4://127.0.0.1:40001"),
    ("SLURM_MPI_TYPE", "pmix"),
    ("SLURM_PMIX_MAPPING_SERV", "(vector,(0,2,2))"),
];

/// Variables of task 3 of `flux run -n 4 -o pmi=off`, and of rank 3 of PALS, by their documentation.
const FLUX: Pairs<'_> = &[
    ("FLUX_JOB_ID", "ƒ2WFCGbQ"),
    ("FLUX_JOB_NNODES", "2"),
    ("FLUX_JOB_SIZE", "4"),
    ("FLUX_TASK_LOCAL_ID", "1"),
    ("FLUX_TASK_RANK", "3"),
];
const PALS: Pairs<'_> = &[
    ("PALS_APID", "2d5c7f52-3a52-4d0e-9f9c-c5a1e0d5f2f1"),
    ("PALS_LOCAL_RANKID", "1"),
    ("PALS_NODEID", "1"),
    ("PALS_RANKID", "3"),
];

/// Variables that `salloc` and `sbatch` set for the shell: no step.
const ALLOCATION: Pairs<'_> = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_JOB_NUM_NODES", "2"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_PROCID", "0"),
];

/// The step of `mpirun`'s own processes, one on each node.
const STEP_OF_MPIRUN: Pairs<'_> = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "0"),
    ("SLURM_STEP_ID", "3"),
    ("SLURM_STEP_NUM_TASKS", "2"),
];

/// Variables of rank 3 of `torchrun --nnodes 2 --nproc-per-node 2`, by its sources.
const TORCHRUN: Pairs<'_> = &[
    ("GROUP_RANK", "1"),
    ("GROUP_WORLD_SIZE", "2"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
    ("RANK", "3"),
    ("ROLE_NAME", "default"),
    ("ROLE_RANK", "3"),
    ("ROLE_WORLD_SIZE", "4"),
    ("TORCHELASTIC_MAX_RESTARTS", "3"),
    ("TORCHELASTIC_RESTART_COUNT", "1"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ("WORLD_SIZE", "4"),
];

/// The variables of these sets; later ones replace earlier ones.
fn environment(sets: &[Pairs<'_>]) -> Environment {
    Environment::from_pairs(sets.iter().flat_map(|set| set.iter().copied()))
}

fn without<'a>(set: Pairs<'a>, names: &[&str]) -> Vec<(&'a str, &'a str)> {
    set.iter().copied().filter(|(name, _)| !names.contains(name)).collect()
}

fn pmi(version: PmiVersion, descriptor: i32) -> Launcher {
    Launcher::Pmi { version, server: PmiServer::Descriptor(descriptor) }
}

fn torchrun() -> Launcher {
    Launcher::TorchRun {
        store: "node1:29500".into(),
        rank: 3,
        size: 4,
        local: Some(LocalRank { rank: 1, size: 2 }),
        job: "none-node1-29500-1".into(),
    }
}

#[test]
fn launchers_are_recognized() {
    use PmiVersion::{One, Two};
    let at_port = PmiServer::Address("node1:37707".into(), 1);
    let port = |version| Launcher::Pmi { version, server: at_port.clone() };
    let none = |_: &str| Launcher::Single;
    let same_rank: Pairs<'_> = &[("PMI_FD", "6"), ("PMI_RANK", "3"), ("PMI_SIZE", "4")];
    let other_rank: Pairs<'_> = &[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
    let half: Pairs<'_> = &[("PMI_RANK", "7"), ("PMIX_RANK", "7")];
    let script: Pairs<'_> = &[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")];
    let wrapper: Pairs<'_> =
        &[("RANK", "0"), ("WORLD_SIZE", "9"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
    let single: Pairs<'_> = &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")];
    let names = |name| [("FABRICAST_LAUNCHER", name)];
    let flux_pmi = [("PMI_FD", "10"), ("PMI_RANK", "3"), ("PMI_SIZE", "4")];
    let cases: [(&str, &[Pairs<'_>], Launcher); 33] = [
        ("nothing", &[], none("")),
        ("Open MPI", &[OPEN_MPI], Launcher::Pmix),
        ("Open MPI in an allocation", &[ALLOCATION, OPEN_MPI], Launcher::Pmix),
        ("Open MPI, started by srun", &[STEP_OF_MPIRUN, OPEN_MPI], Launcher::Pmix),
        ("hydra", &[HYDRA], pmi(One, 8)),
        ("hydra with a port", &[HYDRA_PORT], port(One)),
        ("Intel MPI", &[INTEL], pmi(One, 17)),
        ("hydra in an allocation", &[ALLOCATION, HYDRA], pmi(One, 8)),
        ("hydra, started by srun", &[STEP_OF_MPIRUN, HYDRA], pmi(One, 8)),
        ("srun --mpi=pmi2", &[SRUN, PMI2], pmi(Two, 10)),
        ("srun --mpi=pmix", &[SRUN, SLURM_PMIX], Launcher::Pmix),
        ("PMIx of a step in another one", &[SRUN, SLURM_PMIX, other_rank], Launcher::Pmix),
        ("a batch script", &[ALLOCATION], none("")),
        ("flux run", &[FLUX, &flux_pmi], pmi(One, 10)),
        ("flux run -n 1", &[FLUX, &[("FLUX_JOB_SIZE", "1")]], none("")),
        ("PALS with PMIx", &[PALS, SLURM_PMIX], Launcher::Pmix),
        ("srun -n 1", &[SRUN, single], none("")),
        ("torchrun", &[TORCHRUN], torchrun()),
        ("torchrun, started by srun", &[STEP_OF_MPIRUN, TORCHRUN], torchrun()),
        ("torchrun with half of PMI", &[half, TORCHRUN], torchrun()),
        ("torchrun and PMI of the same rank", &[TORCHRUN, same_rank], torchrun()),
        ("PMI and PMIx of the same rank", &[PMI2, SRUN, SLURM_PMIX], Launcher::Pmix),
        ("hydra with variables of torch", &[HYDRA, wrapper], pmi(One, 8)),
        ("hydra with half of PMIx", &[HYDRA, &[("PMIX_NAMESPACE", "x")]], pmi(One, 8)),
        ("one rank with variables of torch", &[script], none("")),
        ("only the master of torch", &[&[("MASTER_ADDR", "x"), ("RANK", "2")]], none("")),
        ("mpirun -n 1 of Open MPI without PMIx", &[&[("OMPI_COMM_WORLD_SIZE", "1")]], none("")),
        ("mpirun -n 1 of hydra", &[HYDRA, &[("PMI_RANK", "0"), ("PMI_SIZE", "1")]], none("")),
        ("none beside hydra", &[HYDRA, &names("none")], none("")),
        ("PMI-2 of hydra", &[HYDRA, &names("pmi2")], pmi(Two, 8)),
        ("PMI-1 of Slurm", &[SRUN, PMI2, &names("pmi1")], pmi(One, 10)),
        ("PMI-2 at a port", &[HYDRA_PORT, &names("pmi2")], port(Two)),
        ("torchrun under mpirun", &[HYDRA, TORCHRUN, &names("torchrun")], torchrun()),
    ];
    for (name, sets, expected) in cases {
        let found = detect(&environment(sets)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found, expected, "{name}");
    }
    let pmix = [HYDRA, OPEN_MPI, &names("pmix")];
    assert_eq!(detect(&environment(&pmix)).unwrap(), Launcher::Pmix);
}

#[test]
fn address_of_ip_version_6_is_bracketed() {
    let sets = [TORCHRUN, &[("MASTER_ADDR", "fd00::2")]];
    let Launcher::TorchRun { store, .. } = detect(&environment(&sets)).unwrap() else { panic!() };
    assert_eq!(store, "[fd00::2]:29500");
}

#[test]
fn launchers_are_shown_by_their_protocol() {
    let shown = [Launcher::Single, pmi(PmiVersion::Two, 3), Launcher::Pmix, torchrun()];
    let shown = shown.map(|launcher| launcher.to_string());
    assert_eq!(shown, ["no launcher", "PMI-2", "PMIx", "torchrun"]);
}

#[test]
fn unusable_environments_are_refused_with_a_remedy() {
    let remedy = "Start the program by a launcher that sets all of them, or set \
                  FABRICAST_LAUNCHER=none for a job of one rank";
    let half = |detail: &str| format!("{detail} missing. {remedy}");
    let no_server = without(
        OPEN_MPI,
        &[
            "PMIX_SERVER_URI2",
            "PMIX_SERVER_URI21",
            "PMIX_SERVER_URI3",
            "PMIX_SERVER_URI4",
            "PMIX_SERVER_URI41",
        ],
    );
    let no_pmix = without(&no_server, &["PMIX_NAMESPACE", "PMIX_RANK"]);
    let no_port = without(TORCHRUN, &["MASTER_PORT", "RANK"]);
    let no_agent = without(TORCHRUN, &["TORCHELASTIC_USE_AGENT_STORE"]);
    let names = |name| [("FABRICAST_LAUNCHER", name)];
    let cases: [(&[Pairs<'_>], String); 32] = [
        (
            &[&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]],
            half("PMI_RANK and PMI_SIZE are set, PMI_FD is"),
        ),
        (&[&[("PMI_FD", "4")]], half("PMI_FD is set, PMI_RANK and PMI_SIZE are")),
        (&[&[("PMI_PORT", "h:1")]], half("PMI_PORT is set, PMI_ID is")),
        (&[&no_server], half("PMIX_NAMESPACE and PMIX_RANK are set, PMIX_SERVER_URI* is")),
        (
            &[&[("PMIX_NAMESPACE", "x")]],
            half("PMIX_NAMESPACE is set, PMIX_RANK and PMIX_SERVER_URI* are"),
        ),
        (&[&no_port], half("WORLD_SIZE and MASTER_ADDR are set, RANK and MASTER_PORT are")),
        (
            &[&no_agent],
            "RANK=3 and WORLD_SIZE=4 are set, but not TORCHELASTIC_USE_AGENT_STORE=True: rank 0 \
             of the program would host the store. Start the program by torchrun, or pass an \
             exchange"
                .into(),
        ),
        (
            &[TORCHRUN, &[("TORCHELASTIC_USE_AGENT_STORE", "False")]],
            "RANK=3 and WORLD_SIZE=4 are set, but not TORCHELASTIC_USE_AGENT_STORE=True: rank 0 \
             of the program would host the store. Start the program by torchrun, or pass an \
             exchange"
                .into(),
        ),
        (&[SRUN], "srun started 4 tasks without PMI. Use srun --mpi=pmi2 or --mpi=pmix".into()),
        (
            &[FLUX],
            "Flux started 4 tasks without PMI. Use flux run -o pmi=simple or -o pmi=pmix".into(),
        ),
        (
            &[PALS],
            "PALS started rank 3 without PMIx. Use mpiexec --pmi=pmix, or set \
             FABRICAST_LAUNCHER=none for a job of one rank"
                .into(),
        ),
        (
            &[&no_pmix],
            "Open MPI started 2 ranks, but PMIX_NAMESPACE, PMIX_RANK and PMIX_SERVER_URI* are not \
             set. Pass all PMIX_* variables on to the ranks, or set FABRICAST_LAUNCHER=none for \
             jobs of one rank"
                .into(),
        ),
        (
            &[HYDRA, TORCHRUN],
            "two launchers describe different ranks: torchrun (RANK=3, WORLD_SIZE=4), PMI \
             (PMI_RANK=1, PMI_SIZE=2). Set FABRICAST_LAUNCHER to torchrun or pmi1"
                .into(),
        ),
        (
            &[OPEN_MPI, TORCHRUN],
            "two launchers describe different ranks: torchrun (RANK=3, WORLD_SIZE=4), PMIx \
             (PMIX_RANK=1, OMPI_COMM_WORLD_SIZE=2). Set FABRICAST_LAUNCHER to torchrun or pmix"
                .into(),
        ),
        (
            &[OPEN_MPI, INTEL],
            "two launchers describe different ranks: PMIx (PMIX_RANK=1, OMPI_COMM_WORLD_SIZE=2), \
             PMI (PMI_RANK=3, PMI_SIZE=4). Set FABRICAST_LAUNCHER to pmix or pmi1"
                .into(),
        ),
        (
            &[OPEN_MPI, &[("PMI_FD", "3"), ("PMI_RANK", "1"), ("PMI_SIZE", "3")]],
            "two launchers describe different ranks: PMIx (PMIX_RANK=1, OMPI_COMM_WORLD_SIZE=2), \
             PMI (PMI_RANK=1, PMI_SIZE=3). Set FABRICAST_LAUNCHER to pmix or pmi1"
                .into(),
        ),
        (
            &[
                &[("PMIX_NAMESPACE", "x"), ("PMIX_RANK", "3"), ("PMIX_SERVER_URI2", "x")],
                &[("PMI_FD", "3"), ("PMI_RANK", "3"), ("PMI_SIZE", "5")],
                TORCHRUN,
            ],
            "two launchers describe different ranks: torchrun (RANK=3, WORLD_SIZE=4), PMI \
             (PMI_RANK=3, PMI_SIZE=5). Set FABRICAST_LAUNCHER to torchrun or pmi1"
                .into(),
        ),
        (&[HYDRA, &[("PMI_RANK", "2")]], "PMI_RANK=2 is not below PMI_SIZE=2".into()),
        (&[HYDRA, &[("PMI_SIZE", "0")]], "PMI_RANK=1 is not below PMI_SIZE=0".into()),
        (
            &[HYDRA, &[("PMI_RANK", "-1")]],
            "PMI_RANK=-1 is no valid number: invalid digit found in string".into(),
        ),
        (&[HYDRA, &[("PMI_FD", "-1")]], "PMI_FD=-1 is no descriptor".into()),
        (
            &[HYDRA_PORT, &[("PMI_ID", "x")]],
            "PMI_ID=x is no valid number: invalid digit found in string".into(),
        ),
        (
            &[OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "1")]],
            "PMIX_RANK=1 is not below OMPI_COMM_WORLD_SIZE=1".into(),
        ),
        (&[TORCHRUN, &[("WORLD_SIZE", "3")]], "RANK=3 is not below WORLD_SIZE=3".into()),
        (
            &[TORCHRUN, &[("LOCAL_RANK", "2")]],
            "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2".into(),
        ),
        (&[TORCHRUN, &[("MASTER_PORT", "0")]], "MASTER_PORT=0 is no port".into()),
        (
            &[TORCHRUN, &[("MASTER_PORT", "65536")]],
            "MASTER_PORT=65536 is no valid number: number too large to fit in target type".into(),
        ),
        (
            &[HYDRA, &names("mpi")],
            "FABRICAST_LAUNCHER=mpi is no launcher. Set it to pmi1, pmi2, pmix, torchrun or none"
                .into(),
        ),
        (
            &[HYDRA, &names("pmix")],
            "FABRICAST_LAUNCHER=pmix, but PMIX_NAMESPACE is not set. Start the program by that \
             launcher, or unset FABRICAST_LAUNCHER"
                .into(),
        ),
        (
            &[OPEN_MPI, &names("pmi2")],
            "FABRICAST_LAUNCHER=pmi2, but PMI_FD or PMI_PORT is not set. Start the program by \
             that launcher, or unset FABRICAST_LAUNCHER"
                .into(),
        ),
        (
            &[&[("PMI_FD", "4"), ("PMI_SIZE", "1")], &names("pmi1")],
            format!(
                "FABRICAST_LAUNCHER=pmi1, but {}",
                half("PMI_FD and PMI_SIZE are set, PMI_RANK is")
            ),
        ),
        (
            &[&names("torchrun")],
            "FABRICAST_LAUNCHER=torchrun, but TORCHELASTIC_RUN_ID is not set. Start the program \
             by that launcher, or unset FABRICAST_LAUNCHER"
                .into(),
        ),
    ];
    for (sets, expected) in cases {
        let error = detect(&environment(sets)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidEnvironment);
        let text = format!("read launch environment failed: invalid environment: {expected}");
        assert_eq!(error.to_string(), text);
    }
}

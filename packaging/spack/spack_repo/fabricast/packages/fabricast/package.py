# Spack 1.0 or newer. docs/how-to/install-on-a-cluster.md describes the installation.
from spack_repo.builtin.build_systems.generic import Package

from spack.package import *


class Fabricast(Package):
    """Moves GPU and host memory between processes and machines over libfabric, CUDA and shared
    memory, and reports which path the bytes took. A command and a C library."""

    license("MIT OR Apache-2.0")

    # No release yet: "spack dev-build" builds a clone.
    version("0.1.0")

    variant("bench", default=True, description="Benchmarks: fabricast-bench")
    variant("fortran", default=False, description="Module for Fortran")
    variant("mpi", default=False, description="Example programs among the ranks of an MPI job")

    requires("platform=linux")

    depends_on("c", type="build")
    depends_on("fortran", type="build", when="+fortran")
    depends_on("rust@1.88:", type="build")
    depends_on("pkgconfig", type="build")
    # Loaded at run time; its recipe sets LD_LIBRARY_PATH. Bindings of newer versions are generated
    # by scripts/make-bindings.
    depends_on("libfabric@1.17:2.6", type=("build", "link", "run"))

    with when("+mpi"):
        depends_on("mpi")
        # The Rust interface of MPI generates bindings.
        depends_on("llvm+clang", type="build")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        if self.spec.satisfies("+mpi"):
            env.set("LIBCLANG_PATH", self.spec["llvm"].prefix.lib)

    def install(self, spec, prefix):
        # Fetches the crates of Cargo.lock.
        options = ("--locked", "--root", prefix, "-j", str(make_jobs))
        cargo("install", "--path", ".", *options)
        if spec.satisfies("+bench"):
            cargo("install", "--path", "bench", *options)
        if spec.satisfies("+mpi"):
            cargo("install", "--path", "examples/mpi", "--features", "mpi", *options)
        fortran = spack_fc if spec.satisfies("+fortran") else "none"
        Executable("scripts/install-c")("--fortran", fortran, prefix)

    @run_after("install")
    def check_install(self):
        Executable(self.prefix.bin.fabricast)("--version")

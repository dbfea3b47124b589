"""The ranks of a job of torchrun, mpirun or srun, as peers."""

from fabricast._native import Group

__all__ = ["Group"]

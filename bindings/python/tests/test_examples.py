"""The programs of examples/python."""

import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("numpy")
DIRECTORY = pathlib.Path(__file__).parents[3] / "examples" / "python"


def run(command, tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICAST_DIRECTORY", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(": ok"), done.stdout


@pytest.mark.parametrize(
    "words",
    ["share_weights.py", "share_weights.py --device emulated:0", "loader.py", "loader.py --memory emulated:0",
     "kv_handover.py", "kv_handover.py --prefill host --decode host", "camera.py", "ranks.py"],
)
def test_example(words, tmp_path, monkeypatch):
    name, *options = words.split()
    run([sys.executable, str(DIRECTORY / name), *options], tmp_path, monkeypatch)


@pytest.mark.parametrize("device", ["host", "emulated:0"])
def test_ranks_of_mpi(device, tmp_path, monkeypatch):
    if not shutil.which("mpirun.mpich"):
        pytest.skip("mpirun.mpich is not installed")
    command = ["mpirun.mpich", "-n", "4", sys.executable, str(DIRECTORY / "ranks.py"), "--device", device]
    run(command, tmp_path, monkeypatch)


def test_ranks_of_torchrun(tmp_path, monkeypatch):
    pytest.importorskip("torch", "2", reason="torchrun of PyTorch 1 does not run with Python 3.11")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4", str(DIRECTORY / "ranks.py")]
    run(command, tmp_path, monkeypatch)

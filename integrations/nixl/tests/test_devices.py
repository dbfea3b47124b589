"""Memory of devices, with the driver of tests/fake_cuda (its directory is in FAKE_CUDA), and so without a GPU."""

import os
import subprocess
import sys

import pytest

PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "gpu", "vram.py")


@pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="FAKE_CUDA is not the directory of the driver")
def test_memory_of_devices_is_transferred_by_cuda_ipc():
    environment = os.environ | {"LD_LIBRARY_PATH": os.environ["FAKE_CUDA"], "NIXL_LOG_LEVEL": "INFO"}
    run = subprocess.run([sys.executable, PROGRAM, "--megabytes", "4", "--rounds", "3"], env=environment,
                         capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    paths = [line.rsplit("path ", 1)[1] for line in run.stderr.splitlines() if "NIXL FABRICAST" in line and "path " in line]
    # VRAM to VRAM, DRAM to VRAM, VRAM to DRAM of another process, DRAM to DRAM.
    assert paths == ["cuda-ipc", "cuda-ipc", "host-staged", "host-staged"], run.stderr
    assert "still has a route" not in run.stderr

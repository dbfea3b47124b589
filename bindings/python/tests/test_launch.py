"""Ranks of a job, as MPI and torchrun start them."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
from fabricast import errors
from fabricast.launch import Group

pytest.importorskip("numpy")


def test_one_rank_without_a_launcher(tmp_path):
    with Group(directory=tmp_path) as group:
        assert (group.rank, group.size, group.local_rank, group.machines) == (0, 1, 0, 1)
        assert group.local_ranks == [0]
        group.barrier()
        assert group.broadcast(b"alone") == b"alone"
        assert group.rank_of(group.agent.identity) == 0
        with pytest.raises(errors.InvalidArgument, match="close the group"):
            group.agent.close()
        with pytest.raises(errors.InvalidArgument):
            group.peer(1)
    with pytest.raises(errors.Closed):
        group.barrier()
    with pytest.raises(errors.InvalidArgument, match="between-machines"):
        Group(fabric="sometimes")


LAUNCHERS = {
    "mpich": ["mpirun.mpich", "-n"],
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"],
}


@pytest.fixture(params=LAUNCHERS)
def run_ranks(request, tmp_path):
    launcher = request.param
    if launcher == "torchrun":
        pytest.importorskip("torch", "2", reason="torchrun of PyTorch 1 does not run with Python 3.11")
    elif not shutil.which(LAUNCHERS[launcher][0]):
        pytest.skip(f"{LAUNCHERS[launcher][0]} is not installed")

    def run(count, body):
        """Runs the body, with a group, in each rank. Returns what each rank found."""
        program = tmp_path / "program.py"
        source = textwrap.indent(textwrap.dedent(body), "    ")
        program.write_text(
            "import json, numpy, fabricast\n"
            "from fabricast.launch import Group\n"
            f"with Group(directory={str(tmp_path)!r}) as group:\n{source}\n"
            f"    with open(f'{tmp_path}/rank-{{group.rank}}', 'w') as file:\n"
            "        json.dump(found, file)\n"
        )
        python = [] if launcher == "torchrun" else [sys.executable]
        command = [*LAUNCHERS[launcher], str(count), *python, str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(count)]

    return run


def test_ranks_put_into_each_other(run_ranks):
    body = """
        inbox = fabricast.allocate((1000,), "int32")
        outbox = fabricast.allocate((1000,), "int32")
        numpy.asarray(outbox)[:] = group.rank
        agent = group.agent
        region = agent.register(inbox, write=True)
        descriptors = group.all_gather(region.descriptor)
        next_rank = (group.rank + 1) % group.size
        route = agent.join(group.peer(next_rank), descriptors[next_rank], agent.register(outbox))
        agent.put(route, notice=(1, b"")).wait()
        event = agent.next_event()
        while event.kind != "notice":
            event = agent.next_event()
        sender = group.rank_of(event.agent)
        group.barrier()
        root = group.broadcast(bytes([group.rank]), root=2)[0]
        found = [group.size, group.local_ranks, sender, int(numpy.asarray(inbox).sum()), root]
    """
    assert run_ranks(3, body) == [[3, [0, 1, 2], sender, 1000 * sender, 2] for sender in (2, 0, 1)]


def test_ranks_join_a_node(run_ranks):
    body = """
        with group.node() as node:
            with node.topic("steps").subscriber() as subscriber:
                group.barrier()
                if group.rank == 0:
                    with node.open("steps").publisher() as publisher:
                        publisher.publish(numpy.arange(5))
                with subscriber.pull() as sample:
                    found = int(numpy.asarray(sample.array).sum())
                group.barrier()
    """
    assert run_ranks(2, body) == [10, 10]


def test_ranks_reduce_arrays(run_ranks):
    body = """
        total = group.all_reduce(numpy.full(3, group.rank + 1))
        rows = group.all_gather(total + group.rank)
        mine = group.reduce_scatter(rows)
        group.broadcast(total, root=1)
        found = [total.tolist(), rows[:, 0].tolist(), mine.tolist(), len(group.all_gather(b"message"))]
    """
    assert run_ranks(3, body) == [[[6] * 3, [6, 7, 8], [18 + 3 * rank] * 3, 3] for rank in range(3)]

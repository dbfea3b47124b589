"""The backend of torch.distributed, compared with Gloo."""

import datetime
import multiprocessing
import os
import signal
import tempfile

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

if not dist.is_available():
    pytest.skip("PyTorch has no torch.distributed", allow_module_level=True)

import fabricast.torch.distributed  # noqa: E402
from fabricast import errors  # noqa: E402

PROCESSES = multiprocessing.get_context("fork")
TIMEOUT = datetime.timedelta(seconds=60)


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICAST_DIRECTORY", str(tmp_path))


def in_ranks(ranks, tmp_path, body, backends=("fabricast",), timeout=TIMEOUT, machines=1):
    """Runs the body in processes, with each backend. Returns what each rank returned with each backend.

    With several machines each has as many ranks: a directory stands for a machine.
    """

    def run(rank):
        try:
            if machines > 1:
                # Short: it has sockets.
                os.environ["FABRICAST_DIRECTORY"] = f"{directory.name}/{rank * machines // ranks}"
            torch.set_num_threads(1)
            found = []
            for backend in backends:
                store = dist.FileStore(str(tmp_path / f"store-{backend}"), ranks)
                dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
                found.append(body(rank))
                dist.destroy_process_group()
        except BaseException as error:
            torch.save(error, tmp_path / f"rank-{rank}")
            raise
        torch.save(found, tmp_path / f"rank-{rank}")

    directory = tempfile.TemporaryDirectory()
    processes = [PROCESSES.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode is not None
    written = [(rank, tmp_path / f"rank-{rank}") for rank in range(ranks)]
    directory.cleanup()
    found = {rank: torch.load(path, weights_only=False) for rank, path in written if path.exists()}
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return found


def value(rank, *shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 50 + 3 * rank + 1).reshape(shape).to(dtype)


def check_like_gloo(ranks, tmp_path, body, machines=1):
    found = in_ranks(ranks, tmp_path, body, ("fabricast", "gloo"), machines=machines)
    for rank, (ours, theirs) in found.items():
        assert ours.keys() == theirs.keys()
        for name, tensors in theirs.items():
            for index, (found, expected) in enumerate(zip(ours[name], tensors)):
                assert torch.equal(found, expected), (rank, name, index, found, expected)


def test_operations_are_those_of_gloo(tmp_path):
    def body(rank):
        found = {}
        for dtype in [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16]:
            for op in [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]:
                tensor = value(rank, 3, 4, dtype=dtype) % 4
                dist.all_reduce(tensor, op)
                found[f"all-reduce {dtype} {op}"] = [tensor]
        tensor = value(rank, 5)
        dist.reduce(tensor, 1)
        found["reduce"] = [tensor] if rank == 1 else []
        tensor = value(rank, 1000)
        dist.broadcast(tensor, 2)
        found["broadcast"] = [tensor]
        strided = value(rank, 6, 4).t()
        dist.all_reduce(strided)
        found["strided"] = [strided]
        gathered = [torch.empty(4, 2) for _ in range(3)]
        dist.all_gather(gathered, value(rank, 2, 4).t())
        found["all-gather"] = gathered
        gathered = [torch.empty(3) for _ in range(3)] if rank == 0 else None
        dist.gather(value(rank, 3), gathered)
        found["gather"] = gathered or []
        scattered = torch.empty(3)
        dist.scatter(scattered, [value(other, 3) for other in range(3)] if rank == 1 else None, src=1)
        found["scatter"] = [scattered]
        objects = [None] * 3
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert [it["rank"] for it in objects] == [0, 1, 2]
        listed = [{"root": rank}]
        dist.broadcast_object_list(listed, 1)
        assert listed == [{"root": 1}]
        dist.barrier()
        work = dist.all_reduce(tensor := torch.ones(2), async_op=True)
        work.wait()
        assert work.is_completed()
        found["async"] = [tensor]
        return found

    check_like_gloo(3, tmp_path, body)


def test_operations_that_gloo_does_not_have(tmp_path):
    def body(rank):
        for dtype in [torch.bool, torch.complex64, torch.bfloat16, torch.int16]:
            tensor = value(rank, 1000, dtype=dtype)
            dist.broadcast(tensor, 1)
            assert torch.equal(tensor, value(1, 1000, dtype=dtype))
        half = value(rank, 10, dtype=torch.bfloat16)
        dist.all_reduce(half)
        assert torch.equal(half, value(0, 10, dtype=torch.bfloat16) + value(1, 10, dtype=torch.bfloat16))
        mean = value(rank, 4)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert torch.equal(mean, (value(0, 4) + value(1, 4)) / 2)
        flags = torch.tensor([rank == 0, True, False])
        dist.all_reduce(flags, dist.ReduceOp.MIN)
        assert flags.tolist() == [False, True, False]
        numbers = torch.tensor([complex(rank, 1)])
        dist.all_reduce(numbers)
        assert numbers.tolist() == [1 + 2j]
        flat = torch.empty(2, 3)
        gather = getattr(dist, "all_gather_into_tensor", dist._all_gather_base)
        gather(flat, value(rank, 3))
        assert torch.equal(flat, torch.stack([value(0, 3), value(1, 3)]))
        own = torch.empty(3)
        scatter = getattr(dist, "reduce_scatter_tensor", dist._reduce_scatter_base)
        scatter(own, flat)
        assert torch.equal(own, 2 * value(rank, 3))
        dist.reduce_scatter(own, [value(0, 3), value(1, 3)], dist.ReduceOp.MAX)
        assert torch.equal(own, value(rank, 3))
        received = torch.empty(4, 2)
        dist.all_to_all_single(received, value(rank, 4, 2))
        expected = torch.cat([value(other, 4, 2)[2 * rank : 2 * rank + 2] for other in range(2)])
        assert torch.equal(received, expected)
        # Rank 0 sends one row to itself and two to rank 1, and rank 1 three and one.
        splits, taken = [[1, 2], [3, 1]][rank], [[1, 3], [2, 1]][rank]
        received = torch.empty(sum(taken), 2)
        dist.all_to_all_single(received, value(rank, sum(splits), 2), taken, splits)
        parts = [value(0, 3, 2).split([1, 2])[rank], value(1, 4, 2).split([3, 1])[rank]]
        assert torch.equal(received, torch.cat(parts))
        outputs = [torch.empty(2), torch.empty(2)]
        dist.all_to_all(outputs, [value(rank, 2), 10 * value(rank, 2)])
        assert torch.equal(torch.stack(outputs), torch.stack([(10**rank) * value(other, 2) for other in range(2)]))
        with pytest.raises(NotImplementedError, match="collective operations only"):
            dist.send(torch.ones(1), 1 - rank)
        with pytest.raises(errors.InvalidArgument, match="SUM, AVG"):
            dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BAND)
        # The group goes on.
        dist.all_reduce(own)
        assert dist.get_backend() == "fabricast" and dist.get_rank() == rank
        return True

    assert in_ranks(2, tmp_path, body) == {0: [True], 1: [True]}


def test_groups_of_some_ranks(tmp_path):
    def body(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
        found = []
        for members, group in zip([[0, 2], [1, 2]], groups):
            if rank in members:
                tensor = torch.tensor([rank + 1])
                dist.all_reduce(tensor, group=group)
                found.append(tensor.item())
        return found

    assert in_ranks(3, tmp_path, body) == {0: [[4]], 1: [[5]], 2: [[4, 5]]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU(), torch.nn.Linear(300, 300)
        )
        self.last = torch.nn.Linear(300, 5)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, batch):
        return self.last(self.layers(batch))


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True, "bucket_cap_mb": 0.2}, {"gradient_as_bucket_view": True}]
)
def test_gradients_of_ddp_are_those_of_gloo(tmp_path, options):
    from torch.nn.parallel import DistributedDataParallel

    def body(rank):
        # Each rank begins with other weights: those of rank 0 count.
        torch.manual_seed(rank)
        model = Model()
        if "find_unused_parameters" not in options:
            del model.unused
        model = DistributedDataParallel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 20, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
        gradients = [it.grad for it in model.parameters() if it.grad is not None]
        assert len(gradients) >= 8
        return {"gradients": gradients, "weights": [it.detach() for it in model.parameters()]}

    check_like_gloo(2, tmp_path, body)


def test_sharded_training_is_that_of_gloo(tmp_path):
    pytest.importorskip("torch", "2", reason="fully_shard of PyTorch 1 does not load with Python 3.11")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this version of PyTorch has no fully_shard")
    from torch.distributed import _functional_collectives
    from torch.distributed.device_mesh import init_device_mesh

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        for layer in (model[0], model[2], model):
            fsdp.fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(model(value(rank, 4, 8)).square().mean())
            losses[-1].backward()
            optimizer.step()
        summed = _functional_collectives.all_reduce(value(rank, 3), "sum", dist.group.WORLD)
        return {"losses": [it.detach() for it in losses], "functional": [summed + 0]}

    check_like_gloo(2, tmp_path, body)


def test_killed_rank_is_named(tmp_path):
    def body(rank):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(errors.RankFailed, match="rank 1") as raised:
            dist.all_reduce(torch.ones(10))
        return raised.value.ranks

    assert in_ranks(2, tmp_path, body) == {0: [(1,)]}


def test_absent_rank_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set("machine/1", fabricast.torch.distributed._machine())
    with pytest.raises(errors.DeadlineExceeded, match="rank 1"):
        fabricast.torch.distributed.FabricastProcessGroup(store, 0, 2, datetime.timedelta(seconds=0.3))


def test_registering_again_changes_nothing():
    fabricast.torch.distributed.register()
    assert dist.Backend("fabricast")


def test_ranks_on_several_machines_have_the_same_operations(tmp_path):
    def body(rank):
        found = {}
        for count in (3, 100_000):
            tensor = value(rank, count)
            dist.all_reduce(tensor)
            found[f"all-reduce {count}"] = [tensor]
            gathered = [torch.empty(count) for _ in range(4)]
            dist.all_gather(gathered, value(rank, count))
            found[f"all-gather {count}"] = gathered
            tensor = value(rank, count)
            dist.broadcast(tensor, 3)
            found[f"broadcast {count}"] = [tensor]
        some = dist.new_group([1, 2])
        if rank in (1, 2):
            tensor = value(rank, 10)
            dist.all_reduce(tensor, group=some)
            found["some"] = [tensor]
        dist.barrier()
        return found

    check_like_gloo(4, tmp_path, body, machines=2)


def test_killed_rank_of_another_machine_is_named(tmp_path):
    def body(rank):
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(errors.RankFailed, match="rank 3"):
            dist.all_reduce(tensor)
        os._exit(0)

    in_ranks(4, tmp_path, body, machines=2)

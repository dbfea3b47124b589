"""Tensors of PyTorch in several processes."""

import gc
import multiprocessing
import os
import pathlib
import pickle
import socket
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
import fabricast  # noqa: E402
import fabricast.torch  # noqa: E402
from fabricast import errors  # noqa: E402

fork = torch.multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICAST_DIRECTORY", str(tmp_path))


def start(function, *arguments):
    """A forked child with a connection to this process."""
    here, there = fork.Pipe()

    def run():
        here.close()
        function(there, *arguments)

    child = fork.Process(target=run)
    child.start()
    there.close()
    return child, here


def finish(child):
    child.join(20)
    assert child.exitcode == 0


VIEWS = {
    "whole": lambda it: it,
    "rows": lambda it: it[1:3],
    "columns": lambda it: it[:, 1:7:2],
    "transposed": lambda it: it.T,
    "expanded": lambda it: it[:1].expand(3, 8),
    "element": lambda it: it[2, 3],
    "window": lambda it: it.as_strided((3, 3), (2, 1), 4),
    "nothing": lambda it: it[:0],
    "no columns": lambda it: it[:, 8:],
}
TYPES = [
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128", "bool",
    "bfloat16", "uint16", "float8_e4m3fn", "float8_e5m2",
]


def equal(one, other):
    assert one.dtype == other.dtype and one.shape == other.shape
    if one.element_size() == 1:
        one, other = one.view(torch.int8), other.view(torch.int8)
    return torch.equal(one.clone(), other.clone())


@pytest.mark.parametrize("device", ["host", "emulated:0"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_tensors_arrive_in_the_same_memory(view, device):
    whole = fabricast.torch.empty(4, 8, dtype=torch.int32, device=device)
    whole.copy_(torch.arange(32).reshape(4, 8))
    sent = view(whole)

    def receiver(to_parent):
        received = fabricast.torch.recv(to_parent)
        assert received.shape == sent.shape and received.stride() == sent.stride()
        assert equal(received, sent)
        if received.numel():
            received[(0,) * received.dim()] += 100
        to_parent.send("written")

    child, to_child = start(receiver)
    before = sent.clone()
    fabricast.torch.send(sent, to_child)
    assert to_child.recv() == "written"
    if sent.numel():
        first = (0,) * sent.dim()
        assert sent[first] == before[first] + 100
    finish(child)


@pytest.mark.parametrize("name", TYPES)
def test_tensors_of_each_type(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this version of PyTorch has no {name}")
    sent = fabricast.torch.empty(3, 5, dtype=dtype)
    sent.view(torch.uint8).copy_(torch.arange(sent.numel() * sent.element_size()).view(3, -1) % 2)
    here, there = multiprocessing.Pipe()
    for tensor in (sent, sent[:, 1::2], sent.T, sent.clone(), torch.empty(0, dtype=dtype)):
        fabricast.torch.send(tensor, here)
        assert equal(fabricast.torch.recv(there), tensor)


def test_tensors_of_other_memory_are_copied():
    sent = torch.arange(6.0).reshape(2, 3).T
    here, there = multiprocessing.Pipe()
    fabricast.torch.send(sent, here)
    received = fabricast.torch.recv(there)
    assert torch.equal(received, sent)
    received += 1
    assert sent[0, 0] == 0


def test_gradients_and_flags():
    here, there = multiprocessing.Pipe()

    def exchanged(tensor):
        fabricast.torch.send(tensor, here)
        return fabricast.torch.recv(there)

    leaf = torch.ones(3, requires_grad=True)
    received = exchanged(leaf)
    assert received.requires_grad and received.is_leaf
    (received * 2).sum().backward()
    assert torch.equal(received.grad, torch.full((3,), 2.0))
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    received = exchanged(parameter)
    assert isinstance(received, torch.nn.Parameter) and not received.requires_grad
    with pytest.raises(errors.InvalidArgument, match="detach"):
        exchanged(leaf * 2)
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(exchanged(numbers.conj()), numbers.conj())
    assert torch.equal(exchanged(numbers.conj().imag), numbers.conj().imag)
    with pytest.raises(errors.InvalidArgument, match="sparse"):
        exchanged(torch.eye(3).to_sparse())
    with pytest.raises(errors.InvalidArgument, match="meta"):
        exchanged(torch.empty(3, device="meta"))


def test_sockets_carry_tensors():
    one, other = socket.socketpair()
    sent = fabricast.torch.empty(1000)
    fabricast.torch.send(sent, one)
    received = fabricast.torch.recv(other)
    sent.fill_(3)
    assert received.sum() == 3000
    with pytest.raises(errors.DeadlineExceeded):
        fabricast.torch.recv(other, timeout=0.05)
    one.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(errors.Malformed):
        fabricast.torch.recv(other)
    one.close()
    with pytest.raises(EOFError):
        fabricast.torch.recv(other)


def test_hostile_messages_are_refused():
    message = fabricast.torch.token(torch.ones(3, 4))
    for length in range(len(message)):
        with pytest.raises(errors.Malformed):
            fabricast.torch.load(message[:length])
    empty = fabricast.torch.token(torch.ones(0, 4))
    for length in range(len(empty)):
        with pytest.raises(errors.Malformed):
            fabricast.torch.load(empty[:length])
    for changed in (empty[:4] + b"\xc8" + empty[5:], empty[:-16] + b"\x07" + empty[-15:]):
        try:
            fabricast.torch.load(changed)
        except errors.Malformed:
            pass
    assert torch.equal(fabricast.torch.load(message), torch.ones(3, 4))
    with pytest.raises(errors.Unknown):
        fabricast.torch.load(message)


@pytest.fixture
def installed():
    from multiprocessing.reduction import ForkingPickler

    before = dict(ForkingPickler._extra_reducers)
    fabricast.torch.install()
    yield
    ForkingPickler._extra_reducers.clear()
    ForkingPickler._extra_reducers.update(before)


def test_queues_of_torch_carry_tensors(installed):
    tasks, results = fork.Queue(), fork.Queue()

    def worker():
        for tensor in iter(tasks.get, None):
            tensor.mul_(2)
            results.put(tensor.sum().item())

    child = fork.Process(target=worker)
    child.start()
    mine = fabricast.torch.empty(4, 8)
    mine.fill_(1)
    for tensor, expected in ((mine, 64), (mine[1:3, ::2], 32), (torch.ones(5), 10)):
        tasks.put(tensor)
        assert results.get(timeout=20) == expected
    tasks.put(None)
    finish(child)
    assert mine[0, 0] == 2 and mine[1, 0] == 4, "written by the worker"


def test_spawned_processes_of_torch_share_tensors(installed, tmp_path):
    program = tmp_path / "spawned.py"
    program.write_text(
        "import torch, fabricast.torch\n"
        "def worker(tensor, done):\n"
        "    tensor += 1\n"
        "    done.put(float(tensor.sum()))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import spawned

        spawn = torch.multiprocessing.get_context("spawn")
        done = spawn.Queue()
        mine = fabricast.torch.empty(10)
        child = spawn.Process(target=spawned.worker, args=(mine, done))
        child.start()
        assert done.get(timeout=60) == 10
        finish(child)
        assert mine.sum() == 10
    finally:
        sys.path.remove(str(tmp_path))


def test_loss_of_the_sender_is_told():
    def sender(to_parent):
        to_parent.send_bytes(fabricast.torch.token(torch.ones(3)))
        os._exit(0)

    child, from_child = start(sender)
    message = from_child.recv_bytes()
    finish(child)
    with pytest.raises(errors.Closed, match="has ended"):
        fabricast.torch.load(message)


def test_sent_tensors_are_kept_until_they_are_received():
    here, there = multiprocessing.Pipe()
    for number in range(200):
        sent = fabricast.torch.empty(100)
        sent.fill_(number)
        fabricast.torch.send(sent, here)
    del sent
    gc.collect()
    for number in range(200):
        assert fabricast.torch.recv(there)[99] == number


def test_samples_are_tensors(node, name):
    topic = node.topic(name)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        publisher.publish(torch.arange(6.0).reshape(2, 3).T)
        with subscriber.pull() as sample, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            received = torch.tensor(memoryview(sample.array).tolist())
        assert torch.equal(received, torch.arange(6.0).reshape(2, 3).T)
        with publisher.loan((4,), torch.float32) as loan:
            torch.from_dlpack(loan.array).copy_(torch.arange(4.0))
            gc.collect()
        assert memoryview(subscriber.pull().array).tolist() == [0, 1, 2, 3]


def test_loans_are_assigned_from_tensors(node, name):
    topic = node.topic(name, dtype=torch.float32, shape=(2, 3))
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        with publisher.loan() as loan:
            loan.array[...] = torch.arange(6.0).reshape(2, 3)
        assert subscriber.pull().array[1].tolist() == [3, 4, 5]


def test_bytes_are_not_read_as_tensors_of_float32(node, name):
    array = fabricast.allocate((2, 3), "int16")
    with pytest.raises(Exception, match="buffer|without type"):
        torch.asarray(array)
    assert torch.from_dlpack(array).shape == (2, 3)
    assert torch.frombuffer(memoryview(array), dtype=torch.int16).numel() == 6


def test_messages_are_read_by_every_version(node, name):
    topic = node.topic(name)
    with topic.publisher() as publisher, topic.subscriber() as subscriber, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        publisher.publish(torch.arange(3))
        array = subscriber.pull().array
        try:
            received = torch.from_dlpack(array)
        except BufferError as error:
            # A version that does not know read-only arrays: as the message says.
            assert "torch.from_numpy(numpy.asarray(array))" in str(error)
            received = torch.from_numpy(array[...])
        assert received.tolist() == [0, 1, 2]


def test_structures_of_tensors_are_opened_as_tensors(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    parameters = model.state_dict()
    with fabricast.share(parameters, copy=True, directory=tmp_path) as shared:
        opened = fabricast.torch.open(shared.token, directory=tmp_path)
        assert list(opened) == list(parameters)
        assert all(torch.equal(opened[name], parameters[name]) for name in parameters)
        again = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        again.load_state_dict(opened)
        shared.value["0.bias"][...] = 7
        assert opened["0.bias"].tolist() == [7, 7, 7]
    nested = {"steps": [fabricast.torch.empty(2, 3), (1, "text")], "narrow": torch.ones(3, dtype=torch.bfloat16)}
    with pytest.raises(errors.InvalidArgument, match="copy=True"):
        fabricast.share(nested, directory=tmp_path)
    nested["narrow"] = fabricast.torch.empty(3, dtype=torch.bfloat16)
    with fabricast.share(nested, directory=tmp_path) as shared:
        opened = fabricast.torch.open(shared.token, directory=tmp_path)
        opened["narrow"].fill_(2)
        assert nested["narrow"].tolist() == [2, 2, 2] and opened["steps"][1] == (1, "text")


def test_tensors_are_pickled_by_torch_without_install():
    assert torch.equal(pickle.loads(pickle.dumps(torch.ones(3))), torch.ones(3))


def test_memory_is_not_kept_if_the_message_cannot_be_sent(tmp_path):
    directory = tmp_path / "share"
    here, there = socket.socketpair()
    there.close()
    for _ in range(3):
        with pytest.raises(OSError):
            fabricast.torch.send(torch.ones(1 << 20), here, directory=directory)
    with pytest.raises(AttributeError):
        fabricast.torch.send(torch.ones(1 << 20), None, directory=directory)
    here.close()
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert not [line for line in maps.splitlines() if "memfd" in line and _length(line) == 4 << 20]


def _length(line):
    first, last = line.split()[0].split("-")
    return int(last, 16) - int(first, 16)


def test_message_must_describe_the_memory(tmp_path):
    message = bytearray(fabricast.torch.token(torch.ones(3), directory=tmp_path / "share"))
    for place, wrong in ((4, 7), (4, 5), (5, 2)):
        changed = bytearray(fabricast.torch.token(torch.ones(3), directory=tmp_path / "share"))
        changed[place] = wrong
        with pytest.raises(errors.Malformed, match="the memory of"):
            fabricast.torch.load(bytes(changed), directory=tmp_path / "share")
    assert torch.equal(fabricast.torch.load(bytes(message), directory=tmp_path / "share"), torch.ones(3))


@pytest.mark.parametrize("device", ["cpu", "host", torch.device("cpu")])
def test_devices_have_the_names_of_torch_too(device):
    assert fabricast.torch.empty(3, device=device).device.type == "cpu"


def test_other_objects_are_no_tensors():
    with pytest.raises(errors.InvalidArgument, match="list is no tensor"):
        fabricast.torch.token([1])


def test_requests_take_tensors():
    with fabricast.Agent("here") as here, fabricast.Agent("there") as there:
        source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
        region = there.register(target, write=True)
        route = here.join(here.connect(there.card), region.descriptor, here.register(source))
        blocks = torch.tensor([[0, 8, 8], [8, 0, 8], [16, 16, 8]])
        put = here.prepare(route, blocks, "put")
        assert here.submit(put, torch.tensor([0, 2], dtype=torch.int32)).wait() == 16
        assert target[:24].tolist() == [*range(8, 16), *[0] * 8, *range(16, 24)]
        with pytest.raises(errors.InvalidArgument, match="float32"):
            here.submit(put, torch.tensor([0.0]))

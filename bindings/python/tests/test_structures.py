"""Structures of arrays, names, pickles, and other users."""

import json
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
import time

import fabricast
import numpy
import pytest
from fabricast import errors


def in_process(program, *arguments, timeout=60, **options):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def model(count):
    return {"layers": [{"weight": numpy.full((8, 4), number, "float32"), "bias": numpy.arange(4) + number} for number in range(count)]}


def test_structures_arrive_as_they_are(tmp_path):
    structure = {
        "w": numpy.arange(6, dtype="float32").reshape(2, 3),
        "nested": [numpy.int8(3), ("text", 2.5, None, True), {}],
        7: numpy.zeros((0, 2)),
        "records": numpy.zeros(2, [("a", "<i4"), ("b", "<f8")]),
        "bits": numpy.array([True, False]),
    }
    with fabricast.share(structure, copy=True, directory=tmp_path) as shared:
        found = fabricast.open(shared.token, directory=tmp_path)
    assert list(found) == list(structure)
    assert numpy.array_equal(found["w"], structure["w"]) and found["w"].dtype == "float32"
    assert found["nested"][0][()] == 3 and found["nested"][1:] == [("text", 2.5, None, True), {}]
    assert found[7].shape == (0, 2)
    assert found["records"].dtype == structure["records"].dtype
    assert found["bits"].dtype == bool


def test_a_structure_has_one_descriptor_for_owner_and_reader(tmp_path):
    program = """
import os, sys, fabricast
count = lambda: len(os.listdir("/proc/self/fd"))
first = fabricast.share(fabricast.allocate(3, "uint8"), directory=sys.argv[2])
first_opened = fabricast.open(first.token, directory=sys.argv[2])
before = count()
found = fabricast.open(bytes.fromhex(sys.argv[1]), directory=sys.argv[2])
print(count() - before, sum(int(layer["weight"][7, 3]) for layer in found["layers"]))
"""
    fabricast.share(fabricast.allocate(3, "uint8"), directory=tmp_path).close()
    before = descriptors()
    with fabricast.share(model(100), copy=True, directory=tmp_path) as shared:
        assert descriptors() - before <= 3
        assert len(shared.token) < 200
        opened, total = map(int, in_process(program, shared.token.hex(), tmp_path).split())
        # The connection, and the memory.
        assert opened <= 2 and total == sum(range(100))


def test_the_owner_writes_what_readers_see(tmp_path):
    with fabricast.share(model(2), copy=True, directory=tmp_path) as shared:
        found = fabricast.open(shared.token, directory=tmp_path)
        shared.value["layers"][1]["weight"][...] = 42
        assert found["layers"][1]["weight"][7, 3] == 42
        found["layers"][0]["bias"][0] = -1
        assert shared.value["layers"][0]["bias"][0] == -1
    with fabricast.share(model(1), copy=True, readonly=True, directory=tmp_path) as shared:
        found = fabricast.open(shared.token, directory=tmp_path)
        assert found["layers"][0]["bias"].readonly and not shared.value["layers"][0]["bias"].readonly


def test_memory_of_allocate_is_shared_in_place(tmp_path):
    block, other = fabricast.allocate((4, 8), "int32"), fabricast.allocate(3, "float64")
    view = numpy.asarray(block)[1::2, ::-2]
    with fabricast.share({"a": block, "b": view, "c": other}, directory=tmp_path) as shared:
        found = fabricast.open(shared.token, directory=tmp_path)
        view[1, 1] = 5
        other[2] = 2.5
        assert found["b"][1, 1] == 5 and found["a"][3, 5] == 5 and found["c"][2] == 2.5
        # An opened structure can be shared again.
        with fabricast.share(found, directory=tmp_path) as again:
            assert fabricast.open(again.token, directory=tmp_path)["c"][2] == 2.5


def deep(levels):
    structure = []
    for _ in range(levels):
        structure = [structure]
    return structure


def test_structures_that_cannot_be_shared_say_why(tmp_path):
    itself = []
    itself.append(itself)
    for structure, words in [
        ({"a": numpy.zeros(3)}, "copy=True"),
        (itself, "contains itself"),
        ({(1, 2): fabricast.allocate(3, "uint8")}, "neither a text nor a number"),
        ([object()], "is no array"),
        ([numpy.zeros(3, ">f4")], "big-endian"),
        ([10**5000], "an integer of 16610 bits"),
        (deep(5000), "too many levels"),
    ]:
        with pytest.raises((errors.InvalidArgument, TypeError), match=words):
            fabricast.share(structure, directory=tmp_path)


@pytest.mark.parametrize(
    "tree",
    [
        ["a", -1, 1 << 40, "int8", [1], None], ["a", -1, 0, "int8", [1 << 62], None], ["a", -1, -1, "int8", [1], None],
        ["a", -1, 0, "int64", [2], [1 << 61]], ["a", 0, 0, "int8", [1], None], ["a", 5], ["p", 3], ["x"], [], {}, 3, None,
        ["a", -1, 0, "float64", [1 << 62], [0]], ["a", -1, 0, "float64", [1 << 31, 1 << 31], [0, 0]], ["d", [[[], ["v", 1]]]], ["a", -1, 0, "nothing", [1], None], ["a", -1, 0, "{a:i4", [1], None], ["a", -1, 0, "int8", "x", None],
    ],
)  # fmt: skip
def test_malformed_structures_are_refused(tree, tmp_path):
    from fabricast import _native

    description = json.dumps({"parts": [], "tree": tree}).encode()
    memory = fabricast.allocate(4096, "uint8")
    memory[:8] = numpy.frombuffer(len(description).to_bytes(8, "little"), "uint8")
    memory[8 : 8 + len(description)] = numpy.frombuffer(description, "uint8")
    with _native._share_structure(memory, [], None, False, (tmp_path, None, [], [])) as shared:
        with pytest.raises(errors.Malformed):
            fabricast.open(shared.token, directory=tmp_path)
        for length in (1 << 63, 4089, 3):
            memory[:8] = numpy.frombuffer(length.to_bytes(8, "little"), "uint8")
            with pytest.raises(errors.Malformed):
                fabricast.open(shared.token, directory=tmp_path)


class Strided:
    """An array of more elements than there are addresses, all in the same place."""

    def __init__(self):
        self.memory = numpy.zeros(8)
        self.__array_interface__ = dict(self.memory.__array_interface__, shape=(1 << 62,), strides=(0,))


def test_more_elements_than_addresses_are_refused(tmp_path, exchange):
    for use in (exchange, lambda it: fabricast.share(it, copy=True, directory=tmp_path), lambda it: fabricast.share([it], copy=True)):
        with pytest.raises(errors.InvalidArgument, match=r"less than 2\^63 bytes"):
            use(Strided())


def test_records_are_shared_and_pickled(tmp_path):
    records = fabricast.allocate(3, [("a", "<i4"), ("b", "<f8")])
    records[1] = (2, 2.5)
    with fabricast.share(records, directory=tmp_path) as shared:
        opened = fabricast.open(shared.token, directory=tmp_path)
        assert opened.dtype == records.dtype and opened[1]["b"] == 2.5
        records["a"] = 7
        assert (opened["a"] == 7).all()
    assert pickle.loads(pickle.dumps(records))[1]["b"] == 2.5
    with fabricast.share(numpy.zeros(2, "i4,f8"), copy=True, directory=tmp_path) as shared:
        assert fabricast.open(shared.token, directory=tmp_path).shape == (2,)


def test_memory_of_others_that_is_read_only_is_pickled_as_a_copy(tmp_path):
    program = """
import pickle, sys, fabricast
opened = fabricast.open("read-only", directory=sys.argv[1])
assert opened.readonly
copied = pickle.loads(pickle.dumps(opened))
assert copied[2] == 5 and not copied.readonly
"""
    array = fabricast.allocate(3, "uint8")
    array[2] = 5
    with fabricast.share(array, name="read-only", readonly=True, directory=tmp_path):
        in_process(program, tmp_path)


# Names.


@pytest.mark.parametrize("timeout", [float("nan"), -1])
def test_timeouts_that_are_none_are_refused(timeout, tmp_path):
    for call in (
        lambda: fabricast.open("name", timeout=timeout, directory=tmp_path),
        lambda: fabricast.open(b"token", timeout=timeout, directory=tmp_path),
        lambda: fabricast.wait([], timeout),
    ):
        with pytest.raises(errors.InvalidArgument, match="at least 0 seconds"):
            call()


def test_memory_that_is_there_is_opened_without_waiting(tmp_path):
    with fabricast.share(fabricast.allocate(3, "uint8"), name="here", directory=tmp_path) as shared:
        for token in ("here", shared.token):
            assert fabricast.open(token, timeout=0, directory=tmp_path).shape == (3,)


def test_users_that_do_not_exist_are_named(tmp_path):
    array = fabricast.allocate(3, "uint8")
    for options, words in [
        ({"users": "no-such-user"}, "share memory failed: there is no user 'no-such-user'"),
        ({"groups": ["no-such-group"]}, "there is no group"),
        ({"users": [-1]}, "-1 is no number of a user"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=words):
            fabricast.share(array, directory=tmp_path, **options)
    with pytest.raises(errors.InvalidArgument, match="open shared memory failed: there is no user"):
        fabricast.open("name", owner="no-such-user", timeout=0, directory=tmp_path)


def test_memory_is_found_by_its_name(tmp_path):
    program = """
import sys, fabricast
array = fabricast.allocate(3, "int16")
array[...] = [1, 2, 3]
shared = fabricast.share(array, name="weights", directory=sys.argv[1])
print("shared", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        # The reader may begin before the owner.
        found = fabricast.open("weights", timeout=20, directory=tmp_path)
        assert found.dtype == "int16" and found[2] == 3
        with pytest.raises(errors.TooMany, match="already"):
            fabricast.share(found, name="weights", directory=tmp_path)
        # The name of a killed owner can be used again.
        owner.kill()
        owner.wait()
        with pytest.raises(TimeoutError, match="weights"):
            fabricast.open("weights", timeout=0.05, directory=tmp_path)
        assert found[2] == 3
        with fabricast.share(fabricast.allocate(1, "uint8"), name="weights", directory=tmp_path):
            assert fabricast.open("weights", timeout=1, directory=tmp_path).shape == (1,)
    with pytest.raises(LookupError):
        fabricast.open("weights", timeout=0, directory=tmp_path)
    assert not list(pathlib.Path(tmp_path).glob("shared-*"))


@pytest.mark.parametrize("name", ["", "a/b", "x" * 129, "a\n"])
def test_names_that_cannot_be_used_say_why(name, tmp_path):
    with pytest.raises(errors.InvalidArgument, match="1 to 128 bytes"):
        fabricast.share(fabricast.allocate(1, "uint8"), name=name, directory=tmp_path)
    with pytest.raises(errors.InvalidArgument, match="1 to 128 bytes"):
        fabricast.open(name, timeout=0, directory=tmp_path)


@pytest.mark.parametrize("token", [3, None, 2.5, ["weights"]])
def test_other_tokens_say_what_a_token_is(token):
    with pytest.raises(errors.InvalidArgument, match="neither a token.*nor a name"):
        fabricast.open(token)


# Pickles.


SENDER = """
import multiprocessing, sys, time
import fabricast, numpy

def made(number):
    array = fabricast.allocate(64, "int32")
    array[...] = number
    return array

def produce(queue):
    for number in range(20):
        queue.put(made(number))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2, maxtasksperchild=1) as pool:
        assert [int(array.sum()) for array in pool.map(made, range(6), chunksize=1)] == [64 * number for number in range(6)]
    queue = context.Queue()
    producer = context.Process(target=produce, args=(queue,))
    producer.start()
    time.sleep(0.3)
    assert [int(queue.get(timeout=20).sum()) for _ in range(20)] == [64 * number for number in range(20)]
    producer.join(20)
    assert producer.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_arrays_outlive_the_process_that_sent_them(method, tmp_path):
    program = tmp_path / "sender.py"
    program.write_text(SENDER)
    environment = {**os.environ, "FABRICAST_DIRECTORY": str(tmp_path / "node")}
    subprocess.run([sys.executable, program, method], timeout=60, check=True, env=environment)


def _double(array):
    array[...] *= 2
    return array


def test_arrays_go_through_queues(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICAST_DIRECTORY", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    array = fabricast.allocate(4, "int64")
    array[...] = range(4)
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_echo, args=(there, back))
    process.start()
    try:
        there.put(array)
        returned = back.get(timeout=60)
        # Both have the same memory.
        assert numpy.asarray(array).tolist() == [0, 2, 4, 6]
        returned[0] = 5
        assert array[0] == 5
        there.put(None)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


def _echo(there, back):
    while (array := there.get(timeout=60)) is not None:
        back.put(_double(array))
        del array


def test_messages_are_pickled_as_copies(exchange):
    sample = exchange(numpy.arange(3))
    copied = pickle.loads(pickle.dumps(sample.array))
    assert numpy.asarray(copied).tolist() == [0, 1, 2] and not copied.readonly
    with pytest.raises(TypeError):
        pickle.dumps(sample)


def test_every_pickle_is_for_one_receiver():
    array = fabricast.allocate(3, "uint8")
    pickled = pickle.dumps(array)
    assert len(pickled) < 400
    first = pickle.loads(pickled)
    first[0] = 7
    assert array[0] == 7
    with pytest.raises(errors.Unknown):
        pickle.loads(pickled)


# Other users.


@pytest.mark.skipif(os.getuid() != 0, reason="changes the user: needs root")
def test_other_users_open_what_they_are_admitted_to(tmp_path_factory):
    directory = tmp_path_factory.mktemp("users")
    for above in [directory, *directory.parents][:3]:
        above.chmod(0o755)
    package = pathlib.Path(fabricast.__file__).parent.parent
    program = """
import os, sys
sys.path[:0] = [sys.argv[1]]
import numpy, fabricast, fabricast._array
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    array = fabricast.open(sys.argv[2], owner="root", timeout=2, directory=sys.argv[3])
    print(array[0])
except fabricast.errors.Denied as error:
    print("denied")
except PermissionError as error:
    print("no file")
"""

    def other_user(name):
        return in_process(program, package, name, directory).strip()

    array = fabricast.allocate(3, "uint8")
    array[...] = 9
    with fabricast.share(array, name="admitted", users=["nobody"], directory=directory):
        assert other_user("admitted") == "9"
    with fabricast.share(array, name="admitted", groups=[65534], directory=directory):
        assert other_user("admitted") == "9"
    with fabricast.share(array, name="other", users=[12345], directory=directory):
        assert other_user("other") == "denied"


def test_waits_for_a_name_end_with_ctrl_c(tmp_path):
    program = "import sys, fabricast; print('waits', flush=True); fabricast.open('missing', timeout=None, directory=sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.1)
        process.send_signal(2)
        assert "KeyboardInterrupt" in process.communicate(timeout=20)[1]

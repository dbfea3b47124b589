"""CUDA devices, with the driver of tests/fake_cuda in LD_LIBRARY_PATH: no GPU is needed, and none is used."""

import ctypes
import gc
import multiprocessing
import os
import time
from types import SimpleNamespace

import fabricast
import pytest
from fabricast import _native, errors

numpy = pytest.importorskip("numpy")
if not any(device["product"] == "Fake GPU 0" for device in fabricast.info()["devices"]):
    pytest.skip("the driver of tests/fake_cuda is not in LD_LIBRARY_PATH", allow_module_level=True)

spawn = multiprocessing.get_context("spawn")
driver = ctypes.CDLL("libcuda.so.1")
allocator = ctypes.CDLL(_native.__file__)
allocator.fabricast_torch_malloc.restype = ctypes.c_void_p
MEBI = 1 << 20


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def on_host(array):
    """Memory of the fake driver, as an array of the host."""
    shown = dict(array.__cuda_array_interface__)
    shown.pop("stream", None)

    class Shown:
        __array_interface__ = shown
        owner = array

    return numpy.asarray(Shown())


class CudaArray:
    """Like CuPy: an array at an address of a device."""

    def __init__(self, address, shape, typestr="<f4", strides=None, owner=None):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "strides": strides, "data": (address, False), "version": 3,
        }


class OnlyDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        assert options["stream"] == 1
        return self.array.__dlpack__(**options)


def test_memory_of_a_device():
    array = fabricast.allocate((3, 4), "float32", device="cuda:1")
    assert array.device == "cuda:1" and array.__dlpack_device__() == (2, 1)
    on_host(array)[:] = numpy.arange(12).reshape(3, 4)
    assert array.tobytes() == numpy.arange(12, dtype="float32").tobytes()
    with pytest.raises(BufferError, match="DLPack"):
        memoryview(array)
    with pytest.raises(AttributeError):
        array.__array_interface__
    copied = numpy.from_dlpack(array, device="cpu")
    assert copied.sum() == 66
    with pytest.raises(errors.Error, match="cuda:7"):
        fabricast.allocate((3,), "uint8", device="cuda:7")


def read_shared(connection):
    for device in (None, "cuda:1"):
        opened = fabricast.open(connection.recv_bytes(), device=device)
        assert opened.device == "cuda:0", opened.device
        seen = on_host(opened)
        connection.send((opened.shape, opened.strides, float(seen.sum())))
        connection.recv()
        seen[:] = 5
        connection.send("written")
        connection.recv()
        del opened, seen


@pytest.mark.parametrize("kind", ["library", "pool", "cudaMalloc"])
def test_processes_share_memory_of_a_device(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICAST_DIRECTORY", str(tmp_path))
    if kind == "library":
        own = fabricast.allocate((4, 8), "float32", device="cuda:0")
    elif kind == "pool":
        address = allocator.fabricast_torch_malloc(ctypes.c_size_t(128), 0, None)
        own = CudaArray(address, (4, 8))
    else:
        context, plain = ctypes.c_void_p(), ctypes.c_uint64()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert driver.cuCtxSetCurrent(context) == 0
        assert driver.cuMemAlloc_v2(ctypes.byref(plain), ctypes.c_size_t(128)) == 0
        own = CudaArray(plain.value, (4, 8))
    on_host(own)[:] = numpy.arange(32).reshape(4, 8)
    address = own.__cuda_array_interface__["data"][0]
    part = CudaArray(address + 4, (4, 3), strides=(32, 8), owner=own)
    here, there = spawn.Pipe()
    child = spawn.Process(target=read_shared, args=(there,))
    child.start()
    for whole in (own, part):
        expected = on_host(whole).sum()
        here.send_bytes(fabricast.share(whole).for_one_receiver())
        assert here.poll(30)
        assert here.recv() == (on_host(whole).shape, on_host(whole).strides, expected)
        here.send("write")
        assert here.recv() == "written" and (on_host(whole) == 5).all()
        here.send("next")
    child.join(30)
    assert child.exitcode == 0


def test_topics_take_and_give_arrays_of_devices(node, name):
    topic = node.topic(name, memory="cuda:0", largest=4096)
    with topic.publisher() as publisher, topic.subscriber() as subscriber:
        own = fabricast.allocate((4, 8), "float32", device="cuda:0")
        numbers = numpy.arange(32, dtype="float32").reshape(4, 8)
        on_host(own)[:] = numbers
        address = own.__cuda_array_interface__["data"][0]
        strided = CudaArray(address, (8, 4), strides=(4, 32), owner=own)
        for sent, expected in ((own, numbers), (OnlyDlpack(own), numbers), (strided, numbers.T), (numbers.T, numbers.T)):
            publisher.publish(sent)
            with subscriber.pull() as sample:
                assert sample.array.device == "cuda:0"
                assert numpy.array_equal(on_host(sample.array), expected)
        with publisher.loan((5,), "int32") as loan:
            on_host(loan.array)[:] = 3
            gc.collect()
        assert subscriber.pull().array.tobytes() == numpy.full(5, 3, "int32").tobytes()


def test_allocator_of_pytorch():
    def allocate(length, stream=None):
        address = allocator.fabricast_torch_malloc(ctypes.c_size_t(length), 1, ctypes.c_void_p(stream))
        assert address
        return address

    def free(address, stream=None):
        allocator.fabricast_torch_free(ctypes.c_void_p(address), ctypes.c_size_t(0), 1, ctypes.c_void_p(stream))

    blocks = [allocate(MEBI, 8) for _ in range(10)]
    assert len(set(blocks)) == 10 and all(block % 512 == 0 for block in blocks)
    found = _native._pool_statistics(1)
    assert found["allocated"] == 10 * MEBI and found["reserved"] == 32 * MEBI
    for block in blocks:
        free(block, 8)
    assert allocate(MEBI, 8) in blocks
    # More than the device has.
    assert allocator.fabricast_torch_malloc(ctypes.c_size_t(1 << 40), 1, None) is None
    assert allocator.fabricast_torch_malloc(ctypes.c_size_t(1), 99, None) is None
    free(12345)


def hold_shared(connection):
    opened = fabricast.open(connection.recv_bytes())
    connection.send("opened")
    connection.recv()
    del opened
    gc.collect()
    connection.send("dropped")
    connection.recv()


def test_owner_of_shared_memory_is_kept(tmp_path, monkeypatch):
    """The owner is like a tensor of PyTorch, whose memory its allocator would use again."""
    monkeypatch.setenv("FABRICAST_DIRECTORY", str(tmp_path))

    class Owner:
        pass

    import weakref

    owner = Owner()
    kept = weakref.ref(owner)
    address = allocator.fabricast_torch_malloc(ctypes.c_size_t(4096), 0, None)
    here, there = spawn.Pipe()
    child = spawn.Process(target=hold_shared, args=(there,))
    child.start()
    here.send_bytes(fabricast.share(CudaArray(address, (16,), owner=owner)).for_one_receiver())
    del owner
    gc.collect()
    assert here.recv() == "opened" and kept() is not None
    here.send("drop")
    assert here.recv() == "dropped"
    wait_until(lambda: kept() is None)
    here.send("end")
    child.join(30)
    assert child.exitcode == 0


def test_agents_move_memory_of_devices(tmp_path):
    with fabricast.Agent("one", directory=tmp_path) as one, fabricast.Agent("other", directory=tmp_path) as other:
        inbox = fabricast.allocate((64,), "float32", device="cuda:1")
        outbox = fabricast.allocate((64,), "float32", device="cuda:0")
        on_host(outbox)[:] = numpy.arange(64)
        region = other.register(inbox, write=True)
        try:
            route = one.join(one.connect(other.card), region.descriptor, one.register(OnlyDlpack(outbox)))
        except errors.NoPath as error:
            # In one process devices need memory that is open to both.
            assert "cuda" in str(error)
            return
        one.put(route).wait()
        assert numpy.array_equal(on_host(inbox), on_host(outbox))


class CudaStream:
    """A stream of the driver, as PyTorch and other libraries show theirs."""

    def __init__(self, index):
        self.device = SimpleNamespace(index=index)
        context, handle = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) == 0
        assert driver.cuCtxSetCurrent(context) == 0
        assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
        self.handle = handle.value

    def __cuda_stream__(self):
        return 0, self.handle


def test_transfers_follow_cuda_streams():
    with fabricast.Agent("one") as one, fabricast.Agent("other") as other:
        inbox, outbox = (fabricast.allocate((64,), "float32", device="cuda:0") for _ in range(2))
        region = other.register(inbox, write=True, read=True)
        route = one.join(one.connect(other.card), region.descriptor, one.register(outbox))
        assert route.path == "same-process"
        stream = CudaStream(0)
        of_torch = SimpleNamespace(cuda_stream=stream.handle, device=stream.device)
        prepared = one.prepare(route, [(0, 0, 128), (128, 128, 128)], "put")
        for number, used in enumerate([stream, stream.handle, of_torch, 0, 1]):
            on_host(outbox)[:] = number
            on_host(inbox)[:] = -1
            put = one.put(route, stream=used)
            put.delay_stream(used)
            assert put.wait() == 256 and (on_host(inbox) == number).all()
            on_host(outbox)[:] = 50
            assert one.submit(prepared, [1], stream=used).wait() == 128
            assert on_host(inbox).tolist() == [number] * 32 + [50] * 32
        with pytest.raises(errors.NotSupported, match="per-thread default stream"):
            one.put(route, stream=2)
        graph = ctypes.c_void_p()
        assert driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream.handle), 2) == 0
        for call in (
            lambda: one.put(route, stream=stream),
            lambda: one.get(route, stream=stream),
            lambda: one.submit(prepared, stream=stream),
            lambda: put.delay_stream(stream),
        ):
            with pytest.raises(errors.NotSupported, match="captured into a graph"):
                call()
        assert driver.cuStreamEndCapture(ctypes.c_void_p(stream.handle), ctypes.byref(graph)) == 0
        assert one.put(route, stream=stream).wait() == 256


def test_transfers_of_host_memory_follow_cuda_streams():
    with fabricast.Agent("one") as one, fabricast.Agent("other") as other:
        inbox, outbox = fabricast.allocate((64,), "uint8"), fabricast.allocate((64,), "uint8")
        region = other.register(inbox, write=True)
        route = one.join(one.connect(other.card), region.descriptor, one.register(outbox))
        memoryview(outbox)[:] = bytes(range(64))
        stream = CudaStream(1)
        assert one.put(route, stream=stream).wait() == 64 and inbox.tobytes() == bytes(range(64))
        with pytest.raises(errors.InvalidArgument, match="device of the stream is not known"):
            one.put(route, stream=stream.handle)


def test_foreign_addresses_are_refused():
    here = numpy.zeros(16, "float32")
    with pytest.raises(errors.InvalidArgument, match="no address of a CUDA device"):
        fabricast.share(CudaArray(here.ctypes.data, (16,)))
    own = fabricast.allocate((16,), "float32", device="cuda:0")
    address = own.__cuda_array_interface__["data"][0]
    far = CudaArray(address, (1 << 30,))
    with pytest.raises(errors.Error):
        fabricast.share(far)
    with pytest.raises(errors.InvalidArgument, match="no multiples"):
        fabricast.share(CudaArray(address, (2, 2), strides=(6, 3)))


def _handle_of_pool(expected):
    address = allocator.fabricast_torch_malloc(ctypes.c_size_t(4 * MEBI), 0, None)
    handle = ctypes.c_uint64()
    assert driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)) == 0
    exported = (ctypes.c_uint8 * 64)()
    assert (driver.cuMemExportToShareableHandle(exported, handle, 8, ctypes.c_uint64(0)) == 0) == expected
    assert any(exported) == expected
    assert fabricast.info()["devices"][0]["fabric_handles"] == expected


@pytest.mark.parametrize("is_permitted", [False, True])
def test_memory_of_pool_has_fabric_handles_where_permitted(is_permitted, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_IMEX", str(int(is_permitted)))
    process = spawn.Process(target=_handle_of_pool, args=(is_permitted,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [("type", ctypes.c_uint), ("handle_types", ctypes.c_uint), ("location_type", ctypes.c_uint),
                ("device", ctypes.c_int), ("security", ctypes.c_void_p), ("flags", ctypes.c_uint8 * 8)]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location_type", ctypes.c_uint), ("device", ctypes.c_int), ("flags", ctypes.c_uint)]


def mapped_memory(length, handle_types):
    """Memory of another allocator, mapped from one piece."""
    context, handle, address = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    properties, zero = Properties(1, handle_types, 1, 0), ctypes.c_uint64(0)
    size = ctypes.c_size_t(length)
    assert driver.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(properties), zero) == 0
    assert driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero) == 0
    assert driver.cuMemMap(address, size, ctypes.c_size_t(0), handle, zero) == 0
    access = Access(1, 0, 3)
    assert driver.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1)) == 0
    return address.value


def _share_by_fabric_handle(connection, directory):
    os.environ["FABRICAST_DIRECTORY"] = directory
    own = CudaArray(mapped_memory(2 * MEBI, 8), (4, 8))
    on_host(own)[:] = numpy.arange(32).reshape(4, 8)
    connection.send_bytes(fabricast.share(own).for_one_receiver())
    assert connection.recv() == "seen"
    assert (on_host(own) == 5).all()


@pytest.mark.parametrize("is_permitted", [False, True])
def test_memory_with_fabric_handles_only_is_opened_where_permitted(is_permitted, tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICAST_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("FAKE_CUDA_IMEX", "1")
    here, there = spawn.Pipe()
    owner = spawn.Process(target=_share_by_fabric_handle, args=(there, str(tmp_path)))
    owner.start()
    assert here.poll(30)
    token = here.recv_bytes()
    # The owner may create such handles; this process may open them only with a channel of IMEX.
    monkeypatch.setenv("FAKE_CUDA_IMEX", str(int(is_permitted)))
    if is_permitted:
        opened = fabricast.open(token)
        seen = on_host(opened)
        assert (seen == numpy.arange(32).reshape(4, 8)).all()
        seen[:] = 5
        here.send("seen")
        owner.join(30)
        assert owner.exitcode == 0
    else:
        with pytest.raises(errors.Error, match="import memory"):
            fabricast.open(token)
        owner.kill()
        owner.join(30)


def test_views_are_registered_by_their_allocations(tmp_path):
    agent = fabricast.Agent("here", directory=str(tmp_path))
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    starts = []
    for _ in range(2):
        plain = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(plain), ctypes.c_size_t(MEBI)) == 0
        starts.append(plain.value)
    # Each page of 4 KiB is followed by a gap, and pages of both caches alternate.
    pages = [CudaArray(start + at, (1024,)) for at in range(8192, MEBI, 8192) for start in starts]
    views = agent.register_views(pages, read=True)
    assert len(views) == len(pages) and {id(region) for region, _ in views} == {id(views[0][0]), id(views[1][0])}
    assert [offset for _, offset in views[::2]] == list(range(0, MEBI - 8192, 8192))
    assert agent.register_views([]) == []
    for wrong, cause in (
        ([pages[0], numpy.zeros(4)], "array 1 is not on a GPU"),
        ([CudaArray(starts[0], (4, 3), strides=(32, 8))], "array 0 is empty or has gaps"),
    ):
        with pytest.raises(errors.InvalidArgument, match=cause):
            agent.register_views(wrong)
    begin = time.monotonic()
    many = agent.register_views([pages[at % len(pages)] for at in range(10_000)])
    print(f"10 000 views in {(time.monotonic() - begin) * 1e3:.1f} ms")
    assert len(many) == 10_000
    del many, views
    agent.close()


def _in_domain(body, rank, ranks, directory, results):
    os.environ["FAKE_CUDA_DEVICES"] = str(ranks)
    from fabricast.collective import Domain

    try:
        domain = Domain.join(rank, ranks, directory=directory)
        results.put((rank, body(domain)))
        domain.close()
    except BaseException as error:
        results.put((rank, error))
        raise


def in_domain(ranks, directory, body):
    """Runs the body in processes with a device each. Returns what each rank returned."""
    results = spawn.Queue()
    arguments = [(body, rank, ranks, directory, results) for rank in range(ranks)]
    processes = [spawn.Process(target=_in_domain, args=it) for it in arguments]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return [found[rank] for rank in range(ranks)]


def _array(domain, values):
    array = fabricast.allocate(values.shape, str(values.dtype), device=f"cuda:{domain.rank}")
    on_host(array)[...] = values
    return array


def _operations(domain):
    rank, size = domain.rank, domain.size
    # The last size is reduced in the buffers of the ranks, by handles of their memory.
    for count in (3, 5000, 5 << 20):
        each = [numpy.arange(count, dtype="float32") % 100 + other for other in range(size)]
        own = _array(domain, each[rank])
        assert domain.all_reduce(own) is own and (on_host(own) == sum(each)).all()
        own, out = _array(domain, each[rank]), _array(domain, numpy.zeros(count, "float32"))
        assert domain.all_reduce(own, out=out) is out
        assert (on_host(out) == sum(each)).all() and (on_host(own) == each[rank]).all()
        gathered = domain.all_gather(own)
        assert gathered.device == f"cuda:{rank}" and (on_host(gathered) == numpy.stack(each)).all()
        blocks = [numpy.arange(size * count, dtype="float32").reshape(size, count) + other for other in range(size)]
        mine = _array(domain, blocks[rank])
        assert (on_host(domain.reduce_scatter(mine)) == sum(blocks)[rank]).all()
        assert (on_host(domain.all_to_all(mine)) == numpy.stack([block[rank] for block in blocks])).all()
        gathered = domain.gather(own, 1)
        assert (on_host(gathered) == numpy.stack(each)).all() if rank == 1 else gathered is None
        out = _array(domain, numpy.zeros(count, "float32"))
        domain.scatter(mine if rank == 0 else None, 0, out=out)
        assert (on_host(out) == blocks[0][rank]).all()
        own = _array(domain, each[rank])
        assert (on_host(domain.broadcast(own, 1)) == each[1]).all()
        own = _array(domain, each[rank])
        reduced = domain.reduce(own, 0)
        assert (on_host(own) == sum(each)).all() if rank == 0 else reduced is None
        # Arrays of the host, in the same domain.
        assert (domain.all_reduce(each[rank].copy()) == sum(each)).all()
    with pytest.raises(errors.InvalidArgument, match="in memory of the host"):
        domain.all_reduce(own, out=numpy.zeros(count, "float32"))
    with pytest.raises(errors.Unavailable, match="equal"):
        domain.all_gather(own, counts=[count, count])
    return True


def test_operations_on_arrays_of_devices_match_numpy(tmp_path):
    assert in_domain(2, tmp_path, _operations) == [True, True]


def _on_a_stream(domain):
    handle = ctypes.c_void_p()
    own = _array(domain, numpy.ones(1000, "float32"))
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    domain.use_stream(SimpleNamespace(cuda_stream=handle.value, device=SimpleNamespace(index=domain.rank)))
    for _ in range(10):
        domain.all_reduce(own)
    assert driver.cuStreamSynchronize(handle) == 0
    domain.check()
    domain.use_stream(None)
    with pytest.raises(errors.InvalidArgument, match="device of the stream is not known"):
        domain.use_stream(1)
    return float(on_host(own)[999])


def test_operations_start_on_a_stream_of_the_program(tmp_path):
    assert in_domain(2, tmp_path, _on_a_stream) == [1024.0, 1024.0]


def _mismatch(domain):
    own = _array(domain, numpy.ones(1000, "float32"))
    domain.all_reduce(own)
    failure = None
    try:
        domain.all_reduce(own) if domain.rank == 0 else domain.broadcast(own, 1)
    except errors.Mismatch as error:
        failure = str(error)
    return failure


def test_ranks_that_call_different_operations_of_devices_learn_both(tmp_path):
    for failure in in_domain(2, tmp_path, _mismatch):
        assert "all-reduce of 1000 f32" in failure and "broadcast of 1000 f32 with root 1" in failure


def _late(domain):
    own = _array(domain, numpy.ones(1000, "float32"))
    domain.all_reduce(own)
    if domain.rank == 1:
        time.sleep(1.5)
        return None
    began = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded) as failure:
        domain.all_reduce(own, timeout=0.5)
    took = time.monotonic() - began
    assert failure.value.ranks == (1,) and 0.4 < took < 1.4, (failure.value.ranks, took)
    return str(failure.value)


def test_rank_that_does_not_call_an_operation_of_devices_is_named(tmp_path):
    assert "rank 1" in in_domain(2, tmp_path, _late)[0]

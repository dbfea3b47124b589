"""Communication domains and parameter stores, whose ranks are processes."""

import multiprocessing
import os
import pathlib
import signal
import time

import fabricast
import pytest
from fabricast import errors
from fabricast.collective import Domain, Parameters, ParamStore
from fabricast.launch import Group

numpy = pytest.importorskip("numpy")

PROCESSES = multiprocessing.get_context("fork")


def _rank(body, rank, ranks, directory, results):
    # The parent of the fork has not used the library in this test.
    try:
        results.put((rank, body(rank, ranks, directory)))
    except BaseException as error:
        results.put((rank, error))
        raise


def in_ranks(ranks, directory, body):
    """Runs the body in processes. Returns what each rank returned."""
    results = PROCESSES.Queue()
    processes = [PROCESSES.Process(target=_rank, args=(body, rank, ranks, directory, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return [found[rank] for rank in range(ranks)]


def in_domain(ranks, directory, body, **options):
    def run(rank, ranks, directory):
        with Domain.join(rank, ranks, directory=directory, **options) as domain:
            return body(domain)

    return in_ranks(ranks, directory, run)


def value(rank, count, dtype="float64"):
    return (numpy.arange(count) % 100 + rank + 1).astype(dtype)


@pytest.mark.parametrize("count", [1, 1000, 200_000])
def test_operations_match_numpy(tmp_path, count):
    def body(domain):
        rank, size = domain.rank, domain.size
        each = [value(other, count) for other in range(size)]
        blocks = [value(other, size * count).reshape(size, count) for other in range(size)]
        own = each[rank].copy()
        assert domain.all_reduce(own) is own
        assert (own == sum(each)).all()
        out = numpy.empty(count)
        assert domain.all_reduce(each[rank], "max", out=out) is out
        assert (out == each[-1]).all() and (each[rank] == value(rank, count)).all()
        own = each[rank].copy()
        reduced = domain.reduce(own, 1, "mean")
        assert (reduced is own and numpy.allclose(own, sum(each) / size)) if rank == 1 else reduced is None
        own = each[rank].copy()
        assert (domain.broadcast(own, 1) == each[1]).all()
        gathered = domain.all_gather(each[rank])
        assert gathered.shape == (size, count) and (gathered == numpy.stack(each)).all()
        assert (domain.reduce_scatter(blocks[rank]) == sum(blocks)[rank]).all()
        expected = numpy.stack([block[rank] for block in blocks])
        assert (domain.all_to_all(blocks[rank]) == expected).all()
        place = blocks[rank].copy()
        assert domain.all_to_all(place, out=place) is place and (place == expected).all()
        gathered = domain.gather(each[rank], 0)
        assert (gathered == numpy.stack(each)).all() if rank == 0 else gathered is None
        if rank == 0:
            assert (domain.scatter(blocks[0]) == blocks[0][0]).all()
        else:
            out = numpy.empty(count)
            assert domain.scatter(None, out=out) is out and (out == blocks[0][rank]).all()
        domain.barrier()
        return True

    assert in_domain(3, tmp_path, body) == [True] * 3


def test_unequal_blocks(tmp_path):
    counts = [3, 0, 5]

    def body(domain):
        rank = domain.rank
        each = [value(other, counts[other], "int16") for other in range(3)]
        everything = numpy.concatenate(each)
        assert (domain.all_gather(each[rank], counts=counts) == everything).all()
        gathered = domain.gather(each[rank], 2, counts=counts)
        assert gathered is None if rank != 2 else (gathered == everything).all()
        scattered = domain.scatter(everything if rank == 2 else None, 2, counts=counts,
                                   out=None if rank == 2 else numpy.empty(counts[rank], "int16"))
        assert (scattered == each[rank]).all()
        reduced = domain.reduce_scatter(everything, counts=counts)
        assert (reduced == each[rank] * 3).all()
        # Rank n sends as many elements to rank m as m has.
        received = domain.all_to_all(everything, send_counts=counts, receive_counts=[counts[rank]] * 3)
        assert (received == numpy.tile(each[rank], 3)).all()
        return True

    assert in_domain(3, tmp_path, body) == [True] * 3


def test_types_and_kinds_of_arrays(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def body(domain):
        for dtype in ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32"]:
            assert domain.all_reduce(numpy.full(5, 2, dtype), "product").tolist() == [4] * 5, dtype
        half = domain.all_reduce(numpy.full(5, 1.5, ml_dtypes.bfloat16))
        assert half.dtype == ml_dtypes.bfloat16 and half.tolist() == [3] * 5
        assert domain.all_reduce(numpy.array([domain.rank == 0, True]), "min").tolist() == [False, True]
        moved = domain.all_gather(numpy.array([complex(1, domain.rank)]))
        assert moved.tolist() == [[1], [1 + 1j]]
        records = numpy.array([(domain.rank, 2.5)], [("id", "u8"), ("pose", "f4")])
        assert domain.all_gather(records)["id"].tolist() == [[0], [1]]
        own = fabricast.allocate((2, 3), "float32")
        own[...] = domain.rank + 1
        assert domain.all_reduce(own) is own and float(own[1, 2]) == 3
        gathered = domain.all_gather(own)
        assert isinstance(gathered, fabricast.Array) and gathered.shape == (2, 2, 3)
        data = bytearray([domain.rank, 7])
        assert domain.all_reduce(data, "max") is data and data == bytearray([1, 7])
        # What cannot be written stays.
        frozen = numpy.ones(3)
        frozen.flags.writeable = False
        assert domain.all_reduce(frozen).tolist() == [2] * 3 and frozen.tolist() == [1] * 3
        assert domain.broadcast(frozen if domain.rank == 0 else numpy.zeros(3)).tolist() == [1] * 3
        return True

    assert in_domain(2, tmp_path, body) == [True] * 2


def test_invalid_arguments_leave_the_domain_as_it_is(tmp_path):
    def body(domain):
        ones = numpy.ones((4, 4))
        invalid = [
            (lambda: domain.all_reduce(ones.T[::2]), "contiguous"),
            (lambda: domain.all_reduce(ones, "sums"), "sum, product, min, max, mean"),
            (lambda: domain.all_reduce(ones > 0), "bool have no sum"),
            (lambda: domain.all_reduce(ones * 1j), "complex128 have no sum"),
            (lambda: domain.all_reduce(ones, out=numpy.ones(3)), ""),
            (lambda: domain.all_reduce(ones, out=numpy.ones((4, 4), "float32")), "of float64, that for the result"),
            (lambda: domain.broadcast(ones, 2), "rank 2 does not exist"),
            (lambda: domain.reduce_scatter(ones), "first axis"),
            (lambda: domain.all_gather(ones, counts=[1]), ""),
            (lambda: domain.all_gather(ones, out=numpy.ones(3)), "3 elements are not blocks"),
            (lambda: domain.all_to_all(ones, send_counts=[8, 8]), "together"),
            (lambda: domain.scatter(None, domain.rank), "passes the array"),
            (lambda: domain.scatter(ones, 1 - domain.rank), "passes out"),
            (lambda: domain.barrier(-1), "timeout"),
        ]
        for call, text in invalid:
            with pytest.raises(errors.InvalidArgument, match=text):
                call()
        with pytest.raises(TypeError, match="is no array"):
            domain.all_reduce([1, 2])
        return domain.all_reduce(numpy.ones(1)).tolist()

    assert in_domain(2, tmp_path, body) == [[2]] * 2


def test_different_calls_are_reported_with_the_ranks(tmp_path):
    def body(rank, ranks, directory):
        domain = Domain.join(rank, ranks, directory=directory)
        with pytest.raises(errors.Mismatch, match=r"rank 0 calls all-reduce of 1 f64") as raised:
            domain.all_reduce(numpy.ones(1 + rank))
        with pytest.raises(errors.Mismatch):
            domain.barrier()
        return sorted(raised.value.ranks), raised.value.operation

    assert in_ranks(2, tmp_path, body) == [([0, 1], "all-reduce")] * 2


def test_late_and_absent_ranks_are_named(tmp_path):
    def body(rank, ranks, directory):
        domain = Domain.join(rank, ranks, directory=directory)
        if rank == 1:
            time.sleep(0.5)
        with pytest.raises(TimeoutError) as raised:
            domain.barrier(timeout=0.1)
        return raised.value.ranks

    assert in_ranks(2, tmp_path, body) == [(1,)] * 2
    with pytest.raises(errors.DeadlineExceeded, match="rank 1"):
        Domain.join(0, 2, directory=tmp_path, timeout=0.1)
    with pytest.raises(errors.InvalidArgument):
        Domain.join(2, 2, directory=tmp_path)


def test_killed_rank_is_named(tmp_path):
    def body(rank, ranks, directory):
        domain = Domain.join(rank, ranks, directory=directory)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(errors.RankFailed, match="rank 2") as raised:
            domain.barrier()
        return raised.value.ranks

    results = PROCESSES.Queue()
    processes = [PROCESSES.Process(target=_rank, args=(body, rank, 3, tmp_path, results)) for rank in range(3)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in range(2)) == [(0, (2,)), (1, (2,))]
    for process in processes:
        process.join(60)


def test_signal_handler_ends_a_wait(tmp_path):
    def body(rank, ranks, directory):
        domain = Domain.join(rank, ranks, directory=directory)
        if rank == 0:
            def interrupt(*_):
                raise KeyboardInterrupt

            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                domain.barrier()
            assert time.monotonic() - started < 5
            return True
        time.sleep(1)
        with pytest.raises(errors.Closed, match="rank 0") as raised:
            domain.barrier()
        return raised.value.ranks

    assert in_ranks(2, tmp_path, body) == [True, (0,)]


def test_closed_domain(tmp_path):
    with Domain.join(0, 1, directory=tmp_path) as domain:
        assert (domain.rank, domain.size) == (0, 1)
        assert domain.all_reduce(numpy.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(errors.Closed, match="domain was closed"):
        domain.barrier()
    domain.close()


def test_forked_child_cannot_use_the_domain(tmp_path):
    domain = Domain.join(0, 1, directory=tmp_path)
    child = os.fork()
    if child == 0:
        try:
            domain.barrier()
        except errors.Forked:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    domain.barrier()
    domain.close()


def test_fixed_and_learnt_parameters(tmp_path):
    direct = Parameters(algorithm="two-step", chunk_bits=14)
    assert direct == Parameters(chunk_bits=14, algorithm="two-step") != Parameters()
    for invalid in [{"alpha": 1001}, {"chunk_bits": 41}, {"algorithm": "one"}]:
        with pytest.raises(errors.InvalidArgument):
            Parameters(**invalid)

    def fixed(domain):
        return domain.all_reduce(numpy.ones(100_000)).sum()

    assert in_domain(2, tmp_path, fixed, parameters=direct) == [200_000] * 2

    def learnt(domain):
        array = numpy.zeros(1 << 18, "float32")
        for _ in range(40):
            domain.all_reduce(array)
        found = domain.parameters("all_reduce", array.nbytes, "float32")
        if domain.rank == 0:
            domain.load(domain.save("here"), "here")
            with pytest.raises(errors.Malformed, match="topology"):
                domain.load(domain.save("here"), "there")
            domain.freeze()
        domain.barrier()
        return repr(found)

    first, second = in_domain(2, tmp_path, learnt)
    assert first == second


def execute(store, count):
    for _ in range(count):
        entry = store.enter("all-gather", 1 << 24, timeout=30)
        fast = entry.fast_bytes(1 << 24)
        second = (1 << 24) - fast
        store.record(entry, fast_time=fast / 300e9, second_time=second / 30e9, fast_bytes=fast, second_bytes=second)
    return entry


@pytest.mark.parametrize("options", [{}, {"round_timeout": 1.0, "aggregation": 90}, {"aggregation": "mean"}])
def test_parameter_store(tmp_path, options):
    def body(rank, ranks, directory):
        with ParamStore.attach(rank, ranks, directory=directory, first_alpha=900, **options) as store:
            entry = execute(store, 30)
            assert entry.number == 30 and entry.operation == "all-gather"
            assert store.parameters("all-gather", 1 << 24) == entry.parameters
            if rank == 1:
                json = store.save("two paths")
                assert "all-gather" in json
                store.load(json, "two paths")
                while not store.has_lost_writer:
                    time.sleep(0.01)
                assert execute(store, 5).parameters == entry.parameters
            return entry.parameters.alpha

    first, second = in_ranks(2, tmp_path, body)
    assert first == second and 880 < first < 930


def test_rank_that_is_behind_is_named(tmp_path):
    def body(rank, ranks, directory):
        store = ParamStore.attach(rank, ranks, directory=directory)
        if rank == 1:
            time.sleep(1)
            store.close()
            return True
        store.enter("barrier", 0)
        store.enter("barrier", 0)
        with pytest.raises(errors.DeadlineExceeded, match="rank 1") as raised:
            store.enter("barrier", 0, timeout=0.1)
        with pytest.raises(errors.InvalidArgument, match="all-reduce, all-gather"):
            store.enter("nothing", 0)
        return raised.value.ranks

    assert in_ranks(2, tmp_path, body) == [(1,), True]


def test_group_of_one_rank(tmp_path):
    with Group(directory=tmp_path) as group:
        ones = numpy.ones((1, 3))
        assert group.all_reduce(ones) is ones
        assert group.all_gather(ones).shape == (1, 1, 3)
        assert group.broadcast(ones) is ones and group.broadcast(b"ones") == b"ones"
        assert group.reduce(ones) is ones
        assert group.reduce_scatter(ones).shape == group.scatter(ones).shape == (3,)
        assert group.all_to_all(ones).shape == (1, 3) and group.gather(ones).shape == (1, 1, 3)
        domain = group.domain()
        assert domain is group.domain() and domain.size == 1
    with pytest.raises(errors.Closed):
        domain.barrier()


def test_directory_is_empty_afterwards(tmp_path):
    in_domain(2, tmp_path, lambda domain: domain.barrier())
    assert list(pathlib.Path(tmp_path).iterdir()) == []

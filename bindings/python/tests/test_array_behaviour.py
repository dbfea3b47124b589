"""Arrays as users of NumPy, pandas, Arrow and PyTorch use them."""

import copy
import gc
import itertools
import operator
import subprocess
import sys
import warnings
import weakref

import fabricast
import numpy
import pytest
from fabricast import errors

POINT = numpy.dtype([("id", "<u8"), ("pose", "<f4", (3, 4)), ("valid", "?")])
ALIGNED = numpy.dtype([("small", "u1"), ("large", "<f8")], align=True)


@pytest.fixture
def matrix():
    array = fabricast.allocate((2, 3), "float32")
    array[...] = [[1, 2, 3], [4, 5, 6]]
    return array


def test_elements_are_read_and_written_by_index(matrix):
    assert matrix[1, 2] == 6 and isinstance(matrix[0, 0], numpy.float32)
    assert (matrix[:, 1] == [2, 5]).all()
    matrix[0] = 0
    matrix[1][:2] = 7
    assert numpy.asarray(matrix).tolist() == [[0, 0, 0], [7, 7, 6]]
    with pytest.raises(IndexError):
        matrix[2]


def test_it_has_the_length_and_the_elements_of_numpy(matrix):
    assert (len(matrix), matrix.size, matrix.ndim, matrix.nbytes) == (2, 6, 2, 24)
    assert [row.tolist() for row in matrix] == [[1, 2, 3], [4, 5, 6]]
    assert 6 in matrix and 7 not in matrix
    assert matrix.dtype == numpy.float32 and matrix.dtype.itemsize == 4
    with pytest.raises(TypeError, match="0-dimensional"):
        len(fabricast.allocate((), "int8"))


def test_comparisons_are_of_elements(matrix):
    assert (matrix == numpy.asarray(matrix)).all()
    assert (matrix == matrix).shape == (2, 3)
    assert (matrix > 3).sum() == 3
    with pytest.raises(ValueError, match="ambiguous"):
        bool(matrix)


def test_arrays_of_one_element_are_numbers():
    array = fabricast.allocate((), "float64")
    array[...] = 2.5
    assert (float(array), int(array), bool(array), array[()]) == (2.5, 2, True, 2.5)
    assert repr(array) == "fabricast.Array(2.5, dtype=float64)"


def test_text_has_the_values(matrix, exchange):
    assert repr(matrix) == "fabricast.Array([[1., 2., 3.],\n                 [4., 5., 6.]], dtype=float32)"
    assert repr(exchange(numpy.arange(3, dtype="int8")).array) == "fabricast.Array([0, 1, 2], dtype=int8, read-only)"
    assert repr(fabricast.allocate((2, 0), "int8")) == "fabricast.Array([], shape=(2, 0), dtype=int8)"
    assert repr(fabricast.allocate(4, "float4_e2m1fn")).startswith(("<fabricast.Array float4", "fabricast.Array(["))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (), (1,)])
def test_empty_arrays_and_single_elements_are_as_those_of_numpy(shape, exchange):
    array = fabricast.allocate(shape, "int16")
    assert numpy.asarray(array).shape == array.shape == shape
    assert numpy.from_dlpack(array).shape == shape
    assert exchange(array).array.shape == shape


def test_operators_are_those_of_numpy(matrix, exchange):
    same = numpy.array([[1, 2, 3], [4, 5, 6]], "float32")
    assert numpy.array_equal(matrix * 2 + 1, same * 2 + 1) and isinstance(matrix + 1, numpy.ndarray)
    assert numpy.array_equal(1 - matrix, 1 - same) and numpy.array_equal(-matrix, -same)
    assert numpy.array_equal(same + matrix, same + same) and numpy.array_equal(matrix + matrix, same + same)
    assert (matrix @ numpy.ones(3)).tolist() == [6, 15]
    whole = matrix
    whole += 1
    whole /= 2
    assert whole is matrix and numpy.array_equal(numpy.asarray(matrix), (same + 1) / 2)
    small = fabricast.allocate(5, "int4")
    small += 3
    small -= numpy.arange(5, dtype=small.dtype)
    assert small[...].astype(int).tolist() == [3, 2, 1, 0, -1]
    integers = fabricast.allocate(2, "int32")
    with pytest.raises(TypeError, match="Cannot cast"):
        integers += 0.5
    received = exchange(matrix).array
    with pytest.raises(ValueError, match="read-only"):
        received += 1
    with pytest.raises(TypeError, match="unsupported operand|could not be"):
        matrix + object()


def test_attributes_are_those_of_numpy(matrix):
    assert (matrix.sum(), matrix.mean(), matrix.max()) == (21, 3.5, 6)
    assert matrix.T.shape == (3, 2) and numpy.shares_memory(matrix.reshape(6), numpy.asarray(matrix))
    assert matrix.astype("int32").tolist() == [[1, 2, 3], [4, 5, 6]]
    matrix.fill(7)
    assert matrix[1, 2] == 7 and matrix.flags.writeable
    for name in ("missing", "_missing", "__missing__", "__array_ufunc__"):
        assert not hasattr(matrix, name)
    with pytest.raises(AttributeError, match="'fabricast.Array' object has no attribute 'sume'"):
        matrix.sume()
    assert not hasattr(fabricast.allocate(1, device="emulated:0"), "missing")


def test_memory_has_the_default_type_of_numpy():
    array = fabricast.allocate((2, 3))
    array[...] = 0.5
    assert (array.dtype, array.sum()) == (numpy.float64, 3)


def test_values_that_would_lose_something_are_refused(exchange):
    masked = numpy.ma.array([1, 2, 3], mask=[0, 1, 0])
    with pytest.raises(errors.InvalidArgument, match="filled"):
        exchange(masked)
    with pytest.raises(errors.InvalidArgument, match="filled"):
        fabricast.share(masked, copy=True)
    for value in (numpy.datetime64("2026-01-01"), numpy.timedelta64(3, "s")):
        with pytest.raises(errors.InvalidArgument, match="view"):
            exchange(value)
    assert exchange(numpy.float32(2.5)).array[()] == 2.5


ARRAY_API_TYPES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float32 float64 complex64 complex128".split()
)


@pytest.mark.parametrize("shape", [(), (0,), (2,), (2, 1, 2), (2, 0, 2)])
@pytest.mark.parametrize("dtype", ARRAY_API_TYPES)
def test_dlpack_has_the_options_of_the_array_api(dtype, shape):
    """As the DLPack part of array-api-tests has it, with arrays without dimensions, too."""
    array = fabricast.allocate(shape, dtype)
    array[...] = numpy.ones(shape, dtype)
    kind, number = array.__dlpack_device__()
    assert (int(kind), number) == (1, 0)
    for copy, version, device in itertools.product(
        (None, False, True), (None, (0, 8), (1, 0), (2, 0)), (None, (1, 0))
    ):
        capsule = array.__dlpack__(copy=copy, max_version=version, dl_device=device)
        assert ("dltensor_versioned" in repr(capsule)) == (version is not None and version >= (1, 0))
    for copy in (None, False, True):
        received = numpy.from_dlpack(array, copy=copy, device="cpu")
        assert (received.dtype, received.shape) == (numpy.dtype(dtype), shape)
        assert numpy.array_equal(received, numpy.asarray(array))
        if received.size:
            assert numpy.shares_memory(received, numpy.asarray(array)) == (copy is not True)
    with pytest.raises(BufferError, match="not copied to another device"):
        array.__dlpack__(dl_device=(2, 0))


def test_weak_references():
    matrix = fabricast.allocate((2, 3), "float32")
    matrix[...] = [[1, 2, 3], [4, 5, 6]]
    reference = weakref.ref(matrix)
    assert reference() is matrix
    view = numpy.asarray(matrix)
    del matrix
    gc.collect()
    # The view keeps it.
    assert view.sum() == 21
    del view
    gc.collect()
    assert reference() is None


def test_copies_are_arrays_of_their_own(matrix):
    for copied in (copy.copy(matrix), copy.deepcopy(matrix), copy.deepcopy({"a": matrix})["a"]):
        copied[...] = 0
        assert isinstance(copied, fabricast.Array) and matrix[0, 0] == 1


def test_read_only_arrays_are_not_written_by_index(exchange):
    array = exchange(numpy.arange(3)).array
    with pytest.raises(ValueError, match="read-only.*copy it"):
        array[0] = 1


def test_numpy_converts_and_copies(matrix):
    assert numpy.asarray(matrix, dtype="int64").dtype == numpy.int64
    copied = numpy.array(matrix)
    copied[...] = 0
    assert matrix[0, 0] == 1
    assert numpy.array(matrix, copy=False)[0, 0] == 1 if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else True


# Types of elements.


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (float, "float64"), (int, "int64"), (bool, "bool"), (complex, "complex128"), ("f4", "float32"),
        ("<i2", "int16"), ("=u8", "uint64"), (numpy.float32, "float32"), (numpy.dtype("int8"), "int8"),
        ("half", "float16"), ("single", "float32"), ("b", "int8"), ("?", "bool"),
    ],
)  # fmt: skip
def test_types_are_those_that_numpy_accepts(given, expected):
    assert fabricast.allocate(3, given).dtype == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (">i4", "big-endian.*<i4"), ("O", "objects"), ("U4", "encode"), ("S3", "uint8"), ("M8[ns]", "int64"),
        ("longdouble", "float64"), ("floaty", "no such type"), (None, None), ((float, 3), "one element"), (3.5, "no such type"),
        ([("a", ">i4")], "field 'a'.*big-endian"), ([("a", [("b", "i4")])], "has fields itself"), ([("ä", "i4")], "names of fields"),
    ],
)  # fmt: skip
def test_other_types_are_refused_with_the_remedy(given, words):
    if words is None:
        assert fabricast.allocate(3, given).dtype == "float64"
        return
    with pytest.raises(errors.InvalidArgument, match=f"(?i){words}"):
        fabricast.allocate(3, given)


@pytest.mark.parametrize("shape", [3, (3,), [3], numpy.int32(3), numpy.array([3]), range(3, 4)])
def test_shapes_are_those_that_numpy_accepts(shape, node, name):
    assert fabricast.allocate(shape, "int8").shape == (3,)
    topic = node.topic(name, dtype="int8", shape=shape)
    assert topic.type_name == "int8[3]"
    with topic.publisher() as publisher, publisher.loan(shape) as loan:
        assert loan.array.shape == (3,)


@pytest.mark.parametrize("shape", [(-1,), -1, 3.0, (2.5,), "3", b"3", (None,), (1 << 70,), {}, None])
def test_other_shapes_are_refused_with_the_remedy(shape):
    if shape == {}:
        assert fabricast.allocate(shape).shape == ()
        return
    with pytest.raises(errors.InvalidArgument, match="shape="):
        fabricast.allocate(shape)


@pytest.mark.parametrize("shape", [(2**44,), (2**40, 2**20), (2**62,)])
def test_more_than_there_is_is_a_memory_error(shape):
    with pytest.raises(MemoryError, match="bytes"):
        fabricast.allocate(shape, "uint8")
    with pytest.raises(errors.InvalidArgument, match=r"less than 2\^63 bytes"):
        fabricast.allocate((2**40, 2**20), "complex128")


def test_big_endian_arrays_are_refused_with_the_remedy(exchange):
    for sent, words in [
        (numpy.zeros(3, ">i4"), r"big-endian: use dtype \"<i4\""),
        (numpy.zeros(3, "M8[ns]"), r"array\.view\('int64'\)"),
        (numpy.zeros(3, object), "objects of Python"),
        (numpy.zeros(3, "U4"), "encode"),
        (numpy.zeros(3, "longdouble"), "float64"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=f"(?i){words}"):
            exchange(sent)


@pytest.mark.parametrize("dtype", [POINT, ALIGNED, numpy.dtype([("a", "i2"), ("b", "c16")])])
def test_records_arrive_with_their_fields(dtype, node, name, exchange):
    sent = numpy.zeros((2, 3), dtype)
    sent[dtype.names[0]] = numpy.arange(6).reshape(2, 3)
    for received in (exchange(sent).array, exchange(sent[:, ::2]).array):
        found = numpy.asarray(received)
        assert found.dtype == received.dtype == dtype
        assert (found == (sent if found.shape == sent.shape else sent[:, ::2])).all()
    topic = node.topic(f"typed-{name}", dtype=dtype, shape=4)
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        with publisher.loan() as loan:
            loan.array[dtype.names[1]] = 1
            loan.array[2] = sent[1, 2]
        received = subscriber.pull(10).array
        assert received.dtype == dtype and received[2] == sent[1, 2]
        with pytest.raises(errors.InvalidArgument, match="but the messages of the topic are {"):
            publisher.publish(numpy.zeros(4, "int8"))
    with pytest.raises(BufferError, match="records"):
        received.__dlpack__()


def test_records_that_cannot_be_described_say_why(node, name):
    many = numpy.dtype([(f"field_number_{number}", "<f8") for number in range(20)])
    with pytest.raises(errors.InvalidArgument, match="64 are the maximum"):
        node.topic(name, dtype=many, shape=3)
    with node.topic(name).publisher() as publisher:
        with pytest.raises(errors.InvalidArgument, match="shorter names"):
            publisher.publish(numpy.zeros(3, many))
    overlapping = numpy.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2]})
    fields = numpy.dtype([(f"f{number}", "u1") for number in range(65)])
    for dtype, words in [
        (overlapping, "do not overlap"), (numpy.dtype([]), "at least one field"), (fields, "at most 64 fields"),
    ]:  # fmt: skip
        with pytest.raises(errors.InvalidArgument, match=words):
            fabricast.allocate(3, dtype)
    reordered = numpy.dtype({"names": ["b", "a"], "formats": ["<i4", "<i8"], "offsets": [8, 0]})
    assert fabricast.allocate(3, reordered).dtype.fields["b"][1] == 8
    titled = numpy.dtype([(("a title", "x"), "<i4")])
    assert fabricast.allocate(3, titled).dtype.names == ("x",)


ml_dtypes = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import ml_dtypes"], capture_output=True).returncode != 0,
    reason="ml_dtypes is not installed",
)


@ml_dtypes
@pytest.mark.parametrize("name_of_type", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_types_are_those_of_ml_dtypes(name_of_type, node, name):
    import ml_dtypes

    dtype = numpy.dtype(getattr(ml_dtypes, name_of_type))
    topic = node.topic(name, dtype=dtype, shape=(2, 3))
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        with publisher.loan() as loan:
            assert loan.array.dtype == dtype
            numpy.asarray(loan.array)[...] = 1.5
            loan.array[0] = [1, 2, 3]
        received = subscriber.pull(10).array
        assert received.dtype == dtype
        assert numpy.asarray(received).astype("float32").tolist() == [[1, 2, 3], [1.5, 1.5, 1.5]]
        assert repr(received).endswith(f"dtype={name_of_type}, read-only)")
        publisher.publish(numpy.full((2, 3), 2, dtype))
        assert (subscriber.pull(10).array == dtype.type(2)).all()
        with pytest.raises(ValueError, match="read-only"):
            numpy.asarray(received)[0] = 1


@ml_dtypes
@pytest.mark.parametrize(
    ("name_of_type", "values"),
    [
        ("int4", [-8, -1, 0, 7, 3]),
        ("float4_e2m1fn", [0.5, -6, 1, 0, 3]),
        ("float6_e2m3fn", [0.125, -7.5, 1, 0, 2]),
        ("float6_e3m2fn", [0.0625, -28, 1, 0, 2]),
    ],
)
def test_types_of_less_than_a_byte_are_packed_and_unpacked(name_of_type, values):
    array = fabricast.allocate(5, name_of_type)
    array[...] = values
    assert array.nbytes < 5
    assert numpy.asarray(array).astype("float32").tolist() == values
    array[1] = 1
    assert array[1] == 1 and array[0] == values[0]
    with pytest.raises(ValueError, match="read-only"):
        numpy.asarray(array)[0] = 1
    with pytest.raises(ValueError, match="copy"):
        array.__array__(copy=False)


@ml_dtypes
def test_types_of_ml_dtypes_that_the_library_has_not_are_refused():
    import ml_dtypes

    with pytest.raises(errors.InvalidArgument, match="dtype=int2: arrays of the library have no such elements"):
        fabricast.allocate(3, ml_dtypes.int2)


@ml_dtypes
def test_packed_integers_begin_with_the_lowest_bits():
    array = fabricast.allocate(3, "int4")
    array[...] = [1, -2, 3]
    assert array.tobytes() == bytes([0xE1, 0x03])


@ml_dtypes
def test_unpacked_elements_are_refused_with_the_remedy(exchange):
    import ml_dtypes

    with pytest.raises(errors.InvalidArgument, match=r"loan\.array\[\.\.\.\] = array"):
        exchange(numpy.zeros(4, ml_dtypes.int4))


def test_types_that_numpy_has_not_are_an_error_without_ml_dtypes():
    program = """
import sys
sys.modules["ml_dtypes"] = None
import fabricast, numpy
array = fabricast.allocate(3, "bfloat16")
assert array.dtype == "bfloat16" and repr(array) == "<fabricast.Array bfloat16[3] on host>"
for call in (lambda: numpy.asarray(array), lambda: array[0], lambda: array.__setitem__(0, 1)):
    try:
        call()
    except TypeError as error:
        assert "install ml_dtypes" in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Loans.


def test_a_view_that_is_left_does_not_prevent_publishing(node, name):
    topic = node.topic(name, dtype="float32", shape=3)
    with topic.subscriber() as subscriber, topic.publisher() as publisher:
        with pytest.warns(errors.CopyWarning, match=r"loan\.array\[\.\.\.\] = x"), publisher.loan() as loan:
            frame = numpy.asarray(loan.array)
            frame[:] = 5
        frame[:] = 6
        # What is written later is no part of the message.
        assert subscriber.pull(10).array.tobytes() == numpy.full(3, 5, "float32").tobytes()
        for number in range(10):
            with warnings.catch_warnings(action="ignore") if sys.version_info >= (3, 11) else None:
                with publisher.loan() as loan:
                    frame = numpy.asarray(loan.array)
                    frame[:] = number
            assert (subscriber.pull(10).array == number).all()


def test_a_view_that_is_left_is_an_error_if_there_is_no_room_for_a_copy(node, name):
    topic = node.topic(name, largest=64, loans=1)
    with topic.publisher() as publisher:
        loan = publisher.loan(64, "uint8")
        view = memoryview(loan.array)
        with warnings.catch_warnings(), pytest.raises(BufferError, match=r"loan\.array\[\.\.\.\] = x"):
            warnings.simplefilter("ignore")
            loan.publish()
        view.release()
        assert loan.publish().subscribers == 0


def test_assignment_leaves_no_view(node, name):
    topic = node.topic(name, largest=64)
    with topic.subscriber() as subscriber, topic.publisher() as publisher, warnings.catch_warnings():
        warnings.simplefilter("error")
        with publisher.loan(64, "uint8") as loan:
            loan.array[...] = 7
            loan.array[:3] = [1, 2, 3]
        assert subscriber.pull(10).array[:4].tolist() == [1, 2, 3, 7]


# Other libraries.


def test_pandas_reads_it(matrix):
    pandas = pytest.importorskip("pandas")
    assert pandas.Series(matrix[0]).dtype == "float32"
    column = fabricast.allocate(3, "int32")
    column[...] = [1, 2, 3]
    series = pandas.Series(column)
    assert series.dtype == "int32" and series.sum() == 6
    assert pandas.DataFrame(matrix).shape == (2, 3)
    assert pandas.DataFrame({"a": column})["a"].tolist() == [1, 2, 3]


def test_series_of_pandas_are_published(exchange):
    pandas = pytest.importorskip("pandas")
    assert exchange(pandas.Series([1.5, 2.5])).array.tobytes() == numpy.array([1.5, 2.5]).tobytes()


def test_xarray_reads_it(matrix, exchange):
    xarray = pytest.importorskip("xarray")
    found = xarray.DataArray(matrix, dims=("y", "x"))
    assert found.dtype == "float32" and float(found.sum()) == 21
    assert exchange(found).array.shape == (2, 3)


def test_arrow_reads_it(matrix):
    pyarrow = pytest.importorskip("pyarrow")
    column = fabricast.allocate(4, "int64")
    column[...] = range(4)
    found = pyarrow.array(column)
    assert found.type == pyarrow.int64() and found.to_pylist() == [0, 1, 2, 3]
    # In place.
    column[0] = 9
    assert found[0].as_py() == 9
    with pytest.raises(ValueError, match="one dimension"):
        pyarrow.array(matrix)
    assert pyarrow.Tensor.from_numpy(matrix[...]).shape == (2, 3)


def test_arrays_of_arrow_are_published(exchange):
    pyarrow = pytest.importorskip("pyarrow")
    assert exchange(pyarrow.array([1, 2, 3], pyarrow.int32())).array.tobytes() == numpy.array([1, 2, 3], "i4").tobytes()
    table = pyarrow.table({"a": [1, 2, 3]})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    received = exchange(sink.getvalue()).array
    assert pyarrow.ipc.open_stream(pyarrow.py_buffer(received)).read_all() == table


def test_consumers_of_bytes_without_type_are_refused(matrix, exchange):
    # As torch.asarray does, which would read all bytes as float32.
    for consumer in (lambda: b"".join([matrix]), lambda: operator.setitem(bytearray(24), slice(None), matrix)):
        try:
            consumer()
        except (BufferError, TypeError) as error:
            assert "without type and shape" in str(error) or isinstance(error, TypeError)
    assert bytes(memoryview(matrix)) == matrix.tobytes()
    # Bytes are bytes.
    assert b"".join([exchange(b"bytes").array]) == b"bytes"

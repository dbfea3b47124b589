"""A backend of `torch.distributed`: CPU tensors of ranks on any machines, CUDA tensors of ranks of one machine, which
have a device each.

Importing this module registers the backend:

>>> import tempfile
>>> import torch
>>> import torch.distributed
>>> import fabricast.torch.distributed
>>> directory = tempfile.TemporaryDirectory()
>>> store = f"file://{directory.name}/store"
>>> torch.distributed.init_process_group("fabricast", init_method=store, rank=0, world_size=1)
>>> tensor = torch.ones(3)
>>> torch.distributed.all_reduce(tensor)
>>> tensor
tensor([1., 1., 1.])
>>> torch.distributed.destroy_process_group()
>>> directory.cleanup()

The ranks find each other by the store. Those that share the directory of `FABRICAST_DIRECTORY` are on one machine;
others use the fabric that the environment names, as for `fabricast.launch.Group`. An operation on CPU tensors is
complete when its call returns, also with `async_op=True`. One on CUDA tensors runs on a stream of the process group,
and `wait` lets the current stream wait for it. Lists of tensors of different lengths are for the CPU only. There is no
`send` and `recv`. If a rank fails, the exceptions of the others name it, and the process group is over. With CUDA
tensors the exception comes at the next operation, since no operation waits for its end: `barrier` waits, and raises if
results since the last one are not valid.
"""

import datetime as _datetime
import math as _math
import pathlib as _pathlib
import secrets as _secrets
from inspect import signature as _signature

import torch as _torch
import torch.distributed as _dist
from torch._C._distributed_c10d import _create_work_from_future

from fabricast._native import _directory
from fabricast.collective import Domain as _Domain
from fabricast.errors import InvalidArgument

__all__ = ["NAME", "FabricastProcessGroup", "register"]

NAME = "fabricast"
# Names of reductions, and their results for truth values.
_REDUCTIONS = [
    (_dist.ReduceOp.SUM, "sum", "max"),
    (_dist.ReduceOp.PRODUCT, "product", "min"),
    (_dist.ReduceOp.MIN, "min", "min"),
    (_dist.ReduceOp.MAX, "max", "max"),
    (_dist.ReduceOp.AVG, "mean", None),
]


def _machine():
    """A name of this machine since its start, and of the directory in which ranks of the machine meet."""
    directory = _directory()
    try:
        directory.mkdir(0o700, parents=True, exist_ok=True)
        status = directory.stat()
        boot = _pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {status.st_dev} {status.st_ino}"
    except OSError:
        return _secrets.token_hex(16)


def _check(operation, tensors):
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not _torch.strided:
            cause = f"a tensor of {tensor.device} and {tensor.layout}: the backend has dense tensors of the CPU and CUDA"
            raise InvalidArgument(f"{operation} failed: {cause}", operation)


def _equal(counts):
    """None for counts that are all equal."""
    return None if len(set(counts)) <= 1 else counts


def _flat(tensor):
    """The elements of a contiguous tensor in one row, without gradient."""
    return tensor.detach().reshape(-1)


def _bytes(tensor):
    """The elements of a contiguous tensor as bytes, for operations that only move them."""
    return _flat(tensor).view(_torch.uint8)


class _Result:
    """A contiguous tensor for a result, which is copied into a tensor that is not."""

    def __init__(self, tensor, has_input=False):
        self._target = tensor
        self.tensor = tensor.detach()
        if not tensor.is_contiguous():
            self.tensor = self.tensor.contiguous() if has_input else _torch.empty_like(
                self.tensor, memory_format=_torch.contiguous_format
            )

    def store(self):
        if self.tensor.data_ptr() != self._target.data_ptr():
            self._target.detach().copy_(self.tensor)


class FabricastProcessGroup(_dist.ProcessGroup):
    """The ranks of a process group, as one of them sees them."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._timeout = timeout.total_seconds()
        self._group_name = ""
        self._domain = _join(store, rank, size, self._timeout)
        # Of the first operation on CUDA tensors: all later ones run on it.
        self._stream = None

    def _run(self, operation, tensors, result, body):
        """Carries out an operation between these tensors."""
        _check(operation, tensors)
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if device is None:
            body()
            future = _torch.futures.Future()
            future.set_result(result)
            return _create_work_from_future(future)
        if self._stream is None:
            self._stream = _torch.cuda.Stream(device)
            self._domain.use_stream(self._stream)
        self._stream.wait_stream(_torch.cuda.current_stream(device))
        for tensor in tensors:
            if tensor.device.type == "cuda":
                # Its memory is not used anew before, also if the operation fails.
                tensor.record_stream(self._stream)
        with _torch.cuda.stream(self._stream):
            body()
            future = _torch.futures.Future(devices=[device])
            future.set_result(result)
        return _create_work_from_future(future)

    def getBackendName(self):
        return NAME

    # Of PyTorch 1.
    def _get_backend_name(self):
        return NAME

    def name(self):
        return NAME

    # PyTorch 2 keeps names of groups in their backends, of which this one has none.
    def _set_group_name(self, name):
        self._group_name = name

    setGroupName = _set_group_name

    def getGroupName(self):
        return self._group_name

    @property
    def group_name(self):
        return self._group_name

    def _reduction(self, operation, tensor, op):
        """The tensor as the domain reduces it, and the name of the reduction."""
        for known, name, of_truth_values in _REDUCTIONS:
            if op != known:
                continue
            if tensor.dtype is _torch.bool and of_truth_values is not None:
                return _bytes(tensor), of_truth_values
            if tensor.is_complex() and name in ("sum", "mean"):
                return _torch.view_as_real(tensor.detach()).reshape(-1), name
            return _flat(tensor), name
        cause = "the reduction is none of SUM, AVG, PRODUCT, MIN and MAX"
        raise InvalidArgument(f"{operation} failed: {cause}", operation)

    # ------------------------------------------------------------------ tensors of equal shapes

    def allreduce(self, tensors, opts=None):
        op = _dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def body():
            for tensor in tensors:
                result = _Result(tensor, has_input=True)
                elements, name = self._reduction("all-reduce", result.tensor, op)
                self._domain.all_reduce(elements, name, timeout=self._timeout)
                result.store()

        return self._run("all-reduce", tensors, tensors, body)

    def allreduce_coalesced(self, tensors, opts=None):
        return self.allreduce(tensors, opts)

    def reduce(self, tensors, opts):
        def body():
            for tensor in tensors:
                result = _Result(tensor, has_input=True)
                elements, name = self._reduction("reduce", result.tensor, opts.reduceOp)
                self._domain.reduce(elements, opts.rootRank, name, timeout=self._timeout)
                result.store()

        return self._run("reduce", tensors, tensors, body)

    def broadcast(self, tensors, opts):
        def body():
            for tensor in tensors:
                result = _Result(tensor, has_input=self.rank() == opts.rootRank)
                self._domain.broadcast(_bytes(result.tensor), opts.rootRank, timeout=self._timeout)
                result.store()

        return self._run("broadcast", tensors, tensors, body)

    def barrier(self, opts=None):
        if self._stream is not None:
            # As in NCCL, work that was started before is done after it.
            _torch.cuda.current_stream(self._stream.device).synchronize()
            self._stream.synchronize()
            self._domain.check()
        return self._run("barrier", [], None, lambda: self._domain.barrier(timeout=self._timeout))

    # ------------------------------------------------------------ tensors with blocks of all ranks

    def _gather_into(self, output, input):
        result = _Result(output)
        own = _bytes(input.contiguous())
        self._domain.all_gather(own, out=_bytes(result.tensor), timeout=self._timeout)
        result.store()

    def _allgather_base(self, output, input, opts=None):
        return self._run("all-gather", [output, input], output, lambda: self._gather_into(output, input))

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        def body():
            for output, input in zip(outputs, inputs):
                self._gather_into(output, input)

        return self._run("all-gather", [*outputs, *inputs], outputs, body)

    def _reduce_scatter_from(self, output, input, opts):
        op = _dist.ReduceOp.SUM if opts is None else opts.reduceOp
        result = _Result(output)
        blocks, name = self._reduction("reduce-scatter", input.contiguous(), op)
        own, _ = self._reduction("reduce-scatter", result.tensor, op)
        self._domain.reduce_scatter(blocks, name, out=own, timeout=self._timeout)
        result.store()

    def _reduce_scatter_base(self, output, input, opts=None):
        def body():
            self._reduce_scatter_from(output, input, opts)

        return self._run("reduce-scatter", [output, input], output, body)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        def body():
            for output, input in zip(outputs, inputs):
                self._reduce_scatter_from(output, input, opts)

        return self._run("reduce-scatter", [*outputs, *inputs], outputs, body)

    def alltoall_base(self, output, input, output_split_sizes, input_split_sizes, opts=None):
        def body():
            result = _Result(output)
            send, receive = _bytes(input.contiguous()), _bytes(result.tensor)
            counts = [None, None]
            if output_split_sizes or input_split_sizes:
                # Of the first axis.
                for index, (tensor, sizes) in enumerate([(input, input_split_sizes), (output, output_split_sizes)]):
                    row = tensor.element_size() * _math.prod(tensor.shape[1:])
                    each = [tensor.shape[0] // self.size()] * self.size()
                    counts[index] = [row * rows for rows in sizes or each]
            self._exchange_blocks(send, receive, *counts)
            result.store()

        return self._run("all-to-all", [output, input], output, body)

    def _exchange_blocks(self, send, receive, send_counts, receive_counts):
        # On the CPU blocks may be equal on some ranks only.
        if send.device.type == "cuda" and send_counts is not None and send_counts == receive_counts:
            send_counts, receive_counts = _equal(send_counts), _equal(receive_counts)
        self._domain.all_to_all(
            send, out=receive, send_counts=send_counts, receive_counts=receive_counts, timeout=self._timeout
        )

    # -------------------------------------------------------------------------- lists of tensors

    def _gathered(self, tensors):
        """A row of bytes for the blocks of all ranks, and the bytes of each."""
        counts = [tensor.numel() * tensor.element_size() for tensor in tensors]
        return _torch.empty(sum(counts), dtype=_torch.uint8, device=tensors[0].device), counts

    @staticmethod
    def _scatter_row(row, counts, tensors):
        for block, tensor in zip(row.split(counts), tensors):
            tensor.detach().copy_(block.view(tensor.dtype).reshape(tensor.shape))

    @staticmethod
    def _row(tensors):
        return _torch.cat([_bytes(tensor.contiguous()) for tensor in tensors])

    def _gather_list(self, outputs, input):
        row, counts = self._gathered(outputs)
        own = _bytes(input.contiguous())
        self._domain.all_gather(own, out=row, counts=_equal(counts), timeout=self._timeout)
        self._scatter_row(row, counts, outputs)

    def allgather(self, output_lists, inputs, opts=None):
        def body():
            for outputs, input in zip(output_lists, inputs):
                self._gather_list(outputs, input)

        tensors = [tensor for outputs in output_lists for tensor in outputs]
        return self._run("all-gather", [*tensors, *inputs], output_lists, body)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        def body():
            # The first list is that of the first rank.
            for index, input in enumerate(inputs):
                self._gather_list([outputs[index] for outputs in output_lists], input)

        tensors = [tensor for outputs in output_lists for tensor in outputs]
        return self._run("all-gather", [*tensors, *inputs], output_lists, body)

    def reduce_scatter(self, outputs, input_lists, opts=None):
        op = _dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def body():
            for output, inputs in zip(outputs, input_lists):
                result = _Result(output)
                blocks = _torch.cat([_flat(tensor.contiguous()) for tensor in inputs])
                elements, name = self._reduction("reduce-scatter", blocks, op)
                own, _ = self._reduction("reduce-scatter", result.tensor, op)
                each = elements.numel() // max(blocks.numel(), 1)
                counts = _equal([tensor.numel() * each for tensor in inputs])
                self._domain.reduce_scatter(elements, name, out=own, counts=counts, timeout=self._timeout)
                result.store()

        tensors = [tensor for inputs in input_lists for tensor in inputs]
        return self._run("reduce-scatter", [*tensors, *outputs], outputs, body)

    def alltoall(self, outputs, inputs, opts=None):
        def body():
            row, counts = self._gathered(outputs)
            send_counts = [tensor.numel() * tensor.element_size() for tensor in inputs]
            self._exchange_blocks(self._row(inputs), row, send_counts, counts)
            self._scatter_row(row, counts, outputs)

        return self._run("all-to-all", [*outputs, *inputs], outputs, body)

    def gather(self, output_lists, inputs, opts):
        is_root = self.rank() == opts.rootRank

        def body():
            own = _bytes(inputs[0].contiguous())
            if not is_root:
                self._domain.gather(own, opts.rootRank, timeout=self._timeout)
                return
            row, counts = self._gathered(output_lists[0])
            self._domain.gather(own, opts.rootRank, out=row, timeout=self._timeout)
            self._scatter_row(row, counts, output_lists[0])

        return self._run("gather", [*inputs, *(output_lists[0] if is_root else [])], output_lists, body)

    def scatter(self, outputs, input_lists, opts):
        is_root = self.rank() == opts.rootRank

        def body():
            result = _Result(outputs[0])
            blocks = self._row(input_lists[0]) if is_root else None
            self._domain.scatter(blocks, opts.rootRank, out=_bytes(result.tensor), timeout=self._timeout)
            result.store()

        return self._run("scatter", [*outputs, *(input_lists[0] if is_root else [])], outputs, body)

    # ----------------------------------------------------------------------------- not there

    def _refuse(self, operation):
        raise NotImplementedError(
            f"{operation} failed: the backend {NAME} has collective operations only. Use a group of another backend: "
            'torch.distributed.new_group(backend="gloo")'
        )

    def send(self, tensors, rank, tag=0):
        self._refuse("send")

    def recv(self, tensors, rank, tag=0):
        self._refuse("recv")

    def recv_anysource(self, tensors, tag=0):
        self._refuse("recv")


def _exchange(store, rank, size):
    """A function that gathers bytes of all ranks by the store."""
    rounds = 0

    def gather(own, seconds):
        nonlocal rounds
        rounds += 1
        keys = [f"gather/{rounds}/{other}" for other in range(size)]
        store.set(keys[rank], own)
        store.wait(keys, _datetime.timedelta(seconds=min(seconds, 1e6)))
        return [store.get(key) for key in keys]

    return gather


def _join(store, rank, size, timeout):
    """The domain of the ranks of a store. They find out by the store whether they are on one machine."""
    store.set(f"machine/{rank}", _machine())
    machines = {store.get(f"machine/{other}") for other in range(size)}
    if rank == 0:
        store.set("job", _secrets.token_hex(16))
    job = store.get("job").decode()
    if len(machines) > 1:
        return _Domain._join_over(rank, size, _exchange(store, rank, size), job=job, timeout=timeout)
    return _Domain.join(rank, size, job=job, timeout=timeout)


def _create(store, rank, size, timeout):
    return FabricastProcessGroup(store, rank, size, timeout)


def register():
    """Registers the backend, if it is not registered yet: importing the module does so."""
    if hasattr(_dist.Backend, NAME.upper()):
        return
    has_devices = "devices" in _signature(_dist.Backend.register_backend).parameters
    options = {"devices": ["cpu", "cuda"]} if has_devices else {}
    _dist.Backend.register_backend(NAME, _create, **options)


register()

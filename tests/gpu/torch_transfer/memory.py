"""Memory that is moved: a tensor, or emulated device memory without PyTorch."""

import ctypes
import random
import time

from library import Failure

MEBI = 1 << 20
# The value of memory that must not be written.
BLANK = 0x5A
# Operations, in the numbers of the library.
PUT, GET = 0, 1


class TorchMemory:
    """A tensor of bytes, with operations of PyTorch."""

    def __init__(self, number, length, is_expandable):
        import torch

        self.torch, self.number, self.length = torch, number, length
        self.place = f"cuda:{number}"
        # Before it in its segment, so that it does not begin at a piece.
        self.spacer = self.make(3 * MEBI)
        self.bytes = self.make(length)
        self.address = self.bytes.data_ptr()
        self.is_expandable = is_expandable
        self.settle()

    def make(self, length, number=None):
        place = self.place if number is None else f"cuda:{number}"
        return self.torch.empty(length, dtype=self.torch.uint8, device=place)

    def describe(self):
        """Fails unless the memory is of the requested kind."""
        for segment in self.torch.cuda.memory_snapshot():
            begin, size = segment["address"], segment["total_size"]
            if segment["device"] == self.number and begin <= self.address < begin + size:
                found = bool(segment.get("is_expandable"))
                if found != self.is_expandable:
                    raise Failure(f"the tensor's segment has is_expandable {found}")
                if self.address + self.length > begin + size:
                    raise Failure("the tensor is longer than its segment")
                return {"device": self.place, "is_expandable": found, "segment": size}
        raise Failure("PyTorch's snapshot has no segment with the tensor in it")

    def pattern(self, length, seed):
        words = self.torch.arange(length // 4, dtype=self.torch.int32, device=self.place)
        # Odd factors: all words differ, also after a wrap.
        return words.mul_(1_664_525 + 2 * seed).add_(seed * 7919)

    def part(self, offset, length):
        return self.bytes[offset : offset + length]

    def fill(self, offset, length, seed):
        self.part(offset, length).view(self.torch.int32).copy_(self.pattern(length, seed))
        self.settle()

    def matches(self, offset, length, seed):
        words = self.part(offset, length).view(self.torch.int32)
        return bool(self.torch.equal(words, self.pattern(length, seed)))

    def clear(self):
        self.bytes.fill_(BLANK)
        self.settle()

    def is_blank(self, offset, length):
        return length == 0 or bool((self.part(offset, length) == BLANK).all())

    def settle(self):
        self.torch.cuda.synchronize(self.number)

    def raw_copy(self, operation, other, length):
        """A function that copies as much within this process, and returns nanoseconds."""
        local, remote = self.make(length), self.make(length, other)
        to, source = (remote, local) if operation == PUT else (local, remote)
        device, cuda = source.device.index, self.torch.cuda
        local.fill_(1)
        remote.fill_(2)
        for number in {self.number, other}:
            cuda.synchronize(number)

        def once():
            begun = time.monotonic_ns()
            # On the stream of the source.
            to.copy_(source, non_blocking=True)
            cuda.synchronize(device)
            return time.monotonic_ns() - begun

        once()
        if not self.torch.equal(local, remote.to(local.device)):
            raise Failure("PyTorch's copy is corrupted")
        return once

    def versions(self):
        version = self.torch.version.cuda
        return {"torch": self.torch.__version__, "cuda": version, "devices": devices(self.torch)}


def devices(torch):
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


class EmulatedMemory:
    """Memory without PyTorch and without a GPU, to test the rest."""

    # As long as PyTorch's pieces.
    PIECE = 20 * MEBI

    def __init__(self, library, number, length):
        self.place, self.length, self.number = f"emulated:{number}", length, number
        spacer = 3 * MEBI
        count = -(-(length + spacer) // self.PIECE)
        self.address = library.call("play", number, self.PIECE, count) + spacer
        self.patterns = {}

    def describe(self):
        return {"device": self.place, "is_expandable": True}

    def pattern(self, length, seed):
        if (length, seed) not in self.patterns:
            self.patterns = {(length, seed): random.Random(seed).randbytes(length)}
        return self.patterns[length, seed]

    def fill(self, offset, length, seed):
        ctypes.memmove(self.address + offset, self.pattern(length, seed), length)

    def matches(self, offset, length, seed):
        return ctypes.string_at(self.address + offset, length) == self.pattern(length, seed)

    def clear(self):
        ctypes.memset(self.address, BLANK, self.length)

    def is_blank(self, offset, length):
        return ctypes.string_at(self.address + offset, length) == bytes([BLANK]) * length

    def settle(self):
        pass

    def raw_copy(self, _operation, _other, length):
        local, remote = bytearray(length), bytearray(length)

        def once():
            begun = time.monotonic_ns()
            remote[:] = local
            return time.monotonic_ns() - begun

        return once

    def versions(self):
        return {"torch": None}

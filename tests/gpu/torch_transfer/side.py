"""A process of the two: common code, and the target."""

import json
import os
import struct
import time

from library import Failure, Library, given, report
from memory import MEBI, EmulatedMemory, TorchMemory

# Timeouts of a process, in milliseconds.
TIMEOUT = 60_000
KINDS = ["pid", "ipc", "mnt", "net"]
# Bytes of a tensor beyond its longest region.
MARGIN = 32 * MEBI
# Offsets of the regions in the tensor, and their length if it is not that of the longest
# block. A small region is within one of PyTorch's pieces, which have 20 MiB.
REGIONS = [("start", 0, None), ("middle", 25 * MEBI + 4608, None), ("small", 5 * MEBI + 1536, MEBI)]
START, MIDDLE, SMALL = range(3)
# Tags of notifications; their data are four numbers.
TIMED, CHECK, CLEAR, FILL, NOTIFIED, END, ANSWER = range(1, 8)


def namespaces():
    return {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}


class Side:
    """A process: its memory, regions of that, and its agent."""

    def __init__(self, options, role):
        self.options, self.role = options, role
        self.directory = options.directory
        self.largest = max(options.sizes)
        self.library = Library(options.library)
        is_eager = 0 if options.emulated else 1
        label = given(role.encode())
        self.library.call("start", given(self.directory.encode()), label, is_eager)
        self.numbers = self.choose()
        number = self.numbers[0 if role == "first" else 1]
        length = self.largest + MARGIN
        if options.emulated:
            self.memory = EmulatedMemory(self.library, number, length)
        else:
            self.memory = TorchMemory(number, length, options.memory == "expandable")
        hello = {"namespaces": namespaces(), "process": os.getpid()}
        self.leave("hello", json.dumps(hello).encode())
        report(what="memory", role=role, **self.memory.describe(), **self.memory.versions())
        self.offsets = [offset for _, offset, _ in REGIONS]
        self.lengths = [length or self.largest for _, _, length in REGIONS]
        self.regions = [self.register(number) for number in range(len(REGIONS))]
        self.leave("card", self.library.bytes_of("card"))
        self.leave("ready", b"")

    def choose(self):
        """The devices of the two."""
        if self.options.emulated:
            return [0, 1]
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            raise Failure("PyTorch sees no GPU")
        if count > 1 and not torch.cuda.can_device_access_peer(0, 1):
            raise Failure("the two GPUs cannot reach each other's memory")
        return [0, 1] if count > 1 else [0, 0]

    def register(self, number):
        """A region of the tensor, exported as its allocator allows."""
        address, device = self.memory.address + self.offsets[number], self.memory.place
        name, length = REGIONS[number][0], self.lengths[number]
        region = self.library.call("register", given(device.encode()), address, length)
        pieces = self.library.call("pieces", region)
        if (pieces > 0) != (self.options.memory == "expandable"):
            raise Failure(f"{self.options.memory} memory is exported in {pieces} pieces")
        offset = self.library.call("offset", region) if pieces else None
        if offset == 0 and number != START:
            raise Failure(f"the region {name} begins at a piece")
        self.leave(f"region-{number}", self.library.bytes_of("descriptor", region))
        report(what="region", role=self.role, region=name, length=length, pieces=pieces,
               offset=offset)
        return region

    def leave(self, name, data):
        """Writes a file for the other process, atomically."""
        path = os.path.join(self.directory, f"{name}-{self.role}")
        with open(path + ".part", "wb") as file:
            file.write(data)
        os.rename(path + ".part", path)

    def find(self, name):
        """Reads a file of the other process."""
        other = "second" if self.role == "first" else "first"
        path = os.path.join(self.directory, f"{name}-{other}")
        end = time.monotonic() + self.options.deadline
        while not os.path.exists(path):
            if time.monotonic() > end:
                raise Failure(f"the other process did not write {name}")
            time.sleep(0.005)
        with open(path, "rb") as file:
            return file.read()

    def connect(self):
        self.find("ready")
        self.peer = self.library.call("connect", given(self.find("card")), TIMEOUT)

    def notify(self, tag, *numbers):
        self.library.call("notify", self.peer, given(notice(tag, *numbers)), TIMEOUT)

    def receive(self):
        """Tag and numbers of the next notification."""
        tag, *numbers = struct.unpack("<Qqqqq", self.library.bytes_of("next_notice", TIMEOUT))
        return tag, numbers

    def is_right(self, region, offset, length, seed):
        """Is the pattern there, and the rest unwritten?"""
        begin = self.offsets[region] + offset
        end = begin + length
        memory = self.memory
        return (memory.matches(begin, length, seed) and memory.is_blank(0, begin)
                and memory.is_blank(end, memory.length - end))


def notice(tag, *numbers):
    return struct.pack("<Qqqqq", tag, *(list(numbers) + [0] * 4)[:4])


def second(side):
    """Serves the requests of the initiator."""
    side.connect()
    while True:
        tag, numbers = side.receive()
        seen = time.monotonic_ns()
        region, offset, length, seed = numbers
        value = 0
        if tag == TIMED:
            value = seen - numbers[0]
        elif tag == CHECK:
            value = int(side.is_right(region, offset, length, seed))
        elif tag == CLEAR:
            side.memory.clear()
        elif tag == FILL:
            side.memory.fill(side.offsets[region] + offset, length, seed)
        elif tag == NOTIFIED:
            value = seed
        elif tag == END:
            break
        side.notify(ANSWER, value)

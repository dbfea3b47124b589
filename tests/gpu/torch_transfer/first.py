"""The initiator: it moves, compares and measures."""

import json
import statistics
import time

from library import Failure, given, report
from memory import GET, PUT
from side import (ANSWER, CHECK, CLEAR, END, FILL, MIDDLE, NOTIFIED, REGIONS, SMALL, START,
                  TIMED, TIMEOUT, notice)

GIBI = 1 << 30
PATH = "cuda-ipc"
NAMES = {PUT: "put", GET: "get"}
# Tolerance of the link counters.
TOLERANCE = 0.01


class First:
    """The initiator."""

    def __init__(self, side):
        self.side, self.library, self.memory = side, side.library, side.memory
        self.options = side.options
        side.connect()
        self.remote_regions = [side.find(f"region-{number}") for number in range(len(REGIONS))]
        self.are_apart = side.numbers[0] != side.numbers[1]
        self.seed = 0
        self.moved = 0
        # The baseline is a copy between two GPUs.
        self.is_bound = self.are_apart and not self.options.emulated

    def join(self, local, remote, policy):
        arguments = given(self.remote_regions[remote]), given(policy.encode()), TIMEOUT
        route = self.library.call("join", self.side.peer, self.side.regions[local], *arguments)
        path = self.library.bytes_of("path", route).decode()
        if path != PATH:
            raise Failure(f"the path is {path}")
        return route

    def is_refused(self, policy):
        """A policy that cannot be satisfied is an error, and no other path is taken."""
        try:
            self.join(0, 0, policy)
        except Failure as failure:
            if "no path" in str(failure):
                return
            raise
        raise Failure(f"{policy} was not refused")

    def ask(self, tag, *numbers):
        self.side.notify(tag, *numbers)
        return self.answer()

    def answer(self):
        tag, (value, *_) = self.side.receive()
        if tag != ANSWER:
            raise Failure(f"notice {tag} instead of an answer")
        return value

    def move(self, operation, route, to, source, length, behind=b""):
        numbers = operation, route, to, source, length
        begun = self.library.call("begin", *numbers, given(behind))
        moved = self.library.call("wait", begun, TIMEOUT)
        if moved != length:
            raise Failure(f"{moved} bytes instead of {length}")
        self.moved += moved

    def run(self):
        self.is_refused("=shared-memory")
        same = [(START, START), (MIDDLE, MIDDLE)]
        joins = [*same, (START, MIDDLE), (MIDDLE, START), (SMALL, SMALL), (MIDDLE, SMALL)]
        routes = {pair: self.join(*pair, "=" + PATH) for pair in joins}
        for pair, route in routes.items():
            whole = min(self.side.lengths[number] for number in pair)
            for operation in (PUT, GET):
                for size in sorted({min(size, whole) for size in self.options.sizes}):
                    self.check(operation, route, pair, size, is_whole=size == whole)
        for operation in (PUT, GET):
            for size in sorted(self.options.sizes)[-2:]:
                for pair in same:
                    self.measure(operation, routes[pair], pair, size)
            self.watch(operation, routes[MIDDLE, MIDDLE], self.side.largest)
        self.count()
        self.side.notify(END)

    def check(self, operation, route, pair, size, is_whole):
        """Moves a new pattern, and compares it at its destination."""
        local, remote = pair
        to, source = (0, 0) if is_whole else (512, 3136)
        for _ in range(2):
            self.seed += 1
            if operation == PUT:
                self.ask(CLEAR)
                self.memory.fill(self.side.offsets[local] + source, size, self.seed)
                self.move(operation, route, to, source, size,
                          notice(CHECK, remote, to, size, self.seed))
                is_right = self.answer() == 1
            else:
                self.ask(FILL, remote, source, size, self.seed)
                self.memory.clear()
                self.move(operation, route, to, source, size, notice(NOTIFIED, 0, 0, 0, self.seed))
                is_right = self.side.is_right(local, to, size, self.seed)
                if self.answer() != self.seed:
                    raise Failure("the notice of a get has wrong content")
            if not is_right:
                raise Failure(f"received data is corrupted: {NAMES[operation]} of {size} bytes from "
                              f"or to {REGIONS[remote][0]}, pattern {self.seed}")
        report(what="correct", op=NAMES[operation], size=size, local=REGIONS[local][0],
               remote=REGIONS[remote][0])

    def once(self, operation, route, size):
        """Nanoseconds until the data is there, and for a put, the other process is notified."""
        begun = time.monotonic_ns()
        if operation == GET:
            self.move(operation, route, 0, 0, size)
            return time.monotonic_ns() - begun
        self.move(operation, route, 0, 0, size, notice(TIMED, begun))
        return self.answer()

    def measure(self, operation, route, pair, size):
        """Interleaves transfers and PyTorch's copy."""
        raw = self.memory.raw_copy(operation, self.side.numbers[1], size)
        each = 3 if size >= GIBI else 10
        for _ in range(3):
            self.once(operation, route, size)
            raw()
        ours, baseline, ratios = [], [], []
        for number in range(self.options.rounds):
            times = {}
            for turn in (0, 1) if number % 2 == 0 else (1, 0):
                begin = raw if turn else lambda: self.once(operation, route, size)
                times[turn] = [begin() for _ in range(each)]
            ours += times[0]
            baseline += times[1]
            ratios.append(statistics.median(times[1]) / statistics.median(times[0]))
        ratio = statistics.median(ratios)
        time_of_ours = statistics.median(ours)
        report(what="time", op=NAMES[operation], size=size, local=REGIONS[pair[0]][0],
               remote=REGIONS[pair[1]][0], rounds=self.options.rounds, us=time_of_ours / 1e3,
               gb_per_s=round(size / time_of_ours, 1), raw_us=statistics.median(baseline) / 1e3,
               ratio=round(ratio, 4), least=round(min(ratios), 4), are_apart=self.are_apart)
        if self.is_bound and size >= GIBI and ratio < self.options.least_ratio:
            raise Failure(f"{NAMES[operation]} of {size} bytes: {ratio:.4f} of a raw copy, at "
                          f"least {self.options.least_ratio} is required")

    def links(self):
        return json.loads(self.library.bytes_of("links", given(self.memory.place.encode())))

    def watch(self, operation, route, size):
        """NVLink moves exactly the transferred bytes."""
        line = dict(what="links", op=NAMES[operation])
        if not self.are_apart:
            report(**line, why_not="one GPU: no link is used")
            return
        try:
            before = self.links()
        except Failure as failure:
            report(**line, why_not=str(failure))
            return
        times = 4
        for _ in range(times):
            self.once(operation, route, size)
        after = self.links()
        carried = [None if None in pair else pair[1] - pair[0] for pair in zip(before, after)]
        names = ["nvlink_sent", "nvlink_received", "pcie_sent", "pcie_received"]
        line |= dict(zip(names, carried), moved=times * size)
        nvlink = carried[0 if operation == PUT else 1]
        report(**line, why_not="NVLink is not counted here" if nvlink is None else None)
        if nvlink is not None and abs(nvlink - times * size) > TOLERANCE * times * size:
            raise Failure(f"NVLink moved {nvlink} bytes of {times * size}")

    def count(self):
        """Checks the counters: everything used one path."""
        numbers = {}
        for line in self.library.bytes_of("metrics").decode().splitlines():
            if not line.startswith("#"):
                name, number = line.rsplit(" ", 1)
                numbers[name] = int(number)
        by_path = {name: number for name, number in numbers.items()
                   if name.startswith("fabricast_path_bytes_total") and number}
        fallbacks = sum(number for name, number in numbers.items() if "_fallback_" in name)
        report(what="books", bytes=by_path, fallbacks=fallbacks)
        if by_path != {f'fabricast_path_bytes_total{{path="{PATH}"}}': self.moved} or fallbacks:
            raise Failure(f"{self.moved} bytes were moved, the counters have {by_path}")

#!/usr/bin/env python3
"""collected.py LIBRARY [--rounds N]

Two agents, a region and a route that Python destroys while transfers are in flight: by the garbage
collector in any order, and by reference counts in every order. Exits with 0 if no byte moved after
the end or outside the region, and no destruction took long.
"""

import argparse
import ctypes
import gc
import itertools
import sys
import time


class Owner:
    """Owns a handle, which it destroys when it is collected."""

    def __init__(self, end, handle):
        if not handle:
            sys.exit("collected: a handle is NULL")
        self.end, self.handle, self.others = end, handle, []

    def __del__(self):
        self.end(self.handle)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("library")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    side = ctypes.CDLL(options.library)
    pointer = ctypes.c_void_p
    for name, result, arguments in [
        ("delay", None, [ctypes.c_uint64]),
        ("agent", pointer, []),
        ("region", pointer, [pointer]),
        ("route", pointer, [pointer] * 3),
        ("put", ctypes.c_int, [pointer] * 2),
        ("drop_agent", None, [pointer]),
        ("drop_region", None, [pointer]),
        ("drop_route", None, [pointer]),
        ("check", ctypes.c_int, [pointer]),
        ("check_later", ctypes.c_int, []),
    ]:
        function = getattr(side, f"endings_{name}")
        function.restype, function.argtypes = result, arguments

    def make(delay):
        initiator = Owner(side.endings_drop_agent, side.endings_agent())
        target = Owner(side.endings_drop_agent, side.endings_agent())
        region = Owner(side.endings_drop_region, side.endings_region(target.handle))
        route = side.endings_route(initiator.handle, target.handle, region.handle)
        route = Owner(side.endings_drop_route, route)
        side.endings_delay(delay)
        if side.endings_put(initiator.handle, route.handle) != 6:
            sys.exit("collected: the puts were not started")
        return [initiator, target, region, route]

    def check(memory, start, what):
        if time.monotonic() - start > 5:
            sys.exit(f"collected: {what}: destruction took more than 5 s")
        side.endings_delay(0)
        if side.endings_check(memory) != 0:
            sys.exit(f"collected: {what}: bytes moved after the end, or outside the region")

    gc.disable()
    for turn in range(options.rounds):
        for order in itertools.permutations(range(4)):
            objects = make(turn % 4 * 100)
            memory, start = objects[2].handle, time.monotonic()
            for which in order:
                objects[which] = None
            check(memory, start, order)
        for first in range(4):
            objects = make(turn % 4 * 100)
            memory, start = objects[2].handle, time.monotonic()
            for one in objects:
                one.others = objects[first:] + objects[:first]
            one = objects = None
            gc.collect()
            check(memory, start, "a cycle")
    if side.endings_check_later() != 0:
        sys.exit("collected: bytes moved later, or outside the region")
    print(f"24 orders and 4 cycles, {options.rounds} times each")


if __name__ == "__main__":
    main()

"""The agent of a process, by the C interface of transfer/examples/torch_side.rs."""

import ctypes
import json
import os
import sys


class Failure(Exception):
    """A failure of the test."""


def report(**what):
    """Prints a result as one line, atomically."""
    sys.stdout.flush()
    os.write(1, (json.dumps(what) + "\n").encode())


class Bytes(ctypes.Structure):
    """An input buffer of the library."""

    _fields_ = [("address", ctypes.c_char_p), ("length", ctypes.c_uint64)]


class Room(ctypes.Structure):
    """An output buffer of the library."""

    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_uint64)]


def given(data):
    return Bytes(data, len(data))


class Library:
    """Functions of the library, with Python's numbers and bytes."""

    LONGEST = 64 << 10
    NUMBER, LONG = ctypes.c_uint32, ctypes.c_uint64
    FUNCTIONS = {
        "error": [Room],
        "start": [Bytes, Bytes, NUMBER],
        "end": [],
        "card": [Room],
        "play": [NUMBER, LONG, NUMBER],
        "register": [Bytes, LONG, LONG],
        "pieces": [NUMBER],
        "offset": [NUMBER],
        "descriptor": [NUMBER, Room],
        "connect": [Bytes, LONG],
        "join": [NUMBER, NUMBER, Bytes, Bytes, LONG],
        "path": [NUMBER, Room],
        "begin": [NUMBER, NUMBER, LONG, LONG, LONG, Bytes],
        "wait": [LONG, LONG],
        "notify": [NUMBER, Bytes, LONG],
        "next_notice": [LONG, Room],
        "links": [Bytes, Room],
        "metrics": [Room],
    }

    def __init__(self, path):
        library = ctypes.CDLL(os.path.abspath(path))
        self.functions = {}
        for name, arguments in self.FUNCTIONS.items():
            function = getattr(library, "torch_side_" + name)
            function.argtypes, function.restype = arguments, ctypes.c_int64
            self.functions[name] = function
        self.buffer = ctypes.create_string_buffer(self.LONGEST)
        self.room = Room(ctypes.addressof(self.buffer), len(self.buffer))

    def call(self, name, *arguments):
        """The number that it returns."""
        number = self.functions[name](*arguments)
        if number < 0:
            length = max(self.functions["error"](self.room), 0)
            text = self.buffer.raw[:length].decode(errors="replace")
            raise Failure(f"{name}: {text} ({number})")
        return number

    def bytes_of(self, name, *arguments):
        """The bytes that it returns."""
        length = self.call(name, *arguments, self.room)
        return ctypes.string_at(self.buffer, length)

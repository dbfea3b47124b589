from collections.abc import Sequence
from multiprocessing.connection import Connection
from os import PathLike
from socket import socket
from types import TracebackType
from typing import Any, Self

import torch

_Directory = str | PathLike[str] | None
_Device = int | str | torch.device | None

def token(tensor: torch.Tensor, *, directory: _Directory = None) -> bytes: ...
def load(
    message: bytes | bytearray | memoryview, *, timeout: float | None = 30.0, directory: _Directory = None
) -> torch.Tensor: ...
def send(tensor: torch.Tensor, to: Connection | socket | int, *, directory: _Directory = None) -> None: ...
def recv(
    frm: Connection | socket | int, *, timeout: float | None = 30.0, directory: _Directory = None
) -> torch.Tensor: ...
# Any: a tensor, or a structure of tensors.
def open(
    token: bytes | bytearray | memoryview | str,
    *,
    device: str | None = None,
    timeout: float | None = 30.0,
    directory: _Directory = None,
    owner: str | int | None = None,
) -> Any: ...
def empty(
    *shape: int | Sequence[int], dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> torch.Tensor: ...
def install() -> None: ...

class pool:
    def __init__(self, device: _Device = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None: ...

def pool_statistics(device: _Device = None) -> dict[str, int]: ...
def trim_pool(device: _Device = None) -> None: ...

from datetime import timedelta
from typing import Any

NAME: str

# Any: PyTorch may be absent.
class FabricastProcessGroup:
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None: ...

def register() -> None: ...

import logging
import threading

from fabricast import _native

_lock = threading.Lock()
_thread = None


def forward_log(level: int | str = logging.INFO) -> None:
    """Forwards the log of the library to the loggers of Python, from this level on.

    The loggers are those of its modules: ``fabricast.transfer``, ``fabricast.pubsub``, …; the records come from a thread that this starts. It can be called once in a process.
    """
    global _thread
    if isinstance(level, str):
        level = logging.getLevelNamesMapping()[level.upper()]
    with _lock:
        _native._start_log(level)
        _thread = threading.Thread(target=_forward, name="fabricast-log", daemon=True)
        _thread.start()


def _forward() -> None:
    while True:
        found = _native._next_record()
        if found is None:
            continue
        level, module, message, time = found
        logger = logging.getLogger(module)
        if logger.isEnabledFor(level):
            record = logger.makeRecord(module, level, "", 0, message, (), None)
            record.created = time
            record.msecs = time % 1 * 1000
            logger.handle(record)

"""Compiles functions for this CPU, and keeps the code for later processes.

Several processes need the same code when they start together: replicas, or the workers of a test. One of them compiles
a function, and the others wait for its code. Otherwise each would compile all of it, and take the others' time.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from numba import njit
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock

log = logging.getLogger(__name__)
TOLD_S = 5.0  # of waiting for another process, until the log tells of it
LONGEST_S = 300.0  # of waiting after that; the other may hang
Function = Callable[..., Any]
# With these flags sums may be taken in another order, so that they are taken in vectors. Infinities and NaN keep their
# meaning.
FAST = {"reassoc", "contract", "nsz", "arcp", "afn"}
# Nobody calls the code from C, and wrappers for that take a tenth of the compiler's time.
OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def _folder() -> Path:
    """Where compiled code is kept. Numba compiles a function anew when its own file changes. Here it also depends on
    the code that is emitted, so each version of these files has a folder."""
    files, digest = Path(__file__).parent, hashlib.sha256()
    for file in sorted(files.glob("cpu_*.py")):
        digest.update(file.read_bytes())
    chosen = Path(config.CACHE_DIR or files / "__pycache__")  # type: ignore[attr-defined]
    return chosen / f"cpu-{digest.hexdigest()[:16]}"


FOLDER = _folder()
config.CACHE_DIR = str(FOLDER)  # type: ignore[attr-defined]


def compiled(function: Function) -> Any:
    """The function as compiled code, for arguments of any types. It adds numbers in any order."""
    return _shared(njit(**OPTIONS, fastmath=FAST)(function))


def compiled_exactly(function: Function) -> Any:
    """As `compiled`, but it adds numbers in the order that is written."""
    return _shared(njit(**OPTIONS, fastmath={"contract"})(function))


def inlined(function: Function) -> Any:
    """The function as a part of the compiled code that calls it, with the caller's options.

    LLVM optimises a compiled function again in each one that calls it. This saves that time where a long function has
    one caller. If all functions were like this it would take longer, because Numba would work on one very long
    function. Where an argument is a constant of the call, Numba leaves out the branches that it rules out.
    """
    return njit(inline="always")(function)


def _shared(dispatcher: Any) -> Any:
    compile_here, function = dispatcher.compile, dispatcher.py_func

    def compile_once(signature: Any) -> Any:
        with global_compiler_lock, _by_one_process(f"{function.__module__}.{function.__qualname__} {signature}"):
            return compile_here(signature)

    dispatcher.compile = compile_once
    return dispatcher


@contextmanager
def _by_one_process(what: str) -> Iterator[None]:
    """Wait while another process compiles the same. Whoever holds this lock compiles, so it holds Numba's lock, and
    waits only for what the function calls: nobody waits in a circle."""
    with ExitStack() as held:
        with suppress(OSError):  # where nothing can be written, Numba looks for another folder by itself
            FOLDER.mkdir(parents=True, exist_ok=True)
            file = FOLDER / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
            held.enter_context(_lock(file, what))  # a Timeout is an OSError
        yield


def _lock(file: Path, what: str) -> AbstractContextManager[object]:
    lock = FileLock(file)
    try:
        return lock.acquire(timeout=TOLD_S)
    except Timeout:
        log.info("another process compiles %s; this one waits for its code", what.partition(" ")[0])
    return lock.acquire(timeout=LONGEST_S)

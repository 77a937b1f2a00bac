"""Processes of inlay that are forked where the libraries they use are imported already.

Importing torch and transformers takes 3 s of CPU time, and tests start hundreds of processes. After
`install`, `subprocess` has `python -m` of `_FORKED` forked by a *helper* that has imported them, and
`multiprocessing` what it spawns: a process with one thread, that has touched no GPU. All else is as of a
process that was started: it is its starter's child, and has the arguments, environment, directory,
descriptors, session, signals and exit status it should have. A server has a helper of its own, for
its workers; where another engine's libraries are imported, all that is forked has one, as their
processes start others, and a server that runs in inlay's own Python (`FRONTEND_PYTHON`) is lent one.

A process is started for real where a variable of `_AT_START` differs, but for those that a test
names (`having`), where it is to have a function called first, as in a terminal, and where a test of
the start itself asks for it (`started`).
"""

import _posixsubprocess
import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec

_FORKED = (
    *("inlay.cli", "inlay.worker"),
    *("tests.engine.torch.page_giver", "tests.engine.torch.page_asker"),
    *("tests.engines.vllm.bare", "tests.engines.vllm.bare_pair"),
    "vllm.entrypoints.openai.api_server",
)
_QUIET = ["-W", "ignore"]
"""Options of an interpreter that need no other."""
_SPAWNED = "--multiprocessing-fork"
"""The last word of a process that `multiprocessing` spawns."""
_WITH_WORKERS = tuple(["inlay.cli", word] for word in ("serve", "worker", "demo"))
"""Commands that start workers."""
_IMPORTED = (
    "inlay.cli.frontend",
    "inlay.cli.serve",
    "inlay.cli.worker",
    "inlay_stages.engines.diffusers.engine",
    "inlay.engine.echo",
    "inlay.engine.embed.engine",
    "inlay.engine.torch.engine",
    "inlay.engine.torch.loading",
    "inlay.engine.torch.tensor_parallel.launch",
    "inlay.worker.child",
    "transformers.models.llama.modeling_llama",
)
_AT_START = (
    *("PYTHON", "OMP_", "MKL_", "OPENBLAS", "LD_", "LC_", "LANG", "TZ", "HOME", "XDG_CACHE"),
    *("TORCH_", "PYTORCH", "TRANSFORMERS", "TOKENIZERS", "HF_", "HUGGINGFACE"),
)
"""Beginnings of variables that are read when a process starts, or when a library is imported."""
_SAFE_PATH = "PYTHONSAFEPATH"
_BY_IMPORT = ("PYTORCH_NVML_BASED_CUDA_CHECK", "LD_PRELOAD", "LD_LIBRARY_PATH")
"""Variables that vLLM and OpenCV set when they are imported, for what is started later."""
_PATH = "PYTHONPATH"
_LENT = "inlay-lent-"
"""In a path that inlay is lent by: its modules are those that are imported already."""
_FRONTEND = "--frontend"
"""First word of a process that is lent the helper whose descriptor is next."""
_ABOVE = 500
"""Descriptors from here on are the helper's."""
_SET_CHILD_SUBREAPER = 36
"""Of Linux's prctl."""

_fork_exec = _posixsubprocess.fork_exec


class _Job(msgspec.Struct):
    words: list[str]
    environment: dict[str, str]
    directory: str
    descriptors: list[int]
    session: bool
    python: str | None = None
    """Executable of a server that is lent a helper, and has not its libraries."""


class _Helper:
    """A helper as its starter sees it.

    Args:
        connect: makes the connection to it.
        environment: it has at its start.
        otherwise: starts what it does not fork.
        python: its executable.
        frontend: executable of servers that are lent a helper, if any.
        ignored: variables that may differ.
    """

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        environment: Mapping[str, str],
        otherwise: Any = _fork_exec,
        *,
        python: str = sys.executable,
        frontend: str | None = None,
        ignored: Sequence[str] = _BY_IMPORT,
    ) -> None:
        self._connect = cache(connect)
        self._ignored = ignored
        self._environment = _at_start(environment, ignored)
        self._otherwise = otherwise
        self._python = python
        self._frontend = frontend
        self._lock = threading.Lock()

    def fork_exec(self, *given: Any) -> int:
        """As `subprocess` calls its own; returns the process id."""
        command, _, close_fds, keep, cwd, variables, stdin, _, _, stdout, _, stderr, _, errors = (
            given[:14]
        )
        _, session, *rare, _ = given[14:]
        words = [os.fsdecode(word) for word in command]
        if words[1:3] == _QUIET:
            del words[1:3]
        environment = dict(os.environ)
        if variables is not None:
            environment = dict(os.fsdecode(each).split("=", 1) for each in variables)
        lent = words[0] == self._frontend and words[2:4] in _WITH_WORKERS
        if (
            not (words[0] == self._python or lent)
            or not (words[-1] == _SPAWNED or (words[1:2] == ["-m"] and words[2] in _FORKED))
            or not close_fds
            or any(value not in (None, -1) for value in rare)
            or _at_start(environment, self._ignored) != self._environment
        ):
            return int(self._otherwise(*given))
        passed = [fd for fd in keep if fd != errors]
        standard = [fd if fd >= 0 else own for own, fd in enumerate((stdin, stdout, stderr))]
        directory = os.fsdecode(cwd or Path.cwd())
        # What `multiprocessing` spawns has the options of this interpreter first.
        given_words = words[-3:] if words[-1] == _SPAWNED else words[1:]
        job = _Job(
            given_words,
            environment,
            directory,
            [0, 1, 2, *passed],
            bool(session),
            words[0] if lent else None,
        )
        with self._lock, _adopting():
            answer = b""
            with suppress(ConnectionError):
                socket.send_fds(self._connect(), [msgspec.json.encode(job)], [*standard, *passed])
                answer = self._connect().recv(64)
        if not answer:
            raise RuntimeError("the process that forks those of inlay has ended")
        return int(answer)


def install(
    imported: Sequence[str] = _IMPORTED,
    variables: Mapping[str, str] = MappingProxyType({}),
    frontend: str | None = None,
) -> None:
    """Have processes of inlay forked from now on, by a helper that starts with the first.

    Args:
        imported: modules that the helper imports.
        variables: it has beside those of this process, where another engine is imported.
        frontend: executable of inlay's own Python, where this is another engine's.
    """
    undo = ExitStack()
    atexit.register(undo.close)
    nested = bool(variables)
    _use(_starting(imported, variables, undo, nested=nested, frontend=frontend).fork_exec)


@contextmanager
def having(variables: Mapping[str, str], imported: Sequence[str] = _IMPORTED) -> Iterator[None]:
    """Within it, processes that have these variables at their start are forked too.

    By a helper of their own, which ends them with itself.
    """
    before = _posixsubprocess.fork_exec
    with ExitStack() as undo:
        _use(_starting(imported, variables, undo).fork_exec)
        undo.callback(_use, before)
        yield


def _starting(
    imported: Sequence[str],
    variables: Mapping[str, str],
    undo: ExitStack,
    *,
    nested: bool = False,
    frontend: str | None = None,
) -> _Helper:
    """A helper that is started when it is first asked, and ended by `undo`.

    What it forks has a helper too where it is `nested`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", **variables}
    environment.pop(_SAFE_PATH, None)

    def connect() -> socket.socket:
        ours, theirs = _pair()
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.preloaded",
                    str(theirs.fileno()),
                    str(int(nested)),
                    *imported,
                ],
                cwd=Path(__file__).parent.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )

        undo.callback(process.wait)
        undo.callback(ours.close)
        return ours

    ignored = _BY_IMPORT if nested else ()
    return _Helper(
        connect, environment, _posixsubprocess.fork_exec, frontend=frontend, ignored=ignored
    )


@contextmanager
def started() -> Iterator[None]:
    """Within it, processes of inlay are started as they are outside of tests."""
    before = _posixsubprocess.fork_exec
    _use(_fork_exec)
    try:
        yield
    finally:
        _use(before)


def _use(fork_exec: Any) -> None:
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    _posixsubprocess.fork_exec = fork_exec


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _at_start(environment: Mapping[str, str], ignored: Sequence[str]) -> dict[str, str]:
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_START) and name not in (_SAFE_PATH, *ignored)
    }
    if _PATH in found:
        found[_PATH] = ":".join(each for each in found[_PATH].split(":") if _LENT not in each)
    return found


@contextmanager
def _adopting() -> Iterator[None]:
    """Within it, this process becomes the parent of a descendant whose own parent ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _forked(starter: socket.socket, *, to_kill: bool) -> tuple[_Job, list[int]]:
    """The job and its descriptors, in each process forked; the helper returns never.

    It ends with its starter, and kills those it forked where `to_kill` is set.
    """
    children: list[int] = []
    while True:
        data, received, _, _ = socket.recv_fds(starter, 1 << 20, 64)
        if not data:
            for child in children if to_kill else ():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
            os._exit(0)
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            # Once this one has ended, its child is the starter's.
            if (child := os.fork()) != 0:
                os.write(write, str(child).encode())
                os._exit(0)
            return msgspec.json.decode(data, type=_Job), received
        os.waitpid(between, 0)
        answer = os.read(read, 64)
        children.append(os.pidfd_open(int(answer)))
        for descriptor in (read, write, *received):
            os.close(descriptor)
        starter.send(answer)


def _close_all_but(*kept: int) -> None:
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):  # that of the listing
                os.close(int(path.name))


def _become(job: _Job, received: list[int], *kept: int) -> None:
    """Take over what a process has of its starter, and forget all else but `kept`."""
    received = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in received]
    _close_all_but(*received, *kept)
    for fd, number in zip(received, job.descriptors, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if job.session:
        os.setsid()
    os.chdir(job.directory)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.argv[1:] = job.words[2:]
    sys.path[:1] = [] if _SAFE_PATH in os.environ else [job.directory]
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()


def _run(option: str, program: str) -> NoReturn:
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(program)
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    # As Python ends, but for taking all modules apart.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fork_workers(connection: socket.socket, python: str = sys.executable) -> None:
    """Have a server's workers forked."""
    _use(_Helper(lambda: connection, os.environ, python=python).fork_exec)


def _serve(starter: socket.socket, *, to_kill: bool, nested: bool) -> _Job:
    """Return the job of each process forked, which has become what the job says."""
    job, received = _forked(starter, to_kill=to_kill)
    starter.close()  # later its number is another's
    if not (nested or job.words[1:3] in _WITH_WORKERS):
        _become(job, received)
        return job
    ours, theirs = _pair()
    if os.fork() == 0:
        ours.close()
        _close_all_but(theirs.fileno())
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        return _serve(theirs, to_kill=False, nested=nested)
    kept = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    ours.close()
    theirs.close()
    _become(job, received, kept)
    if job.python is not None:
        os.set_inheritable(kept, True)
        lent = [job.python, "-m", "tests.preloaded", _FRONTEND, str(kept), sys.executable]
        os.execve(job.python, [*lent, *job.words], job.environment)
    _fork_workers(socket.socket(fileno=kept))
    return job


def _frontend(descriptor: int, python: str, *words: str) -> NoReturn:
    """Run a command of inlay, whose workers are forked by a helper of another engine."""
    os.set_inheritable(descriptor, False)
    _fork_workers(socket.socket(fileno=descriptor), python)
    sys.argv[1:] = words[2:]
    _run(*words[:2])


def _main() -> NoReturn:
    if sys.argv[1] == _FRONTEND:
        _frontend(int(sys.argv[2]), *sys.argv[3:])
    gc.disable()
    with suppress(ImportError):
        # Finds where the title stands, which it cannot once variables have been changed.
        importlib.import_module("setproctitle").getproctitle()
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.freeze()
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise RuntimeError("a process with several threads cannot be forked")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = _serve(
        socket.socket(fileno=int(sys.argv[1])), to_kill=True, nested=bool(int(sys.argv[2]))
    )
    _run(*job.words[:2])


if __name__ == "__main__":
    _main()

"""The process in which grammars are compiled for the first time.

A fork for each, within limits of the operating system.

It has one thread, the tokenizer, and nothing of the model. For each trial it is sent one end of a
socket pair and forks. The fork reads the grammar from the socket, answers there, and ends; this
process adds one byte that says how it ended. Where the other end of the socket is closed, the fork
is killed.
"""

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from llguidance import LLTokenizer

from inlay.base.errors import InlayError
from inlay.engine.grammar.matchers import compiled, tokenizer_of
from inlay.engine.grammar.source import source_of
from inlay.messages.request import Grammar

MAX_CPU = 2
"""Seconds of processor time for a trial."""

MAX_MEMORY = 256 * 1024 * 1024
"""Bytes of address space for a trial, beyond what this process has."""

MAX_STACK = 4 * 1024 * 1024
"""Bytes of stack: less than a thread has, so that what was tried in a process holds in a thread."""


FAILED = 255
"""In the place of a signal's number."""


SIZE, RESIDENT = 0, 1
"""Fields of /proc/self/statm: all address space, and what is in memory."""


class TrialResult(msgspec.Struct, omit_defaults=True):
    """The outcome of a trial: the grammar in llguidance's form, or why it is refused.

    `num_bytes` is what memory grew by while it was compiled.
    """

    source: str | None = None
    refused: str | None = None
    num_bytes: int = 0


_Tokenizer: TypeAlias = LLTokenizer | InlayError | None
"""The model's, why it cannot be used, or none."""


class _Fork(NamedTuple):
    pid: int
    client: socket.socket


def main(
    control: socket.socket, path: Path | None, eos_token_ids: tuple[int, ...], max_cpu: int
) -> None:
    """Serve until the other end of `control` is closed.

    Args:
        control: where ends of socket pairs come from.
        path: of the model directory with the tokenizer; without one grammars are counted and
            not compiled.
        eos_token_ids: what ends an output.
        max_cpu: seconds of processor time for a trial.
    """
    tokenizer: _Tokenizer = None
    try:
        if path is not None:
            tokenizer = tokenizer_of(path, eos_token_ids)
    except InlayError as error:
        tokenizer = error
    gc.freeze()  # so that forks share its pages
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    forks: dict[int, _Fork] = {}  # by descriptor
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                _, sent, _, _ = socket.recv_fds(control, 1, 1)
                if not sent:
                    return
                fork = _begin(socket.socket(fileno=sent[0]), tokenizer, max_cpu)
                forks[fork.client.fileno()] = fork
                poll.register(fork.client, 0)  # tells that the other end is closed
            elif descriptor == woken:
                os.read(woken, 4096)
            else:
                with suppress(ProcessLookupError):
                    os.kill(forks[descriptor].pid, signal.SIGKILL)
                poll.unregister(descriptor)
        for descriptor, fork in tuple(forks.items()):
            pid, status = os.waitpid(fork.pid, os.WNOHANG)
            if pid:
                with suppress(KeyError):
                    poll.unregister(descriptor)
                del forks[descriptor]
                with fork.client, suppress(OSError):
                    fork.client.sendall(bytes((_signal(status),)))
                    # Forks that began meanwhile have it as well.
                    fork.client.shutdown(socket.SHUT_RDWR)


def _signal(status: int) -> int:
    """The signal that ended a fork: 0 for itself, `FAILED` for an error of ours."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    return FAILED if os.WEXITSTATUS(status) else 0


def _begin(client: socket.socket, tokenizer: _Tokenizer, max_cpu: int) -> _Fork:
    pid = os.fork()
    if pid:
        return _Fork(pid, client)
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic would quote the grammar
        _limit(max_cpu)
        with client.makefile("rb") as file:
            grammar = msgspec.msgpack.decode(file.read(), type=Grammar)
        client.sendall(msgspec.msgpack.encode(_try(grammar, tokenizer)))
        code = 0
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)
    finally:
        os._exit(code)


def _try(grammar: Grammar, tokenizer: _Tokenizer) -> TrialResult:
    try:
        if isinstance(tokenizer, InlayError):
            raise tokenizer
        before, source = _pages(RESIDENT), source_of(grammar)
        matcher = None if tokenizer is None else compiled(tokenizer, grammar.kind, source)
        grown = _pages(RESIDENT) - before
        del matcher  # only now: it is what is measured
    except InlayError as error:
        return TrialResult(refused=error.message)
    return TrialResult(source=source, num_bytes=max(0, grown * resource.getpagesize()))


def _limit(max_cpu: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu, max_cpu + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, size in (
        (resource.RLIMIT_AS, _pages(SIZE) * resource.getpagesize() + MAX_MEMORY),
        (resource.RLIMIT_STACK, MAX_STACK),
    ):
        most = resource.getrlimit(name)[1]
        if most == resource.RLIM_INFINITY or size < most:
            resource.setrlimit(name, (size, size))


def _pages(field: int) -> int:
    """Memory of this process in pages, `SIZE` or `RESIDENT`; only Linux tells."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[field])
    except FileNotFoundError:
        return 1 << 28


if __name__ == "__main__":
    os.nice(5)
    descriptor, path, ids, seconds = sys.argv[1:]
    main(
        socket.socket(fileno=int(descriptor)),
        Path(path) if path else None,
        tuple(json.loads(ids)),
        int(seconds),
    )

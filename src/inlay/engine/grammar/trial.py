"""Trials: a grammar is compiled in a process that can be killed, before it is where nothing can."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.grammar.regex import cost_of_regex
from inlay.engine.grammar.source import source_of
from inlay.engine.grammar.trial_process import MAX_CPU, MAX_MEMORY, TrialResult
from inlay.messages.request import Grammar

MAX_SOURCE = 8 * 1024
"""Characters."""

MAX_PROPERTIES = 200
"""Of all objects together."""

MAX_COST = 500
"""States and transitions of a regular expression.

Twenty times as many states visited on the way to its shortest match.
"""

_NOTES = {
    "$schema",
    "$id",
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "readOnly",
    "writeOnly",
}
_VALUES = {"type", "required", "enum", "const", "minimum", "maximum", "minLength", "maxLength"}
_SCHEMAS = {"items", "additionalProperties"}
_NAMED = {"properties", "$defs", "definitions"}


def is_cheap(grammar: Grammar) -> bool:
    """True where compiling it takes less than 0.1 s.

    Raises:
        InvalidRequestError: it is nested too deeply.
    """
    if grammar.kind == "json_object":
        return True
    if len(grammar.source) > MAX_SOURCE:
        return False
    if grammar.kind == "choice":
        return True
    if grammar.kind == "regex":
        cost = cost_of_regex(grammar.source)
        return max(cost.states, cost.transitions, cost.width * cost.shortest // 20) <= MAX_COST
    if grammar.kind != "json_schema":
        return False
    try:
        return _properties(json.loads(grammar.source)) <= MAX_PROPERTIES
    except (ValueError, RecursionError):
        return False


def _properties(schema: Any) -> float:
    """Properties of a schema that has nothing in it but what is known to be cheap.

    Infinitely many of any other.
    """
    if not isinstance(schema, dict):
        return 0
    count = 0.0
    for key, value in schema.items():
        if key in _SCHEMAS:
            count += _properties(value)
        elif key in _NAMED and isinstance(value, dict):
            count += sum(map(_properties, value.values())) + (
                len(value) if key == "properties" else 0
            )
        elif key == "anyOf" and isinstance(value, list):
            count += sum(map(_properties, value))
        elif key != "$ref" and key not in _NOTES | _VALUES:
            return float("inf")
    return count


CHEAP_BYTES = 2 * 1024 * 1024
"""Memory of a compiled grammar that is cheap, at most: the largest take 1 MiB."""

_ENDED_BY = {
    signal.SIGXCPU: f"compiling it takes more than {MAX_CPU} s of processor time",
    signal.SIGABRT: f"compiling it takes more than {MAX_MEMORY >> 20} MiB of memory",
    signal.SIGSEGV: "it is nested too deeply",
}


class TrialProcess:
    """The process that forks for each trial.

    It is started when it is first needed, and again where it has died. Safe to use from any thread.
    """

    def __init__(
        self, path: Path | None, eos_token_ids: tuple[int, ...] = (), *, max_cpu: int = MAX_CPU
    ) -> None:
        """For the tokenizer of a model directory, whose outputs end with one of `eos_token_ids`.

        Without a path grammars are counted and not compiled: for engines that compile them
        themselves. A trial has `max_cpu` seconds of processor time.
        """
        self._path = path
        self._eos_token_ids = eos_token_ids
        self._max_cpu = max_cpu
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Its number, once it is started."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Kill it, and the trials under way."""
        with self._lock:
            self._closed = True
            self._end()

    def take(self, client: socket.socket) -> None:
        """Have it fork for the trial at the other end of `client`.

        Raises `EngineError` when it cannot be started.
        """
        with self._lock:
            for _ in range(2):
                control = self._started()
                with suppress(OSError):  # it has died
                    socket.send_fds(control, [b"t"], [client.fileno()])
                    return
                self._end()
        raise EngineError("the process that tries grammars cannot be started")

    def _started(self) -> socket.socket:
        if self._closed:
            raise EngineError("the engine is closing")
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "inlay.engine.grammar.trial_process",
                        str(theirs.fileno()),
                        str(self._path or ""),
                        json.dumps(self._eos_token_ids),
                        str(self._max_cpu),
                    ],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    # To be killed with its forks. In a session of its own it would give way to
                    # nobody: Linux has niceness count within a session (sched_autogroup).
                    process_group=0,
                )
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = self._control = None


class Checked(NamedTuple):
    """A grammar whose cost is known.

    Attributes:
        source: in llguidance's form.
        num_bytes: memory that it takes compiled, at most.
    """

    source: str
    num_bytes: int


class Trial:
    """One grammar's. `run` it in one thread, `stop` it from any."""

    __slots__ = ("_grammar", "_lock", "_process", "_socket", "_stopped")

    def __init__(self, process: TrialProcess, grammar: Grammar) -> None:
        self._process = process
        self._grammar = grammar
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._stopped = False

    def run(self) -> Checked:
        """Compile it: compiling it again takes no more than `MAX_CPU` and `MAX_MEMORY`.

        Raises:
            InvalidRequestError: it is none, or costs more.
            EngineError: the process died, or the trial was stopped.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with self._lock:
                if self._stopped:
                    theirs.close()
                    raise EngineError("the trial was stopped")
                self._socket = ours
            try:
                with theirs:
                    self._process.take(theirs)
                ours.sendall(msgspec.msgpack.encode(self._grammar))
                ours.shutdown(socket.SHUT_WR)
                came = b"".join(iter(lambda: ours.recv(1 << 16), b""))
            except (BrokenPipeError, ConnectionResetError):
                came = b""
            finally:
                with self._lock:
                    self._socket = None
        return self._read(came)

    def stop(self) -> None:
        """Kill it where it runs; `run` raises."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, came: bytes) -> Checked:
        if self._stopped:
            raise EngineError("the trial was stopped")
        if not came or (came[-1] and came[-1] not in _ENDED_BY):
            raise EngineError("the process that tries grammars died")
        if came[-1]:
            raise InvalidRequestError(
                f"the grammar is too large: {_ENDED_BY[signal.Signals(came[-1])]}; make it simpler"
            )
        answer = msgspec.msgpack.decode(came[:-1], type=TrialResult)
        if answer.source is None:
            raise InvalidRequestError(answer.refused or "the grammar cannot be used")
        return Checked(answer.source, max(answer.num_bytes, CHEAP_BYTES))


def checked_source(grammar: Grammar, trial: Trial) -> Checked:
    """A grammar in llguidance's form, after its trial unless it is cheap by its count.

    Raises as `Trial.run`.
    """
    return Checked(source_of(grammar), CHEAP_BYTES) if is_cheap(grammar) else trial.run()

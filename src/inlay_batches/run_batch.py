"""`inlay run-batch`: a file of requests, answered by a server line by line.

Every line of the output is whole and on the disk's way once it is counted, so a run that ended in
any way goes on with `--resume`.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from inlay.base.errors import InlayError, OverloadedError, RateLimitedError, why_unusable
from inlay.cli.command import FileError, UsageError
from inlay.cli.process import Console
from inlay.http.errors import error_json
from inlay_batches.commands import RunBatchSettings
from inlay_batches.lines import (
    Line,
    LineError,
    LineRequest,
    answered,
    read_line,
    seed_of,
    with_seed,
)
from inlay_batches.records import UsageSum
from inlay_tools.chat.own_server import own_server, serve_settings
from inlay_tools.http_client import HttpClient, RemoteServer, server_of

MAX_LINE_BYTES = 64 * 1024 * 1024
_BATCH = "batch_local"
_SHOWN = 10
_TRIES = 3
_MOST_SECONDS = 30.0
_EVERY = 0.5
_SEEDED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class _WrittenLine(msgspec.Struct):
    custom_id: str


_written = msgspec.json.Decoder(_WrittenLine)


class _Counts(NamedTuple):
    total: int
    before: int


def run(settings: RunBatchSettings, extra_args: Sequence[str]) -> int:
    """Answer all lines; the exit status.

    Raises:
        UsageError: words that contradict each other.
        FileError: a file cannot be read or written, or a line is no request.
        InlayError: the server did not start.
    """
    if settings.model is None and extra_args:
        raise UsageError("words after -- are options of inlay serve, and need --model")
    if settings.model is not None and settings.url is not None:
        raise UsageError("--url asks a server, and --model starts one: give one of them")
    console = Console(sys.stdout, sys.stderr)
    try:
        with ExitStack() as stack:
            source = stack.enter_context(settings.input_file.open("rb"))
            total = _check(source, settings.input_file)
            done, output = _opened(settings)
            stack.callback(output.close)
            if settings.model is None:
                server = server_of(settings.url, settings.api_key)
            else:
                running = own_server(serve_settings(settings.model, extra_args))
                server = RemoteServer.of(stack.enter_context(running), None)
            work = _BatchRun(server, source, output, done, console, _Counts(total, len(done)))
            return asyncio.run(work.run(settings.max_inflight))
    except OSError as error:
        name = error.filename or settings.output_file
        # It has a name where it could not be opened: nothing was asked then.
        more = "" if error.filename else "; --resume goes on from there"
        raise FileError(f"{name}: {why_unusable(error)}{more}") from error


def _lines(file: BinaryIO) -> Iterator[Line]:
    file.seek(0)
    number, offset = 0, 0
    while data := file.readline(MAX_LINE_BYTES + 2):
        end = offset + len(data)
        text = data.removeprefix(b"\xef\xbb\xbf").strip() if number == 0 else data.strip()
        if len(data) > MAX_LINE_BYTES + 1:
            yield Line(number, offset, end, None)
            return
        if text:
            yield Line(number, offset, end, text)
        number, offset = number + 1, end


def _check(file: BinaryIO, path: Path) -> int:
    """Check all lines; return their number. Raises `FileError`."""
    problems: list[str] = []
    seen: dict[str, int] = {}
    for line in _lines(file):
        try:
            request = read_line(line, None, MAX_LINE_BYTES)
            earlier = seen.setdefault(request.custom_id, line.number + 1)
            if earlier != line.number + 1:
                raise LineError(f"custom_id is that of line {earlier}")
        except LineError as error:
            problems.append(f"{path}:{line.number + 1}: {error.message}")
            if len(problems) == _SHOWN:
                break
    if problems:
        raise FileError("; ".join(problems) + "; nothing was asked")
    if not seen:
        raise FileError(f"{path} has no lines")
    return len(seen)


def _opened(settings: RunBatchSettings) -> tuple[set[str], BinaryIO]:
    """Return the ids that the output file has, and the file. Raises `FileError`."""
    path = settings.output_file
    if not settings.resume:
        try:
            return set(), path.open("xb")
        except FileExistsError as error:
            raise FileError(
                f"{path} exists; --resume goes on with it, and another --output-file begins anew"
            ) from error
    done: set[str] = set()
    file = path.open("a+b")
    file.seek(0)
    whole = 0
    for text in file:
        if not text.endswith(b"\n"):
            break
        try:
            done.add(_written.decode(text).custom_id)
        except msgspec.MsgspecError as error:
            file.close()
            raise FileError(f"{path} is no output of a batch: {error}") from error
        whole += len(text)
    file.truncate(whole)
    file.seek(whole)
    return done, file


class _BatchRun:
    def __init__(
        self,
        server: RemoteServer,
        source: BinaryIO,
        output: BinaryIO,
        done: set[str],
        console: Console,
        counts: _Counts,
    ) -> None:
        self._client = HttpClient(server)
        self._source = source
        self._output = output
        self._done = done
        self._console = console
        self._counts = counts
        self._answered = self._failed = 0
        self._began = time.monotonic()

    async def run(self, inflight: int) -> int:
        room = asyncio.Semaphore(inflight)
        showing = asyncio.create_task(self._show_often()) if sys.stderr.isatty() else None
        try:
            async with asyncio.TaskGroup() as group:
                for line in _lines(self._source):
                    request = read_line(line, None, MAX_LINE_BYTES)
                    if request.custom_id not in self._done:
                        await room.acquire()
                        task = group.create_task(self._answer(line.number, request))
                        task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        finally:
            if showing is not None:
                showing.cancel()
            await self._client.close()
        self._console.line(f"{self._progress()}, in {time.monotonic() - self._began:.1f} s")
        return 1 if self._failed else 0

    async def _answer(self, number: int, request: LineRequest) -> None:
        body = request.body
        if request.url in _SEEDED and b'"seed"' not in body:
            body = with_seed(body, seed_of(_BATCH, request.custom_id))
        status, text = await self._asked(request.url, body)
        id_, usage = f"req_{number}", UsageSum()
        outcome = answered(_BATCH, number, request.custom_id, status, id_, text, usage)
        self._output.write(outcome.text)
        self._output.flush()
        self._answered += 1
        self._failed += status != 200

    async def _asked(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Return (status, body) of an answer; what fails for a time is tried again."""
        path = url.removeprefix("/v1") if url.startswith("/v1/") else f"..{url}"
        tries, wait = 0, 1.0
        while True:
            try:
                async with self._client.streaming("POST", path, body) as pieces:
                    return 200, b"".join([piece.data async for piece in pieces])
            except (OverloadedError, RateLimitedError) as error:
                lost = error.retry_after is None
                tries += lost
                if tries >= _TRIES:
                    raise
                await asyncio.sleep(error.retry_after or wait)
                wait = min(2 * wait, _MOST_SECONDS)
            except InlayError as error:
                tries += 1
                if error.status < 500 or tries >= _TRIES:
                    return error.status, error_json(error)
                await asyncio.sleep(1.0)

    async def _show_often(self) -> None:
        while True:
            done = self._counts.before + self._answered
            width = 30 * done // self._counts.total
            bar = "#" * width + "." * (30 - width)
            self._console.progress(f"\r[{bar}] {self._progress()} ")
            await asyncio.sleep(_EVERY)

    def _progress(self) -> str:
        done = self._counts.before + self._answered
        rate = self._answered / max(time.monotonic() - self._began, 1e-3)
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{done} of {self._counts.total} lines{failed}, {rate:.1f} a second"

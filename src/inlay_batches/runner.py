"""Runs one batch to its end: validate, run, write pieces, finalize.

Each input line gets exactly one output line, whatever dies. Lines that are done gather in memory;
from time to time they are written as pieces under new names, and one compare-and-set adds the
pieces, the numbers of their lines, counts and usage to the record. What is not in the record does
not exist. So whoever takes the batch over runs the lines that the record does not have, and one
that lost the batch cannot add any.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from inlay.base import liveness
from inlay.base.errors import OverloadedError
from inlay.store.kept.contents import Contents, Piece, new_name
from inlay.store.kept.joining import join_small
from inlay.store.kept.lease import RENEW_SECONDS, Lease, replace
from inlay_batches.lines import Line, Outcome, blocks_of, not_run, read_line
from inlay_batches.matrix import piece_of
from inlay_batches.records import (
    ENDS,
    BatchRecord,
    HeldBatch,
    LineProblem,
    Place,
    Stop,
    UsageSum,
    holds,
    new_id,
    with_numbers,
)
from inlay_batches.validate import Validation
from inlay_batches.work import Work

_log = logging.getLogger(__name__)

T = TypeVar("T")

PIECE_LINES = 1000
PIECE_OUTPUT_BYTES = 4 * 1024 * 1024
PIECE_SECONDS = 10.0
"""Lines, bytes and seconds after which what is done is written, whichever comes first."""

_RETRY_SECONDS = 1.0


class Pace(NamedTuple):
    """Times and bounds of a runner.

    Attributes:
        inflight: lines under way at most.
        inflight_bytes: of their input at most; one line may pass it.
        piece_lines: lines after which a piece is written.
        piece_seconds: or seconds.
        renew: seconds between two renewals of the lease.
    """

    inflight: int
    inflight_bytes: int = 16 * 1024 * 1024
    piece_lines: int = PIECE_LINES
    piece_seconds: float = PIECE_SECONDS
    renew: float = RENEW_SECONDS


class _Checkpoint(NamedTuple):
    """Lines that are done, written, and not yet in the record."""

    output: Piece | None
    error: Piece | None
    numbers: list[int]
    completed: int
    usage: UsageSum
    resume: Place
    matrix: Piece | None = None
    width: int = 0

    def added(self, record: BatchRecord) -> BatchRecord:
        """Return a record that has them, which it may have already."""
        if self.output in record.output or self.error in record.error:
            return record
        return replace(
            record,
            output=record.output if self.output is None else (*record.output, self.output),
            error=record.error if self.error is None else (*record.error, self.error),
            done=with_numbers(record.done, self.numbers),
            completed=record.completed + self.completed,
            failed=record.failed + len(self.numbers) - self.completed,
            usage=record.usage + self.usage,
            resume=self.resume,
            matrix=record.matrix if self.matrix is None else (*record.matrix, self.matrix),
            width=self.width or record.width,
        )


class BatchRunner:
    """One batch that this frontend owns.

    Args:
        held: the batch.
        contents: its contents, and where those of its outputs go.
        work: answers its lines.
        pace: times and bounds.
        clock: Unix time.
    """

    def __init__(
        self,
        held: HeldBatch,
        contents: Contents,
        work: Work,
        pace: Pace,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._held = held
        self._contents = contents
        self._work = work
        self._pace = pace
        self._clock = clock
        self._done: list[Outcome] = []
        self._done_bytes = 0
        self._all_done = False
        self._due = asyncio.Event()
        self._running: dict[int, tuple[Line, asyncio.Task[None]]] = {}
        self._running_bytes = 0
        self._next = Place()
        self._stop: Stop | None = None
        self._left = False
        self._look = asyncio.Event()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    def look(self) -> None:
        """Look at the record now: its client has changed it."""
        self._look.set()

    async def run(self) -> None:
        """Run the batch until it has ended.

        Raises:
            LeaseLostError: another frontend has it.
        """
        renewing = asyncio.create_task(self._renew())
        renewing.add_done_callback(self._ended)
        try:
            if self._held.record.status == "validating":
                await self._validate()
            if self._held.record.status in ("in_progress", "cancelling"):
                await self._run_lines()
            if self._held.record.status == "finalizing":
                await self._finalize()
        finally:
            self._left = True
            renewing.cancel()
            for _, task in self._running.values():
                task.cancel()
            await asyncio.gather(
                renewing, *(task for _, task in self._running.values()), return_exceptions=True
            )

    async def release(self) -> None:
        """Let another frontend take it at once. Raises `OverloadedError`, `LeaseLostError`."""
        await self._held.change(
            lambda record: replace(record, lease=Lease("", record.lease.epoch + 1))
        )

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._changed.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The lease, and what others say.

    async def _renew(self) -> None:
        refs: list[str] | None = None
        while True:
            self._look.clear()
            try:
                await self._renewed()
                if refs is None and (held := self._held.record.held) is not None:
                    refs = (await self._contents.read(held)).decode().split()
                if refs:
                    await self._work.hold(refs)
            except OverloadedError as error:
                _log.warning("batch %s: %s", self._held.record.id, error.message)
            left = self._held.record.expires_at - self._clock()
            seconds = min(self._pace.renew, left) if left > 0 else self._pace.renew
            try:
                async with liveness.timeout(seconds):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _renewed(self) -> None:
        record = await self._held.change(lambda found: replace(found, renewed=found.renewed + 1))
        if record.ended or self._stop is not None:
            return
        if record.stop is not None:
            self._halt(record.stop)
        elif record.status == "cancelling":
            self._halt("batch_cancelled")
        elif not self._work.is_allowed():
            _log.info("batch %s is cancelled: its key was removed", record.id)
            await self._cancel()
        elif self._clock() >= record.expires_at:
            self._halt("batch_expired")

    async def _cancel(self) -> None:
        await self._held.change(lambda record: cancelled(record, self._clock()))
        self._halt("batch_cancelled")

    def _halt(self, why: Stop) -> None:
        """Run no more lines: those that are under way end as those that never began."""
        if self._stop is None:
            self._stop = why
            for _, task in self._running.values():
                task.cancel()
            self._changed.set()

    # Validation.

    async def _validate(self) -> None:
        while True:
            self._check()
            try:
                validation = Validation(self._held.record, self._contents, self._work)
                found = await validation.run()
                break
            except OverloadedError as error:
                _log.info("batch %s waits: %s", self._held.record.id, error.message)
            if self._stop is not None:
                await self._patient(lambda: self._held.change(self._given_up))
                self._tell()
                return
            await asyncio.sleep(_RETRY_SECONDS)

        def checked(record: BatchRecord) -> BatchRecord:
            if found.problems:
                ended = replace(record, problems=found.problems, input=())
                return ended.at("failed", self._clock())
            if record.status == "validating":
                record = record.at("in_progress", self._clock())
            return replace(
                record, total=found.total, model=found.model, held=found.held, rows=found.rows
            )

        await self._patient(lambda: self._held.change(checked))
        self._tell()

    def _given_up(self, record: BatchRecord) -> BatchRecord:
        return replace(record, input=()).at(ENDS[self._stop], self._clock())

    # Lines.

    async def _run_lines(self) -> None:
        record = self._held.record
        if record.stop is not None or record.status == "cancelling":
            self._halt(record.stop or "batch_cancelled")
        writing = asyncio.create_task(self._write_often())
        writing.add_done_callback(self._ended)
        try:
            await self._start_lines()
            while self._running:
                await self._wait()
            self._all_done = True
            self._due.set()
            await writing
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        self._check()
        await self._patient(lambda: self._held.change(self._finalizing))
        self._tell()

    async def _start_lines(self) -> None:
        record = self._held.record
        done, self._next = record.done, record.resume
        while True:
            limit, prepare = self._work.max_line_bytes, self._work.prepare
            blocks = blocks_of(self._contents, record.input, self._next, limit, prepare)
            while True:
                try:
                    block = await anext(blocks, None)
                except OverloadedError as error:
                    _log.warning("batch %s waits: %s", record.id, error.message)
                    await asyncio.sleep(_RETRY_SECONDS)
                    break
                if block is None:
                    return
                for line in block:
                    if not holds(done, line.number):
                        await self._room(line)
                        self._begin(line)
                    self._next = Place(line.number + 1, line.end)

    async def _room(self, line: Line) -> None:
        """Wait until a line may begin."""
        size, pace = len(line.data or b""), self._pace
        while (
            len(self._done) >= 2 * pace.piece_lines
            or self._done_bytes >= 2 * PIECE_OUTPUT_BYTES
            or len(self._running) >= pace.inflight
            or (self._running and self._running_bytes + size > pace.inflight_bytes)
        ):
            await self._wait()
        self._check()

    async def _wait(self) -> None:
        self._changed.clear()
        self._check()
        await self._changed.wait()
        self._check()

    def _begin(self, line: Line) -> None:
        task = asyncio.create_task(self._answer(line))
        self._running[line.number] = line, task
        self._running_bytes += len(line.data or b"")
        task.add_done_callback(lambda task: self._answered(line, task))

    async def _answer(self, line: Line) -> None:
        endpoint, limit = self._held.record.endpoint, self._work.max_line_bytes
        read = partial(read_line, line, endpoint, limit)
        request = await self._work.prepare(len(line.data or b""), read)
        if self._stop is None:
            self._take(await self._work.answer(line.number, request))
        else:
            self._take(not_run(self._held.record.id, line.number, request.custom_id, self._stop))

    def _answered(self, line: Line, task: "asyncio.Task[None]") -> None:
        del self._running[line.number]
        self._running_bytes -= len(line.data or b"")
        if task.cancelled():
            if self._stop is not None and not self._left:
                self._begin(line)
        elif task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._changed.set()

    def _take(self, outcome: Outcome) -> None:
        if not self._done:
            asyncio.get_running_loop().call_later(self._pace.piece_seconds, self._due.set)
        self._done.append(outcome)
        self._done_bytes += len(outcome.text) + len(outcome.vector)
        if self._is_full:
            self._due.set()
        self._changed.set()

    @property
    def _is_full(self) -> bool:
        return len(self._done) >= self._pace.piece_lines or self._done_bytes >= PIECE_OUTPUT_BYTES

    # Pieces.

    async def _write_often(self) -> None:
        """Write what is done, until all is. Ended at another place, it may be in the record."""
        while not (self._all_done and not self._done):
            await self._due.wait()
            self._due.clear()
            while self._done:
                await self._write()
                if not (self._is_full or self._all_done):
                    break

    async def _write(self) -> None:
        """Write what is done, and note it in the record."""
        outcomes = self._done[: self._pace.piece_lines]
        resume = min(
            (Place(line.number, line.offset) for line, _ in self._running.values()),
            default=self._next,
            key=lambda place: place.line,
        )
        rest = self._done[self._pace.piece_lines :]
        checkpoint = await self._kept(outcomes, resume if not rest else None)
        await self._patient(lambda: self._held.change(checkpoint.added))
        for output in ("output", "error", "matrix"):
            await join_small(self._held, self._contents, output, self._new_name(output))
        self._done = self._done[len(outcomes) :]
        self._done_bytes -= sum(len(each.text) + len(each.vector) for each in outcomes)
        if self._done:
            asyncio.get_running_loop().call_later(self._pace.piece_seconds, self._due.set)
        self._changed.set()
        if not await self._patient(self._has_room):
            await self._patient(
                lambda: self._held.change(lambda found: replace(found, stop="storage_full"))
            )
            self._halt("storage_full")

    async def _has_room(self) -> bool:
        """Return True if there is room for more, or none is needed: then nobody waits for any."""
        record = self._held.record
        # Of the whole matrix, blank lines and all; the rest is kept already.
        more = 4 * record.rows * record.width - sum(piece.size for piece in record.matrix)
        if self._stop is not None or (self._all_done and not self._done and not more):
            return True
        return await self._work.has_room(more)

    def _new_name(self, output: str) -> str:
        return f"{new_name('lines')}-{self._held.record.lease.epoch}-{output}"

    async def _kept(self, outcomes: list[Outcome], resume: Place | None) -> _Checkpoint:
        good = [outcome for outcome in outcomes if outcome.status == 200]
        bad = [outcome for outcome in outcomes if outcome.status != 200]
        return _Checkpoint(
            await self._piece("output", good),
            await self._piece("error", bad),
            [outcome.number for outcome in outcomes],
            len(good),
            sum((outcome.usage for outcome in outcomes), UsageSum()),
            self._held.record.resume if resume is None else resume,
            await self._written("matrix", piece_of(good)),
            len(good[0].vector) // 4 if good else 0,
        )

    async def _piece(self, output: str, outcomes: Iterable[Outcome]) -> Piece | None:
        return await self._written(output, b"".join(outcome.text for outcome in outcomes))

    async def _written(self, output: str, data: bytes) -> Piece | None:
        if not data:
            return None
        # Each try has a name of its own: one that failed may have left a part.
        return await self._patient(lambda: self._contents.write(self._new_name(output), data))

    # The end.

    def _finalizing(self, record: BatchRecord) -> BatchRecord:
        if record.status == "finalizing":
            return record
        stop = record.stop or self._stop
        if record.status == "cancelling":
            stop = stop or "batch_cancelled"
        return replace(
            record,
            stop=stop,
            output_file_id=new_id("file-") if record.output else None,
            error_file_id=new_id("file-") if record.error else None,
            matrix_file_id=new_id("file-") if record.matrix and stop != "storage_full" else None,
            input=(),
        ).at("finalizing", self._clock())

    async def _finalize(self) -> None:
        await self._patient(lambda: self._work.publish(self._held.record))

        def ended(record: BatchRecord) -> BatchRecord:
            if record.ended:
                return record
            problems = record.problems
            if record.stop == "storage_full":
                problems = (*problems, _FULL)
            record = replace(record, output=(), error=(), matrix=(), held=None, problems=problems)
            return record.at(ENDS[record.stop], self._clock())

        await self._patient(lambda: self._held.change(ended))
        self._tell()

    def _tell(self) -> None:
        record = self._held.record
        _log.info(
            "batch %s is %s: %d lines, %d completed, %d failed",
            record.id,
            record.status,
            record.total,
            record.completed,
            record.failed,
        )

    async def _patient(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do what the storage refuses now until it is done; the batch is lost meanwhile or not."""
        while True:
            try:
                return await act()
            except OverloadedError as error:
                _log.warning("batch %s waits: %s", self._held.record.id, error.message)
                await asyncio.sleep(_RETRY_SECONDS)
                self._check()


_FULL = LineProblem(
    "storage_full", "the files of this key reached their limit (--files-tenant-bytes)"
)


def cancelled(record: BatchRecord, now: float) -> BatchRecord:
    """Return a record whose client cancels it: as it is where it has ended or ends anyway."""
    if record.status in ("validating", "in_progress"):
        return record.at("cancelling", now)
    return record

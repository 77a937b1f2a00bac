"""All lines of a batch are checked before one runs."""

import re
from array import array
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
from blake3 import blake3

from inlay.base.errors import BodyTooLargeError, InvalidRequestError, NotFoundError
from inlay.base.pace import yield_gil
from inlay.store.kept.contents import Contents, new_name
from inlay.store.names import ID_PATTERN
from inlay_batches.lines import Line, LineError, blocks_of, problem_of, read_line
from inlay_batches.records import BatchRecord, LineProblem, Place
from inlay_batches.work import Work

MAX_PROBLEMS = 100
"""Errors of a file that are told."""

MAX_HELD = 10_000
"""Different stored prompts and documents that the lines of a batch may name."""

_BYTES_OF_AN_ID = 20

_ref = re.compile(rf'"ref"\s*:\s*"({ID_PATTERN})"'.encode())


class _SeenIds:
    """Digests of custom ids, 16 bytes each, and the lines they stand in."""

    def __init__(self) -> None:
        self._digests = array("Q")
        self._more = array("Q")
        self._lines = array("I")

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, custom_id: str, line: int) -> None:
        digest = blake3(custom_id.encode()).digest(16)
        self._digests.append(int.from_bytes(digest[:8], "little"))
        self._more.append(int.from_bytes(digest[8:], "little"))
        self._lines.append(line)

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Yield (line, earlier line of the same id), not in order."""
        digests = np.frombuffer(self._digests, np.uint64)
        order = np.argsort(digests, kind="stable")
        ordered = digests[order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1])
        del ordered
        for index in same:
            first, second = int(order[index]), int(order[index + 1])
            if self._more[first] == self._more[second]:
                yield self._lines[second], self._lines[first]


class Validation:
    """Checks one batch; `run` returns its record with what was found."""

    def __init__(self, record: BatchRecord, contents: Contents, work: Work) -> None:
        self._record = record
        self._contents = contents
        self._work = work
        self._seen = _SeenIds()
        self._refs: set[bytes] = set()
        self._problems: list[LineProblem] = []
        self._model: str | None = None
        self._rows = 0

    async def run(self) -> BatchRecord:
        """Return the record with `problems`, or with `total`, `model` and `held`.

        Raises `OverloadedError`: the storage or the models cannot be asked now.
        """
        record, work = self._record, self._work
        try:
            limit = work.max_line_bytes
            blocks = blocks_of(self._contents, record.input, Place(), limit, work.prepare)
            async for block in blocks:
                size = sum(len(line.data or b"") for line in block)
                await work.prepare(size, partial(self._check_all, block))
                if len(self._problems) >= MAX_PROBLEMS:
                    break
        except NotFoundError as error:
            self._tell("input_file_lost", error.message)
        else:
            await self._check_whole()
        if self._problems:
            found = sorted(self._problems, key=lambda each: each.line or 0)
            return msgspec.structs.replace(record, problems=tuple(found[:MAX_PROBLEMS]))
        held = None
        if self._refs:
            held = await self._contents.write(new_name("held"), b"\n".join(sorted(self._refs)))
        return msgspec.structs.replace(
            record, total=len(self._seen), model=self._model, held=held, rows=self._rows
        )

    def _check_all(self, block: list[Line]) -> None:
        for line in block:
            yield_gil()
            if len(self._problems) >= MAX_PROBLEMS:
                return
            try:
                self._check(line)
            except InvalidRequestError as error:
                self._problems.append(problem_of(line, error))
            except BodyTooLargeError as error:
                too_long = LineError(error.message, code="line_too_long", param="body")
                self._problems.append(problem_of(line, too_long))

    def _check(self, line: Line) -> None:
        if line.number >= self._work.max_lines:
            if not any(each.code == "too_many_tasks" for each in self._problems):
                raise LineError(
                    f"the file has more than {self._work.max_lines} lines (--max-batch-lines)",
                    code="too_many_tasks",
                )
            return
        request = read_line(line, self._record.endpoint, self._work.max_line_bytes)
        self._seen.add(request.custom_id, line.number + 1)
        self._rows = line.number + 1
        try:
            model = self._work.check(request.body)
        except InvalidRequestError as error:
            param = "body" if error.param is None else f"body.{error.param}"
            raise LineError(error.message, code=error.code, param=param) from error
        if len(self._seen) == 1:
            self._model = model
        elif model != self._model:
            raise LineError(
                f"the model is {model!r}, and {self._model!r} in the lines before; a batch is for "
                "one model",
                code="model_mismatch",
                param="body.model",
            )
        self._refs.update(_ref.findall(request.body))
        if len(self._refs) > MAX_HELD:
            raise LineError(
                f"the lines name more than {MAX_HELD} different stored prompts and documents",
                code="too_many_references",
                param="body",
            )

    async def _check_whole(self) -> None:
        if not len(self._seen) and not self._problems:
            self._tell("empty_file", "the file has no lines")
            return

        def repeated() -> None:
            for line, earlier in self._seen.repeated():
                if len(self._problems) >= MAX_PROBLEMS:
                    return
                self._problems.append(
                    LineProblem(
                        "duplicate_custom_id",
                        f"custom_id is that of line {earlier}",
                        line,
                        "custom_id",
                    )
                )

        await self._work.prepare(_BYTES_OF_AN_ID * len(self._seen), repeated)
        if self._problems:
            return
        try:
            await self._work.check_model(self._model)
        except NotFoundError as error:
            self._tell("model_not_found", error.message, "body.model")
        except InvalidRequestError as error:
            self._tell("invalid_model", error.message, "body.model")

    def _tell(self, code: str, message: str, param: str | None = None) -> None:
        self._problems.append(LineProblem(code, message, None, param))

"""`inlay bench`: load on a server, or on two in turn, and its figures.

    workload.py     bodies made at random, or read from a file; writing.py
    load.py         sends them, and says when each piece of an answer came
    metrics.py      figures by the definitions of `vllm bench serve`; report.py shows them

It needs no torch and no tokenizer: tokens are counted, and texts cut, by the server.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import numpy as np

from inlay.base.errors import EngineError
from inlay.cli.command import UsageError
from inlay.cli.process import Console, waiting
from inlay.client import Uploader
from inlay_tools.bench.load import LoadSender, LoadShape
from inlay_tools.bench.metrics import BOUNDABLE, BenchFigures, Round, bounds_of
from inlay_tools.bench.report import Measured, as_text, compared, comparison
from inlay_tools.bench.workload import Body, Workload, prepared, read_bodies
from inlay_tools.http_client import HttpClient, ListedModel, served_model, server_of
from inlay_tools.settings import BenchSettings

_ROUNDS_COMPARED = 3
_LATE_SECONDS = 0.02
"""Delay of sending from which on the figures say more about this machine than about the server."""

_WARMUP = 1 << 31
"""Round of the prompts of warm-ups, which no measured round has."""


def run(settings: BenchSettings) -> int:
    """Measure and report; the exit status: 1 if a request failed.

    Raises:
        UsageError: settings that contradict each other.
        FileError: the file of bodies cannot be read.
        InlayError: a server cannot be reached, or no request was answered.
    """
    with asyncio.Runner() as runner:
        return runner.run(_Bench(settings, Console(sys.stdout, sys.stderr)).run())


@dataclass
class _MeasuredServer:
    """A server that is measured."""

    client: HttpClient
    model: ListedModel
    workload: Workload
    rounds: list[Round] = field(default_factory=list)


class _Bench:
    """One measurement."""

    def __init__(self, settings: BenchSettings, console: Console) -> None:
        if len(settings.url) > 2:
            raise UsageError(f"--url takes one server, or two to compare, got {len(settings.url)}")
        if any(not 0 < percentile < 100 for percentile in settings.metric_percentiles):
            raise UsageError("--metric-percentiles must be more than 0 and less than 100")
        self._settings = settings
        self._console = console
        self._bounds = bounds_of(settings.goodput, BOUNDABLE, "--goodput")
        self._lines = None if settings.bodies is None else read_bodies(settings.bodies)
        self._load = LoadShape(
            settings.request_rate,
            settings.burstiness,
            settings.max_concurrency,
            settings.request_timeout,
        )

    async def run(self) -> int:
        """Measure and report; the exit status."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            urls: Sequence[str | None] = settings.url or [None]
            targets = [await self._target(url, stack) for url in urls]
            for target in targets:
                await self._warm_up(target)
            rounds = settings.rounds or (_ROUNDS_COMPARED if len(targets) > 1 else 1)
            for index in range(rounds):
                # Each server goes first in turn, so that neither gains by what changes in time.
                for target in targets if index % 2 == 0 else reversed(targets):
                    await self._round(target, index, rounds)
        return self._report(targets)

    async def _target(self, url: str | None, stack: AsyncExitStack) -> _MeasuredServer:
        settings = self._settings
        server = server_of(url, settings.api_key)
        client = HttpClient(server)
        stack.push_async_callback(client.close)
        model = await served_model(client, settings.model_name)
        uploader = Uploader(server.url, server.api_key)
        workload = Workload(settings.workload, model, client, uploader)
        if self._lines is None:
            workload.check()
        return _MeasuredServer(client, model, workload)

    async def _warm_up(self, target: _MeasuredServer) -> None:
        count = self._settings.num_warmups
        if count:
            with waiting(self._console, f"warming up {target.client.server.url}"):
                bodies = await self._bodies(target, _WARMUP, count)
                alone = LoadShape(max_concurrency=1, request_timeout=self._settings.request_timeout)
                await LoadSender(target.client, alone).send(bodies, np.random.default_rng(0))

    async def _round(self, target: _MeasuredServer, index: int, rounds: int) -> None:
        where = target.client.server.url
        with waiting(self._console, f"making prompts for {where}"):
            bodies = await self._bodies(target, index, self._settings.workload.num_prompts)
        sender = LoadSender(target.client, self._load)

        def told() -> str:
            return f"{where}: round {index + 1} of {rounds}, {sender.done} of {len(bodies)} done"

        with waiting(self._console, told):
            rng = np.random.default_rng([self._settings.workload.seed, index, 1])
            target.rounds.append(Round(await sender.send(bodies, rng)))

    async def _bodies(self, target: _MeasuredServer, round_: int, count: int) -> Sequence[Body]:
        if self._lines is not None:
            always = self._settings.model_name is not None
            return [
                prepared(line, target.model.name, always=always) for line in self._lines[:count]
            ]
        return [body async for body in target.workload.bodies(round_, count)]

    def _report(self, targets: Sequence[_MeasuredServer]) -> int:
        settings = self._settings
        found = [
            Measured(
                target.client.server.url,
                target.model.name,
                BenchFigures(target.rounds, self._bounds, settings.metric_percentiles),
            )
            for target in targets
        ]
        for measured in found:
            if not measured.metrics.good:
                why = next(iter(measured.metrics.errors))
                raise EngineError(f"{measured.url} answered no request: {why}")
        self._notes(found)
        configured = {
            "request_rate": settings.request_rate,
            "max_concurrency": settings.max_concurrency,
        }
        if settings.output_format == "json":
            shown: dict[str, object] = {
                "date": time.strftime("%Y%m%d-%H%M%S"),
                **configured,
                "burstiness": settings.burstiness,
                "num_prompts": settings.workload.num_prompts,
            }
            if len(found) == 1:
                shown |= found[0].as_json()
            else:
                shown["servers"] = [each.as_json() for each in found]
                shown["compared"] = compared(*found)
            self._console.out(msgspec.json.encode(shown).decode() + "\n")
        else:
            reports = [as_text(each, configured) for each in found]
            if len(found) == 2:
                reports.append(comparison(*found))
            self._console.out("\n".join(reports))
        return 1 if any(each.metrics.errors for each in found) else 0

    def _notes(self, found: Sequence[Measured]) -> None:
        for measured in found:
            for error, count in measured.metrics.errors.items():
                self._console.line(f"{measured.url}: {count} failed: {error}")
            late = measured.metrics.lateness
            if self._settings.max_concurrency is None and late > _LATE_SECONDS:
                self._console.line(
                    f"this machine sent requests up to {late * 1000:.0f} ms late: it is too busy "
                    "for such a rate"
                )

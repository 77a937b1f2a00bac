"""`inlay plan`: how many workers a load needs, and in which roles.

measuring.py    step times of one worker, by a small bench of a server
fleet.py        a fleet on paper
sizing.py       the smallest that keeps the targets
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec

from inlay.cli.command import FileError, UsageError
from inlay.cli.process import Console, waiting
from inlay_tools.bench.metrics import bounds_of
from inlay_tools.files import read
from inlay_tools.http_client import HttpClient, server_of
from inlay_tools.plan.fleet import Demand, FleetTimes, StepTimes
from inlay_tools.plan.measuring import measured
from inlay_tools.plan.sizing import Sizing, Tried
from inlay_tools.settings import PlanSettings

BOUNDABLE = ("ttft", "itl")


class _Planned(msgspec.Struct):
    """A file that `--step-times` takes: what this command prints as JSON."""

    step_times: StepTimes


class PlanRow(msgspec.Struct, omit_defaults=True):
    """The fleet for one rate; times in milliseconds, at the 95th percentile.

    Attributes:
        sequences: that a worker decodes in a step, on average.
        fewer: what one worker fewer would do.
    """

    request_rate: float
    workers: int
    prefill_workers: int
    keeps_targets: bool
    p95_ttft_ms: float
    p95_itl_ms: float
    sequences: float
    fewer: dict[str, float] | None = None


def run(settings: PlanSettings) -> int:
    """Print the fleets; the exit status: 1 where none keeps the targets.

    Raises:
        UsageError: settings that contradict each other.
        FileError: the file of step times cannot be read.
        InlayError: the server cannot be reached, or answers with an error.
    """
    console = Console(sys.stdout, sys.stderr)
    targets = bounds_of(settings.targets, BOUNDABLE, "--targets")
    if not targets:
        raise UsageError("--targets names none: ttft, itl or both with milliseconds, as ttft:500")
    if settings.step_times is not None:
        times = _read(settings.step_times)
    else:
        with asyncio.Runner() as runner:
            times = runner.run(_measure(settings, console))
    sizing = Sizing(times, targets, settings.fetch_share or 0.0, settings.requests, settings.seed)
    with waiting(console, "simulating fleets"):
        rows = list(_rows(settings, sizing))
    if settings.output_format == "json":
        shown = {"step_times": asdict(times), "fleets": rows}
        console.out(msgspec.json.encode(shown).decode() + "\n")
    else:
        console.out(_text(times, rows))
    return 0 if all(row.keeps_targets for row in rows) else 1


def _read(path: Path) -> StepTimes:
    try:
        return msgspec.json.decode(read(path), type=_Planned).step_times
    except msgspec.MsgspecError as error:
        raise FileError(f"{path}: not what inlay plan -o json prints: {error}") from error


async def _measure(settings: PlanSettings, console: Console) -> StepTimes:
    client = HttpClient(server_of(settings.url, settings.api_key))
    try:
        with waiting(console, f"measuring {client.server.url}"):
            return await measured(
                client,
                settings.model_name,
                settings.max_num_seqs,
                settings.max_num_batched_tokens,
            )
    finally:
        await client.close()


def _rows(settings: PlanSettings, sizing: Sizing) -> Iterator[PlanRow]:
    for rate in settings.request_rate:
        demand = Demand(
            rate, settings.input_len, settings.output_len, settings.cached_share, settings.spread
        )
        for divided in (False, True) if settings.fetch_share is not None else (False,):
            yield _row(rate, *sizing.least(demand, divided=divided))


def _row(rate: float, found: Tried, fewer: Tried | None) -> PlanRow:
    return PlanRow(
        rate,
        found.layout.workers,
        found.layout.prefill,
        found.excess <= 1,
        **_times(found.outcome),
        sequences=round(found.outcome.sequences, 1),
        fewer=None if fewer is None else _times(fewer.outcome),
    )


def _times(outcome: FleetTimes) -> dict[str, float]:
    return {
        "p95_ttft_ms": round(outcome.first * 1000, 1),
        "p95_itl_ms": round(outcome.gap * 1000, 1),
    }


def _text(times: StepTimes, rows: list[PlanRow]) -> str:
    steps = (
        f"a step {times.step * 1e3:.2f} ms, each sequence {times.per_sequence * 1e3:.3f} ms, "
        f"each prompt position {times.per_position * 1e6:.1f} us, "
        f"a first token {times.overhead * 1e3:.1f} ms more"
    )
    lines = [steps]
    for row in rows:
        roles = (
            f" ({row.prefill_workers} prefill, {row.workers - row.prefill_workers} decode)"
            if row.prefill_workers
            else ""
        )
        number = f"{row.workers} worker{'s' * (row.workers > 1)}"
        said = f"{row.request_rate:g} requests/s: {number}{roles}"
        if not row.keeps_targets:
            said = f"{row.request_rate:g} requests/s: no fleet keeps the targets; {number} have"
        lines.append(f"{said}: {_said(row.p95_ttft_ms, row.p95_itl_ms)}")
        if row.fewer is not None:
            lines.append(f"    one fewer: {_said(**row.fewer)}")
    return "\n".join(lines) + "\n"


def _said(p95_ttft_ms: float, p95_itl_ms: float) -> str:
    return f"p95 of the first token {p95_ttft_ms:.0f} ms, between tokens {p95_itl_ms:.0f} ms"

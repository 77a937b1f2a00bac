"""`inlay status`: the workers of a fleet, as their heartbeats say."""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import uvloop

from inlay.base import liveness
from inlay.cli.process import Console, on_signals
from inlay.cli.settings import StatusSettings
from inlay.router.shares import Weights, called, shares_of
from inlay.transport.nats.discovery import LOADING, Discovery, FleetWorker
from inlay.transport.nats.member import Member

_LISTEN_SECONDS = 0.6
"""Bound of the wait for heartbeats of the workers with a card: longer than between two of them."""
_ROLL_SECONDS = 0.15
"""Wait for the heartbeats of workers without a card: those that load their model."""
_CLEAR = "\x1b[H\x1b[2J"
_HEAD = (
    "WORKER",
    "MODEL",
    "WEIGHTS",
    "SHARE",
    "TASK",
    "STATE",
    "RUNNING",
    "WAITING",
    "CACHE",
    "ADAPTERS",
    "ENGINE",
)


def run(settings: StatusSettings) -> int:
    """Show the fleet once, or until a signal; return the exit status.

    Raises:
        InlayError: NATS is out of reach.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_show(settings, Console(sys.stdout, sys.stderr)))
    return 0


async def _show(settings: StatusSettings, console: Console) -> None:
    as_json = settings.output_json or settings.output_format == "json"
    # A file or a pipe gets the tables one after the other.
    clears = settings.watch and not as_json and console.stdout.isatty()
    stop = asyncio.Event()
    on_signals(stop.set)
    member = await Member.join(settings.fleet, "frontend")
    discovery = Discovery(member, secret_fingerprint=None)
    await discovery.start()
    try:
        with suppress(TimeoutError):
            async with liveness.timeout(_LISTEN_SECONDS):
                await _everybody(discovery, member)
        while True:
            secret = await member.recorded_fingerprint()
            seen = fleet(discovery, settings.fleet.namespace, secret)
            shown = json.dumps(seen) + "\n" if as_json else table(seen)
            console.out((_CLEAR if clears else "") + shown)
            if not settings.watch or stop.is_set():
                return
            await _wait(stop, settings.interval)
    finally:
        await discovery.close()
        await member.leave()


async def _everybody(discovery: Discovery, member: Member) -> None:
    """Return once all running workers have answered the roll call that discovery began with."""
    expected = await member.cards.workers()
    await asyncio.sleep(_ROLL_SECONDS)
    while (
        not expected
        <= {worker.participant for worker in discovery.workers()} | discovery.unavailable().keys()
    ):
        await discovery.changed()


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


def fleet(discovery: Discovery, namespace: str, secret: str | None = None) -> dict[str, Any]:
    """The state of a fleet, as `--output-json` prints it; `secret` is the namespace's."""
    found = sorted(discovery.workers(), key=lambda worker: (worker.card.name, worker.id))
    ready = [worker.card for worker in found if worker.ready]
    shares = {name: shares_of(called(ready, name)) for name in {card.name for card in ready}}
    workers = [_worker(worker, shares) for worker in found]
    strangers = [worker for worker in found if secret not in (None, worker.card.secret_fingerprint)]
    unavailable = discovery.unavailable()
    loading = sorted(name for name, reason in unavailable.items() if reason == LOADING)
    return {
        "namespace": namespace,
        # All that is known of a worker before it has loaded its model.
        "workers": [*workers, *({"id": name, "state": "loading"} for name in loading)],
        "missing": {
            **{name: why for name, why in unavailable.items() if name not in loading},
            **{worker.id: _other_secret(worker, secret) for worker in strangers},
        },
    }


def _other_secret(worker: FleetWorker, secret: str | None) -> str:
    own = worker.card.secret_fingerprint or "of nobody"
    return f"it has the secret {own}, the namespace {secret}: start it again"


def _worker(worker: FleetWorker, shares: Mapping[str, Mapping[Weights, float]]) -> dict[str, Any]:
    card, beat, stats = worker.card, worker.beat, worker.stats
    state = "asleep" if beat.state == "ready" and card.asleep else beat.state
    if state == "ready" and worker.refusal is not None:
        state = "refused"
    return {
        "id": worker.id,
        "model": card.name,
        "aliases": list(card.aliases),
        # Of all workers with these weights together.
        "share": shares.get(card.name, {}).get(Weights.of(card), 0.0),
        "task": str(card.role),
        "role": card.phase,
        "tasks": [str(task) for task in card.tasks],
        "state": state,
        "running": stats.running,
        "waiting": stats.waiting,
        "blocks_used": stats.blocks_used,
        "blocks_total": stats.blocks_total,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "progress": stats.progress,
        "seconds_since_engine_answered": round(beat.stats_age, 3),
        "adapters": [adapter.name for adapter in card.adapters],
        "engine": f"{card.engine} {card.engine_version}",
        "dtype": card.dtype,
        "weights_id": card.weights_id,
        "self_check": msgspec.to_builtins(card.self_check),
        "secret_fingerprint": card.secret_fingerprint,
        "protocol": beat.protocol,
    }


def table(seen: dict[str, Any]) -> str:
    """The same as text: a line for each worker, then the missing ones and the reasons."""
    rows = [_HEAD, *(_row(worker) for worker in seen["workers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if not seen["workers"] and not seen["missing"]:
        lines.append(f"no worker in namespace {seen['namespace']}")
    return "\n".join([*lines, *_missing(seen["missing"])]) + "\n"


def _row(worker: dict[str, Any]) -> Sequence[str]:
    if worker["state"] == "loading":
        return (worker["id"], *["-"] * 4, "loading", *["-"] * (len(_HEAD) - 6))
    used, total = worker["blocks_used"], worker["blocks_total"]
    return (
        worker["id"],
        worker["model"],
        worker["weights_id"][:8],
        f"{worker['share']:.0%}",
        worker["task"] if worker["role"] == "both" else worker["role"],
        worker["state"],
        str(worker["running"]),
        str(worker["waiting"]),
        f"{100 * used // total}% of {total}" if total else "-",
        ", ".join(worker["adapters"]) or "-",
        f"{worker['engine']}{_checked(worker['self_check'])}",
    )


def _checked(self_check: dict[str, Any] | None) -> str:
    """Return what a worker's check at start left to say."""
    if self_check is None or self_check["result"] == "passed":
        return ""
    return f" (self-check: {self_check['result']})"


def _missing(missing: dict[str, str]) -> Iterator[str]:
    for name, reason in sorted(missing.items()):
        yield f"missing: {name}: {reason}"

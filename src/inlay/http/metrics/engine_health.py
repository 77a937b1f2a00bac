"""Health of the workers' engines, from their last reports; no worker is asked."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from inlay.base import liveness
from inlay.base.errors import ErrorBody
from inlay.messages.card import ModelCard
from inlay.messages.fields import example, field
from inlay.transport.api import Silences, Worker

State = Literal["ok", "unprobed", "asleep", "failing", "silent"]
"""State of a worker. `failing`: its last probe failed, or its last two canaries.

`silent`: it owes an answer, or the next probe is long overdue, so the worker process itself is
stuck.
"""
SILENT_SECONDS = 10.0
"""Seconds for which a process may owe an answer that takes it no time."""

_WELL: frozenset[State] = frozenset({"ok", "unprobed", "asleep"})


class LastProbe(msgspec.Struct, frozen=True):
    """Last probe of an engine: its age, its duration, and its error if it failed."""

    age: Annotated[float, field("seconds since then.", 1.5)]
    seconds: Annotated[float, field("seconds that it took.", 0.02)]
    error: Annotated[str | None, field("error, if it failed.", "no token within 20 s")] = None


class WorkerHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """Health of one worker.

    Attributes:
        id: of the worker.
        model: that it has.
        state: as `State` says.
        last_probe: of its engine, if there was one.
        silence: seconds for which its process has owed an answer, if those are too many.
        canary: reason why its numbers are wrong, if they are.
    """

    id: Annotated[str, example("w-5d0f")]
    model: Annotated[str, example("my-model")]
    state: Annotated[State, example("ok")]
    last_probe: LastProbe | None = None
    silence: Annotated[float | None, example(12.0)] = None
    canary: Annotated[
        str | None,
        example("the answer to the worker's own request differs from its first one by 0.4"),
    ] = None

    @property
    def well(self) -> bool:
        """True if the worker is healthy."""
        return self.state in _WELL

    @property
    def reason(self) -> str:
        """Cause of a bad state."""
        probe = self.last_probe
        if self.canary is not None:
            return f"{self.id}: {self.canary}"
        if self.silence is not None:
            return f"{self.id} has not answered for {self.silence:.0f} s"
        if probe is None or self.well:
            return f"{self.id} is {self.state}"
        if self.state == "silent":
            return f"{self.id} has not reported its engine's health for {probe.age:.0f} s"
        return f"{self.id}: {probe.error} ({probe.age:.0f} s ago)"


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Response of `/health`.

    Attributes:
        status: "degraded" if a worker is unhealthy, but each model has a healthy one.
        workers: workers that are ready or asleep.
        missing: workers that should be ready and are not, with the reason.
        error: the error, if `status` is "failing".
    """

    status: Literal["ok", "degraded", "failing"]
    workers: list[WorkerHealth]
    missing: Annotated[dict[str, str], example({"my-model": "it has not loaded yet"})] = {}
    error: ErrorBody | None = None


def health_of(worker: Worker) -> WorkerHealth:
    card = worker.card
    probe = card.probe
    last: LastProbe | None = None
    state: State = "unprobed"
    if card.asleep:
        state = "asleep"
    elif probe is not None:
        age = max(0.0, time.time() - probe.at)
        last = LastProbe(round(age, 3), round(probe.seconds, 6), probe.error)
        state = "ok" if probe.error is None else "failing"
        if age - liveness.clock().lost(age) > probe.next_within:
            state = "silent"
    silence = worker.silence() if isinstance(worker, Silences) else 0.0
    if silence <= SILENT_SECONDS:
        if state in _WELL and card.canary is not None and card.canary.wrong:
            return WorkerHealth(worker.id, card.name, "failing", last, canary=card.canary.reason)
        return WorkerHealth(worker.id, card.name, state, last)
    return WorkerHealth(worker.id, card.name, "silent", last, round(silence, 3))


def combined_status(
    models: Iterable[ModelCard], workers: Sequence[Worker], missing: Mapping[str, str]
) -> Health:
    """Return the health of all workers.

    Args:
        models: models that are or were served.
        workers: ready workers.
        missing: workers that should be ready and are not, with the reason.
    """
    found = [health_of(worker) for worker in workers]
    well = {
        (worker.card.name, worker.card.role)
        for worker, health in zip(workers, found, strict=True)
        if health.well
    }
    names = {name for name, _ in well}
    absent: set[str] = set()
    for card in models:
        if (card.name, card.role) not in well:
            absent.add(card.name)
        if card.stage is not None:
            # Some may never have been seen.
            absent.update(card.stage.missing(names).values())
    lost = sorted(absent)
    gone = dict(missing)
    if lost or not well:
        reasons = [f"{name}: {reason}" for name, reason in gone.items()]
        reasons += [worker.reason for worker in found if not worker.well]
        what = f"no worker of {', '.join(lost)} is well" if lost else "no worker is ready"
        said = "; ".join([what, *reasons])
        return Health("failing", found, gone, ErrorBody(message=said, type="overloaded_error"))
    bad = gone or any(not worker.well for worker in found)
    return Health("degraded" if bad else "ok", found, gone)

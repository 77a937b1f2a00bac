"""How the workers' engines are, by what they said last; nobody is asked."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from inlay import liveness
from inlay.card import ModelCard
from inlay.errors import ErrorBody
from inlay.transport.api import Worker

State = Literal["ok", "unprobed", "asleep", "failing", "silent"]
"""`failing`: its last probe failed.

`silent`: the next is long overdue, so the worker itself is stuck.
"""

_WELL: frozenset[State] = frozenset({"ok", "unprobed", "asleep"})


class LastProbe(msgspec.Struct, frozen=True):
    """The last probe of an engine: how long ago it was, how long it took, why it failed."""

    age: float
    seconds: float
    error: str | None = None


class WorkerHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one worker is."""

    id: str
    model: str
    state: State
    last_probe: LastProbe | None = None

    @property
    def well(self) -> bool:
        """Whether nothing speaks against it."""
        return self.state in _WELL

    @property
    def reason(self) -> str:
        """What is wrong with it."""
        probe = self.last_probe
        if probe is None or self.well:
            return f"{self.id} is {self.state}"
        if self.state == "silent":
            return f"{self.id} has not told of its engine for {probe.age:.0f} s"
        return f"{self.id}: {probe.error} ({probe.age:.0f} s ago)"


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `/health`.

    Attributes:
        status: "degraded" when some worker is not well, but each model has one that is.
        workers: those that are ready, or asleep.
        missing: those that should be there and are not, and why.
        error: with "failing".
    """

    status: Literal["ok", "degraded", "failing"]
    workers: list[WorkerHealth]
    missing: dict[str, str] = {}
    error: ErrorBody | None = None


def health_of(worker: Worker) -> WorkerHealth:
    """How a worker is now."""
    card = worker.card
    probe = card.probe
    if card.asleep:
        return WorkerHealth(worker.id, card.name, "asleep")
    if probe is None:
        return WorkerHealth(worker.id, card.name, "unprobed")
    age = max(0.0, time.time() - probe.at)
    state: State = "ok" if probe.error is None else "failing"
    if age - liveness.clock().lost(age) > probe.next_within:
        state = "silent"
    return WorkerHealth(
        worker.id, card.name, state, LastProbe(round(age, 3), round(probe.seconds, 6), probe.error)
    )


def combined_status(
    models: Iterable[ModelCard], workers: Sequence[Worker], missing: Mapping[str, str]
) -> Health:
    """How all of them are.

    Args:
        models: that are or were served.
        workers: that are ready.
        missing: workers that should be there and are not, and why.
    """
    found = [health_of(worker) for worker in workers]
    well = {worker.model for worker in found if worker.well}
    lost = sorted({card.name for card in models} - well)
    gone = dict(missing)
    if lost or not well:
        reasons = [f"{name}: {reason}" for name, reason in gone.items()]
        reasons += [worker.reason for worker in found if not worker.well]
        what = f"no worker of {', '.join(lost)} is well" if lost else "no worker is ready"
        said = "; ".join([what, *reasons])
        return Health("failing", found, gone, ErrorBody(message=said, type="overloaded_error"))
    bad = gone or any(not worker.well for worker in found)
    return Health("degraded" if bad else "ok", found, gone)

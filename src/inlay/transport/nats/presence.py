"""Since when the namespace has had a set of weights."""

import asyncio
import time

import msgspec
from nats.aio.msg import Msg

from inlay.base.errors import OverloadedError
from inlay.messages.card import ModelCard
from inlay.transport.nats.member import Member
from inlay.transport.nats.messages import Beat
from inlay.transport.nats.subjects import last_token

LISTEN_SECONDS = 0.6
"""Longer than between two heartbeats."""
_STEP = 0.001

_beats = msgspec.msgpack.Decoder(Beat)


async def present_since(member: Member, card: ModelCard) -> float:
    """The Unix time from which on some worker has had the name, weights and graph of `card`.

    It is handed on from worker to worker. Weights that no worker has now begin now, after all
    others of that name, whatever this machine's clock says. Takes `LISTEN_SECONDS`.

    Args:
        member: the worker that asks; its own card does not count.
        card: of its model.

    Raises:
        OverloadedError: NATS does not answer.
    """
    heard: set[str] = set()
    connected = member.control.since

    def on_beat(message: Msg) -> None:
        participant = last_token(message.subject)
        try:
            beat = _beats.decode(message.data)
        except msgspec.MsgspecError:
            return  # frontends say it
        if beat.revision and beat.state in ("ready", "draining") and participant != member.id:
            heard.add(participant)

    stop = await member.control.subscribe(member.subjects.beats(), on_beat)
    try:
        member.control.publish(member.subjects.roll_call, b"")
        await asyncio.sleep(LISTEN_SECONDS)
    finally:
        await stop()
    if connected is None or member.control.since != connected:
        raise OverloadedError("NATS is not connected", retry_after=1)
    latest = 0.0
    same: list[float] = []
    for participant in heard:
        try:
            found = await member.cards.get(participant)
        except msgspec.MsgspecError:
            continue
        if found is None or found[1].name != card.name:
            continue
        other = found[1]
        latest = max(latest, other.rollout.since)
        if _version(other) == _version(card):
            same.append(other.rollout.since)
    return min(same, default=max(time.time(), latest + _STEP))


def _version(card: ModelCard) -> tuple[str, str, tuple[str, ...], bytes]:
    """Return what a change of a model changes."""
    whole = b"" if card.stage is None else card.stage.identity
    return card.weights_id, card.dtype, card.outputs, whole

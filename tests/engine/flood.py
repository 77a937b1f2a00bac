"""A client that asks an engine for everything, and what another waits beside it."""

import asyncio
from pathlib import Path
from typing import Any

from inlay.engine.api import GenerateEngine
from inlay.messages.prompt import Prompt, Tokens
from tests.engine import reference
from tests.engine.conformance import Receiver, ids, make_request, run

LENGTH = 100


async def flood(engine: GenerateEngine, count: int, **sampling: Any) -> list[Receiver]:
    """`count` long outputs of one client, once as many as the engine has places for have begun."""
    receivers = []
    for number in range(count):
        prompt = Prompt.of(Tokens(ids(number, 6)))
        asked = make_request(f"greedy-{number}", prompt, LENGTH, client="greedy", **sampling)
        receivers.append(Receiver(asked))
        engine.submit(asked, receivers[-1])
    places = engine.card.limits.max_num_seqs
    await asyncio.gather(*(receiver.begun() for receiver in receivers[:places]))
    return receivers


async def a_newcomer_is_served_at_once(
    engine: GenerateEngine, directory: Path, client: str = "new", priority: int = 0
) -> None:
    """A client's four tokens, beside one that asked for three times the places there are.

    That one has asked at `priority`.
    """
    places = engine.card.limits.max_num_seqs
    before = engine.stats()
    receivers = await flood(engine, 3 * places, priority=priority)
    assert engine.stats().waiting >= 2 * places
    asked = make_request("new", Prompt.of(Tokens(ids(900, 6))), 4, client=client)
    at_most = [len(receiver.output) for receiver in receivers]
    (newcomer,) = await run(engine, asked)
    steps = max(
        len(receiver.output) - had for receiver, had in zip(receivers, at_most, strict=True)
    )
    # One to take a place back, and then a prompt and four tokens; not the rest of an output.
    assert steps < LENGTH // 3
    assert newcomer.output == reference.greedy(directory, asked.prompt, 4)
    await engine.probe()
    assert not any(receiver.ended_already for receiver in receivers)
    for receiver in receivers:
        await receiver.ended()
        assert receiver.output == reference.greedy(directory, receiver.request.prompt, LENGTH)
        assert receiver.last.finish_reason == "length"
    after = engine.stats()
    assert after.preemptions - before.preemptions == 1
    assert (after.waiting, after.running) == (0, 0)

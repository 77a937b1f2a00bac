"""What routing by caches is worth on three real workers.

Prefix hits and time to first token, against round-robin.

    python -m benchmarks.kv_routing [--rounds N]

Three processes of `inlay worker` with the torch engine, a NATS server, and this process as the
frontend's plane and router. A Llama of 8 layers and 512 wide with random weights, so a prompt costs
what it does in a real one of that size. Prompts are documents of embeddings, 768 rows, each asked
about several times with 16 tokens of its own and 8 tokens of output; the documents' requests are
shuffled, three at a time. The caches of the three hold all documents together, one of them a part.
Documents are new for each policy, and policies take turns. Prints one line a policy.
"""

import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from tests.models import make
from tests.parts import Part
from tests.transport.nats_server import NatsServer

from benchmarks._options import parser_of
from inlay.messages.digest import Secret, with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Request, Sampling
from inlay.router import Router
from inlay.router.settings import RouterSettings
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member

WORKERS = 3
HIDDEN, LAYERS, HEADS, KV_HEADS = 512, 8, 8, 4
ROWS, QUESTION, OUTPUT = 768, 16, 8
DOCUMENTS, ASKED = 12, 6
AT_ONCE = 3
POLICIES = ("round-robin", "kv")


def document(draw: np.random.Generator) -> Rows:
    """New embeddings."""
    values = draw.standard_normal((ROWS, HIDDEN), np.float32) * 0.5
    return Rows(Buffer(values.tobytes()), "float32", (ROWS, HIDDEN))


def works_of(secret: Secret, seed: int) -> list[Request]:
    """Every request of a run, in the order in which they are sent."""
    draw = np.random.default_rng(seed)
    requests = []
    for number in range(DOCUMENTS):
        rows = document(draw)
        for turn in range(ASKED):
            question = Tokens([int(token) for token in draw.integers(10, 300, QUESTION)])
            prompt = with_digests(Prompt.of(rows, question), secret)
            sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True)
            requests.append(
                Request(id=f"{seed}-{number}-{turn}", prompts=(prompt,), params=sampling)
            )
    random.Random(seed).shuffle(requests)
    return requests


async def run(
    plane: NatsPlane, secret: Secret, policy: str, seed: int
) -> tuple[float, list[float]]:
    """(part of the positions that were cached, seconds to the first token of each request)."""
    router = Router(plane, RouterSettings.model_validate({"router_policy": policy}), secret=secret)
    await router.start()
    waiting = works_of(secret, seed)
    positions = cached = 0
    seconds: list[float] = []

    async def client() -> None:
        nonlocal positions, cached
        while waiting:
            request = waiting.pop()
            began = time.perf_counter()
            (stream,) = await router.send("m", [request])
            first = None
            async for deltas in stream:
                first = first or time.perf_counter() - began
                for delta in deltas:
                    if delta.usage is not None and delta.finish_reason is not None:
                        positions += delta.usage.prompt_tokens
                        cached += delta.usage.cached_tokens
            seconds.append(first or 0.0)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    await router.close()
    return cached / positions, seconds


async def measure(server: NatsServer, rounds: int) -> None:
    """Print all figures."""
    member = await Member.join(server.settings(), "frontend")
    secret = await member.secret(None)
    plane = NatsPlane(member, secret)
    await plane.start()
    while len(plane.workers()) < WORKERS:
        await plane.changed()
    found: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    # The first requests of a process are slower, whoever gets them.
    await run(plane, secret, "round-robin", 0)
    for number in range(rounds):
        for turn, policy in enumerate(POLICIES):
            hits, seconds = await run(plane, secret, policy, 1 + number * len(POLICIES) + turn)
            found[policy].append((hits, statistics.mean(seconds)))
    await plane.close()
    for policy, runs in found.items():
        parts, means = [part for part, _ in runs], [mean for _, mean in runs]
        print(
            f"{policy:12} hits {statistics.mean(parts):.1%} ({min(parts):.1%}-{max(parts):.1%}), "
            f"mean time to first token {statistics.mean(means) * 1e3:.0f} ms ({min(means) * 1e3:.0f}-{max(means) * 1e3:.0f})"
        )
    ratios = [
        slow[1] / fast[1] for slow, fast in zip(found["round-robin"], found["kv"], strict=True)
    ]
    print(f"round-robin / kv: {statistics.mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


def main() -> None:
    """Run it."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shape: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HIDDEN // HEADS,
            "max_position_embeddings": 2048,
        }
        model = make("llama", directory / "model", **shape)
        server = stack.enter_context(NatsServer(directory))
        # Keys and values of a position: half of all documents fit into one worker.
        position = 2 * LAYERS * KV_HEADS * (HIDDEN // HEADS) * 4
        longest = ROWS + 2 * QUESTION + OUTPUT
        room = position * longest * (DOCUMENTS // 2 + AT_ONCE)
        words: tuple[object, ...] = (
            "--dtype",
            "float32",
            "--num-threads",
            1,
            "--served-model-name",
            "m",
        )
        words += (
            "--enable-prompt-embeds",
            "--kv-cache-memory-bytes",
            room,
            "--max-model-len",
            longest,
        )
        parts = [
            Part("worker", model, "--nats", server.url, *words, until=" serves ")
            for _ in range(WORKERS)
        ]
        for part in parts:
            stack.callback(part.end)
        for part in parts:
            part.wait_ready()
        uvloop.run(measure(server, rounds))


if __name__ == "__main__":
    main()

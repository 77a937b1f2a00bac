"""A fleet over NATS beside one machine's server and beside Dynamo, all behind HTTP, with engines that compute nothing.

Of inlay the echo engine, in `inlay serve` and as a worker behind NATS and a frontend; of Dynamo its
frontend and its mocker, over TCP and over NATS. All run at once and take turns. First what a
request costs, as ids and as embeddings: milliseconds until it is answered, and CPU of all
processes. Then streams: tokens and events a CPU-second of all processes, NATS included.

    [BENCH_DYNAMO=/path/to/python] python -m benchmarks.fleet [--rounds N]
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.parts import Part
from transformers import AutoTokenizer

from benchmarks import _serving
from benchmarks._options import parser_of
from benchmarks._serving import Server
from benchmarks.cached_prompt import SIZES, Cost, cost, forms_of
from benchmarks.frontend_streams import BODIES, exchange

CONNECTIONS, TOKENS = 32, 128
MOCKED_IDS = 8192


def requests(servers: list[Server], table: torch.Tensor, label: str, rounds: int) -> None:
    """One prompt in its forms, at all servers."""
    forms = {server.name: forms_of(server, table, SIZES[label], stored=False) for server in servers}
    costs: dict[tuple[str, str], list[Cost]] = {}
    for turn in range(rounds + 2):
        for server in servers:
            for name, form in forms[server.name].items():
                one = cost(server, form)
                if turn >= 2:
                    costs.setdefault((name, server.name), []).append(one)
    for (name, server_name), own in sorted(costs.items()):
        base = costs[name, servers[0].name]
        more = statistics.median(
            one.wall - other.wall for one, other in zip(own, base, strict=True)
        )
        print(
            f"{label:>6} {name:10} {server_name:14} {1e3 * statistics.median(one.wall for one in own):7.1f} ms   "
            f"least {1e3 * min(one.wall for one in own):7.1f} ms   {1e3 * more:+7.1f} ms   "
            f"CPU {1e3 * statistics.fmean(one.cpu for one in own):6.1f} ms",
            flush=True,
        )


def with_words(model: Path) -> Path:
    """Give every id that the mocker answers with a text: what has none makes no event."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f" w{number}" for number in range(MOCKED_IDS - len(tokenizer))])
    tokenizer.save_pretrained(model)
    return model


async def streams(servers: list[Server], rounds: int) -> None:
    """Many streams at once, as fast as they come, at one server after the other."""
    for name in ("completions", "chat"):
        path, fields = BODIES[name]
        request = {**fields, "model": "m", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        body = json.dumps(request | {"temperature": 0}).encode()
        cpu = dict.fromkeys((server.name for server in servers), 0.0)
        events = dict.fromkeys(cpu, 0)
        for turn in range(rounds + 1):
            for server in servers:
                before = server.cpu_seconds()
                answers = await asyncio.gather(
                    *(exchange(server.port, path, body) for _ in range(CONNECTIONS))
                )
                if any(b'"length"' not in answer for answer in answers):
                    raise RuntimeError(f"{server.name}: {answers[0][-500:]!r}")
                if turn:
                    cpu[server.name] += server.cpu_seconds() - before
                    events[server.name] += sum(answer.count(b"data: ") - 1 for answer in answers)
        tokens = rounds * CONNECTIONS * TOKENS
        for server_name, seconds in cpu.items():
            print(
                f"{name:12} {server_name:14} {tokens / seconds:9.0f} tokens and {events[server_name] / seconds:8.0f} events "
                f"a CPU-second   {tokens / events[server_name]:5.2f} tokens an event",
                flush=True,
            )


@contextmanager
def nats_server() -> Iterator[str]:
    """The URL of one, for Dynamo."""
    port = _serving.free_port()
    with tempfile.TemporaryDirectory() as store:
        part = Part("nats", "--port", port, "--store-dir", store, until="NATS at").wait_ready()
        try:
            yield f"nats://127.0.0.1:{port}"
        finally:
            part.end()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["inlay", "dynamo"], action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = with_words(_serving.wide_model(Path(directory) / "model"))
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        limits = _serving.wide_limits(64)[:6]
        launches: list[AbstractContextManager[Server] | None] = []
        if not options.only or "inlay" in options.only:
            launches += [
                _serving.inlay(model, "--engine", "echo", *limits),
                _serving.inlay_fleet(model, "--engine", "echo", frontend=(*limits,)),
            ]
        if not options.only or "dynamo" in options.only:
            launches += [
                _serving.dynamo(model, worker="mocker"),
                _serving.dynamo(model, worker="mocker", nats=stack.enter_context(nats_server())),
            ]
        servers = [stack.enter_context(launch) for launch in launches if launch is not None]
        asyncio.run(streams(servers, options.rounds))
        for label in ("1 MB", "4 MB", "10 MB"):
            requests(servers, table, label, options.rounds)


if __name__ == "__main__":
    main()

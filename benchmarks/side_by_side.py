"""Prompts of embeddings beside vLLM and Dynamo.

The table of docs/performance.md, measured in one run.

Each figure is another benchmark's (`intake`, `cached_prompt`, `stalls`, `memory`), taken here with
fewer rounds, with all servers up at once and in turns. Beside the longest stall stands the floor:
the same with the large prompts sent to a process that reads and drops them.

    BENCH_VLLM=/path/to/python BENCH_DYNAMO=/path/to/python python -m benchmarks side_by_side
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from benchmarks import _serving, cached_prompt, intake, memory, stalls
from benchmarks._options import parser_of
from benchmarks._serving import HIDDEN, Server

NAMES = ("inlay", "vllm", "dynamo")
TOO_LARGE = "refuses over 10 MB"
NONE = "has none"
NOT_THERE = "not there"
SIZES = (10, 64)

Row = tuple[str, Mapping[str, str]]


def cells(
    figure: Callable[[str], str | None], otherwise: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What stands under each name: its figure, or why there is none."""
    why = otherwise or {}
    return {name: figure(name) or why.get(name, NOT_THERE) for name in NAMES}


def reading(megabytes: int, best: Mapping[str, float]) -> Row:
    """From a body to a checked tensor. Of Dynamo its worker's part."""

    def figure(name: str) -> str | None:
        stage = {"inlay": "inlay", "vllm": "vllm body", "dynamo": "dynamo reader"}[name]
        if stage not in best:
            return None
        alone = ", its worker's part alone" if name == "dynamo" else ""
        return f"{best[stage] / best['memcpy']:.1f}x{alone}"

    return f"body to checked tensor, {megabytes} MB, over a memcpy", cells(
        figure, too_large(megabytes)
    )


def too_large(megabytes: int) -> dict[str, str]:
    """Why there may be no figure of that size."""
    return {} if _serving.takes("dynamo", _serving.rows_of(megabytes)) else {"dynamo": TOO_LARGE}


def digesting(best: Mapping[str, float], seconds: float) -> Row:
    """Digests: inlay's of each row, the others' of blocks of rows."""

    def figure(name: str) -> str | None:
        if name == "inlay":
            return f"{seconds * 1e6:.1f} us"
        taken = best.get(f"{name} digests")
        return (
            None
            if taken is None
            else f"{taken / _serving.rows_of(10) * 1e6:.1f} us, by blocks of 32"
        )

    return "digest of a row of 8 KB", cells(figure)


def cached(servers: Sequence[Server], table: torch.Tensor, rounds: int) -> list[Row]:
    """A cached prompt over the same as ids."""
    rows: list[Row] = []
    for megabytes in (1, *SIZES):
        num_rows = _serving.rows_of(megabytes)
        able = [server for server in servers if _serving.takes(server.name, num_rows)]
        ratios = cached_prompt.measure(able, table, f"{megabytes} MB", num_rows, rounds)
        for form, said in (
            ("value", "by value"),
            ("multipart", "as multipart"),
            ("reference", "by reference"),
        ):
            found = {name: f"{ratio:.2f}x" for (name, of), ratio in ratios.items() if of == form}
            why = too_large(megabytes) if form == "value" else {"vllm": NONE, "dynamo": NONE}
            rows.append((f"cached {megabytes} MB prompt {said} over ids", cells(found.get, why)))
    return rows


def stalled(
    servers: Sequence[Server], echo: Server, table: torch.Tensor, seconds: float, rounds: int
) -> list[Row]:
    """The longest a small request waits while large ones arrive, and while they go elsewhere."""
    rows: list[Row] = []
    for megabytes in SIZES:
        num_rows = _serving.rows_of(megabytes)
        able = [server for server in (echo, *servers) if _serving.takes(server.name, num_rows)]
        found = stalls.measure(
            able, table, num_rows, seconds=seconds, rounds=rounds, turns=("sink", "loud")
        )
        stalls.show(found)
        longest = {
            server.name: f"{found[server.name, 'loud'].longest * 1e3:.1f} ms ({found[server.name, 'sink'].longest * 1e3:.1f} ms)"
            for server in able
        }
        said = f"longest stall while {megabytes} MB prompts arrive (floor)"
        rows.append((said, cells(longest.get, too_large(megabytes))))
        rows.append(
            (
                f"{said}, without a model",
                cells({"inlay": longest["echo"]}.get, {"vllm": "-", "dynamo": "-"}),
            )
        )
    return rows


def grown(servers: Sequence[Server], model: Path, table: torch.Tensor) -> list[Row]:
    """Peak memory of one request, of servers that have had none before.

    At 10 MB those given, at 64 MB others.
    """
    rows: list[Row] = []
    for megabytes in SIZES:
        shares: dict[str, str] = {}
        with ExitStack() as stack:
            fresh = (
                servers
                if megabytes == SIZES[0]
                else _serving.side_by_side(stack, model, ("inlay", "vllm"))
            )
            for server in fresh:
                found = memory.growth(server, table, megabytes)
                assert found is not None
                print(
                    f"{server.name:8} {megabytes:3} MB   front process {found.front / memory.MIB:.0f} MiB, {found.share:.2f}x   "
                    f"others {found.others / memory.MIB:.0f} MiB",
                    flush=True,
                )
                shares[server.name] = f"{found.share:.2f}x"
        rows.append(
            (
                f"peak memory of a {megabytes} MB request, over its tensor",
                cells(shares.get, too_large(megabytes)),
            )
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of cached prompts")
    parser.add_argument("--stall-rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a turn, where stalls are measured"
    )
    options = parser.parse_args()
    os.environ |= _serving.ONE_THREAD
    table_rows: list[Row] = []
    with TemporaryDirectory() as directory, ExitStack() as stack:
        model = _serving.wide_model(Path(directory) / "model")
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        with intake.peer_readers() as readers:
            best = {megabytes: intake.measure(megabytes, readers, 4.0) for megabytes in SIZES}
        table_rows += [reading(megabytes, best[megabytes]) for megabytes in SIZES]
        table_rows.append(digesting(best[10], intake.digests(10 << 20, 2 * HIDDEN, 2.0)))
        servers = _serving.side_by_side(stack, model)
        taken = grown(servers, model, table)
        table_rows += cached(servers, table, options.rounds)
        echo = stack.enter_context(stalls.echo(model, 64))
        table_rows += stalled(servers, echo, table, options.seconds, options.stall_rounds)
        table_rows += taken
    print("\n| | inlay | vLLM | Dynamo |\n|---|---|---|---|")
    for said, row in table_rows:
        print(f"| {said} | {' | '.join(row[name] for name in NAMES)} |")


if __name__ == "__main__":
    main()

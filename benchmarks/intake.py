"""From the bytes of a body to a checked tensor: inlay, and vLLM's own reader where `BENCH_VLLM` is set, over one memcpy of the tensor.

The same body, JSON with base64 of what `torch.save` wrote, in bfloat16. inlay is fed it in the pieces a connection gives, into the shared
memory a server would use, parses, reads, and checks every element for being finite and not too large; digests are apart. vLLM's
`safe_load_prompt_embeds` runs in its own environment, with and without the parsing of the body around it; it does not look
at the elements. All take turns; each figure is the best of its turns.

    python -m benchmarks.intake [--sizes 0.1 1 10 64] [--seconds 4]
"""

import argparse
import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from inlay.digest import Secret, row_digests
from inlay.frontend.bodies import lift
from inlay.frontend.bodies.allocator import keep_freed_memory
from inlay.frontend.bodies.memory import private
from inlay.frontend.bodies.sources import in_completion, tensor_data
from inlay.plane.local import Arena
from inlay.prompt import Buffer, Rows
from inlay.protocol.openai.completions import CompletionRequest
from inlay.tensors import ReadLimits, read, to_rows, write

HIDDEN = 4096
LIMITS = ReadLimits(max_bytes=1 << 30)
_decoder = msgspec.json.Decoder(CompletionRequest)


def taken_in(body: bytes, arena: Arena, piece: int) -> Callable[[], float]:
    """Takes `body` in as a server does; gives the seconds."""

    def room(num_bytes: int) -> memoryview:
        found = arena.reserve(num_bytes)
        return private(num_bytes) if found is None else found

    def run() -> float:
        view = memoryview(body)
        start = time.perf_counter()
        lifting = lift.Lift(len(body), room)
        for at in range(0, len(body), piece):
            lifting.feed(view[at : at + piece])
        parsed = lift.parse(
            lifting.close(), _decoder, lambda request: tensor_data(in_completion(request)), limits=LIMITS
        )
        (text,) = tensor_data(in_completion(parsed.request))
        tensor = read(parsed.data(text, limits=LIMITS), limits=LIMITS)
        to_rows(tensor, hidden_size=HIDDEN, dtype="bfloat16", max_abs=1e4)
        return time.perf_counter() - start

    return run


@contextmanager
def vllm_reader() -> Iterator[Callable[[str, Path], float] | None]:
    """Asks vLLM's own reader for the seconds a stage takes; None where there is no vLLM."""
    python = os.environ.get("BENCH_VLLM")
    if python is None:
        yield None
        return
    command = [python, str(Path(__file__).with_name("_vllm_reader.py")), str(HIDDEN)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask(stage: str, path: Path) -> float:
            print(stage, path, file=asked, flush=True)
            for line in answers:
                if line.startswith("SECONDS "):
                    return float(line.split()[1])
            raise RuntimeError("vLLM's reader ended")

        yield ask
        asked.close()


def best_of(runs: dict[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """The shortest time of each, all taking turns until `seconds` have passed."""
    best = dict.fromkeys(runs, float("inf"))
    end, turns = time.perf_counter() + seconds, 0
    while turns < 5 or time.perf_counter() < end:
        for name, run in runs.items():
            best[name] = min(best[name], run())
        turns += 1
    return best


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """`work`, giving the seconds it takes."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def digests(num_bytes: int, seconds: float) -> None:
    """Print the time of a row's digest for `num_bytes` of rows of 1 and of 8 KB."""
    secret = Secret(bytes(32))
    for row in (1024, 8192):
        rows = Rows(Buffer(bytes(num_bytes)), "bfloat16", (num_bytes // row, row // 2))
        best = best_of({"digests": timed(partial(row_digests, rows, secret))}, seconds)["digests"]
        print(
            f"digests of rows of {row:5} bytes: {best / len(rows) * 1e6:.2f} us a row, {best * 1e3:.1f} ms in all"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.1, 1, 10, 64], help="megabytes of tensor"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="to measure each size for, at least")
    parser.add_argument("--piece", type=int, default=256 * 1024, help="bytes inlay is fed at a time")
    options = parser.parse_args()
    keep_freed_memory()
    arena = Arena(256 << 20)
    print("     MB   memcpy ms   inlay ms   over memcpy   vLLM's reader   with its parsing")
    with tempfile.TemporaryDirectory() as directory, vllm_reader() as ask:
        for size in options.sizes:
            num_rows = max(int(size * (1 << 20)) // (2 * HIDDEN), 1)
            wide = np.random.default_rng(1).standard_normal((num_rows, HIDDEN), np.float32) * np.float32(0.02)
            rows = wide.astype(ml_dtypes.bfloat16)
            body = json.dumps(
                {"model": "m", "prompt_embeds": base64.b64encode(write(rows, "torch")).decode()}
            ).encode()
            path = Path(directory) / f"{size:g}.json"
            path.write_bytes(body)
            target, source = np.empty(rows.nbytes, np.uint8), rows.view(np.uint8).ravel()
            np.copyto(target, source)
            runs = {
                "memcpy": timed(partial(np.copyto, target, source)),
                "inlay": taken_in(body, arena, options.piece),
            }
            if ask is not None:
                for stage in ("reader", "body"):
                    runs[stage] = partial(ask, stage, path)
            best = best_of(runs, options.seconds)
            print(
                f"{size:7g} {best['memcpy'] * 1e3:11.3f} {best['inlay'] * 1e3:10.3f}"
                + "".join(
                    f"{best[name] / best['memcpy']:14.1f}x"
                    for name in ("inlay", "reader", "body")
                    if name in best
                ),
                flush=True,
            )
    digests(10 << 20, options.seconds / 2)


if __name__ == "__main__":
    main()

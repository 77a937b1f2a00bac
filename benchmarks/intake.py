"""From the bytes of a body to a checked tensor, over one memcpy of the tensor.

Inlay, and the readers of vLLM and Dynamo where `BENCH_VLLM` and `BENCH_DYNAMO` are set.

The same body, JSON with base64 of what `torch.save` wrote, in bfloat16. inlay is fed it in the
pieces a connection gives, into the shared memory a server would use, parses, reads, and checks
every element for being finite and not too large; digests are apart. vLLM's
`safe_load_prompt_embeds` runs in its own environment, with and without the parsing of the body
around it, and so does what Dynamo's worker calls (its frontend decodes the same base64 once more
before that, and cannot be called alone); neither looks at the elements. All take turns; each figure
is the best of its turns.

    python -m benchmarks.intake [--sizes 0.1 1 10 64] [--seconds 4]
"""

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np

from benchmarks._options import parser_of
from benchmarks._serving import HIDDEN, takes
from inlay.api.openai.completions.route import in_completion
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.http.bodies import base64_extractor as lift
from inlay.http.bodies.allocator import keep_freed_memory
from inlay.http.bodies.embeds import tensor_data
from inlay.http.bodies.memory import private
from inlay.http.parsed_request import parse_body
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import Buffer, Rows
from inlay.tensors import ReadLimits, read, to_rows, write
from inlay.transport.local import Arena

_PIECE = 256 * 1024
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
        lifting = lift.Base64Extractor(len(body), room)
        for at in range(0, len(body), piece):
            lifting.feed(view[at : at + piece])
        parsed = parse_body(
            lifting.close(),
            _decoder,
            lambda request: tensor_data(in_completion(request)),
            limits=lambda: LIMITS,
        )
        (text,) = tensor_data(in_completion(parsed.request))
        tensor = read(parsed.data(text, limits=LIMITS), limits=LIMITS)
        to_rows(tensor, hidden_size=HIDDEN, dtype="bfloat16", max_abs=1e4)
        return time.perf_counter() - start

    return run


@dataclass(frozen=True)
class PeerReader:
    """Another server's own reader, in its environment.

    Attributes:
        name: "vllm" or "dynamo".
    """

    name: str
    _process: "subprocess.Popen[str]"

    def seconds(self, stage: str, path: Path) -> float:
        """That a stage of `benchmarks/_peer_reader.py` takes, of the body in a file."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        print(stage, path, file=asked, flush=True)
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"the reader of {self.name} ended")
        return float(answer)


@contextmanager
def peer_readers() -> Iterator[list[PeerReader]]:
    """Those whose environments are there."""
    with ExitStack() as stack:
        found = []
        for name in ("vllm", "dynamo"):
            python = os.environ.get(f"BENCH_{name.upper()}")
            if python is None:
                continue
            process = stack.enter_context(
                subprocess.Popen(
                    [python, str(Path(__file__).with_name("_peer_reader.py")), str(HIDDEN)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    bufsize=1,
                )
            )
            found.append(PeerReader(name, process))
        yield found


def best_of(runs: dict[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """The shortest time of each, all taking turns until `seconds` have passed."""
    best = dict.fromkeys(runs, float("inf"))
    end, turns = time.perf_counter() + seconds, 0
    while turns < 5 or time.perf_counter() < end:
        for name, run in runs.items():
            best[name] = min(best[name], run())
        turns += 1
    return best


def timed(request: Callable[[], object]) -> Callable[[], float]:
    """`request`, giving the seconds it takes."""

    def run() -> float:
        start = time.perf_counter()
        request()
        return time.perf_counter() - start

    return run


def digests(num_bytes: int, row: int, seconds: float) -> float:
    """Seconds that the digest of a row of `row` bytes takes, among `num_bytes` of them."""
    rows = Rows(Buffer(bytes(num_bytes)), "bfloat16", (num_bytes // row, row // 2))
    return best_of({"digests": timed(partial(row_digests, rows, Secret(bytes(32))))}, seconds)[
        "digests"
    ] / len(rows)


def measure(
    megabytes: float, readers: Sequence[PeerReader], seconds: float, *, piece: int = _PIECE
) -> dict[str, float]:
    """Best seconds of each.

    "memcpy", "inlay", and of each reader "NAME reader", "NAME digests" and for vLLM "vllm body".

    Args:
        megabytes: of tensor. Dynamo is left out over its limit of 10.
        readers: of others.
        seconds: to measure for, at least.
        piece: bytes that inlay is fed at a time.
    """
    # With what is around them in a file they are no more than that.
    num_rows = max(int(megabytes * (1 << 20)) // (2 * HIDDEN) - 2, 1)
    wide = np.random.default_rng(1).standard_normal((num_rows, HIDDEN), np.float32) * np.float32(
        0.02
    )
    rows = wide.astype(ml_dtypes.bfloat16)
    body = json.dumps(
        {"model": "m", "prompt_embeds": base64.b64encode(write(rows, "torch")).decode()}
    ).encode()
    target, source = np.empty(rows.nbytes, np.uint8), rows.view(np.uint8).ravel()
    np.copyto(target, source)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "body.json"
        path.write_bytes(body)
        runs = {
            "memcpy": timed(partial(np.copyto, target, source)),
            "inlay": taken_in(body, Arena(256 << 20), piece),
        }
        for reader in readers:
            if not takes(reader.name, num_rows):
                continue
            stages = (
                ("reader", "body", "digests") if reader.name == "vllm" else ("reader", "digests")
            )
            for stage in stages:
                runs[f"{reader.name} {stage}"] = partial(reader.seconds, stage, path)
        return best_of(runs, seconds)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.1, 1, 10, 64], help="megabytes of tensor"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="to measure each size for, at least"
    )
    parser.add_argument("--piece", type=int, default=_PIECE, help="bytes inlay is fed at a time")
    options = parser.parse_args()
    keep_freed_memory()
    with peer_readers() as readers:
        for size in options.sizes:
            best = measure(size, readers, options.seconds, piece=options.piece)
            memcpy = best.pop("memcpy")
            print(f"{size:7g} MB   memcpy {memcpy * 1e3:8.3f} ms", end="")
            for name, found in best.items():
                print(f"   {name} {found * 1e3:.2f} ms, {found / memcpy:.1f}x", end="")
            print(flush=True)
    for row in (1024, 8192):
        took = digests(10 << 20, row, options.seconds / 2)
        print(f"digests of rows of {row:5} bytes: {took * 1e6:.2f} us a row")


if __name__ == "__main__":
    main()

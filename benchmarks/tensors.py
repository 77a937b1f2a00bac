"""What it costs to take embeddings in, as multiples of one memcpy of the tensor's bytes.

    python -m benchmarks.tensors [--sizes 0.1 1 10 64] [--seconds 1]

Columns: this library from container bytes to checked rows, with and without a cast; the base64
decoding before it; and what a server does that hands the bytes to `torch.load(weights_only=True)`
and then asks `isfinite`. All of one size run in turns, so that a busy neighbour slows all alike;
each figure is the best of its turns. One thread.
"""

import base64
import io
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pybase64
import torch

from benchmarks._options import parser_of
from inlay.tensors import ReadLimits, read, to_rows, write

HIDDEN = 1024
LIMITS = ReadLimits(max_bytes=1 << 30)


def taken_in(container: bytes, dtype: str) -> Callable[[], object]:
    return lambda: to_rows(
        read(container, limits=LIMITS), hidden_size=HIDDEN, dtype=dtype, max_abs=1e4
    )


def loaded(container: bytes, dtype: torch.dtype) -> Callable[[], object]:
    def load() -> object:
        rows = torch.load(io.BytesIO(container), weights_only=True).to(dtype)  # noqa: TID251
        return bool(torch.isfinite(rows).all())

    return load


def stages(num_bytes: int) -> dict[str, Callable[[], object]]:
    """What is measured for a tensor of about `num_bytes`, by name; "memcpy" is the unit."""
    rng = np.random.default_rng(1)
    wide = (rng.standard_normal((num_bytes // (4 * HIDDEN), HIDDEN)) * 0.02).astype(np.float32)
    narrow = np.concatenate([wide, wide]).astype(ml_dtypes.bfloat16)
    target = np.empty_like(wide)
    torch_wide, torch_narrow = write(wide, "torch"), write(narrow, "torch")
    encoded = base64.b64encode(torch_wide)
    return {
        "memcpy": lambda: np.copyto(target, wide),
        "read": lambda: read(torch_wide, limits=LIMITS),
        "bf16": taken_in(torch_narrow, "bfloat16"),
        "f32": taken_in(torch_wide, "float32"),
        "f32>bf16": taken_in(torch_wide, "bfloat16"),
        "f32>f16": taken_in(torch_wide, "float16"),
        "bf16>f16": taken_in(torch_narrow, "float16"),
        "bf16>f32": taken_in(torch_narrow, "float32"),
        "safetensors": taken_in(write(wide, "safetensors"), "float32"),
        "npy": taken_in(write(wide, "npy"), "float32"),
        "pybase64": lambda: pybase64.b64decode(encoded, validate=True),
        "base64": lambda: base64.b64decode(encoded, validate=True),
        "torch.load f32": loaded(torch_wide, torch.float32),
        "torch.load f32>bf16": loaded(torch_wide, torch.bfloat16),
    }


def best_of(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The shortest time of each run, in seconds, all taking turns until `seconds` have passed."""
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + seconds
    turns = 0
    while turns < 5 or time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
        turns += 1
    return best


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.1, 1, 10, 64], help="megabytes of tensor"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="to measure each size for, at least"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = {
        size: best_of(stages(int(size * (1 << 20))), options.seconds) for size in options.sizes
    }
    print("| " + " | ".join(["", *(f"{size:g} MB" for size in columns)]) + " |")
    print("|---" * (len(columns) + 1) + "|")
    print(
        "| memcpy, us | "
        + " | ".join(f"{best['memcpy'] * 1e6:.0f}" for best in columns.values())
        + " |"
    )
    for name in next(iter(columns.values())):
        if name != "memcpy":
            ratios = (f"{best[name] / best['memcpy']:.1f}" for best in columns.values())
            print(f"| {name} | " + " | ".join(ratios) + " |")


if __name__ == "__main__":
    main()

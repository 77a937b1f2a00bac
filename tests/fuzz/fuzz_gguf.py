"""Fuzz the reader of GGUF headers: a file is refused, or is sound.

python -m tests.fuzz.fuzz_gguf --executions 1000000 [--seed 1]
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from inlay.base.errors import InvalidRequestError
from inlay.tensors.blocks import TYPES, dequantise, is_finite
from inlay.tensors.gguf import GgufFile, read_bytes
from tests.fuzz.mutation import mutated
from tests.tensors.gguf_files import gguf_bytes, stored

WORDS = (
    b"GGUF", b"\x03\0\0\0", b"general.alignment", b"general.architecture", b"llama", b"split.count",
    b"a.weight", *(number.to_bytes(4, "little") for number in range(14)),
    *(kind.number.to_bytes(4, "little") for kind in TYPES.values()),
)  # fmt: skip


def corpus() -> list[bytes]:
    """Small files with every type of value and several types of tensors."""
    values = np.linspace(-2, 2, 128, dtype=np.float32).reshape(2, 64)
    metadata: dict[str, Any] = {"general.architecture": "llama", "n": 3, "x": 0.5, "yes": True}
    arrays: dict[str, Any] = {"tokens": ["a", "é", ""], "scores": [0.5, -1.0], "types": [1, 3]}
    tensors = {f"{kind}.weight": stored(values, kind) for kind in ("F32", "F16", "Q8_0", "Q4_0")}
    return [
        gguf_bytes(metadata, tensors),
        gguf_bytes(metadata | arrays, {"a.weight": stored(values)}),
        gguf_bytes(arrays | {"general.alignment": 64, "split.count": 1}, tensors, alignment=64),
    ]


def check(path: Path) -> bool:
    """Read a file as a server would; True if it was accepted.

    Raises:
        AssertionError: it was accepted and should not have been.
        Exception: anything but an `InvalidRequestError` came out of the reader.
    """
    try:
        file = GgufFile.open(path)
    except InvalidRequestError as refusal:
        if len(refusal.message) >= 1000 or not refusal.message.isprintable():
            raise AssertionError(f"a message: {refusal.message[:1000]!r}") from refusal
        return False
    end = 0
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        assert end <= tensor.offset
        end = tensor.offset + tensor.nbytes
        raw = read_bytes(tensor.file, tensor.offset, tensor.nbytes)
        values = dequantise(tensor.type, raw, tensor.shape)
        assert np.isfinite(values).all() or not is_finite(tensor.type, raw)
    assert end <= path.stat().st_size
    return True


def fuzz(executions: int, seed: int) -> int:
    """Check so many mutations of the corpus; return how many were accepted."""
    rng, inputs, accepted = random.Random(seed), corpus(), 0
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for _ in range(executions):
            path.write_bytes(mutated(rng.choice(inputs), inputs, WORDS, rng))
            try:
                accepted += check(path)
            except BaseException:
                Path("crash.bin").write_bytes(path.read_bytes())
                raise
    return accepted


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the module's docstring says."""
    parser = argparse.ArgumentParser(description="Fuzz the reader of GGUF headers.")
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    accepted = fuzz(options.executions, options.seed)
    print(f"{options.executions} executions, {accepted} accepted")


if __name__ == "__main__":
    main()

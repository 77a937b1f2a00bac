"""Write the golden blocks: random bytes of each type, and what the package `gguf` makes of them.

    python -m tests.tensors.make_blocks

Random bytes are valid blocks of every type; scales that are no numbers are drawn again.
"""

from pathlib import Path

import numpy as np

from inlay.tensors.blocks import TYPES, is_finite

BLOCKS = Path(__file__).parent / "golden_blocks"
_NUMBER = 6


def main() -> None:
    """Write one file for each type."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng(17)
    BLOCKS.mkdir(exist_ok=True)
    for name, kind in TYPES.items():
        found: list[np.ndarray] = []
        while len(found) < _NUMBER:
            block = rng.integers(0, 256, kind.nbytes, np.uint8)
            if is_finite(name, block):
                found.append(block)
        raw = np.concatenate(found)
        values = dequantize(raw, GGMLQuantizationType[name]).astype(np.float32)
        np.savez_compressed(BLOCKS / f"{name}.npz", raw=raw, values=values.reshape(-1))


if __name__ == "__main__":
    main()

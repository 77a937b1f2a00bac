"""Adapters as files, written without PEFT so that they may be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
Write = Callable[..., Path]


def encoded(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with whatever header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensors(named: dict[str, Any]) -> bytes:
    """A safetensors file of float32 arrays, as it should be."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in named.items():
        raw = np.ascontiguousarray(array, dtype=np.float32).tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(np.shape(array)),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return encoded(header, data)


def pair(rank: int = 2, module: str = MODULE) -> dict[str, Any]:
    """The matrices of one module of 4 inputs and 6 outputs."""
    random = np.random.default_rng(1)
    return {
        f"{module}.lora_A.weight": random.standard_normal((rank, 4)),
        f"{module}.lora_B.weight": random.standard_normal((6, rank)),
    }


def lora_config(**changes: Any) -> dict[str, Any]:
    """An adapter_config.json of rank 2."""
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **changes}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an adapter's directory."""

    def written(
        config: Any = None, weights: bytes | None = None, *, directory: Path | None = None
    ) -> Path:
        where = directory or tmp_path / "adapter"
        where.mkdir(parents=True, exist_ok=True)
        said = lora_config() if config is None else config
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        (where / "adapter_config.json").write_bytes(content)
        (where / "adapter_model.safetensors").write_bytes(
            tensors(pair()) if weights is None else weights
        )
        return where

    return written

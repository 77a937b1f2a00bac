"""Fuzz the reader of GGUF files: one is refused, or is sound, and so is the model in it.

python -m tests.fuzz.fuzz_gguf --executions 1000000 [--seed 1]
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from inlay.base.errors import InvalidRequestError
from inlay.tensors.blocks import TYPES, dequantise, is_finite
from inlay.tensors.gguf import GgufFile, read_bytes
from inlay.tensors.gguf_config import config_of, named_tensors
from inlay.tensors.gguf_tokenizer import GgufTokenizer
from tests.fuzz.mutation import mutated
from tests.tensors.gguf_files import gguf_bytes, stored

WORDS = (
    b"GGUF", b"\x03\0\0\0", b"general.alignment", b"general.architecture", b"llama", b"split.count",
    b"a.weight", b"tokenizer.ggml.pre", b"llama.block_count", b"output.weight", b"a b", *(number.to_bytes(4, "little") for number in range(14)),
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
        *(_model(kind) for kind in ("gpt2", "llama")),
    ]


def _model(kind: str) -> bytes:
    """The smallest Llama, with byte-level BPE or a vocabulary of SentencePiece."""
    keys: dict[str, Any] = {"block_count": 1, "context_length": 8, "embedding_length": 4}
    keys |= {"feed_forward_length": 4, "attention.head_count": 1}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": keys[key] for key in keys}
    tokens: dict[str, Any] = {"model": kind, "pre": "gpt-2", "tokens": ["a", "b", "ab", "</s>"]}
    tokens |= {"token_type": [1, 1, 1, 3], "eos_token_id": 3, "scores": [-1.0, -2.0, -3.0, 0.0]}
    tokens |= {"merges": ["a b"]} if kind == "gpt2" else {"add_space_prefix": False}
    metadata |= {f"tokenizer.ggml.{key}": of for key, of in tokens.items()}
    square = stored(np.eye(4, dtype=np.float32))
    norm = stored(np.ones(4, np.float32))
    layer = [*(f"attn_{of}" for of in ("q", "k", "v", "output")), "ffn_gate", "ffn_up", "ffn_down"]
    tensors = {f"blk.0.{name}.weight": square for name in layer}
    tensors |= {f"blk.0.{name}_norm.weight": norm for name in ("attn", "ffn")}
    tensors |= {"token_embd.weight": square, "output_norm.weight": norm}
    return gguf_bytes(metadata, tensors)


def check(path: Path) -> bool:
    """Read a file as a server would; True if it was accepted as a model.

    Raises:
        AssertionError: it was accepted and should not have been.
        Exception: anything but an `InvalidRequestError` came out of the reader.
    """
    try:
        file = GgufFile.open(path)
    except InvalidRequestError as refusal:
        _check_message(refusal)
        return False
    end = 0
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
        assert end <= tensor.offset
        end = tensor.offset + tensor.nbytes
        raw = read_bytes(tensor.file, tensor.offset, tensor.nbytes)
        values = dequantise(tensor.type, raw, tensor.shape)
        assert np.isfinite(values).all() or not is_finite(tensor.type, raw)
    assert end <= path.stat().st_size
    return _is_a_model(file)


def _is_a_model(file: GgufFile) -> bool:
    try:
        tokenizer = GgufTokenizer(file.path, file.metadata)
        config = config_of(file, tokenizer.end_tokens)
        tensors = [*named_tensors(file, config)]
        form = tokenizer.form()
    except InvalidRequestError as refusal:
        _check_message(refusal)
        return False
    json.dumps([config, form, tokenizer.config()])
    assert len(tensors) > config["num_hidden_layers"]
    return True


def _check_message(refusal: InvalidRequestError) -> None:
    if len(refusal.message) >= 1000 or not refusal.message.isprintable():
        raise AssertionError(f"a message: {refusal.message[:1000]!r}") from refusal


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

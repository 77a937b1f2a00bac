"""Safetensors of a GGUF file, dequantised: by our own reader where it knows the architecture.

Else by transformers, which drops scalings of positions and normalisers of text.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.weights.gguf import gguf_weights
from inlay.tensors.checkpoint import checkpoint_of, config_of
from inlay.tensors.gguf import GgufFile
from inlay.tensors.gguf_architectures import ARCHITECTURES
from inlay.tensors.weight_files import WHOLE


def convert(file: Path, output: Path, dtype: str) -> None:
    """Write the model and the tokenizer in `file` into the empty directory `output`.

    Args:
        file: of one part.
        output: gets config.json, safetensors and tokenizer.
        dtype: of the weights, by torch's name.

    Raises:
        InvalidRequestError: neither can read it, or the package gguf is missing.
    """
    if GgufFile.open(file).metadata.get("general.architecture") in ARCHITECTURES:
        _write(file, output, dtype)
    else:
        _by_transformers(file, output, dtype)
    for made in output.iterdir():  # the library lets nobody else read weights
        made.chmod(file.stat().st_mode & 0o666)


def _write(file: Path, output: Path, dtype: str) -> None:
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (output / name).write_bytes(checkpoint_of(file).file(name) or b"{}")
    config = config_of(file) | {"dtype": dtype}
    (output / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = gguf_weights(file, getattr(torch, dtype), str)
    weights = {name: weight[...] for name, weight in stored.items()}
    save_file(weights, output / WHOLE, metadata={"format": "pt"})


def _by_transformers(file: Path, output: Path, dtype: str) -> None:
    if find_spec("gguf") is None:
        raise InvalidRequestError(
            f"{file} is GGUF, which transformers reads with a package: pip install gguf"
        )
    transformers_logging.disable_progress_bar()
    given = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=getattr(torch, dtype), output_loading_info=True, **given
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    # Its loaders raise whatever a damaged file makes of them.
    except Exception as error:
        raise InvalidRequestError(
            f"transformers cannot read {file}: {type(error).__name__}: {error}"
        ) from error
    if found["missing_keys"]:
        raise InvalidRequestError(
            f"{file} lacks weights of the model: {', '.join(sorted(found['missing_keys'])[:8])}"
        )
    # What is dequantised is saved as a plain model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(getattr(torch, dtype)).save_pretrained(output)
    tokenizer.save_pretrained(output)

"""Checks of a model directory before anything is loaded."""

import json
import shlex
from pathlib import Path

from inlay.base.errors import InvalidRequestError
from inlay.engine.sections import ModelOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.source import ModelSource
from inlay.engine.torch.checks import check_settings
from inlay.engine.weights import directory_of
from inlay.extension import parts
from inlay.render.tokenizer import keep_tokenizer, load_tokenizer
from inlay.tensors.checkpoint import check_tensors, config_of, whole_config_of
from inlay.tensors.gguf import is_gguf
from inlay.tensors.hub import local_directory
from inlay.tensors.weight_files import convertible, find_weights

_READ_GGUF = ("torch", "echo")
"""Engines that serve GGUF files."""

_OLDER_FORM = "hf_quant_config.json"
"""File in which older versions of ModelOpt say that weights are theirs."""


def check_model(engine: EngineSettings, *, renders: bool = False) -> None:
    """Say at once that a model cannot be served; one that is elsewhere is looked at by its engine.

    Args:
        engine: settings of its engine.
        renders: this process also renders prompts for it: the tokenizer read here is kept for that.

    Raises:
        InvalidRequestError: there is no model, or no tokenizer (every route has text to read or to
            write), its weights are missing, cut short or no safetensors files, or the engine does
            not serve what its config.json says.
    """
    path = Path(engine.model.model).expanduser()
    if path.is_file() and not is_gguf(path):
        raise InvalidRequestError(
            f"{path} is a file; MODEL is the directory it is in, with config.json and the "
            "tokenizer, or a GGUF file",
            param="model",
        )
    directory = local_directory(engine.model.model)
    source: ModelSource
    for _, source in parts("models"):
        if source.check(engine, directory):
            return
    if directory is None and ":" in engine.model.model and (why := _gguf_refused(engine.model)):
        raise InvalidRequestError(why, param="model")
    if directory is not None:
        other = _gguf_refused(engine.model) if is_gguf(directory) else _other_format(directory)
        if other is not None:
            raise InvalidRequestError(other, param="model")
        config_of(directory)
        (keep_tokenizer if renders else load_tokenizer)(directory)
        if engine.model.engine != "echo":
            check_tensors(directory)
    if engine.model.engine == "torch":
        check_settings(engine, directory)


def stored_form(model: str, revision: str | None) -> str | None:
    """Return the form of a model's weights as vLLM names it; None where they are not quantised.

    Of a name on the hub what says it is fetched. Looked for where vLLM looks, in its order.

    Raises:
        InvalidRequestError: there is no such model, or it has no `config.json`.
    """
    directory = local_directory(model)
    if directory is None and ":" not in model:
        directory = directory_of(model, revision, ["config.json", _OLDER_FORM])
    if directory is None or is_gguf(directory):
        return "gguf"
    config = whole_config_of(directory)
    text, older = config.get("text_config"), config.get("compression_config")
    stored = config.get("quantization_config") or older
    if not isinstance(stored, dict) and (directory / _OLDER_FORM).is_file():
        return "modelopt"
    if not isinstance(stored, dict) and isinstance(text, dict):
        stored = text.get("quantization_config")
    if not isinstance(stored, dict):
        return None
    unnamed = "compressed-tensors" if older else "unknown"
    if isinstance(maker := stored.get("producer"), dict):
        unnamed = str(maker.get("name"))
    form = str(stored.get("quant_method") or unnamed).lower()
    return form.replace("compressed_tensors", "compressed-tensors")


def _gguf_refused(options: ModelOptions) -> str | None:
    """Return why an engine does not serve a GGUF file; None where it does."""
    if options.engine not in _READ_GGUF:
        return (
            f"{options.model}: the {options.engine} engine does not serve GGUF files; "
            "--engine torch does"
        )
    if options.task not in ("auto", "generate"):
        return f"{options.model}: GGUF files are served with --task generate, not {options.task}"
    return None


def _other_format(directory: Path) -> str | None:
    """Return why a directory is not a model for inlay, and what to do; None where it may be one."""
    if not (directory / "config.json").is_file() and (directory / "adapter_config.json").is_file():
        return (
            f"{directory} is an adapter, not a model; serve the model it is for: "
            f"inlay serve {_base_of(directory)} --enable-lora --lora-modules "
            f"{directory.name}={shlex.quote(str(directory))}"
        )
    if find_weights(directory) is not None:
        return None
    name = convertible(directory)
    if name is None or not (directory / "config.json").is_file():
        return None
    return (
        f"{directory} has its weights in {name}, which is pickled; inlay reads safetensors. Make "
        f"them, which runs none of its code: inlay convert {shlex.quote(str(directory))}"
    )


def _base_of(directory: Path) -> str:
    try:
        base = json.loads((directory / "adapter_config.json").read_bytes()).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError, AttributeError):
        base = None
    return shlex.quote(base) if isinstance(base, str) and base else "MODEL"

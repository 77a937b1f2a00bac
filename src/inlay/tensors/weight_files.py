"""The files that are a model's weights, among all that lie in its directory.

One rule for every reader, that of transformers (`modeling_utils._get_resolved_checkpoint_files`):
`model.safetensors`, else the files that `model.safetensors.index.json` names. So a second file
beside them (another variant, `consolidated.safetensors`, an adapter) or an index left over from
before changes nothing. Parts of diffusers' pipelines have names of their own, and there the index
comes first (`ModelMixin.from_pretrained`). Beyond that, as vLLM does: all parts without an index,
and a file that lies alone, whatever its name.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inlay.errors import InvalidRequestError

WHOLE = "model.safetensors"
"""Name of the file of a model whose weights are in one."""
_PIPELINE = "diffusion_pytorch_model.safetensors"
_INDEX = ".index.json"
_PART = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.safetensors")
_ADAPTER = "adapter_model"
_CONVERTED = (".bin", ".pt", ".pth", ".ckpt", ".gguf")
"""Endings of weights that `inlay convert` reads."""
_OTHERS = (*_CONVERTED, ".h5", ".msgpack", ".onnx")

_MAX_INDEX = 64 << 20
"""Bytes of an index: that of 160 files with 90,000 tensors has 9 MB."""
_NAMED = 3
"""Files that a message names."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of a directory.

    Attributes:
        directory: of the model.
        names: of the files, which may be absent where there is an index; sorted.
        index: name of the file of each tensor, as the index says; empty without one.
        plain: transformers finds the same files by itself.
    """

    directory: Path
    names: tuple[str, ...]
    index: Mapping[str, str] = field(default_factory=dict)
    plain: bool = True

    def paths(self, wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
        """Return the files that are there.

        Args:
            wanted: which tensors matter: a file that holds none of them may be missing.

        Raises:
            InvalidRequestError: one with such a tensor is missing.
        """
        absent = {name for name in self.names if not (self.directory / name).is_file()}
        missing = sorted({file for name, file in self.index.items() if wanted(name)} & absent)
        if missing:
            raise InvalidRequestError(
                f"{self.directory} lacks {len(missing)} of the {len(self.names)} weight files that "
                f"its index names: {_some(missing)}"
            )
        return [self.directory / name for name in self.names if name not in absent]


def weight_files(directory: Path) -> WeightFiles:
    """Return the files that are the weights of the model in `directory`.

    Raises:
        InvalidRequestError: there are none, it cannot be told which, or an index that is none.
    """
    found = find_weights(directory)
    if found is None:
        others = sorted(file.name for file in directory.glob("*") if file.suffix in _OTHERS)
        has = f"; it has {_some(others)}" if others else ""
        raise InvalidRequestError(
            f"{directory} has no weights: no *.safetensors file, and no other format is read{has}"
        )
    return found


def find_weights(directory: Path) -> WeightFiles | None:
    """Return the same, or None where there is no file of weights in safetensors.

    Raises `InvalidRequestError` as `weight_files`.
    """
    named = _named_by_config(directory)
    for name in [named] if named else _in_order(directory):
        if (directory / name).is_file():
            if not name.endswith(_INDEX):
                return WeightFiles(directory, (name,))
            index, plain = _read_index(directory / name)
            return WeightFiles(directory, tuple(sorted({*index.values()})), index, plain)
    if named:
        raise InvalidRequestError(
            f"{directory / 'config.json'} says transformers_weights = {named!r}, and there is no "
            "such file"
        )
    files = sorted(
        file.name
        for file in directory.glob("*.safetensors")
        if file.is_file() and not file.name.startswith(_ADAPTER)
    )
    parts = _parts(directory, files)
    if parts or len(files) == 1:
        return WeightFiles(directory, tuple(parts or files), plain=False)
    if files:
        raise InvalidRequestError(
            f"{directory} has {len(files)} safetensors files ({_some(files)}), and none is called "
            f"{WHOLE}: it cannot be told which are the weights"
        )
    return None


def convertible(directory: Path) -> Path | None:
    """Return the first file of weights that `inlay convert` reads, pickled ones first."""
    found = [
        file
        for ending in _CONVERTED
        for file in sorted(directory.glob(f"*{ending}"))
        if file.is_file() and (ending != ".bin" or "model" in file.name)
    ]
    return found[0] if found else None


def _in_order(directory: Path) -> list[str]:
    return [WHOLE, WHOLE + _INDEX, _PIPELINE + _INDEX, _PIPELINE]


def _named_by_config(directory: Path) -> str | None:
    """Return the file that transformers reads because the configuration says so."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # whoever needs a configuration says what is wrong with it
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    if name is None:
        return None
    if not isinstance(name, str) or not _is_plain(name.removesuffix(_INDEX)):
        raise InvalidRequestError(
            f"{directory / 'config.json'} says transformers_weights = {str(name)[:80]!r}; allowed: "
            "a safetensors file of this directory, or an index of such files"
        )
    return name


def _is_plain(name: object) -> bool:
    """True for the name of a safetensors file without folders."""
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _read_index(path: Path) -> tuple[dict[str, str], bool]:
    """Return the file of each tensor, and True if transformers reads this index."""
    try:
        if path.stat().st_size > _MAX_INDEX:
            raise InvalidRequestError(f"{path} is over {_MAX_INDEX} bytes: no index has so many")
        whole = json.loads(path.read_bytes())
        index = whole["weight_map"]
        outside = sorted({str(file) for file in index.values() if not _is_plain(file)})
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not a safetensors index: {error!r}") from error
    if outside:
        raise InvalidRequestError(
            f"{path} names files outside its directory, or no safetensors files: {_some(outside)}"
        )
    if not index:
        raise InvalidRequestError(f"{path} is not a safetensors index: it names no tensor")
    return dict(index), isinstance(whole.get("metadata"), dict)


def _parts(directory: Path, files: list[str]) -> list[str]:
    """Return the parts of a model without an index; empty where there are none.

    Raises:
        InvalidRequestError: one is missing, or there are several sets.
    """
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for name in files:
        if match := _PART.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), {})[int(match[2])] = name
    if len(sets) > 1 and len(own := {key: sets[key] for key in sets if key[0] == "model"}) == 1:
        sets = own
    if len(sets) > 1:
        names = [next(iter(parts.values())) for parts in sets.values()]
        raise InvalidRequestError(
            f"{directory} has the parts of {len(sets)} models ({_some(sorted(names))}) and no "
            "index: it cannot be told which are the weights"
        )
    for (_, count), parts in sets.items():
        lacking = count - len(parts)
        if lacking or parts.keys() != set(range(min(parts), min(parts) + count)):
            raise InvalidRequestError(
                f"{directory} lacks {lacking or 'some'} of the {count} weight files that "
                f"{next(iter(parts.values()))} is one of"
            )
        return sorted(parts.values())
    return []


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}"

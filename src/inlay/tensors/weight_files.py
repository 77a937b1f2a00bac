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
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inlay.base.errors import InvalidRequestError

WHOLE = "model.safetensors"
"""Name of the file of a model whose weights are in one."""
_PIPELINE = "diffusion_pytorch_model.safetensors"
_INDEX = ".index.json"
_PART = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})\.[a-z]+")
_NO_WEIGHTS = ("adapter_model",)
"""Beginnings of the names of other files in safetensors."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of files that `torch.save` has written."""
_PICKLED_ORDER = (
    "pytorch_model.bin",
    f"pytorch_model.bin{_INDEX}",
    "adapter_model.bin",
    f"diffusion_pytorch_model.bin{_INDEX}",
    "diffusion_pytorch_model.bin",
)
BGE_M3_HEADS = ("sparse_linear.pt", "colbert_linear.pt")
"""Files of BGE-M3's heads, beside the weights of its body."""
_NO_PICKLED = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "spk_dict")
"""Beginnings of the names of what trainers and others keep in such files."""

OTHERS = (*PICKLED, ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of weights in other formats than safetensors."""

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
        others = sorted(file.name for file in directory.glob("*") if file.suffix in OTHERS)
        has = f"; it has {_some(others)}" if others else ""
        if convertible(directory):
            has += f": inlay convert {shlex.quote(str(directory))}"
        raise InvalidRequestError(
            f"{directory} has no weights: no *.safetensors file, and no other format is read{has}"
        )
    return found


def find_weights(directory: Path) -> WeightFiles | None:
    """Return the same, or None where there is no file of weights in safetensors.

    Raises `InvalidRequestError` as `weight_files`.
    """
    named = _named_by_config(directory)
    if named and not (directory / named).is_file():
        raise InvalidRequestError(
            f"{directory / 'config.json'} says transformers_weights = {named!r}, and there is no "
            "such file"
        )
    order = (WHOLE, WHOLE + _INDEX, _PIPELINE + _INDEX, _PIPELINE)
    return _find(directory, (named,) if named else order, (".safetensors",), _NO_WEIGHTS)


def find_pickled(directory: Path) -> WeightFiles | None:
    """Return those that `torch.save` has written, by the same rule; None where there are none.

    Raises `InvalidRequestError` as `weight_files`.
    """
    return _find(directory, _PICKLED_ORDER, PICKLED, _NO_PICKLED)


def _find(
    directory: Path, order: Sequence[str], endings: tuple[str, ...], others: tuple[str, ...]
) -> WeightFiles | None:
    """Return the first of the names in `order` that is there, else parts, else what lies alone."""
    for name in order:
        if (directory / name).is_file():
            if not name.endswith(_INDEX):
                return WeightFiles(directory, (name,))
            index, plain = _read_index(directory / name, endings)
            return WeightFiles(directory, tuple(sorted({*index.values()})), index, plain)
    files = sorted(
        file.name
        for file in directory.glob("*")
        if file.suffix in endings and file.is_file() and not file.name.startswith(others)
    )
    parts = _parts(directory, files)
    if parts or len(files) == 1:
        return WeightFiles(directory, tuple(parts or files), plain=False)
    if files:
        raise InvalidRequestError(
            f"{directory} has {len(files)} files of weights ({_some(files)}), and none is called "
            f"{order[0]}: it cannot be told which are the model's"
        )
    return None


def convertible(directory: Path) -> str | None:
    """Return the name of a file of weights that `inlay convert` reads, pickled ones first."""
    try:
        pickled = find_pickled(directory)
    except InvalidRequestError:
        return None
    gguf = sorted(file.name for file in directory.glob("*.gguf") if file.is_file())
    return next(iter([*(pickled.names if pickled else ()), *gguf]), None)


def _named_by_config(directory: Path) -> str | None:
    """Return the file that transformers reads because the configuration says so."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # whoever needs a configuration says what is wrong with it
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    if name is None:
        return None
    if not isinstance(name, str) or not _is_plain(name.removesuffix(_INDEX), (".safetensors",)):
        raise InvalidRequestError(
            f"{directory / 'config.json'} says transformers_weights = {str(name)[:80]!r}; allowed: "
            "a safetensors file of this directory, or an index of such files"
        )
    return name


def _is_plain(name: object, endings: tuple[str, ...]) -> bool:
    """True for the name of a file without folders."""
    return isinstance(name, str) and name.endswith(endings) and Path(name).name == name


def _read_index(path: Path, endings: tuple[str, ...]) -> tuple[dict[str, str], bool]:
    """Return the file of each tensor, and True if transformers reads this index."""
    try:
        if path.stat().st_size > _MAX_INDEX:
            raise InvalidRequestError(f"{path} is over {_MAX_INDEX} bytes: no index has so many")
        whole = json.loads(path.read_bytes())
        index = whole["weight_map"]
        outside = sorted({str(file) for file in index.values() if not _is_plain(file, endings)})
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not a safetensors index: {error!r}") from error
    if outside:
        raise InvalidRequestError(
            f"{path} names files outside its directory, or of another format: {_some(outside)}"
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

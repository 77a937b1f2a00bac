"""Safetensors of what `torch.save` has written: a file, or a directory with all that is below it.

Tensor by tensor, without the code of any model: names, dtypes and every value stay, and so do all
other files, byte for byte. What is made appears whole or not at all, and replaces nothing.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from inlay.base.errors import InvalidRequestError
from inlay.tensors.safetensors_file import METADATA, NAMES, encode_header
from inlay.tensors.state_dict import StateTensor, open_state_dict
from inlay.tensors.tensor import ELEMENT_SIZES
from inlay.tensors.weight_files import (
    BGE_M3_HEADS,
    OTHERS,
    PICKLED,
    WHOLE,
    find_pickled,
    find_weights,
)

_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of configuration and tokenizer files, which go with a file of weights."""
_INDEX = ".index.json"
_OTHER_NAMES = {"adapter_model.safetensors", "diffusion_pytorch_model.safetensors"}
"""Names that PEFT and diffusers look for in the place of transformers' own."""
_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class _Folder:
    """A directory of weights, relative to the whole: files to read, and what to call each."""

    place: Path
    names: dict[Path, str]


@dataclass(slots=True)
class Converted:
    """Result of a conversion.

    Attributes:
        output: file or directory.
        files: of weights, relative to it or to its directory.
        tensors: in all of them.
        nbytes: of all tensors.
    """

    output: Path
    files: list[Path] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0


def convert_directory(source: Path, output: Path | None = None) -> Converted:
    """Make safetensors of every pickled checkpoint in a model's directory and below it.

    Args:
        source: the directory.
        output: one to make, with copies of all other files; the weights go beside the pickled ones
            unless given.

    Raises:
        InvalidRequestError: there is none, one that cannot be read, no room, or something would be
            overwritten. Nothing is left then.
    """
    folders = list(_folders(source))
    if not folders:
        there = find_weights(source) is not None
        raise InvalidRequestError(
            f"{source} has its weights in safetensors already"
            if there
            else f"{source} has no checkpoint: no {', '.join(f'*{each}' for each in PICKLED)} file "
            "of weights, in no folder of it"
        )
    wanted = [folder.place / name for folder in folders for name in _written(folder)]
    _refuse_existing([output] if output else [source / name for name in wanted])
    if output is not None and output.absolute().is_relative_to(source.absolute()):
        raise InvalidRequestError(f"{output} lies in {source}, which would be copied into it")
    _check_room(source if output is None else output.parent, folders)
    found = Converted(output or source)
    with made_aside(source if output is None else output.parent) as made:
        for folder in folders:
            (made / folder.place).mkdir(parents=True, exist_ok=True)
            _convert(folder, made, found)
        if output is None:
            for name in wanted:
                (made / name).rename(source / name)
        else:
            _copy_others(source, made, {*wanted})
            made.chmod(source.stat().st_mode & 0o777)
            made.rename(output)
    return found


def convert_file(source: Path, output: Path | None = None) -> Converted:
    """Make safetensors of one file by `torch.save`.

    Args:
        source: the file.
        output: directory to make, with the weights and copies of the configuration and tokenizer
            files beside `source`; a file beside it unless given.

    Raises:
        InvalidRequestError: as `convert_directory`.
    """
    name = _renamed(source.with_suffix(".safetensors").name)
    target = source.parent / name
    _refuse_existing([output or target])
    folder = _Folder(Path(), {source: name if output is None else WHOLE})
    place = source.parent if output is None else output.parent
    _check_room(place, [folder])
    found = Converted(output or target)
    with made_aside(place) as made:
        _convert(folder, made, found)
        if output is None:
            (made / name).rename(target)
        else:
            if (source.parent / "config.json").is_file():
                for file in source.parent.iterdir():
                    if file.suffix in _SMALL and not file.name.endswith(_INDEX) and file.is_file():
                        shutil.copy2(file, made)
            made.chmod(source.parent.stat().st_mode & 0o777)
            made.rename(output)
    return found


def _folders(source: Path) -> Iterator[_Folder]:
    for root, directories, _ in os.walk(source):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        place = Path(root)
        pickled = find_pickled(place)
        if pickled is None or find_weights(place) is not None:
            continue
        names = {file: _renamed(file.with_suffix(".safetensors").name) for file in pickled.paths()}
        if len(names) == 1 and not {*names.values()} <= _OTHER_NAMES:
            names = dict.fromkeys(names, WHOLE)
        if not any((place / name).exists() for name in names.values()):
            yield _Folder(place.relative_to(source), names)


def _renamed(name: str) -> str:
    """Return the name that transformers looks for; diffusers' and PEFT's stay."""
    return name.replace("pytorch_model", "model", 1) if name.startswith("pytorch_model") else name


def _written(folder: _Folder) -> list[str]:
    """Names of the files to make, the index last."""
    names = list(folder.names.values())
    if len(names) == 1:
        return names
    whole = next((each for each in _OTHER_NAMES if names[0].startswith(Path(each).stem)), WHOLE)
    return [*names, whole + _INDEX]


def _refuse_existing(paths: Sequence[Path]) -> None:
    there = [path for path in paths if path.exists() or path.is_symlink()]
    if there:
        raise InvalidRequestError(f"{there[0]} is there already, and nothing is overwritten")


def _check_room(place: Path, folders: Sequence[_Folder]) -> None:
    """Read all headers, so that nothing begins that cannot end."""
    needed = 0
    for folder in folders:
        for file in folder.names:
            with open_state_dict(file) as tensors:
                needed += sum(tensor.nbytes for tensor in tensors)
    if not place.is_dir():
        raise InvalidRequestError(f"{place} is no directory: nothing can be made in it")
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InvalidRequestError(
            f"{place} has {free} bytes of room; the weights have {needed} (--output)"
        )


@contextmanager
def made_aside(place: Path) -> Iterator[Path]:
    """Yield a directory in `place`, which is removed if it is still there in the end.

    Raises `InvalidRequestError` where it cannot be written.
    """
    try:
        made = Path(tempfile.mkdtemp(prefix=".inlay-convert-", dir=place))
    except OSError as error:
        raise InvalidRequestError(
            f"{place} cannot be written: {error.strerror} (--output: another directory)"
        ) from error
    try:
        yield made
    except OSError as error:
        raise InvalidRequestError(f"{place} cannot be written: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _convert(folder: _Folder, made: Path, found: Converted) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for file, name in folder.names.items():
        with open_state_dict(file) as tensors, (made / folder.place / name).open("xb") as stream:
            twice = next((each.name for each in tensors if each.name in weight_map), None)
            if twice is not None:
                raise InvalidRequestError(f"{file} has tensor {twice} once more, of another file")
            write_tensors(stream, tensors)
            stream.flush()
            os.fsync(stream.fileno())
            weight_map |= dict.fromkeys((tensor.name for tensor in tensors), name)
            total += sum(tensor.nbytes for tensor in tensors)
        found.files.append(folder.place / name)
    if len(folder.names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (made / folder.place / _written(folder)[-1]).write_text(text + "\n", encoding="utf-8")
    found.tensors += len(weight_map)
    found.nbytes += total


def write_tensors(stream: BinaryIO, tensors: Sequence[StateTensor]) -> None:
    """Write a safetensors file; one tensor at most is in memory.

    Elements of the largest size come first, so that each tensor lies on a multiple of its own.
    """
    order = sorted(tensors, key=lambda each: (-ELEMENT_SIZES[each.dtype], each.name))
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for tensor in order:
        end = at + tensor.nbytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (at, end),
        }
        at = end
    stream.write(encode_header(header))
    for tensor in order:
        data = tensor.read().view
        for start in range(0, len(data), _CHUNK):
            stream.write(data[start : start + _CHUNK])


def _copy_others(source: Path, made: Path, wanted: set[Path]) -> None:
    """Copy all but weights in other formats, and hidden files."""
    indices = tuple(f"{ending}{_INDEX}" for ending in PICKLED)
    for root, directories, files in os.walk(source):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        place = Path(root).relative_to(source)
        for name in files:
            leave = name.startswith(".") or name.endswith((*OTHERS, *indices))
            leave = leave and name not in BGE_M3_HEADS
            if not leave and place / name not in wanted and (Path(root) / name).is_file():
                (made / place).mkdir(exist_ok=True, parents=True)
                shutil.copy2(Path(root) / name, made / place / name)

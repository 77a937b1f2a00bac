"""An adapter's directory: its configuration and the tensors of its one safetensors file.

A LoRA of an image pipeline may also be in the form that diffusers writes: one file, whose tensors
are named by the pipeline's components, and whose header has their configurations. Nothing is ever
unpickled.

The files are untrusted. Shapes are checked against file sizes before any allocation, nothing is
memory-mapped (a file that shrinks would crash the process), and every number is checked once.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from inlay.adapter.config import (
    MAX_CONFIG_BYTES,
    LoraConfig,
    PromptConfig,
    lora_config,
    parse_config,
)
from inlay.adapter.patterns import PatternWork
from inlay.adapter.tables import DTYPES, CheckTable, is_table, refuse
from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.messages.prompt import DTYPE_SIZES
from inlay.tensors.cast import NON_FINITE, largest_magnitude
from inlay.tensors.checkpoint import stored_tensors
from inlay.tensors.stored import StoredTensor, metadata_in, tensors_in
from inlay.tensors.tensor import BITS_DTYPES, NUMPY_DTYPES, quoted

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_HEADER_BYTES = 16 * 1024 * 1024
_CHUNK = 1024 * 1024
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_ROWS = "prompt_embeddings"

PIPELINE = "pytorch_lora_weights.safetensors"
"""File of a LoRA of an image pipeline, as diffusers writes it."""
_HALVES = {
    _DOWN: _UP,
    ".lora_linear_layer.down.weight": ".lora_linear_layer.up.weight",
    ".lora.down.weight": ".lora.up.weight",
}
"""Ends of the names of its matrices, A and B."""
_CONFIGS = "lora_adapter_metadata"
"""Metadata of such a file: fields of PEFT's configurations, named by component."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two matrices of one module's LoRA.

    Attributes:
        down: [rank, inputs], A in PEFT.
        up: [outputs, rank], B in PEFT.
        scale: factor of their product.
    """

    down: StoredTensor
    up: StoredTensor
    scale: float


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """A LoRA on disk.

    Attributes:
        directory: of the files.
        modules: matrices by module name in the original model; of a pipeline, behind the name of
            the component.
        names: of the files.
    """

    directory: Path
    modules: Mapping[str, LoraPair]
    names: tuple[str, ...] = (CONFIG, WEIGHTS)

    @property
    def rank(self) -> int:
        """The largest rank of any of its modules."""
        return max(pair.down.shape[0] for pair in self.modules.values())

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors of the adapter."""
        for pair in self.modules.values():
            yield pair.down
            yield pair.up


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """Prompt-tuning embeddings on disk: `rows` is [num_positions, hidden size]."""

    directory: Path
    config: PromptConfig
    rows: StoredTensor
    names: ClassVar[tuple[str, ...]] = (CONFIG, WEIGHTS)

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        """The adapter's one tensor."""
        yield self.rows


AdapterFiles: TypeAlias = LoraFiles | PromptFiles


def open_adapter(
    directory: Path, *, max_bytes: int = 2**40, check_table: CheckTable = refuse
) -> AdapterFiles:
    """Open an adapter's directory and check its structure; tensor data is not read yet.

    Args:
        directory: in PEFT's layout, or in diffusers', of a pipeline.
        max_bytes: limit for both files together.
        check_table: checks each embedding table or head of a LoRA; what passes is left out.

    Raises:
        NotFoundError: no adapter in `directory`.
        InvalidRequestError: the files are not an adapter inlay can run; the message says why.
    """
    if is_of_pipeline(directory):
        return _pipeline_lora(directory, max_bytes)
    config_size = _size(directory, CONFIG)
    if config_size > MAX_CONFIG_BYTES:
        raise InvalidRequestError(
            f"{CONFIG} has {config_size} bytes; allowed: at most {MAX_CONFIG_BYTES}"
        )
    config = parse_config(_read(directory / CONFIG, 0, config_size))
    if not (directory / WEIGHTS).exists():
        pickled = next((name for name in _PICKLED if (directory / name).exists()), None)
        if pickled is not None:
            raise InvalidRequestError(
                f"the adapter's weights are in {pickled}, which is pickled and may run code; inlay "
                "convert DIRECTORY makes safetensors of it"
            )
    _check_size(config_size + _size(directory, WEIGHTS), max_bytes)
    tensors = _tensors(directory / WEIGHTS)
    if isinstance(config, LoraConfig):
        return LoraFiles(directory, _pairs(config, tensors, check_table))
    return PromptFiles(directory, config, _rows_of(config, tensors))


def is_of_pipeline(directory: Path) -> bool:
    """Return True if what is there is in diffusers' form."""
    return not is_there(directory / CONFIG) and is_there(directory / PIPELINE)


def is_there(path: Path) -> bool:
    """Return True if a path exists; False also for one that no file may have."""
    try:
        return path.exists()
    except OSError:
        return False


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise InvalidRequestError(
            f"the adapter has {size} bytes; allowed: at most {max_bytes} (--max-lora-bytes)"
        )


def _pipeline_lora(directory: Path, max_bytes: int) -> LoraFiles:
    """Open a LoRA in diffusers' form, as its `load_lora_weights` reads it.

    Without a configuration of its component, alpha is the rank.
    """
    file = directory / PIPELINE
    _check_size(_size(directory, PIPELINE), max_bytes)
    tensors = _tensors(file)
    configs = _component_configs(file)
    pairs: dict[str, LoraPair] = {}
    paired: set[str] = set()
    for name, down in tensors.items():
        end = next((end for end in _HALVES if name.endswith(end)), None)
        if end is None:
            continue
        module = name.removesuffix(end)
        up = tensors.get(module + _HALVES[end])
        if up is None:
            raise InvalidRequestError(f"the adapter has {quoted(name)} without its other half")
        component = module.partition(".")[0]
        rank = down.shape[0]
        config = configs.get(component, LoraConfig(rank, rank))
        pairs[module] = _pair(config, module, down, up)
        paired |= {name, up.name}
    rest = sorted(tensors.keys() - paired)
    if rest:
        raise InvalidRequestError(
            f"the adapter's tensor {quoted(rest[0])} is not one of a LoRA of linear layers "
            f"(COMPONENT.*{' or *'.join(_HALVES)}, and the other half)"
        )
    return LoraFiles(directory, pairs, (PIPELINE,))


def _component_configs(file: Path) -> dict[str, LoraConfig]:
    """Return the configurations that diffusers has written into a file, by component."""
    try:
        fields = json.loads(metadata_in(file, MAX_HEADER_BYTES).get(_CONFIGS, "{}"))
        found: dict[str, dict[str, Any]] = {}
        for key, value in fields.items():
            component, _, name = key.partition(".")
            found.setdefault(component, {})[name] = value
    except (ValueError, RecursionError, AttributeError) as error:
        raise InvalidRequestError(
            f"{_CONFIGS} in the header of {file.name} is not an object in JSON"
        ) from error
    work = PatternWork()
    return {component: lora_config(config, work) for component, config in found.items()}


def content_id(files: AdapterFiles) -> str:
    """Return the BLAKE3 of all files' bytes as 32 hex digits. Reads the files."""
    hasher = blake3()
    for name in files.names:
        size = _size(files.directory, name)
        hasher.update(size.to_bytes(8, "little"))
        with _opened(files.directory / name) as stream:
            while piece := stream.read(_CHUNK):
                hasher.update(piece)
    return hasher.hexdigest(16)


def check_finite(files: AdapterFiles) -> None:
    """Read all numbers. Raises `InvalidRequestError` if one is not finite."""
    for tensor in files.tensors:
        if (
            prod(tensor.shape)
            and largest_magnitude(_bits(tensor)) >= NON_FINITE[DTYPES[tensor.dtype]]
        ):
            raise InvalidRequestError(
                f"the adapter's tensor {quoted(tensor.name)} must be finite, and holds NaN or "
                "infinity"
            )


def check_fits(files: LoraFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check a LoRA against the shapes of a model's weights.

    Modules without a weight of that name in the model are ignored.

    Args:
        files: files of the adapter.
        shapes: (outputs, inputs) of each known module of the model, by name.

    Raises:
        InvalidRequestError: the adapter was made for a model with other sizes.
    """
    for name, pair in files.modules.items():
        shape = shapes.get(name)
        if shape is not None and shape != (pair.up.shape[0], pair.down.shape[1]):
            raise InvalidRequestError(
                f"the adapter was made for another model: {name} has {shape[1]} inputs and "
                f"{shape[0]} outputs here, the adapter takes {pair.down.shape[1]} and gives "
                f"{pair.up.shape[0]}"
            )


def shapes_of(model: Path) -> dict[str, tuple[int, ...]]:
    """Return (outputs, inputs) of each linear module in a model's checkpoint.

    None if the checkpoint cannot be read.
    """
    try:
        stored = [tensor for tensor in stored_tensors(model) if tensor.name.endswith(".weight")]
    except InvalidRequestError:
        return {}
    return {
        tensor.name.removesuffix(".weight"): tensor.shape
        for tensor in stored
        if len(tensor.shape) == 2
    }


def elements(tensor: StoredTensor) -> npt.NDArray[Any]:
    """Read a tensor found by `open_adapter`, in its shape (bfloat16 through `ml_dtypes`).

    The array owns its memory.
    """
    return _bits(tensor).view(NUMPY_DTYPES[DTYPES[tensor.dtype]]).reshape(tensor.shape)


def dtype_of(tensor: StoredTensor) -> str:
    """Return the dtype of such a tensor, one of `inlay.messages.prompt.DTYPE_SIZES`."""
    return DTYPES[tensor.dtype]


def _bits(tensor: StoredTensor) -> npt.NDArray[Any]:
    data = _read(tensor.file, tensor.offset, tensor.nbytes)
    return np.frombuffer(data, BITS_DTYPES[DTYPE_SIZES[DTYPES[tensor.dtype]]])


def _opened(path: Path) -> Any:
    """Open a regular file: reading a pipe could block, and a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequestError(f"{path.name} of the adapter is not a regular file")
    return open(descriptor, "rb", buffering=0)  # noqa: PTH123 - of a descriptor


def _read(path: Path, offset: int, size: int) -> bytearray:
    """Read `size` bytes of a file into new writable memory.

    Raises `InvalidRequestError` if the file has become shorter.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    with _opened(path) as stream:
        stream.seek(offset)
        while done < size:
            count = stream.readinto(view[done:])
            if not count:
                raise InvalidRequestError(f"{path.name} of the adapter ended while it was read")
            done += count
    return data


def _size(directory: Path, name: str) -> int:
    try:
        with _opened(directory / name) as stream:
            return os.fstat(stream.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"No adapter found in {directory}: it has no {name}") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise InvalidRequestError(f"{name} of the adapter cannot be read: {why}") from error


def _tensors(file: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for tensor in tensors_in(file, MAX_HEADER_BYTES):
        if tensor.dtype not in DTYPES:
            raise InvalidRequestError(
                f"the adapter's tensor {quoted(tensor.name)} is {quoted(tensor.dtype)}; allowed: "
                f"{', '.join(DTYPES)}"
            )
        if len(tensor.shape) != 2 or min(tensor.shape) < 1:
            raise InvalidRequestError(
                f"the adapter's tensor {quoted(tensor.name)} has shape {tensor.shape}; a matrix is "
                "needed"
            )
        if prod(tensor.shape) * DTYPE_SIZES[DTYPES[tensor.dtype]] != tensor.nbytes:
            raise InvalidRequestError(
                f"the adapter's tensor {quoted(tensor.name)} of shape {tensor.shape} has "
                f"{tensor.nbytes} bytes"
            )
        found[tensor.name] = tensor
    if not found:
        raise InvalidRequestError(f"{file.name} holds no tensors")
    return found


def _pairs(
    config: LoraConfig, tensors: Mapping[str, StoredTensor], check_table: CheckTable
) -> dict[str, LoraPair]:
    pairs: dict[str, LoraPair] = {}
    for name, tensor in tensors.items():
        if is_table(name):
            check_table(tensor)
        elif name.startswith(_PREFIX) and name.endswith(_DOWN):
            module = name.removeprefix(_PREFIX).removesuffix(_DOWN)
            up = tensors.get(f"{_PREFIX}{module}{_UP}")
            if up is None:
                raise InvalidRequestError(f"the adapter has {quoted(name)} without its lora_B")
            pairs[module] = _pair(config, module, tensor, up)
        elif not (
            name.startswith(_PREFIX)
            and name.endswith(_UP)
            and name.removesuffix(_UP) + _DOWN in tensors
        ):
            raise InvalidRequestError(
                f"the adapter's tensor {quoted(name)} is not one of a LoRA of linear layers "
                f"({_PREFIX}*{_DOWN} and *{_UP})"
            )
    if not pairs:
        raise InvalidRequestError("the adapter has no matrices of a LoRA")
    return pairs


def _pair(config: LoraConfig, module: str, down: StoredTensor, up: StoredTensor) -> LoraPair:
    rank = config.rank_of(module)
    if down.shape[0] != rank or up.shape[1] != rank:
        raise InvalidRequestError(
            f"the adapter's matrices of {quoted(module)} have shapes {down.shape} and {up.shape}; "
            f"its configuration says rank {rank}"
        )
    return LoraPair(down, up, config.scale_of(module, rank))


def _rows_of(config: PromptConfig, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    rows = tensors.get(_ROWS)
    if rows is None or len(tensors) != 1:
        raise InvalidRequestError(
            f"the rows of a prompt-tuning adapter are one tensor, {_ROWS}; it has "
            f"{quoted(', '.join(sorted(tensors)))}"
        )
    if rows.shape != (config.num_positions, config.hidden_size):
        raise InvalidRequestError(
            f"the adapter's rows have shape {rows.shape}; {CONFIG} says "
            f"{(config.num_positions, config.hidden_size)}"
        )
    return rows

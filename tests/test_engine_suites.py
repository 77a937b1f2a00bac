"""Suites of engines run two at a time: each is told whole, and what failed by its name."""

import sys
from pathlib import Path

import pytest
from scripts import test_engines as suites
from scripts.test_again import ENDED, RESTARTS, again

TESTS = """
import time
import pytest
pytestmark = pytest.mark.engines
@pytest.mark.parametrize("number", range(3))
def test_that_takes_its_time(number):
    time.sleep(0.1)
"""
ONCE = """
from pathlib import Path
import pytest
pytestmark = pytest.mark.engines
def test_that_fails_once():
    mark = Path(__file__).with_suffix(".ran")
    ran = mark.exists()
    mark.touch()
    assert ran
"""
NEVER = """
import pytest
pytestmark = pytest.mark.engines
def test_that_fails():
    assert 0, "as ever"
"""


def suite(root: Path, name: str, *texts: str) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "constraints.txt").touch()
    for number, text in enumerate(texts):
        (folder / f"test_{name}_{number}.py").write_text(text)
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "SUITES", tmp_path)
    # The environment of these tests in place of one that is to be filled.
    monkeypatch.setattr(suites, "environment_of", lambda _: Path(sys.prefix))
    monkeypatch.setattr(sys, "argv", ["test_engines", "-v", "-p", "no:xdist"])
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = engines: of these\n")
    return tmp_path


@pytest.mark.slow
def test_what_each_says_is_whole_and_what_fails_twice_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", "1")
    suite(root, "slow", TESTS, TESTS)
    suite(root, "once", TESTS, ONCE)
    suite(root, "never", NEVER)
    assert suites.main() == 1
    said, _ = capfd.readouterr()
    *parts, last = said.partition("at a time: ")[2].split("engine suite ")
    assert len(parts) == 3
    for name in ("slow", "once", "never"):
        (whole,) = [part for part in (*parts, last) if f"test_{name}_0.py" in part]
        others = {"slow", "once", "never"} - {name}
        assert not any(f"test_{other}_0.py" in whole for other in others)
    assert "failed once, passed alone:\n  once/test_once_1.py::test_that_fails_once" in said
    assert said.splitlines()[-1] == "3 parts of engine suites ran; failed: never (status 1)"


def test_every_file_is_in_one_part_of_few(root: Path) -> None:
    folder = suite(root, "large", *[TESTS] * 23)
    parts = list(suites.parts_of(folder, Path(sys.executable)))
    assert [part.name for part in parts] == ["large 1 of 3", "large 2 of 3", "large 3 of 3"]
    files = [file for part in parts for file in part.files]
    assert sorted(files) == sorted(folder.glob("test_*.py"))
    assert max(len(part.files) for part in parts) <= suites.FILES


@pytest.mark.slow
def test_words_choose_no_test_of_a_part_but_some_test_of_all(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite(root, "slow", TESTS)
    suite(root, "never", NEVER)
    plain = sys.argv
    monkeypatch.setattr(sys, "argv", [*plain, "-k", "takes_its_time"])
    assert suites.main() == 0
    monkeypatch.setattr(sys, "argv", [*plain, "-k", "nothing_of_this_name"])
    assert suites.main() == 1
    assert "-k nothing_of_this_name chooses" in capfd.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(sys, "argv", plain[:1])
    (root / "slow" / "test_slow_0.py").write_text("")
    assert suites.main() == 1
    assert "slow (status 5)" in capfd.readouterr().out.splitlines()[-1]


def test_a_status_begins_a_line_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = suite(root, "killed", NEVER)
    (folder / "test_killed_0.py").write_text(
        "import os\nos.write(1, b'in the middle of a li')\nos._exit(9)\n"
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "-s"])
    assert suites.main() == 1
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("engine suite killed: status 9") for line in lines)


def test_uv_looks_for_packages_where_pip_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/wheels /other/wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example/simple")
    told = suites.installer()
    assert told["UV_FIND_LINKS"] == "/some/wheels,/other/wheels"
    assert told["UV_DEFAULT_INDEX"] == "https://packages.example/simple"
    assert Path(told["UV"]).exists()


def test_a_run_that_ended_before_its_last_test_fails_for_certain(tmp_path: Path) -> None:
    values = tmp_path / "v"
    for key, value in {"cache/lastfailed": '{"a": true}', ENDED: str(RESTARTS)}.items():
        (values / key).parent.mkdir(parents=True, exist_ok=True)
        (values / key).write_text(value)
    assert again(tmp_path, lambda *_: 0)[0] == 0
    (values / ENDED).write_text(str(RESTARTS + 1))
    assert again(tmp_path, lambda *_: 0)[0] == 1


def test_environments_are_filled_without_a_test(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    filled: list[Path] = []

    def fill(folder: Path) -> Path:
        filled.append(folder)
        return root

    monkeypatch.setattr(suites, "environment_of", fill)
    monkeypatch.setattr(sys, "argv", ["test_engines", "--fill"])
    folders = [suite(root, name, NEVER) for name in ("one", "two")]
    assert suites.main() == 0
    assert filled == folders
    assert capfd.readouterr().out == "environments of engine suites filled; failed: none\n"

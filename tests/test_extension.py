"""Extensions: which are loaded, and what keeps a start from having two of one name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.base.errors import InvalidRequestError
from inlay.extension import API, BUNDLED, load, merged
from tests.commands import run

pytestmark = pytest.mark.usefixtures("started_processes")

_COMMANDS = """
from pydantic import BaseModel
from inlay.cli.command import Command

class Settings(BaseModel, frozen=True, defer_build=True):
    word: str = "hello"

COMMANDS = (Command({name!r}, "Say a word.", "{module}.commands", Settings),)

def run(settings):
    print(settings.word)
    return 0
"""


def package(
    folder: Path, name: str, module: str, *, command: str = "greet", api: int = API, wheel: str = ""
) -> None:
    """A distribution whose extension `name` has one command, as pip would have installed it."""
    inside = folder / module
    inside.mkdir()
    (inside / "__init__.py").write_text(
        "from inlay.extension import Extension\n"
        f"extension = Extension({name!r}, api={api}, commands='{module}.commands:COMMANDS')\n"
    )
    (inside / "commands.py").write_text(_COMMANDS.format(name=command, module=module))
    info = folder / f"{wheel or module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {wheel or module}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[inlay.extensions]\n{name} = {module}:extension\n")


def inlay(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "inlay.cli", *words],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_all_that_come_with_inlay_are_loaded_unless_some_are_named() -> None:
    assert [each.name for each in load(None)] == list(BUNDLED)
    assert [each.name for each in load("audit, batches, tools,stages,state,")] == list(BUNDLED)
    assert [each.name for each in load("audit")] == ["audit"]
    assert load("") == ()


def test_a_command_is_there_where_its_extension_is(tmp_path: Path) -> None:
    listed = inlay(tmp_path, "--extensions", "audit", "--help").stdout
    assert "embeds audit" in listed
    assert "embeds encode" not in listed
    without = inlay(tmp_path, "bench", INLAY_EXTENSIONS="")
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr == "inlay: unknown command bench (see inlay --help)\n"
    assert inlay(tmp_path, "bench", "--extensions=tools", "--help").stdout.startswith("usage: ")


def test_the_words_after_two_dashes_name_no_extension(tmp_path: Path) -> None:
    done = inlay(tmp_path, "demo", "--", "--extensions", "x")
    assert "takes no further arguments, got '--extensions x' after --" in done.stderr


def test_another_packages_commands_are_there_where_it_is_named(tmp_path: Path) -> None:
    package(tmp_path, "greeting", "greeter")
    assert "greet" not in inlay(tmp_path, "--help").stdout
    named = inlay(tmp_path, "greet", "--extensions", "greeting", "--word", "moin")
    assert (named.returncode, named.stdout) == (0, "moin\n")
    by_variable = inlay(tmp_path, "greet", INLAY_EXTENSIONS="greeting", INLAY_WORD="ahoi")
    assert (by_variable.returncode, by_variable.stdout) == (0, "ahoi\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "lost",
            "no extension 'lost'; inlay has audit, batches, stages, state, tools; installed beside it: double, early",
        ),
        ("early", "extension 'early' of early 1.0 is for interface 0, this inlay has 1"),
        ("double", "extension 'double' is given twice: by "),
        ("server", "command 'serve' is given twice: by inlay and by extension 'server'"),
        (
            "tools,talk",
            "command 'chat' is given twice: by extension 'tools' and by extension 'talk'",
        ),
    ],
)
def test_what_cannot_be_loaded_is_one_line_that_names_all(
    tmp_path: Path, words: str, said: str
) -> None:
    package(tmp_path, "early", "early", api=0)
    package(tmp_path, "double", "double_a")
    package(tmp_path, "double", "double_b")
    package(tmp_path, "server", "server", command="serve")
    package(tmp_path, "talk", "talk", command="chat")
    done = inlay(tmp_path, "--extensions", words, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_doctor_lists_what_is_loaded_and_what_is_installed_beside_it(tmp_path: Path) -> None:
    package(tmp_path, "greeting", "greeter")
    found = inlay(tmp_path, "doctor").stdout
    assert (
        "stages, batches, state, tools, audit; greeting of greeter 1.0, not loaded: --extensions does not name it"
        in found
    )
    found = inlay(tmp_path, "doctor", "--extensions", "tools,greeting").stdout
    assert "extensions    tools, greeting\n" in found


def test_one_name_of_two_givers_is_refused() -> None:
    assert merged("route", [("a", {"x": 1}), ("b", {"y": 2})]) == {"x": 1, "y": 2}
    with pytest.raises(InvalidRequestError, match="route 'x' is given twice: by a and by b"):
        merged("route", [("a", {"x": 1}), ("b", {"x": 2})])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--engine", "diffusers"),
            "--engine diffusers is of an extension that is not loaded (--extensions); there are: torch",
        ),
        (
            ("--max-image-cost", "3"),
            "--max-image-cost is for engines of an extension that is not loaded, not for torch",
        ),
        (
            ("--task", "image"),
            "--task image is for engines of an extension that is not loaded, not for torch",
        ),
        (
            ("--deploy", "x.yaml"),
            "--deploy is of the extension 'stages', which is not loaded (--extensions)",
        ),
        (
            ("--response-store", "memory"),
            "--response-store is of the extension 'state', which is not loaded (--extensions)",
        ),
    ],
)
def test_an_engine_that_is_not_loaded_is_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = inlay(tmp_path, "serve", str(tmp_path), *words, INLAY_EXTENSIONS="")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


_OPTIONS = """
from pydantic import BaseModel, Field
from inlay.engine.spec import EngineSpec
from inlay.extension import Extension

class Volume(BaseModel, frozen=True, defer_build=True, title="Greetings"):
    {option}: int = Field(default=3, le=11)
    \'\'\'Loudness of the greeting.\'\'\'

OPTIONS = {{"engine": Volume}}
ENGINES = {{"greeter": EngineSpec("greeter:Engine", options=frozenset({{"{option}"}}))}}
extension = Extension("greeting", options="greeter:OPTIONS", engines="greeter:ENGINES")
"""


@pytest.mark.thorough
def test_an_option_of_an_extension_is_a_flag_of_commands_with_an_engine(tmp_path: Path) -> None:
    package(tmp_path, "greeting", "greeter")
    module = tmp_path / "greeter/__init__.py"
    module.write_text(_OPTIONS.format(option="loudness"))
    loaded = {"INLAY_EXTENSIONS": "greeting"}
    shown = inlay(tmp_path, "worker", "--help", "greetings", **loaded).stdout
    said = "greetings: --loudness N Loudness of the greeting. [at most 11; default 3]"
    assert said in " ".join(shown.split())
    over = inlay(tmp_path, "serve", "m", "--loudness", "12", "--extensions", "greeting")
    assert "--loudness: must be at most 11, got '12'" in over.stderr
    other = inlay(tmp_path, "serve", "m", INLAY_LOUDNESS="4", **loaded)
    assert "--loudness is for the greeter engine, not for torch" in other.stderr
    assert "unknown option --loudness" in inlay(tmp_path, "serve", "m", "--loudness", "4").stderr
    module.write_text(_OPTIONS.format(option="max_num_seqs"))
    twice = inlay(tmp_path, "serve", "m", **loaded)
    assert twice.returncode == 1
    said = "option 'max_num_seqs' is given twice: by inlay and by extension 'greeting'"
    assert twice.stderr == f"inlay: {said}\n"


def test_an_extension_that_has_the_name_of_a_section_is_refused(tmp_path: Path) -> None:
    package(tmp_path, "cache", "greeter")
    written = _OPTIONS.format(option="loudness").replace(
        'Extension("greeting"', 'Extension("cache"'
    )
    (tmp_path / "greeter/__init__.py").write_text(written)
    said = "section of settings 'cache' is given twice: by inlay and by an extension of that name"
    assert inlay(tmp_path, "serve", "m", INLAY_EXTENSIONS="cache").stderr == f"inlay: {said}\n"


@pytest.mark.thorough
@pytest.mark.parametrize("extensions", ["", "stages"])
def test_a_graphs_option_that_a_file_leaves_empty_is_none(tmp_path: Path, extensions: str) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("deploy: null\n")
    done = inlay(tmp_path, "serve", "none", "--config", str(config), INLAY_EXTENSIONS=extensions)
    assert "is not a directory" in done.stderr


def test_another_python_is_lent_what_this_one_has_loaded(tmp_path: Path) -> None:
    source, lent = tmp_path / "source", tmp_path / "lent"
    source.mkdir()
    lent.mkdir()
    package(source, "greeting", "greeter")
    made = "import sys; from pathlib import Path; from inlay.extension import lend; lend(Path(sys.argv[1]))"
    variables = {**os.environ, "PYTHONPATH": str(source), "INLAY_EXTENSIONS": "audit,greeting"}
    run(sys.executable, "-c", made, lent, env=variables)
    found = sorted(path.name for path in lent.iterdir())
    assert found == ["greeter", "greeter-1.0.dist-info", "inlay_audit"]
    assert inlay(lent, "greet", INLAY_EXTENSIONS="greeting").stdout == "hello\n"


def test_settings_of_an_engine_need_no_extension_that_another_python_was_not_lent() -> None:
    script = (
        "import sys; sys.modules['inlay_stages'] = None\n"
        "from inlay.engine.settings import EngineSettings\n"
        "print(EngineSettings.of(model='m').model.engine)"
    )
    variables = {**os.environ, "INLAY_EXTENSIONS": "audit"}
    assert run(sys.executable, "-c", script, env=variables) == "torch\n"

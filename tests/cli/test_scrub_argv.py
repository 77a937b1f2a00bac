"""Keys given to `inlay serve` are nowhere others could read them."""

import sys
from pathlib import Path

import httpx
import psutil
import pytest

from inlay.cli.main import main
from tests.models import tiny
from tests.serving import serving

pytestmark = pytest.mark.usefixtures("started_processes")

FLAG, VARIABLE, FILE = "sk-from-the-flag", "sk-from-the-variable", "sk-from-the-file"


def key_file(folder: Path) -> Path:
    path = folder / "keys.yaml"
    path.write_text(f"- {{name: alice, key: {FILE}}}\n")
    path.chmod(0o600)
    return path


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="arguments are overwritten on Linux")
@pytest.mark.parametrize("words", [("--api-key", FLAG), (f"--api-key={FLAG}",)])
def test_keys_are_not_among_the_arguments_the_children_or_what_is_written(
    words: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ("--engine", "echo", "--api-key-file", key_file(tmp_path))
    with serving(
        tiny("llama"), *words, *more, environment={"INLAY_ADMIN_API_KEY": VARIABLE}
    ) as served:
        process = psutil.Process(served.process.pid)
        arguments = " ".join(process.cmdline())
        assert "--api-key" in arguments
        assert "--engine echo" in arguments
        assert FLAG not in arguments
        for child in process.children(recursive=True):
            assert not any(name.endswith("API_KEY") for name in child.environ())
            assert FLAG not in " ".join(child.cmdline())
        answers = [
            httpx.get(served.url + "/v1/models", headers={"authorization": f"Bearer {key}"})
            for key in (FLAG, VARIABLE, FILE, FLAG + "x")
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 401]
        shown = "".join(answer.text for answer in answers) + httpx.get(served.url + "/metrics").text
    captured = capfd.readouterr()
    for key in (FLAG, VARIABLE, FILE):
        assert key not in shown + captured.out + captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-key-file", "none.yaml"], "No such file"),
        (["--ssl-certfile", "none.crt"], "No such file"),
        (["--ssl-keyfile", "none.key"], "needs --ssl-certfile"),
        (["--max-prompt-embeds-bytes", "much"], "got 'much'"),
        (["--allowed-origins", "chat.example"], "scheme://host"),
    ],
)
def test_what_cannot_work_is_told_before_a_model_is_loaded(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no-model", "--port", "0", *words], {}) in (1, 2)
    captured = capsys.readouterr()
    assert said in captured.err
    assert "loading" not in captured.err

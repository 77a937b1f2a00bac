"""openai's package for Node, unchanged, against each route that it has a method for."""

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.serving import Served

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

SCRIPT = Path(__file__).with_name("routes.mjs")


def test_each_method_of_the_client_for_node_is_answered_as_that_for_python(
    server: Served, tmp_path: Path
) -> None:
    # A module is looked for beside the file that imports it.
    (tmp_path / "node_modules").symlink_to(Path(sys.prefix) / "node" / "node_modules")
    script = tmp_path / SCRIPT.name
    script.write_bytes(SCRIPT.read_bytes())
    done = subprocess.run(
        ["node", script, server.url], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    with openai.OpenAI(base_url=server.v1, api_key="k", max_retries=0) as client:
        answer = client.responses.create(
            model="m", input="count the lanterns", max_output_tokens=8, temperature=0
        ).output_text
    assert answer
    for name in ("chat", "chat_streamed", "response", "streamed", "same", "batch_text"):
        assert told[name] == answer, name
    assert told["models"] == ["m"]
    assert isinstance(told["completion"], str)
    assert told["input_items"]["asc"] == ["count the lanterns", answer, "go on"]
    assert told["input_items"]["desc"] == ["go on", answer, "count the lanterns"]
    assert told["counted"] == told["usage"] > 0
    assert told["numbers"] == [*range(len(told["numbers"]))]
    assert told["rest"] == told["numbers"][3:]
    assert told["cancelled"] == "cancelled"
    assert told["deleted"][0] == 404
    assert told["conversation"] == ["count the lanterns", answer]
    assert told["forgotten"]
    assert told["files"].count(True) == 1
    status, counts, errors = told["batch"]
    assert (status, errors) == ("completed", None)
    assert counts == {"total": 2, "completed": 1, "failed": 1}
    assert told["batch_error"] == 400
    assert told["file_deleted"]
    assert told["batch_cancelled"] == "completed"
    assert told["decisions"] == [["predicate", "urgent"], ["choice", "team"], ["score", None]]

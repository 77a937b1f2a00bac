"""openai's package for Node, unchanged, against each route that it has a method for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving import Served

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]


def told_by(name: str, folder: Path, *words: str | Path) -> dict[str, Any]:
    """Run a script; what it tells."""
    # A module is looked for beside the file that imports it.
    (folder / "node_modules").symlink_to(Path(sys.prefix) / "node" / "node_modules")
    script = folder / name
    script.write_bytes(Path(__file__).with_name(name).read_bytes())
    done = subprocess.run(
        ["node", script, *words], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_each_method_of_the_client_for_node_is_answered_as_that_for_python(
    server: Served, tmp_path: Path
) -> None:
    told = told_by("routes.mjs", tmp_path, server.url)
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


@pytest.mark.timeout(600)  # with the start of two servers
def test_embeddings_and_transcriptions_are_as_those_for_python(
    embedder: Served, sound: tuple[Served, Path], tmp_path: Path
) -> None:
    hearing, file = sound
    told = told_by("more_routes.mjs", tmp_path, embedder.url, hearing.url, file)
    with openai.OpenAI(base_url=embedder.v1, api_key="k", max_retries=0) as client:
        wanted = client.embeddings.create(model="m", input=["a lantern", "a harbour"])
    vectors = [one.embedding for one in wanted.data]
    for name in ("floats", "decoded"):
        for vector, one in zip(told[name], vectors, strict=True):
            assert vector == pytest.approx(one, abs=1e-6), name
    assert told["batched"] == pytest.approx(vectors[0], abs=1e-5)
    assert told["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens > 0
    with openai.OpenAI(base_url=hearing.v1, api_key="k", max_retries=0) as client:
        heard = client.audio.transcriptions.create(model="m", file=file, temperature=0).text
    assert told["text"] == heard
    assert told["plain"] == heard + "\n"
    assert told["subtitles"].startswith("1\n00:00:00,000 --> 00:00:0")
    assert told["verbose"] == [heard, 0.7, None]
    assert set(told["events"][:-1]) == {"transcript.text.delta"}
    assert told["events"][-1] == "transcript.text.done"
    assert told["done"] == told["streamed"]
    assert " ".join(told["done"].split()) == " ".join(heard.split())
    assert told["english"] == "string"

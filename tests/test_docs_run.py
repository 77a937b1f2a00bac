"""Every block of the pages runs in a test: here against the demo, or where `ELSEWHERE` says.

A new block is run here, is named there, or fails.
"""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from inlay import demo
from inlay.client import PromptEmbedder
from tests.serving import Served, serving
from tests.test_docs import ROOT, WRITTEN, named
from tests.test_docs_commands import EXAMPLES, blocks, joined

PAGES = [*WRITTEN, EXAMPLES]
BINARY = {"content-type": "application/octet-stream"}
REASONS = ("cluster", "GPU", "hub", "network", "shows")
"""Why a block runs nowhere: what it needs, or that it shows what comes back."""

ELSEWHERE = {
    "README.md": {
        "make demo": "cli/test_demo.py",
        "python examples/eight_rows.py": "published/test_eight_rows.py",
    },
    "CONTRIBUTING.md": {"make install": "network"},
    "examples/README.md": {"python examples/eight_rows.py": "published/test_eight_rows.py"},
    "docs/README.md": {"make demo": "cli/test_demo.py"},
    "docs/api.md": {
        "U=http": "api/test_embeddings.py",
        "inlay serve ./my-vision-model": "equality/test_images_over_http.py",
        "import base64": "equality/test_images_over_http.py",
        '{"type": "image_embeds"': "equality/test_images_over_http.py",
        '{"model": "tower"': "equality/test_encode_over_http.py",
        '{"object": "list", "model": "tower"': "shows",
        "curl http://127.0.0.1:8000/v1/prompt_embeds": "equality/test_stored_images.py",
        '{"id": "pe-': "shows",
        '"hidden_states": [': "shows",
        "curl $U/v1/files": "batches/test_batches.py",
        "curl -s http://127.0.0.1:8000/v1/completions": "api/test_hidden_states.py",
        "POST /v1/load_lora_adapter": "api/test_adapters.py",
        "client.images.generate(": "api/test_images_generations.py",
        "pipeline = StableDiffusionPipeline": "equality/test_image_prompts.py",
        "curl $U/v1/audio/transcriptions": "api/test_transcriptions.py",
        "client.audio.speech.create(": "cli/test_speaking.py",
    },
    "docs/architecture.md": {"Prompt(segments": "test_prompt.py"},
    "docs/attacks.md": {
        "pytest tests/security": "security",
        "python -m tests.fuzz.fuzz_readers": "fuzz/test_fuzz_readers.py",
    },
    "docs/client.md": {
        "pip install .": "network",
        "from inlay.client import MediaEncoder": "client/test_media.py",
        "inlay embeds encode --image": "client/test_media.py",
        "const file": "client/test_npm_package.py",
        "from langchain_openai": "engines/embeddings/test_frameworks.py",
        "llm = ChatOpenAI": "engines/embeddings/test_frameworks.py",
        "from llama_index": "engines/llamaindex/test_snippet.py",
        "llm = OpenAILike": "engines/llamaindex/test_snippet.py",
    },
    "docs/decisions.md": {"python -m benchmarks": "test_house.py"},
    "docs/deepseek.md": {
        "inlay serve deepseek-ai": "GPU",
        "parameters: 671": "shows",
    },
    "docs/engines.md": {
        "inlay serve MODEL  ": "engines/vllm/test_over_http.py",
        "inlay serve MODEL --speculative-config": "engine/torch/test_speculation.py",
        "inlay serve MODEL --batch-invariant": "cli/test_restart_bfloat16.py",
        "inlay serve MODEL --tensor-parallel-size": "engine/torch/test_tensor_parallel.py",
        "inlay worker MODEL --engine vllm": "engines/vllm/test_pairs.py",
        "inlay worker MODEL --engine sglang": "engines/sglang/test_pairs.py",
        "inlay serve ./Qwen-Image": "engines/vllm_omni/test_over_http.py",
        "stages:": "engines/vllm_omni/test_arguments.py",
        "--device cuda": "engines/sglang/test_not_run.py",
    },
    "docs/fleet.md": {
        "inlay nats --host 0.0.0.0  ": "cli/test_fleet.py",
        "inlay worker ./my-model --served-model-name": "cli/test_fleet_images.py",
        "inlay worker ./my-model --enable-kv-fetch": "engine/torch/test_page_exchange.py",
        "inlay worker ./my-model --role": "cli/test_fleet_roles.py",
        "inlay serve ./my-model --kv-offloading": "engine/torch/test_page_tiers.py",
        "inlay nats --host 0.0.0.0 --nats-nkey-seed": "transport/test_nats_cluster.py",
    },
    "docs/from-vllm.md": {"vllm serve": "hub"},
    "docs/models.md": {"inlay doctor MODEL": "cli/test_doctor.py"},
    "docs/operations.md": {
        "inlay serve MODEL": "telemetry/test_server.py",
        "- name: alice": "http/test_auth_keys.py",
    },
    "docs/performance.md": {"python -m benchmarks engine": "test_house.py"},
    "docs/pipelines.md": {
        "pip install": "cli/test_demo_draw.py",
        "inlay serve ./my-pipeline": "cli/test_pipeline.py",
        "for stage in": "cli/test_pipeline.py",
        "name: painter": "stages/test_graph.py",
        "stages:": "stages/test_graph.py",
        "inlay serve graph.yaml": "cli/test_pipeline.py",
        "inlay nats": "cli/test_fleet_pipeline.py",
        "name: inlay-demo": "stages/test_graph.py",
        'answer = client.chat.completions.create(\n    model="inlay-demo"': "demo/test_pipeline.py",
        "name: pair": "cli/test_models_in_a_row.py",
        "inlay serve pair.yaml": "cli/test_models_in_a_row.py",
        "name: omni": "cli/test_speaking.py",
        "import torch": "engine/speech/test_speech.py",
        "voices = torch.load": "engine/speech/test_speech.py",
        'answer = client.chat.completions.create(\n    model="omni"': "cli/test_speaking.py",
    },
    "docs/privacy.md": {
        "inlay embeds inspect": "cli/test_audit.py",
        "inlay embeds audit": "cli/test_audit.py",
        "fail-above": "audit/test_attackers.py",
    },
    "docs/scaling.md": {"inlay plan": "cli/test_plan.py"},
    "docs/security.md": {"INLAY_API_KEY": "cli/test_settings.py"},
    "docs/shell.md": {
        "inlay chat  ": "cli/test_chat.py",
    },
    "docs/start/deploy.md": {
        "docker compose": "deploy/test_compose_file.py",
        "MODELS=": "deploy/test_compose_file.py",
        "helm install": "cluster",
        "image:": "deploy/test_chart.py",
    },
    "docs/start/embeddings.md": {"inlay serve ./my-model": "cli/test_serve.py"},
    "docs/start/fleet.md": {
        "pip install": "cli/test_fleet.py",
        "inlay nats": "cli/test_fleet.py",
        "$ inlay status": "cli/test_fleet.py",
        "inlay bench": "cli/test_fleet_survives.py",
    },
    "docs/start/search.md": {
        "inlay serve sentence-transformers": "test_examples.py",
        "curl http": "published/test_embedders.py",
        "What tool": "shows",
    },
    "docs/start/serve.md": {"pip install": "cli/test_serve.py"},
    "docs/start/soft-prompt.md": {
        "inlay serve ./my-model": "cli/test_convert_model.py",
    },
    "docs/structure.md": {"python -m benchmarks.house": "test_house.py"},
    "docs/vectors.md": {
        "U=http": "api/test_embeddings.py",
        '{"input": ["a text"], "role"': "api/test_outputs.py",
        '{"index": 0': "shows",
        '{"model": "m", "messages"': "equality/test_embeddings_of_media.py",
        "inlay serve Qwen3-Reranker": "api/test_score_templates.py",
        '{"input": ["a text"], "outputs"': "api/test_stored_documents.py",
        '{"query": "boats"': "api/test_stored_documents.py",
    },
    "docs/whisper.md": {"inlay serve mistralai": "api/test_transcriptions.py"},
}
"""Of each page, how a block begins that does not run here as a whole: the test, or a reason."""

ON_THE_DEMO = (
    "inlay bench",
    "inlay chat",
    "inlay completion",
    "inlay convert ./my-prompt",
    "inlay embeds encode --model",
    "inlay embeds inspect",
    "inlay embeds convert",
    "inlay embeds upload",
    "inlay embeds audit --model MODEL",
    "inlay plan",
    "curl $U/v1/models",
    "curl $U/v1/completions",
    "curl $U/v1/chat/completions",
    "curl $U/v1/responses",
    'curl "$U/v1/responses',
    "curl $U/v1/messages",
    "curl $U/v1/decisions",
    "curl $U/v1/prompt_embeds",
    "curl http://127.0.0.1:8000/v1/completions",
    "curl http://127.0.0.1:8000/v1/prompt_embeds -H",
    "curl http://127.0.0.1:8000/ready",
    "curl http://127.0.0.1:8000/health",
)
NOT_THERE = ("harbour.", "--image", "--audio", "node mine.mjs", "chat ./my-model")
"""Files of models that the demo does not have, and what starts another program or server."""

BODIES = {
    '{"model": "m", "prompt": [': "/v1/completions",
    '{"prompt": [': "/v1/completions",
}
"""How blocks begin that are the body of a request, and its route."""

GIVEN = ("U=http", "def fold")
"""How lines begin that the test has done when commands use them: `asked` and `folder`."""

SHORTER = {
    "inlay bench": ["--num-prompts", "4", "--output-len", "4"],
    "inlay embeds audit": ["--attackers", "nearest"],
}
"""Words that are added so that a command takes seconds."""

MOST_BY_JUDGEMENT = 59
"""Blocks at most of which no line runs, and whose test has the like, not what stands there."""


def commands(block: str) -> list[str]:
    """What a block has to run, each line by itself but for bodies of requests and files."""
    return [block] if block.startswith(("{", "def ")) else joined(block)


def runs(command: str) -> bool:
    begins = command.removeprefix(".venv/bin/").removeprefix('eval "$(')
    return begins.startswith((*ON_THE_DEMO, *BODIES, *GIVEN)) and not any(
        word in command for word in NOT_THERE
    )


def run_here(page: Path) -> list[str]:
    """What runs of a page, in order."""
    return [line for block in shown(page) for line in commands(block) if runs(line)]


def shown(page: Path) -> Iterator[str]:
    """Blocks that are no snippets: those run in `test_docs.py`."""
    for language, block in blocks(page):
        if language != "python":
            yield "\n".join(line for line in block.splitlines() if not line.startswith("# "))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_block_of_a_page_runs_or_says_where_it_does(page: Path) -> None:
    if page.parent.name == "deploy":
        return  # Each of their commands is tried in tests/deploy/test_commands.py.
    entries = ELSEWHERE.get(named(page), {})
    used: set[str] = set()
    for block in shown(page):
        if all(runs(line) for line in commands(block)):
            continue
        begins = [start for start in entries if block.startswith(start)]
        assert begins, f"run this block in a test, and name it in ELSEWHERE:\n{block}"
        used.update(begins)
    assert used == set(entries)
    for place in entries.values():
        assert place in REASONS or (ROOT / "tests" / place).exists(), place


def takes_what_stands_there(page: Path, start: str, place: str) -> bool:
    """True if a test reads the block of the page itself."""
    test = ROOT / "tests" / place
    source = test.read_text(encoding="utf-8") if test.is_file() else ""
    graph = start.startswith(("name:", "stages:")) and "documented(" in source
    return f'"{page.name}"' in source or "run_snippet(" in source or graph


def test_few_blocks_run_by_judgement_alone() -> None:
    judged = [
        start
        for page in PAGES
        for start, place in ELSEWHERE.get(named(page), {}).items()
        for block in shown(page)
        if block.startswith(start) and place not in REASONS
        if not any(runs(line) for line in commands(block))
        if not takes_what_stands_there(page, start, place)
    ]
    assert len(judged) <= MOST_BY_JUDGEMENT, len(judged)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files by the names that pages give them."""
    rows = PromptEmbedder.from_pretrained(demo.model_dir()).embed("What tool does Gola use?")
    for name in ("rows", "question", "document"):
        (tmp_path / f"{name}.safetensors").write_bytes(rows.to_bytes())
    (tmp_path / "rows.pt").write_bytes(rows.to_bytes("torch"))
    (tmp_path / "question.txt").write_text("What tool does Gola use?")
    texts = (demo.model_dir().parent / "texts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "texts.jsonl").write_text("".join(texts[:60]))
    for block in shown(ROOT / "docs" / "privacy.md"):
        if block.startswith("def fold"):
            (tmp_path / "mine.py").write_text(block)
    (tmp_path / "my-model").symlink_to(demo.model_dir())
    shutil.copytree(demo.soft_prompt_peft_dir(), tmp_path / "my-prompt")
    trained = tmp_path / "my-prompt" / "adapter_model.safetensors"
    torch.save(load_file(trained), trained.with_suffix(".bin"))
    trained.unlink()
    return tmp_path


def asked(url: str, words: list[str], folder: Path) -> httpx.Response:
    """What curl would send, sent."""
    headers: dict[str, str] = {}
    content: bytes | None = None
    parts: list[tuple[str, tuple[str | None, bytes]]] = []
    rest = iter(words[1:])
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-d":
            content = next(rest).encode()
        elif word == "--data-binary":
            content = (folder / next(rest).removeprefix("@")).read_bytes()
        elif word == "-F":
            name, _, value = next(rest).partition("=")
            file = value.removeprefix("@")
            parts.append((name, (file, (folder / file).read_bytes())) if value != file else
                         (name, (None, value.encode())))  # fmt: skip
        elif word.startswith("http"):
            url = word
    method = "GET" if content is None and not parts else "POST"
    return httpx.request(
        method, url, headers=headers, content=content, files=parts or None, timeout=120
    )


class Ids:
    """Ids that the server gave, in place of those that a page leaves open: `file-...`."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def note(self, response: httpx.Response) -> None:
        """Keep the id of an answer in JSON."""
        if response.headers["content-type"].startswith("application/json"):
            one = response.json().get("id")
            if isinstance(one, str):
                self._last[one[: one.replace("_", "-").index("-") + 1]] = one

    def filled(self, command: str) -> str:
        for begins, one in self._last.items():
            command = command.replace(f"{begins}...", one)
        return command


def replaced(command: str, url: str, folder: Path) -> str:
    rows = base64.b64encode((folder / "rows.safetensors").read_bytes()).decode()
    command = re.sub(r'^eval "\$\((.*?)\)"', r"\1", command.removeprefix(".venv/bin/"))
    command = re.sub(r"http://[ab]:8000|http://127.0.0.1:8000|\$U", url, command)
    command = command.replace("$J", "content-type: application/json")
    command = re.sub(r"<base64( of a tensor file)?>", rows, command)
    return command.replace('"model": "m"', '"model": "inlay-demo"').replace("MODEL", "my-model")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if run_here(page)], ids=named)
def test_commands_of_a_page_run_in_order_against_the_demo(
    page: Path, server: Served, folder: Path
) -> None:
    environment = os.environ | {"INLAY_URL": server.v1}
    ids = Ids()
    with (folder / "rows.safetensors").open("rb") as rows:
        ids.note(httpx.post(server.v1 + "/prompt_embeds", content=rows.read(), headers=BINARY))
    for line in run_here(page):
        if line.startswith(GIVEN):
            continue
        words = shlex.split(ids.filled(replaced(line, server.url, folder)), comments=True)
        if line.startswith("{"):
            (route,) = [route for start, route in BODIES.items() if line.startswith(start)]
            body = ids.filled(replaced(line, server.url, folder))
            words = ["curl", server.url + route, "-H", "content-type: application/json", "-d", body]
        if words[0] == "curl":
            response = asked(server.url, words, folder)
            assert response.status_code == 200, (line, response.text)
            ids.note(response)
            continue
        words = words[: words.index("|")] if "|" in words else words
        given = folder / words.pop() if words[-2:-1] == ["<"] else None
        more = [word for start, some in SHORTER.items() if line.startswith(start) for word in some]
        done = subprocess.run(
            [sys.executable, "-m", "inlay.cli", *(one for one in words[1:] if one != "<"), *more],
            cwd=folder,
            env=environment,
            input=given.read_text() if given else "What tool does Gola use?",
            capture_output=True,
            text=True,
            timeout=180,
        )
        # A gate says that a bound is passed.
        assert done.returncode == ("--fail-above" in words), (line, done.stderr)
        if words[-2:] == ["-o", "json"]:
            json.loads(done.stdout)
        assert done.stdout or done.stderr or "--output" in line, line

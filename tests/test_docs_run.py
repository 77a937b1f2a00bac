"""Every block of the pages runs in a test: here against the demo, or where `ELSEWHERE` says.

A new block is run here, is named there, or fails.
"""

import base64
import json
import os
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
from tests.test_docs import ROOT, SHOWN_URL, WRITTEN, named
from tests.test_docs_commands import EXAMPLES, blocks

PAGES = [*WRITTEN, EXAMPLES]
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
        '{"model": "m", "prompt": [': "api/test_completions.py",
        'curl $U/v1/responses -H "$J" -d \'{"input": "Count': "state/test_background.py",
        "inlay serve ./my-vision-model": "equality/test_images_over_http.py",
        "import base64": "equality/test_images_over_http.py",
        '{"type": "image_embeds"': "equality/test_images_over_http.py",
        '{"model": "tower"': "equality/test_encode_over_http.py",
        '{"object": "list", "model": "tower"': "shows",
        "curl $U/v1/files": "batches/test_batches.py",
        "curl http://127.0.0.1:8000/v1/prompt_embeds": "equality/test_stored_images.py",
        '{"id": "pe-': "shows",
        "curl -s http://127.0.0.1:8000/v1/completions": "api/test_hidden_states.py",
        '"hidden_states": [': "shows",
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
        "def fold": "cli/test_audit.py",
        "inlay embeds audit": "cli/test_audit.py",
        "fail-above": "audit/test_attackers.py",
    },
    "docs/scaling.md": {"inlay plan": "cli/test_plan.py"},
    "docs/security.md": {"INLAY_API_KEY": "cli/test_settings.py"},
    "docs/shell.md": {
        "inlay chat  ": "cli/test_chat.py",
        "inlay bench --max-concurrency": "cli/test_bench.py",
        "inlay bench write": "cli/test_bench.py",
        "eval": "cli/test_completion.py",
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
    },
    "docs/start/search.md": {
        "inlay serve sentence-transformers": "test_examples.py",
        "curl http": "published/test_embedders.py",
        "What tool": "shows",
    },
    "docs/start/serve.md": {"pip install": "cli/test_serve.py"},
    "docs/start/soft-prompt.md": {
        "inlay serve ./my-model": "cli/test_convert_model.py",
        '{"prompt": [': "published/test_eight_rows.py",
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
    "inlay chat --temperature 0",
    "inlay chat --once",
    "inlay chat --embeds",
    "inlay chat -o json",
    "inlay completion",
    "inlay convert ./my-prompt",
    "inlay embeds encode --model",
    "inlay embeds inspect",
    "inlay embeds convert",
    "inlay embeds upload",
    "curl $U/v1/models",
    "curl $U/v1/completions",
    "curl $U/v1/chat/completions",
    "curl $U/v1/responses        ",
    "curl $U/v1/messages",
    "curl $U/v1/decisions",
    "curl $U/v1/prompt_embeds",
    "curl http://127.0.0.1:8000/v1/completions",
    "curl http://127.0.0.1:8000/v1/prompt_embeds -H",
    "curl http://127.0.0.1:8000/ready",
    "curl http://127.0.0.1:8000/health",
)
NOT_THERE = ("harbour.", "--image", "--audio")
"""Files of models that the demo does not have."""


def commands(block: str) -> list[str]:
    """Lines of a block; one whose quotes are open goes on."""
    found: list[str] = []
    for line in block.splitlines():
        if found and found[-1].count("'") % 2:
            found[-1] += f"\n{line}"
        elif line and not line.startswith("#"):
            found.append(line)
    return found


def runs(command: str) -> bool:
    return command.startswith(ON_THE_DEMO) and not any(word in command for word in NOT_THERE)


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
        lines = commands(block)
        if all(runs(line) for line in lines):
            continue
        begins = [start for start in entries if block.startswith(start)]
        assert begins, f"run this block in a test, and name it in ELSEWHERE:\n{block}"
        used.update(begins)
    assert used == set(entries)
    for place in entries.values():
        assert place in REASONS or (ROOT / "tests" / place).exists(), place


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


def replaced(command: str, url: str, folder: Path) -> str:
    rows = base64.b64encode((folder / "rows.safetensors").read_bytes()).decode()
    command = command.replace("$U", url).replace(SHOWN_URL, url)
    command = command.replace("$J", "content-type: application/json")
    command = command.replace("<base64 of a tensor file>", rows)
    return command.replace('"model": "m"', '"model": "inlay-demo"').replace("MODEL", "my-model")


def places() -> Iterator[object]:
    for page in PAGES:
        if any(runs(line) for block in shown(page) for line in commands(block)):
            yield pytest.param(page, id=named(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", [*places()])
def test_commands_of_a_page_run_in_order_against_the_demo(
    page: Path, server: Served, folder: Path
) -> None:
    environment = os.environ | {"INLAY_URL": server.v1}
    for line in (line for block in shown(page) for line in commands(block)):
        if not runs(line):
            continue
        words = shlex.split(replaced(line, server.url, folder), comments=True)
        if words[0] == "curl":
            response = asked(server.url, words, folder)
            assert response.status_code == 200, (line, response.text)
            continue
        words = words[: words.index("|")] if "|" in words else words
        given = folder / words.pop() if words[-2:-1] == ["<"] else None
        done = subprocess.run(
            [sys.executable, "-m", "inlay.cli", *[word for word in words[1:] if word != "<"]],
            cwd=folder,
            env=environment,
            input=given.read_text() if given else "What tool does Gola use?",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (line, done.stderr)
        if words[-2:] == ["-o", "json"]:
            json.loads(done.stdout)
        assert done.stdout or done.stderr or "--output" in line, line

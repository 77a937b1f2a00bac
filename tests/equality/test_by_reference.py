"""A prompt by value, in a multipart body or by reference decodes to the same tokens, also after the server was started anew."""

import base64
import io
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.equality.reference import greedy, rows_of, tokenizer_of
from tests.models import EOS_ID, tiny
from tests.serving import Served, serving

TOKENS = 24
TEXTS = (
    "the harbour town counts its lanterns every night and writes the number in a book",
    "It is",
)


def saved(rows: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return buffer.getvalue()


def serve(path: Path, directory: Path, *more: object) -> AbstractContextManager[Served]:
    kept = ("--prompt-store-dir", directory / "prompts", "--state-dir", directory / "state")
    return serving(path, "--served-model-name", "m", "--enable-prompt-embeds", *kept, *more)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def path(request: pytest.FixtureRequest) -> Path:
    return tiny(request.param)


def ids_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids[:-1] if ids and ids[-1] == EOS_ID else ids


def answers(url: str, data: bytes, id_: str) -> dict[str, list[int]]:
    """The tokens of each way to send the embeddings in `data`."""

    def request(source: object, **more: Any) -> dict[str, Any]:
        fields = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        return {**fields, "prompt_embeds": source, **more}

    def post(source: object, **more: Any) -> list[int]:
        return ids_of(
            httpx.post(url + "/v1/completions", json=request(source, **more), timeout=180)
        )

    files: Any = [("request", (None, json.dumps(request({"part": "a"})))), ("a", ("a.pt", data))]
    inner = [{"type": "prompt_embeds", "ref": id_}]
    return {
        "by value": post(base64.b64encode(data).decode()),
        "multipart": ids_of(httpx.post(url + "/v1/completions", files=files, timeout=180)),
        "by reference": post({"ref": id_}),
        "by reference, apart from what is cached": post({"ref": id_}, cache_salt="another"),
        "by reference in parts": post(None, prompt=inner),
    }


def test_every_way_in_decodes_to_the_reference_before_and_after_a_restart(
    path: Path, tmp_path: Path
) -> None:
    prompts = []
    for text in TEXTS:
        rows = rows_of(path, tokenizer_of(path).encode(text))
        want = greedy(path, rows, TOKENS)
        prompts.append((saved(rows), want[:-1] if want[-1] == EOS_ID else want))
    upload = {"content-type": "application/octet-stream"}
    ids = []
    with serve(path, tmp_path) as server:
        for data, want in prompts:
            stored = httpx.post(server.url + "/v1/prompt_embeds", content=data, headers=upload)
            ids.append(stored.json()["id"])
            for way, got in answers(server.url, data, ids[-1]).items():
                assert got == want, way
    with serve(path, tmp_path, "--prompt-store-memory-bytes", 0) as server:
        for (data, want), id_ in zip(prompts, ids, strict=True):
            for way, got in answers(server.url, data, id_).items():
                assert got == want, way
        assert httpx.delete(f"{server.url}/v1/prompt_embeds/{ids[0]}").status_code == 200
        assert len(list((tmp_path / "prompts").glob("*.prompt"))) == 1


def test_a_directory_needs_a_secret_that_stays(path: Path, tmp_path: Path) -> None:
    words = ("--enable-prompt-embeds", "--prompt-store-dir", tmp_path / "prompts")
    with pytest.raises(RuntimeError, match="status 1"), serving(path, "--engine", "echo", *words):
        pass
    assert not (tmp_path / "prompts").exists()

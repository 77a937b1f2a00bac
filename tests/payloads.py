"""Requests of the frontend's tests."""

import base64
import io
from typing import Any

import httpx
import numpy as np
import torch

from inlay.tensors import write
from tests.equality.reference import rows_of, tokenizer_of
from tests.live import Fleet

TEXT = "count the lanterns of the harbour"
HIDDEN = 48


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def saved(tensor: torch.Tensor | Any) -> str:
    """base64 of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return b64(buffer.getvalue())


def embeds_of(fleet: Fleet, text: str = TEXT) -> torch.Tensor:
    """The model's own rows of a text, (n, 48) float32."""
    return rows_of(fleet.path, tokenizer_of(fleet.path)(text)["input_ids"])


def constant(
    value: float, rows: int = 4, hidden: int = HIDDEN, *, table_id: str | None = None
) -> str:
    """A safetensors file of equal elements."""
    return b64(write(np.full((rows, hidden), value, np.float32), "safetensors", table_id=table_id))


def post(url: str, path: str, body: Any, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(url + path, json=body, headers=names, timeout=180)


def error(response: httpx.Response) -> dict[str, Any]:
    """The error object, whose shape is checked."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found

"""Files that are not what a prompt is made of, sent to a server that others are using."""

import io
import warnings
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from inlay.tensors import write
from tests.equality.reference import rows_of, tokenizer_of
from tests.payloads import HIDDEN, b64, saved
from tests.security.company import (
    MIB,
    Question,
    expected,
    named,
    refused,
    settings,
    shown,
    under_attack,
)
from tests.serving import Served
from tests.tensors.containers import name, text, torch_file
from tests.tensors.hostile import CLONE, NOT_A_TENSOR, hostile_files

FILES = hostile_files()
ROOMS = sorted({title.partition(":")[0] for title in FILES})
STORAGE = bytes(4 * 4 * HIDDEN)


@cache
def made(title: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return b64(FILES[title][0]())


def completion(data: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt_embeds": data, **settings()}


def chat(*data: Any) -> tuple[str, dict[str, Any]]:
    content = [{"type": "prompt_embeds", "data": one} for one in data]
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": content}],
        **settings(),
    }


def is_refused(
    data: Any,
    *phrases: str,
    ways: tuple[Callable[[Any], tuple[str, dict[str, Any]]], ...] = (completion, chat),
) -> Callable[[httpx.Client], None]:
    """An attack with `data` in a completion and in a chat."""

    def attack(client: httpx.Client) -> None:
        for way in ways:
            path, body = way(data)
            refused(client.post(path, json=body), 400, *phrases)

    return attack


@pytest.mark.parametrize("room", ROOMS)
def test_every_hostile_file_is_refused_by_name_and_harms_nobody(
    server: Served, asked: tuple[Question, ...], room: str
) -> None:
    titles = [title for title in FILES if title.partition(":")[0] == room]
    under_attack(
        server,
        asked,
        [named(title, is_refused(made(title), NOT_A_TENSOR, FILES[title][1])) for title in titles],
    )


def deflated(size: int) -> bytes:
    """Return the file of torch.save for `size` bytes of zeros, with every record deflated."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(16, HIDDEN), plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.namelist():
            if not record.endswith("data/0"):
                target.writestr(record, source.read(record))
                continue
            with target.open(record, "w") as data:
                for _ in range(size // MIB):
                    data.write(bytes(MIB))
    return packed.getvalue()


def sparse(rows: int) -> str:
    indices = torch.zeros(2, 1, dtype=torch.int64)
    return saved(torch.sparse_coo_tensor(indices, torch.ones(1), (rows, HIDDEN)))


def stretched() -> str:
    """2 KB that stand for 3 GiB of float8."""
    return saved(torch.zeros(1, 1).to(torch.float8_e4m3fn).expand(3 * 1024 * MIB // HIDDEN, HIDDEN))


BOMBS: dict[str, tuple[Callable[[], str], str]] = {
    "an archive that inflates to 512 MiB": (lambda: b64(deflated(512 * MIB)), "deflated"),
    "a sparse tensor of 12 GiB": (lambda: sparse(1 << 26), "a sparse tensor"),
    "rows of stride 0 that stand for 3 GiB": (stretched, CLONE),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_that_stands_for_much_memory_takes_none(
    server: Served, asked: tuple[Question, ...], bomb: str
) -> None:
    make, phrase = BOMBS[bomb]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        data = make()
    assert len(data) < MIB
    under_attack(server, asked, [is_refused(data, NOT_A_TENSOR, phrase)])


def test_eight_bombs_in_one_chat_take_no_memory_either(
    server: Served, asked: tuple[Question, ...]
) -> None:
    bomb = sparse(1 << 24)
    path, body = chat(*[bomb] * 8)

    def attack(client: httpx.Client) -> object:
        return refused(client.post(path, json=body), 400, NOT_A_TENSOR)

    under_attack(server, asked, [attack])


def test_a_few_rows_of_a_large_storage_are_all_that_is_kept(
    server: Served, asked: tuple[Question, ...], path: Path
) -> None:
    rows = rows_of(path, tokenizer_of(path).encode("count the lanterns"))
    storage = torch.cat((torch.full((40_000, HIDDEN), torch.nan), rows))
    view = storage[40_000:]
    out = io.BytesIO()
    torch.save(view, out)
    data, answer = b64(out.getvalue()), expected(path, rows)
    assert len(data) > 9 * MIB

    def attack(client: httpx.Client) -> None:
        for where, body in (completion(data), chat(data)):
            response = client.post(where, json=body)
            assert response.status_code == 200, response.text
            if where == "/v1/completions":
                assert shown(response.json()) == answer
                assert response.json()["usage"]["prompt_tokens"] == len(rows)

    under_attack(server, asked, [attack], grows=2 * 3 * len(data))


def test_a_pickle_that_calls_something_calls_nothing(
    server: Served, asked: tuple[Question, ...], tmp_path: Path
) -> None:
    marker = tmp_path / "called"
    calls = {
        ("os", "system"): f"touch {marker}",
        ("posix", "system"): f"touch {marker}",
        ("subprocess", "getoutput"): f"touch {marker}",
        ("builtins", "eval"): f"open({str(marker)!r}, 'w')",
        ("builtins", "exec"): f"open({str(marker)!r}, 'w')",
        ("builtins", "open"): str(marker),
        ("torch", "load"): str(marker),
    }
    attacks = []
    for (module, attribute), argument in calls.items():
        pickled = name(module, attribute) + b"(" + text(argument) + b"tR"
        phrase = f"{module}.{attribute}"
        attacks.append(is_refused(b64(torch_file(pickled, STORAGE)), NOT_A_TENSOR, phrase))
        bare = b"\x80\x02" + pickled + b"." + bytes(100)
        attacks.append(is_refused(b64(bare), NOT_A_TENSOR, "a bare pickle"))
    under_attack(server, asked, attacks)
    assert not marker.exists()


def rows_with(value: float, dtype: torch.dtype, *, hidden: int = HIDDEN) -> str:
    rows = torch.full((4, hidden), 0.5, dtype=dtype)
    rows[2, 1] = value
    return saved(rows)


VALUES: dict[str, tuple[Callable[[], str], str]] = {
    "NaN": (partial(rows_with, float("nan"), torch.float32), "must be finite"),
    "NaN in bfloat16": (partial(rows_with, float("nan"), torch.bfloat16), "must be finite"),
    "NaN in float8": (partial(rows_with, float("nan"), torch.float8_e4m3fn), "must be finite"),
    "infinity": (partial(rows_with, float("inf"), torch.float16), "must be finite"),
    "minus infinity": (partial(rows_with, float("-inf"), torch.float32), "must be finite"),
    "infinity once it is cast": (partial(rows_with, 1e300, torch.float64), "must be finite"),
    "the largest float16": (partial(rows_with, 65504, torch.float16), "magnitude"),
    "the largest bfloat16": (partial(rows_with, 3.38e38, torch.bfloat16), "magnitude"),
    "a wrong hidden size": (partial(rows_with, 0, torch.float32, hidden=HIDDEN + 1), "size of tensor must match"),
    "no rows": (lambda: saved(torch.zeros(0, HIDDEN)), NOT_A_TENSOR),
    "another table's": (
        lambda: b64(write(np.full((4, HIDDEN), 0.5, np.float32), "safetensors", table_id="f" * 32)),
        "embedding table",
    ),
    "10 MB and a byte": (lambda: b64(bytes(10 * MIB + 1)), "exceeds maximum size of 10MB"),
}  # fmt: skip


def test_rows_that_would_poison_are_refused_before_the_engine_sees_them(
    server: Served, asked: tuple[Question, ...]
) -> None:
    attacks = [named(case, is_refused(make(), phrase)) for case, (make, phrase) in VALUES.items()]
    under_attack(server, asked, attacks, grows=2 * 3 * 14 * MIB)


def test_a_part_without_rows_does_not_break_its_neighbours(
    server: Served, asked: tuple[Question, ...]
) -> None:
    good, empty = rows_with(0, torch.float32), saved(torch.zeros(0, HIDDEN))
    path, body = chat(good, empty, good)
    whole_path, whole = chat(good, good)

    def attack(client: httpx.Client) -> None:
        refused(client.post(path, json=body), 400, NOT_A_TENSOR, "empty tensor")
        assert client.post(whole_path, json=whole).status_code == 200

    under_attack(server, asked, [attack])

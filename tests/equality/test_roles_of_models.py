"""What a model has crossed with what a request asks for: two workers answer as one does.

Windows, adapters, and images whose rows have three rotary axes, inner features, or are atomic.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from inlay.media.embeds import embeds_segments
from inlay.media.spec import layout
from inlay.messages.commands import LoadAdapter
from inlay.messages.prompt import Buffer, Media, Prompt, Rows, Segment, Tokens
from inlay.messages.request import Grammar
from inlay.tensors import Tensor
from tests import adapters
from tests.engine import reference
from tests.engine.conformance import ids, make_request
from tests.engine.torch import encode_reference
from tests.engine.torch.test_page_exchange import WINDOWED, settings
from tests.engine.torch.vision_reference import (
    Parts,
    Picture,
    generated,
    prompt_of,
    spec,
)
from tests.equality.test_roles_over_nats import (
    COUNT,
    Roles,
    roles,
    short_prompts_are_handed_over,
    shown,
)
from tests.models import make, tiny
from tests.transport.conftest import nats_server
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server", "short_prompts_are_handed_over"]

PAGE = 16
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["one", "two"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded with penalties": {
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "min_tokens": 9,
        "logprobs": 2,
    },
    "schema": {
        "grammar": Grammar("json_schema", json.dumps(SCHEMA)),
        "temperature": 1.0,
        "seed": 2,
        "ignore_eos": False,
    },
    "tenant": {"salt": "tenant", "temperature": 1.0, "seed": 5},
}


def alike(directory: Path) -> dict[str, Prompt]:
    """Prompts of 110 positions and more: text, rows among it, rows alone, a stored prompt."""
    tokens = ids(1, 150)
    size = reference.look_up(directory, [3]).shape[1]
    noise = 0.5 * torch.randn(110, size, generator=torch.Generator().manual_seed(4))
    rows = reference.rows_of(noise)
    stored = replace(rows, data=Buffer(bytes(rows.data.view), "pe-of-a-test/0"))
    return {
        "text": Prompt.of(Tokens(tokens)),
        "mixed": Prompt.of(
            Tokens(tokens[:30]),
            reference.rows_of(reference.look_up(directory, tokens[30:90])),
            Tokens(tokens[90:]),
        ),
        "rows": Prompt.of(rows),
        "by reference": Prompt.of(stored),
    }


async def compared(
    apart: Roles,
    prompts: Mapping[str, Prompt],
    truths: Mapping[str, Sequence[int]],
    **options: Any,
) -> None:
    """Have all kinds of requests for some prompts answered by one worker and by two.

    `truths` are greedy outputs of transformers, by name of a prompt.
    """
    handed = 0
    for kind, asked in KINDS.items():
        for name, prompt in prompts.items():
            request = make_request(f"{kind}-{name}", prompt, COUNT, **{**options, **asked})
            # The fleet is to compute each prompt, not to find it.
            request = replace(request, salt=f"{request.salt}-{kind}-{name}")
            truth = shown(await apart.alone(request))
            before = apart.decode.stats().kv_pages_fetched
            assert shown(await apart.apart(request)) == truth, (kind, name)
            assert apart.decode.stats().kv_pages_fetched > before, (kind, name)
            handed += 1
            assert apart.both.router.stats.handovers == {"m": handed}
            if kind == "greedy" and name in truths:
                assert truth[0] == truths[name], name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["windows", "adapter"])
async def test_windows_and_adapters_with_every_kind_of_request(
    nats_server: NatsServer, model: str, tmp_path: Path
) -> None:
    directory = make("qwen3", tmp_path / "m", **WINDOWED) if model == "windows" else tiny("llama")
    prompts = alike(directory)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    config = settings(directory, **(lora if model == "adapter" else {}))
    async with roles(nats_server, config) as apart:
        if model == "adapter":
            path = adapters.make_lora(tmp_path / "a", directory, seed=1)
            for worker in apart.both.workers.values():
                await worker.host.call(LoadAdapter("a", str(path)))
            await compared(apart, prompts, {}, adapter="a")
        else:
            await compared(
                apart,
                prompts,
                {name: reference.greedy(directory, each, COUNT) for name, each in prompts.items()},
            )


PICTURES: Parts = (ids(3, 27), Picture(5, 70, 90), ids(4, 40), Picture(6, 40, 56), ids(10, 21))


def with_embeds(family: str, parts: Parts) -> Prompt:
    """The prompt with `image_embeds`: rows that a client's own encoder made."""
    segments: list[Segment] = []
    for part in parts:
        if isinstance(part, list):
            segments.append(Tokens(part))
            continue
        assert isinstance(part, Picture)
        found = encode_reference.features(family, part)
        wide = torch.cat([found.rows, *found.levels], dim=1)
        data = Buffer(wide.contiguous().numpy().tobytes())
        segments += embeds_segments(
            spec(family),
            Tensor(data, "float32", tuple(wide.shape), "npy"),
            grid=layout(spec(family), part.height, part.width).grid,
            hidden_size=found.rows.shape[1],
            dtype="float32",
        )
    return Prompt.of(*segments)


def cut_by_pages(prompt: Prompt) -> int:
    """Runs of an image's rows in which a page ends and another begins."""
    return sum(
        start // PAGE != (start + len(segment) - 1) // PAGE
        for start, segment in prompt.spans(0, len(prompt))
        if isinstance(segment, Media | Rows)
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen3_vl", "gemma3"])
async def test_images_and_rows_of_images_with_every_kind_of_request(
    nats_server: NatsServer, family: str
) -> None:
    prompts = {
        "images": prompt_of(family, PICTURES),
        "image_embeds": with_embeds(family, PICTURES),
        # A page ends inside the last image, and the prompt with it.
        "at the end": prompt_of(family, PICTURES[:-1]),
    }
    assert all(cut_by_pages(prompt) for prompt in prompts.values())
    config = encode_reference.settings(
        family,
        task="generate",
        enable_kv_fetch=True,
        block_size=PAGE,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=8 << 20,
    )
    found = generated(family, PICTURES, COUNT)
    best = found.logits.topk(2).values
    # Rounding chooses between no two tokens.
    assert float((best[:, 0] - best[:, 1]).min()) > 0.01
    truth = found.ids
    async with roles(nats_server, config) as apart:
        # The generate() of transformers takes what follows an image at the end for its rows.
        await compared(apart, prompts, dict.fromkeys(("images", "image_embeds"), truth))

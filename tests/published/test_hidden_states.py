"""Hidden states of published models, as a client reads them, are those of transformers.

Both compute in bfloat16: per layer inlay may be as far from transformers in float32 as transformers
in bfloat16 is, and half as far again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch

from inlay.client import hidden_states
from tests.published.conftest import Servers, checkpoint
from tests.published.numbers import FARTHER, in_float32, reference
from tests.published.prompts import CODE, GEMMA, QWEN, TEXTS

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[GEMMA, QWEN])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@torch.no_grad()
def computed(model: Any, ids: Sequence[int]) -> "npt.NDArray[np.float32]":
    """[layers, positions, size]."""
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return np.stack([state[0].float().numpy() for state in states])


def distances(
    found: "npt.NDArray[np.float32]", right: "npt.NDArray[np.float32]"
) -> "npt.NDArray[np.float32]":
    """Median over the positions of each layer: how far one is, as a share of its length.

    Not the mean: where one element is a thousand times as large as others, its rounding is all.
    """
    far = np.linalg.norm(found - right, axis=2) / np.linalg.norm(right, axis=2)
    median: npt.NDArray[np.float32] = np.median(far, axis=1).astype(np.float32)
    return median


def told(client: openai.OpenAI, prompt: str, tokens: int, **fields: Any) -> Any:
    return client.completions.create(
        model="m",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True, **fields},
    ).choices[0]


def test_every_layer_of_prompt_and_answer_is_as_transformers_has_it(
    servers: Servers, name: str
) -> None:
    served = servers.of(name)
    with openai.OpenAI(base_url=served.v1, api_key="unused", max_retries=0, timeout=400) as client:
        # The beginning is cached, and the longest prompt goes through several steps.
        text = "".join(TEXTS) + CODE * 12
        told(client, text, 1)
        choice = told(client, text, 8)
        ids = choice.to_dict()["prompt_token_ids"] + choice.to_dict()["token_ids"][:-1]
        with reference(checkpoint(name)) as model:
            rounded = computed(model, ids)
            # Not all: one client may hold 128 MiB.
            layers = sorted({*range(0, len(rounded), 4), len(rounded) - 1})
            rounded = rounded[layers]
            if name == GEMMA:
                with in_float32(model):
                    exact = computed(model, ids)[layers]
        found = told(client, text, 8, hidden_states={"layers": layers, "of": "all"})
        assert found.text == choice.text
        states = hidden_states(found)
    served_states = np.stack([one.rows.astype(np.float32) for one in states])
    assert served_states.shape == rounded.shape
    if name == GEMMA:
        bound = FARTHER * distances(rounded, exact)
        # What the first layer reads is looked up: there is nothing to round.
        assert (distances(served_states, exact) <= np.maximum(bound, 1e-6)).all()
    # Two roundings of the same states: twice what one is off at most.
    assert distances(served_states, rounded).max() < 0.06

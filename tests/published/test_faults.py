"""The check at a start sees faults that are seeded into a published model."""

import gc
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check.judgement import judge
from inlay.engine.torch.self_check.prompts import WINDOW
from inlay.engine.torch.self_check.reference import Reference
from tests.numbers.faults import FAULTS
from tests.published.conftest import checkpoint
from tests.published.told import GEMMA

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

LENGTH = 4096

BELOW = {
    "a weight for one plus it in the loudest norm",
    "a scale of embeddings that is 1% too large",
    "two channels of one head swapped",
    "the exact GELU for its approximation by tanh",
    "two outputs of one product swapped",
    "products with more noise",
    "products 0.5% too large",
}
"""Faults within the rounding of the model's own code, 0.8 to 1.3 of it at the logits."""


class Judged(NamedTuple):
    """The engine's model, and what its own code said before."""

    model: CausalModel
    reference: Reference


@pytest.fixture
def judged() -> Iterator[Judged]:
    path, threads = checkpoint(GEMMA), torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    own = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    reference = Reference.of(own, path, LENGTH, WINDOW, axes=1, rows=True)
    del own
    gc.collect()
    settings = EngineSettings(
        model=str(path), device="cpu", max_model_len=LENGTH, num_threads=os.cpu_count()
    )
    yield Judged(CausalModel.load(settings), reference)
    torch.set_num_threads(threads)


def test_every_fault_beyond_rounding_is_seen_in_gemma(judged: Judged) -> None:
    assert judge(*judged).right
    made, missed = set(), {}
    for name, fault in FAULTS.items():
        with fault.into(judged.model) as possible:
            if possible:
                made.add(name)
                found = judge(*judged)
                if found.right:
                    missed[name] = found.distance
    assert made >= BELOW
    assert len(made) > 40
    assert missed.keys() <= BELOW, missed
    assert judge(*judged).right

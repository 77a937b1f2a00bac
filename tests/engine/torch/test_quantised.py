"""Checkpoints with weights of four and eight bits give what their dequantised twins give."""

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native import kernels
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights.linear_methods import QuantisedLinear
from inlay.engine.torch.weights.quantised.formats import Codes
from inlay.engine.torch.weights.quantised.weight import Kind
from inlay.prompt import Prompt, Tokens
from inlay.request import Output, Request, Sampling
from tests.engine import reference
from tests.quantised_models import FORMS, write

IDS = [int(n) for n in torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(7))]
NEW = 20


@cache
def pair(form: str) -> tuple[Path, Path]:
    return write(form)


def load(directory: Path, dtype: str = "float32") -> CausalModel:
    return CausalModel.load(
        EngineSettings(model=str(directory), device="cpu", num_threads=1, dtype=dtype)  # type: ignore[arg-type]
    )


def continued(model: CausalModel) -> list[int]:
    bounds = EngineLimits(
        max_model_len=110, max_num_seqs=4, max_num_batched_tokens=32, page_size=16, num_pages=32
    )
    core = Core(model, bounds, Secret(bytes(32)), prefix_caching=True)
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    prompt = Prompt.of(Tokens(IDS))
    outputs: list[Output] = list(
        core.admit(Request(id="one", prompts=(prompt,), params=sampling))
    )
    while len(core):
        outputs += core.step()
    return [id_ for output in outputs for id_ in output.token_ids]


@pytest.mark.parametrize("form", FORMS)
def test_a_published_checkpoint_decodes_as_transformers_does_of_its_values(form: str) -> None:
    quantised, plain = pair(form)
    model = load(quantised)
    kept = [each for each in model._model.modules() if isinstance(each, QuantisedLinear)]
    assert kept
    assert continued(model) == reference.greedy(plain, Prompt.of(Tokens(IDS)), NEW)

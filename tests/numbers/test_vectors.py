"""Models that embed and score, in bfloat16, with lifelike weights: as near float32 as transformers.

Vectors are compared before they get length 1: a cosine hides what is wrong with most of them.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inlay.engine.embed.encoder import Encoder
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Prompt, Tokens
from tests import embedding_reference as reference
from tests.embedding_models import EMBEDDING_MODELS, VOCAB_SIZE, WORDS, tiny_embedding, tiny_scoring
from tests.lifelike import lifelike
from tests.numbers.distance import BOUND, ratio

LENGTHS = (6, 11, 17, 24, 31, 40, 52, 60) * 3

RERANKERS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert", "mpnet")


def distance(directory: Path) -> float:
    """The engine's distance to float32 over transformers'."""
    generator = random.Random(3)
    texts = [[generator.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    encoder = Encoder.load(EngineSettings.of(model=str(directory), task="embed", num_threads=1))
    assert encoder.dtype == torch.bfloat16
    found = encoder.vectors([Prompt.of(Tokens(ids)) for ids in texts])

    def vectors(dtype: torch.dtype, attention: str) -> Tensor:
        model = reference.model_of(directory, dtype, attention)
        return torch.stack([torch.tensor(reference.vector(directory, ids, model)) for ids in texts])

    exact = vectors(torch.float32, "eager")
    names = ("eager", "sdpa") if reference.model_of(directory)._supports_sdpa else ("eager",)
    rounded = [vectors(torch.bfloat16, name) for name in names]
    return ratio(exact, found, rounded)


LIKE_ANOTHER = ("bge", "e5", "camembert", "qwen2", "llama")
"""Of the same code as one of the others."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ())
        for name in EMBEDDING_MODELS
    ],
)
def test_vectors_in_bfloat16_are_as_near_float32_as_transformers_own(name: str) -> None:
    assert distance(lifelike(tiny_embedding(name))) <= BOUND


ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu")


@pytest.mark.parametrize("name", ["bert", pytest.param("distilbert", marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_is_the_configurations_also_where_one_input_is_loud(
    name: str, activation: str
) -> None:
    field = "activation" if name == "distilbert" else "hidden_act"
    plain = tiny_embedding(name, **{field: activation})
    found = [distance(lifelike(plain, seed, loud=True)) for seed in range(3)]
    assert max(found) <= BOUND, found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ())
        for name in RERANKERS
    ],
)
def test_scores_in_bfloat16_are_as_near_float32_as_transformers_own(name: str) -> None:
    directory = lifelike(tiny_scoring(name, 3))
    generator = random.Random(4)
    pairs = [
        (" ".join(generator.choices(WORDS, k=7)), " ".join(generator.choices(WORDS, k=length)))
        for length in LENGTHS[:6]
    ]
    encoder = Encoder.load(EngineSettings.of(model=str(directory), task="score", num_threads=1))
    assert encoder.dtype == torch.bfloat16
    tokenizer = reference.tokenizer_of(directory)
    asked = [Prompt.of(Tokens(tokenizer(*pair)["input_ids"])) for pair in pairs]
    found = encoder.vectors(asked, [len(tokenizer(first)["input_ids"]) for first, _ in pairs])
    exact, theirs = (
        torch.stack([torch.tensor(reference.logits(directory, *pair, dtype)) for pair in pairs])
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert ratio(exact, found, [theirs]) <= BOUND

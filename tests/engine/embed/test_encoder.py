"""Vectors and scores are those of plain transformers, whatever else is in the batch."""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from inlay.base.errors import InvalidRequestError
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.families import FAMILIES
from inlay.engine.embed.gelu import fuse_gelu
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.weights.linear_methods import packs
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from tests import embedding_reference as reference
from tests.embedding_models import (
    EMBEDDING_MODELS,
    MAX_LENGTH,
    VOCAB_SIZE,
    WORDS,
    tiny_embedding,
    tiny_scoring,
)

LENGTHS = (64, 63, 40, 30, 29, 27, 12, 12, 12, 7, 3, 1)


@cache
def encoder(path: Path, task: str = "embed", **settings: object) -> Encoder:
    return Encoder.load(EngineSettings.of(model=str(path), task=task, **settings))


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(5, VOCAB_SIZE) for _ in range(length)]


def prompt(length: int, seed: int = 0) -> Prompt:
    return Prompt.of(Tokens(ids(length, seed)))


@pytest.mark.parametrize("name", EMBEDDING_MODELS)
def test_vectors_are_those_of_transformers_whatever_the_lengths(name: str) -> None:
    path = tiny_embedding(name)
    found = encoder(path).vectors([prompt(length) for length in LENGTHS])
    for length, vector in zip(LENGTHS, found.numpy(), strict=True):
        expected = reference.vector(path, ids(length))
        assert reference.cosine(vector, expected) > 0.99999
        assert np.linalg.norm(vector) == pytest.approx(np.linalg.norm(expected), rel=1e-4)


def test_no_family_is_left_out() -> None:
    made = {
        json.loads((tiny_embedding(name) / "config.json").read_text())["model_type"]
        for name in EMBEDDING_MODELS
    }
    assert made == {name for name, family in FAMILIES.items() if family.language is None}


def test_neighbours_change_nothing() -> None:
    model = encoder(tiny_embedding("bert"))
    alone = model.vectors([prompt(20)])[0]
    for others in ([19, 19, 18], [64] * 5, [20] * 7, [1, 2, 3]):
        among = model.vectors([*(prompt(length, 1) for length in others if length > 20), prompt(20), *(prompt(length, 1) for length in others if length <= 20)])  # fmt: skip
        place = sum(length > 20 for length in others)
        assert torch.allclose(among[place], alone, atol=1e-5)


def test_a_prompt_that_is_not_finite_harms_no_neighbour_in_its_group() -> None:
    model = encoder(tiny_embedding("qwen3"))
    poison = np.full((18, 48), np.inf, np.float32)
    rows = Rows(Buffer(poison.tobytes()), "float32", poison.shape)
    found = model.vectors([Prompt.of(rows), prompt(17), prompt(16)]).numpy()
    assert not np.isfinite(found[0]).any()
    clean = model.vectors([prompt(17), prompt(16)]).numpy()
    assert np.allclose(found[1:], clean, atol=1e-5)


def test_rows_of_a_decoder_are_as_good_as_the_tokens_they_were_looked_up_from() -> None:
    path = tiny_embedding("qwen3")
    tokens = ids(30)
    values = reference.embedded(path, tokens)
    whole = Rows(Buffer(values.tobytes()), "float32", values.shape)
    mixed = Prompt.of(Tokens(tokens[:7]), whole.slice(7, 20), Tokens(tokens[20:]))
    by_ids, by_rows, by_both = encoder(path).vectors([prompt(30), Prompt.of(whole), mixed])
    assert torch.allclose(by_ids, by_rows, atol=1e-6)
    assert torch.allclose(by_ids, by_both, atol=1e-6)
    noise = np.random.default_rng(1).standard_normal((9, 48), dtype=np.float32)
    (soft,) = encoder(path).vectors(
        [Prompt.of(Rows(Buffer(noise.tobytes()), "float32", noise.shape))]
    )
    assert reference.cosine(soft.numpy(), reference.vector(path, noise)) > 0.99999
    assert encoder(path).refuses_rows is None
    assert encoder(tiny_embedding("bert")).refuses_rows is not None


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert", "mpnet"]
)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_those_of_transformers(name: str, labels: int) -> None:
    path = tiny_scoring(name, labels)
    pairs = [
        ("how many ships", "the harbour counts ships every night"),
        ("cold", "wind"),
        ("the the the", "hill"),
    ]
    tokenizer = reference.tokenizer_of(path)
    prompts, seconds = [], []
    for first, second in pairs:
        encoding = tokenizer(first, second)
        prompts.append(Prompt.of(Tokens(encoding["input_ids"])))
        seconds.append(len(tokenizer(first)["input_ids"]))
    found = encoder(path, "score").vectors(prompts, seconds).numpy()
    assert found.shape == (3, labels)
    for logits, (first, second) in zip(found, pairs, strict=True):
        assert np.allclose(logits, reference.logits(path, first, second), atol=1e-4)
    assert encoder(path, "score").card.activation == ("sigmoid" if labels == 1 else "softmax")


def test_a_head_that_reads_the_mean_of_all_states_is_given_it() -> None:
    path = tiny_scoring("modernbert", classifier_pooling="mean")
    first, second = "how many ships", "the harbour counts ships every night"
    tokenizer = reference.tokenizer_of(path)
    given = Prompt.of(Tokens(tokenizer(first, second)["input_ids"]))
    (found,) = encoder(path, "score").vectors([given], [len(tokenizer(first)["input_ids"])])
    assert np.allclose(found, reference.logits(path, first, second), atol=1e-4)


def test_the_card_says_what_may_be_asked_of_vectors() -> None:
    e5 = encoder(tiny_embedding("e5"))
    assert (e5.card.size, e5.card.normalize, e5.max_model_len) == (48, True, MAX_LENGTH)
    assert (e5.card.prompts, e5.card.default_prompt) == (
        {"query": "query : ", "passage": "passage : "},
        "passage",
    )
    assert encoder(tiny_embedding("bge")).card.prompts == {
        "query": "query : ",
        "document": "",
    }
    assert encoder(tiny_embedding("gemma")).card.size == 40
    roberta = encoder(tiny_embedding("roberta"))
    assert (roberta.card.size, roberta.card.normalize) == (96, False)
    assert encoder(tiny_embedding("bert", is_matryoshka=True)).card.any_dimensions
    assert encoder(tiny_embedding("bert"), matryoshka_dimensions=(16, 8)).card.dimensions == (8, 16)


def test_what_makes_a_vector_is_part_of_the_weights_identity() -> None:
    bert, bge = tiny_embedding("bert"), tiny_embedding("bge")
    assert encoder(bert).weights_id != encoder(bge).weights_id
    assert (
        encoder(bert).weights_id
        == Encoder.load(EngineSettings.of(model=str(bert), task="embed")).weights_id
    )
    assert encoder(bert).weights_id != encoder(bert, pooling="cls").weights_id


def test_pooling_can_be_named_and_is_then_what_is_done() -> None:
    path = tiny_embedding("bert")
    (found,) = encoder(path, pooling="cls").vectors([prompt(9)])
    with torch.no_grad():
        states = reference.model_of(path)(torch.tensor([ids(9)])).last_hidden_state[0]
    assert torch.allclose(found, states[0], atol=1e-5)


def test_models_for_another_task_are_refused_with_the_flag_that_serves_them() -> None:
    with pytest.raises(InvalidRequestError, match="--task score"):
        encoder(tiny_scoring("bert"))
    with pytest.raises(InvalidRequestError, match="classification heads"):
        encoder(tiny_embedding("bert"), "score")


def test_more_positions_than_the_model_has_are_refused() -> None:
    assert encoder(tiny_embedding("roberta"), max_model_len=79).max_model_len == 79
    with pytest.raises(InvalidRequestError, match="maximum context length is 79"):
        encoder(tiny_embedding("roberta"), max_model_len=80)


def test_every_word_of_the_tests_is_in_the_vocabulary() -> None:
    tokenizer = reference.tokenizer_of(tiny_embedding("bert"))
    assert tokenizer.unk_token_id not in tokenizer(" ".join(WORDS))["input_ids"]


@pytest.mark.parametrize("loud", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu"]
)
def test_only_the_exact_gelu_is_computed_with_the_product_before_it(
    name: str, dtype: torch.dtype, loud: bool
) -> None:
    """The others are near it; one loud output must not make them near enough."""
    if not packs(dtype):
        pytest.skip(f"no packed linears in {dtype} here")

    class Intermediate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(64, 128)
            self.intermediate_act_fn = ACT2FN[name]

    layer = Intermediate().requires_grad_(False)
    torch.nn.init.normal_(layer.dense.weight, std=1.3 / 8)
    if loud:
        layer.dense.weight[5] *= 10
    layer.to(dtype)
    dense = layer.dense
    fuse_gelu(layer, ("Intermediate", "intermediate_act_fn", "dense"))
    assert (layer.dense is not dense) == (name == "gelu")

"""Faults that are seeded into models that embed and score are seen by the check at their start."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from inlay.engine.embed import encoder as encoder_module
from inlay.engine.embed.attention import PackedAttention
from inlay.engine.embed.encoder import Encoder
from inlay.engine.embed.relative_bias import RelativeBias
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.self_check.reference import Reference
from inlay.engine.torch.self_check.start import Steps
from tests import output_models
from tests.embedding_models import EMBEDDING_MODELS, sized_embedding, tiny_embedding, tiny_scoring
from tests.lifelike import lifelike
from tests.numbers.test_vectors import RERANKERS

Fault = Callable[[ExitStack, Encoder], None]


def load(directory: Path, task: str, mode: str) -> Encoder:
    settings = {"model": str(directory), "task": task, "num_threads": 1, "self_check": mode}
    return Encoder.load(EngineSettings.of(**settings))


@cache
def checked(directory: Path, task: str) -> tuple[Encoder, Reference]:
    """A model without seeded faults, and the reference that its start made."""
    kept: list[Reference] = []

    def steps(read: Any, wrap: Any, reference: Any, *more: Any, **named: Any) -> Any:
        def keeping(model: Any, draw: int) -> Reference:
            kept.append(reference(model, draw))
            return kept[-1]

        return Steps(read, wrap, keeping, *more, **named)

    with mock.patch.object(encoder_module, "Steps", steps):
        found = load(directory, task, "full")
    return found, kept[-1]


def _put(stack: ExitStack, thing: Any, name: str, value: object) -> None:
    stack.enter_context(mock.patch.object(thing, name, value))


def token_types(stack: ExitStack, model: Encoder) -> None:
    """Both texts of a pair have the first type."""
    table: Any = model._base.embeddings.token_type_embeddings
    stack.callback(table.weight.data.copy_, table.weight.detach().clone())
    table.weight.data[1] = table.weight.data[0]


def second_earlier(stack: ExitStack, model: Encoder) -> None:
    """The second text begins a position too early."""
    usual = model._hidden

    def hidden(prompts: Any, lengths: Any, second_from: Any, places: Any = None) -> Tensor:
        return usual(prompts, lengths, [each - 1 for each in second_from], places)

    _put(stack, model, "_hidden", hidden)


def _window(change: int | None) -> Fault:
    def fault(stack: ExitStack, _: Encoder) -> None:
        usual = PackedAttention.attend

        def attend(self: PackedAttention, *given: Any, window: Any, **more: Any) -> Tensor:
            if isinstance(window, int):
                window = None if change is None else window + change
            return usual(self, *given, window=window, **more)

        _put(stack, PackedAttention, "attend", attend)

    return fault


def far_positions(stack: ExitStack, model: Encoder) -> None:
    """Positions beyond 40 are those of 40: a table, or angles, that are cut."""
    usual = model._hidden

    def hidden(prompts: Any, lengths: Any, second_from: Any, places: Any = None) -> Tensor:
        assert places is not None
        return usual(prompts, lengths, second_from, places.clip(max=40))

    _put(stack, model, "_hidden", hidden)


def offset(stack: ExitStack, model: Encoder) -> None:
    """Position ids begin one too early."""
    _put(stack, model, "_first", model._first - 1)


def distances(stack: ExitStack, _: Encoder) -> None:
    """The bias of a distance is that of the next."""
    usual = RelativeBias.of
    _put(
        stack,
        RelativeBias,
        "of",
        lambda self, length: usual(self, length + 1)[:, 1:, :-1],
    )


def bias_of_scores(stack: ExitStack, _: Encoder) -> None:
    """Scores have no bias."""
    usual = RelativeBias.of
    _put(stack, RelativeBias, "of", lambda self, length: torch.zeros_like(usual(self, length)))


def first_for_mean(stack: ExitStack, model: Encoder) -> None:
    """A head that reads the mean of the states is given the first."""
    _put(stack, model._pairs, "select", ("cls",))


def last_state(stack: ExitStack, model: Encoder) -> None:
    """A head is given the last state for the first."""
    _put(stack, model._pairs, "select", ("lasttoken",))


def next_label(stack: ExitStack, model: Encoder) -> None:
    """Logits are those of the next label."""
    pairs = model._pairs
    assert pairs is not None
    usual = pairs.head
    _put(stack, pairs, "head", lambda given: usual(given).roll(1, -1))


MEAN_HEAD = "modernbert, of the mean"


@cache
def directory(name: str, task: str) -> Path:
    if name == MEAN_HEAD:
        return lifelike(tiny_scoring("modernbert", 3, classifier_pooling="mean"))
    return lifelike(tiny_scoring(name, 3) if task == "score" else _embedding(name))


def _embedding(name: str) -> Path:
    if name == "colqwen2":
        return output_models.pages()
    if name == "qwen3":
        # Half of its layers have a window, as published ones may.
        return sized_embedding(
            name, use_sliding_window=True, sliding_window=16, max_window_layers=1
        )
    return tiny_embedding(name)


FAULTS: list[tuple[str, str, str, Fault]] = [
    *(("embed", name, "token types", token_types) for name in ("bert", "electra")),
    ("score", "bert", "token types", token_types),
    ("score", "bert", "second text", second_earlier),
    *(
        ("embed", name, f"window {change}", _window(change))
        for name in ("modernbert", "mistral", "gemma", "qwen3")
        for change in (None, 1, -1)
        # Only one of two layers has a window: one position more is below rounding (1.4).
        if (name, change) != ("qwen3", 1)
    ),
    *(
        ("embed", name, "far positions", far_positions)
        for name in ("bert", "roberta", "distilbert", "modernbert", "mpnet", "gemma", "colqwen2")
    ),
    *(("embed", name, "offset", offset) for name in ("roberta", "camembert", "mpnet")),
    ("embed", "mpnet", "distances", distances),
    ("embed", "mpnet", "no bias of scores", bias_of_scores),
    ("score", MEAN_HEAD, "first state", first_for_mean),
    *(("score", name, "last state", last_state) for name in RERANKERS),
    *(("score", name, "next label", next_label) for name in RERANKERS),
]


@pytest.mark.parametrize(
    ("task", "name", "fault"),
    [pytest.param(task, name, fault, id=f"{name}-{what}") for task, name, what, fault in FAULTS],
)
def test_a_fault_is_seen(task: str, name: str, fault: Fault) -> None:
    model, reference = checked(directory(name, task), task)
    assert model._judged(reference).right
    with ExitStack() as stack:
        fault(stack, model)
        assert not model._judged(reference).right
    assert model._judged(reference).right


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*EMBEDDING_MODELS, "colqwen2"])
def test_no_embedder_differs_without_a_fault(name: str, seed: int) -> None:
    found = load(lifelike(_embedding(name), seed), "embed", "strict").self_check
    assert found is not None
    assert found.result == "passed"


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RERANKERS)
def test_no_reranker_differs_without_a_fault(name: str, seed: int, labels: int) -> None:
    found = load(lifelike(tiny_scoring(name, labels), seed), "score", "strict").self_check
    assert found is not None
    assert found.result == "passed"
    assert "scores" in found.distances

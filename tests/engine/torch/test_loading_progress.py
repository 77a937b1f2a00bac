"""Loading a large model says how far it is, in lines of log."""

import logging
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.weights import checkpoint
from inlay.engine.torch.weights.checkpoint import SECONDS, LoadProgress
from tests.models import tiny

GB = 1_000_000_000


def lines(sizes: dict[str, int], items: dict[str, object], seconds: float) -> list[str]:
    """Log lines if every parameter takes `seconds`."""
    said: list[str] = []
    ticks = count()
    found = list(LoadProgress(sizes, said.append, lambda: next(ticks) * seconds).over(items))
    assert found == list(items.items())
    return said


def test_lines_come_every_few_seconds_and_one_at_the_end() -> None:
    sizes = {str(number): GB for number in range(8)}
    assert lines(sizes, dict.fromkeys(sizes), SECONDS / 2) == [
        "loading weights: 2.0 of 8.0 GB, 25%",
        "loading weights: 4.0 of 8.0 GB, 50%",
        "loading weights: 6.0 of 8.0 GB, 75%",
        "loading weights: 8.0 of 8.0 GB, 100%",
        "loaded 8.0 GB of weights in 14 s; preparing them",
    ]


def test_a_model_that_is_loaded_at_once_says_nothing() -> None:
    assert lines({"a": GB}, {"a": None}, SECONDS / 4) == []


def test_parameters_made_of_several_tensors_share_what_is_left() -> None:
    sizes = {"a": 2 * GB, "experts.0": GB, "experts.1": GB}
    said = lines(sizes, {"a": None, "experts": None}, SECONDS)
    assert said[:2] == [
        "loading weights: 2.0 of 4.0 GB, 50%",
        "loading weights: 4.0 of 4.0 GB, 100%",
    ]


@settings(derandomize=True, max_examples=50)
@given(
    sizes=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10 * GB)),
    names=st.sets(st.sampled_from("abcdxyz")),
)
def test_it_ends_at_all_of_it_whatever_names_are_met(
    sizes: dict[str, int], names: set[str]
) -> None:
    said = lines(sizes, dict.fromkeys(sorted(names)), SECONDS)
    unknown = names - set(sizes)
    if names and sum(sizes.values()) and (unknown or set(sizes) <= names):
        assert said[-2].endswith(" 100%")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_transformers_loop_is_the_one_that_is_told_of(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        CausalModel.load(EngineSettings.of(model=str(tiny(family)), device="cpu", num_threads=1))
    told = [line for line in caplog.messages if line.startswith("loading weights: ")]
    assert len(told) > 5
    assert told[-1].endswith(", 100%")

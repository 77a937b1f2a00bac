"""Families that generate text, in bfloat16, with lifelike weights: as near float32 as transformers.

`tests/engine/torch/test_families.py` holds float32, where tokens are equal.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.lifelike import LOUD, text
from tests.models import FAMILIES
from tests.numbers.distance import BOUND, load, rel, text_ratio, typical
from tests.quantised_models import FORMS, write

SEEDS = range(3)

EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gemma4_text"),
    *("llama4_text", "deepseek_v2", "deepseek_v3", "gpt_oss"),
)
"""Families judged by a typical position, and by the mean of all seeds."""

QUICK = ("gemma2", "gemma3_text", "qwen2", "qwen3", "qwen3_5_text", "phi", "deepseek_v3", "gpt_oss")
"""One of each kind of norm, attention and experts."""


def _cases(quick: Sequence[str]) -> list[Any]:
    return [
        pytest.param(family, loud, marks=() if family in quick else pytest.mark.slow)
        for family in FAMILIES
        for loud in ((False, True) if family in LOUD else (False,))
    ]


CASES = _cases(QUICK)


@pytest.mark.parametrize(("family", "loud"), CASES)
def test_bfloat16_is_as_near_float32_as_transformers_own(family: str, loud: bool) -> None:
    distance = typical if family in EXPERTS else rel
    found = [text_ratio(text(family, seed, loud=loud), distance=distance) for seed in SEEDS]
    worst = math.prod(found) ** (1 / len(found)) if family in EXPERTS else max(found)
    assert worst <= BOUND, found


@pytest.mark.parametrize(("family", "loud"), _cases(["llama4_text", "qwen2"]))
def test_the_check_at_start_raises_no_false_alarm(family: str, loud: bool) -> None:
    for seed in SEEDS:
        found = load(text(family, seed, loud=loud), self_check="strict").self_check
        assert found is not None
        assert found.result == "passed", found


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if form in ("awq", "fp8") else pytest.mark.slow)
        for form in FORMS
    ],
)
def test_quantised_weights_in_bfloat16_are_as_near_as_transformers_own_of_their_values(
    form: str,
) -> None:
    quantised, values = write(form, lively=True)
    assert text_ratio(quantised, values) <= BOUND

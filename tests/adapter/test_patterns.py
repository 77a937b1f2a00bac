"""Patterns of modules' names match as PEFT's do, and all of an adapter's together cost little."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from inlay.adapter import open_adapter
from inlay.adapter.config import LoraConfig, parse_config
from inlay.adapter.patterns import MAX_CHARACTERS, MAX_PATTERNS, Patterns, ways_of
from inlay.base.errors import InvalidRequestError
from tests.adapter.conftest import Write, lora_config

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
MODULES = [f"model.layers.{layer}.{kind}" for layer in range(100) for kind in KINDS]


def parsed(**options: Any) -> LoraConfig:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **options}
    found = parse_config(json.dumps(config).encode())
    assert isinstance(found, LoraConfig)
    return found


def drawn(rng: random.Random, depth: int) -> tuple[str, int]:
    """A pattern, and the ways to read it: those of its parts multiply, of alternatives add up."""
    if not depth or rng.random() < 0.3:
        return rng.choice(["a", ".", "[ab]", r"[)|]", r"\)", r"\|", r"\.", "^", "$", "()", ""]), 1
    parts = [drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        return "(" + "|".join(text for text, _ in parts) + ")", sum(ways for _, ways in parts)
    product = 1
    for _, ways in parts:
        product *= ways
    return "".join(text for text, _ in parts), product


def test_no_pattern_can_be_read_in_more_ways_than_are_counted() -> None:
    rng = random.Random(5)
    for _ in range(20_000):
        one, two = drawn(rng, 4), drawn(rng, 4)
        text, ways = (f"{one[0]}|{two[0]}", one[1] + two[1]) if rng.random() < 0.3 else one
        re.compile(text)
        assert ways_of(text) >= ways, text


def value_of(keys: Sequence[str], module: str) -> int | None:
    """As PEFT's get_pattern_key."""
    return next(
        (place for place, key in enumerate(keys) if re.match(rf"(.*\.)?({key})$", module)), None
    )


def test_the_first_pattern_that_matches_counts() -> None:
    rng = random.Random(7)
    pieces = [
        "q", "q_proj", "proj", "1", ".", "-", "(", ")", "|", "(o|q)", "[qo]", "[|]", r"\|", r"\.",
        r"\d", r"\1", "^", "$",
    ]  # fmt: skip
    names = [
        "q_proj", "a.q_proj", "o_proj", "a.1.q_proj", "q-proj", "aqXproj", "b.1.proj", "q.1", "q|1",
        "q", "",
    ]  # fmt: skip
    tried = 0
    while tried < 3000:
        keys = ["".join(rng.choices(pieces, k=rng.randint(1, 4))) for _ in range(3)]
        patterns = Patterns()
        try:
            for place, key in enumerate(keys):
                patterns.add("rank_pattern", key, place)
        except InvalidRequestError:
            continue
        tried += 1
        for name in names:
            found = patterns.first(name, -1)
            assert (None if found == -1 else found) == value_of(keys, name), (keys, name)


def test_a_pattern_of_ten_layers_is_read(write: Write) -> None:
    pattern = "layers.(0|1|2|3|4|5|6|7|8|9).none"
    open_adapter(write(lora_config(rank_pattern={pattern: 2})))


def test_a_pattern_for_every_module_of_a_hundred_layers_is_read() -> None:
    """As PEFT writes them for EVA, which gives each module a rank of its own."""
    named = {module: place + 1 for place, module in enumerate(MODULES)}
    config = parsed(rank_pattern=named, alpha_pattern=named)
    for module, place in named.items():
        assert config.rank_of(module) == place
        assert config.scale_of(module, place) == 1


@pytest.mark.parametrize(
    ("ranks", "alphas"),
    [
        ({f"x{n}": 2 for n in range(MAX_PATTERNS)}, {"y": 2}),
        ({f"{n:0500}": 2 for n in range(MAX_CHARACTERS // 500 + 1)}, {}),
    ],
)
def test_patterns_that_take_long_to_compile_are_refused(
    ranks: dict[str, int], alphas: dict[str, int]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"more than 4096 patterns, or .* 131072 char"):
        parsed(rank_pattern=ranks, alpha_pattern=alphas)


@pytest.mark.parametrize("key", ["(.|.)" * 8 + "x{}", r"x{}\w\wproj", "x{}|x{}"])
def test_patterns_that_take_long_to_compare_are_refused(key: str) -> None:
    config = parsed(alpha_pattern={key.replace("{}", str(n)): 2 for n in range(1000)})
    names = [f"{'a.' * 40}{module}" for module in MODULES * 30]
    with pytest.raises(InvalidRequestError, match="take too long to compare with the names"):
        sum(config.scale_of(name, 1) for name in names)

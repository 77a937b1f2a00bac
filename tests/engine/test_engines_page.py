"""`docs/engines.md` agrees with the engines' own tables."""

import re
from pathlib import Path

from inlay.engine.sglang import capabilities as sglang
from inlay.engine.vllm.capabilities import IMAGES_OF, NO_LEVEL_2, ROWS_FROM, refusals
from inlay.engine.vllm.connectors import CONNECTORS
from inlay.worker.interpreter import NEEDED

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE = (DOCS / "engines.md").read_text(encoding="utf-8")
FIELDS = (DOCS / "api-reference.md").read_text(encoding="utf-8")
WITH = {"any": "any", "rows": "rows", "mixed": "text and rows"}


def _unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_all_that_either_engine_refuses_is_on_the_page_of_fields() -> None:
    part = FIELDS[FIELDS.index("## Refused by vLLM and SGLang") :]
    usual = {
        "ids_are_looked_up": False,
        "own_reasoning": False,
        "mixes_logprobs": False,
        "counts_thinking": True,
    }
    every = {*sglang.REFUSALS, sglang.SEEDED_MIN_P, *refusals(**usual)}
    for fact, usually in usual.items():
        more = set(refusals(**usual | {fact: not usually})) - every
        assert more
        every |= more
    every |= set(refusals(**usual, takes_images=True))
    for refusal in every:
        assert f"| `{refusal.feature}` | {WITH[refusal.prompts]} |" in part
        assert refusal.reason in part
    assert part.count("| `") == len(every) + 1
    assert NO_LEVEL_2 in part


def test_the_page_names_the_models_the_libraries_and_the_connectors() -> None:
    assert ", ".join(sorted(ROWS_FROM)) in _unwrapped(PAGE)
    assert f"| {', '.join(sorted(IMAGES_OF))} |" in PAGE
    assert ", ".join(sorted(NEEDED)) in _unwrapped(PAGE)
    assert ", ".join(sorted(sglang.ROWS_FROM)) in _unwrapped(PAGE)
    for name, stands_for in CONNECTORS.items():
        assert f"| `{name}` | `{stands_for['kv_connector']}`" in PAGE


def test_every_test_that_the_page_names_is_there() -> None:
    suite = Path(__file__).resolve().parent.parent / "engines" / "vllm"
    files = [suite / "test_guards.py", *suite.glob("test_images*.py")]
    there = {
        name
        for file in files
        for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))
    }
    section = PAGE[
        PAGE.index("### Tests of each fault") : PAGE.index("## Running vLLM behind inlay")
    ]
    named = set(re.findall(r"`(test_\w+)`", section))
    assert len(named) > 5
    assert named <= there

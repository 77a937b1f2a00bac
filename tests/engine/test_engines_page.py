"""`docs/engines.md` agrees with the engines' own tables."""

import re
from pathlib import Path

from inlay.engine.sglang import capabilities as sglang
from inlay.engine.vllm.capabilities import IMAGES_OF, NO_LEVEL_2, ROWS_FROM, refusals
from inlay.engine.vllm.connectors import CONNECTORS
from inlay.worker.interpreter import NEEDED

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "engines.md").read_text(
    encoding="utf-8"
)
WITH = {"any": "any", "rows": "rows", "mixed": "text and rows"}


def _unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_the_page_shows_the_table_of_refusals() -> None:
    facts = {
        "ids_are_looked_up": False,
        "own_reasoning": False,
        "mixes_logprobs": False,
        "counts_thinking": True,
    }
    always = set(refusals(**facts))
    only = {
        " (second model runner, speculation)": set(refusals(**facts | {"ids_are_looked_up": True}))
        - always,
        " (with `--reasoning-parser` after `--`)": set(refusals(**facts | {"own_reasoning": True}))
        - always,
        " (first model runner)": set(refusals(**facts | {"mixes_logprobs": True})) - always,
        " (models with images)": set(refusals(**facts | {"takes_images": True})) - always,
        " (no form of reasoning known)": set(refusals(**facts | {"counts_thinking": False}))
        - always,
    }
    assert all((always, *only.values()))
    shown = [line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 4]
    every = always.union(*only.values())
    for refusal in every:
        where = next((where for where, found in only.items() if refusal in found), "")
        assert (
            f"| `{refusal.feature}`{where} | {WITH[refusal.prompts]} | {refusal.reason} |" in shown
        )
    table = PAGE[PAGE.index("| feature |") : PAGE.index("Worked around")]
    assert table.count("| `") == len(every)
    assert NO_LEVEL_2 in _unwrapped(table)


def test_the_page_shows_what_is_refused_with_sglang() -> None:
    table = PAGE[PAGE.index("## Refusals with SGLang") : PAGE.index("Done in another way")]
    for refusal in sglang.REFUSALS:
        assert f"| `{refusal.feature}` | {WITH[refusal.prompts]} | {refusal.reason} |" in table
    seeded = sglang.SEEDED_MIN_P
    assert (
        f"| `{seeded.feature}` (with --enable-deterministic-inference) | any | {seeded.reason} |"
        in table
    )
    assert table.count("| `") == len(sglang.REFUSALS) + 1
    assert ", ".join(sorted(sglang.ROWS_FROM)) in _unwrapped(PAGE)


def test_the_page_names_the_models_the_libraries_and_the_connectors() -> None:
    assert ", ".join(sorted(ROWS_FROM)) in _unwrapped(PAGE)
    assert f"| {', '.join(sorted(IMAGES_OF))} |" in PAGE
    assert ", ".join(sorted(NEEDED)) in _unwrapped(PAGE)
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

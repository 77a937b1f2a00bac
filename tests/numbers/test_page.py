"""docs/models.md says that every family takes part: its tables and these suites have the same ones."""

import re
from pathlib import Path

from scripts.published import CHECKPOINTS

from inlay.tensors.checkpoint import config_of
from tests import output_models
from tests.embedding_models import EMBEDDING_MODELS, tiny_embedding, tiny_scoring
from tests.engine.embed.test_media import CASES as EMBEDDED
from tests.engine.torch.test_vision import CASES
from tests.engine.torch.vision_reference import directory_of
from tests.models import FAMILIES, tiny
from tests.numbers.test_text import CASES as TEXT
from tests.numbers.test_vectors import RERANKERS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table behind a heading, without its own."""
    part = PAGE.split(f"\n{heading}\n")[1]
    table = re.search(r"(?:^\|.*\n)+", part, re.M)
    assert table is not None
    return [line.strip("|").split("|") for line in table[0].splitlines()[2:]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_-]+)`", cell))


def kinds(directories: list[Path]) -> set[str]:
    return {str(config_of(directory)["model_type"]) for directory in directories}


def test_every_family_that_generates_takes_part() -> None:
    table = rows("## Models that generate")
    assert set().union(*(names(row[5]) for row in table)) == set(FAMILIES)
    assert {str(case.values[0]) for case in TEXT} == set(FAMILIES)
    listed = set().union(*(names(row[1]) for row in table))
    assert kinds([tiny(family) for family in FAMILIES]) <= listed


def test_every_family_with_media_takes_part() -> None:
    tables = (*rows("## Models with images"), *rows("## Models with audio and video"))
    listed = set().union(*(names(row[1]) for row in tables))
    assert kinds([directory_of(case) for case in CASES]) == listed


def test_every_family_that_embeds_or_scores_takes_part() -> None:
    table = rows("## Models that embed and score")
    listed = set().union(*(names(row[0]) for row in table))
    assert kinds([tiny_embedding(name) for name in EMBEDDING_MODELS]) == listed
    scoring = set().union(*(names(row[0]) for row in table if row[2].strip() == "yes"))
    assert kinds([tiny_scoring(name) for name in RERANKERS]) == scoring


def test_every_family_that_embeds_media_takes_part() -> None:
    part = PAGE.split("\n### Models that embed images\n")[1]
    sentence = part.split("otherwise:")[1].split(".")[0]
    directories = [*(directory_of(case) for case in EMBEDDED), output_models.pages()]
    assert kinds(directories) == names(sentence)


def test_the_licence_of_each_published_checkpoint_is_named() -> None:
    text = " ".join(PAGE.split()).lower()
    for name, checkpoint in CHECKPOINTS.items():
        licence = "gemma terms of use" if "gemma" in checkpoint.model_type else "apache-2.0"
        assert re.search(rf"{name.replace('-', '[- ]')}[^()]* \({re.escape(licence)}\)", text), name

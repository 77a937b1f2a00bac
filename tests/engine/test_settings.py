"""Settings of an engine: sections inside, one flat list of options for those who set them."""

from collections import Counter

import pytest

from inlay.engine.settings import EngineSettings, sections


def test_a_section_can_be_seen_at_a_glance() -> None:
    sizes = Counter(sections().values())
    assert {name: size for name, size in sizes.items() if not 1 < size <= 12} == {}
    assert sizes.keys() == EngineSettings.model_fields.keys()


def test_no_two_sections_have_an_option_of_one_name() -> None:
    fields = [type(section).model_fields for _, section in EngineSettings.of(model="m")]
    assert len(sections()) == sum(map(len, fields))


def test_options_are_given_and_found_by_their_names_alone() -> None:
    settings = EngineSettings.of(model="m", block_size=32, max_num_seqs="4")
    assert (settings.cache.block_size, settings.batch.max_num_seqs) == (32, 4)
    assert settings.given() == {"model": "m", "block_size": 32, "max_num_seqs": 4}
    assert settings.value("max_loras") == EngineSettings.default("max_loras") == 8


def test_a_copy_keeps_what_was_given() -> None:
    settings = EngineSettings.of(model="m", dtype="half").replace(engine="echo", max_loras=2)
    assert settings.given() == {"model": "m", "engine": "echo", "dtype": "float16", "max_loras": 2}
    # As an engine's process reads it.
    sent = settings.model_dump_json(exclude_unset=True)
    assert EngineSettings.model_validate_json(sent).given() == settings.given()


def test_an_option_that_no_section_has_is_refused() -> None:
    with pytest.raises(ValueError, match="'max_seqs' is no option of an engine"):
        EngineSettings.of(model="m", max_seqs=1)
    with pytest.raises(ValueError, match="'max_seqs' is no option of an engine"):
        EngineSettings.of(model="m").replace(max_seqs=1)

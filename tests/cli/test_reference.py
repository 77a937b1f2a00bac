"""docs/cli.md is what the settings classes say."""

from scripts.reference import PAGE

from inlay.cli.reference import reference


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make reference`"

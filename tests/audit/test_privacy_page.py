"""The table of docs/privacy.md is what its script makes of reports."""

import re
from typing import Any

import msgspec
import pytest
from scripts import privacy_tables

from inlay_audit.report import as_data
from inlay_audit.run import Audit
from inlay_audit.transform import NAMES, named
from tests.audit.test_attackers import SETTING, TABLE, TEMPLATE, made


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Of a small table, as they come out of a file."""
    audit = Audit(made(30, 1), made(60, 2), TABLE, TEMPLATE, str, ("nearest", "signature"))
    return [
        msgspec.json.decode(msgspec.json.encode(as_data(audit, [audit.of(named(spec, SETTING))])))
        for spec in ("none", "rotate")
    ]


def test_each_transform_is_a_row_and_each_model_its_columns(reports: list[dict[str, Any]]) -> None:
    found = privacy_tables.table({"one": reports, "other": reports[1:]})
    head, rule, *rows = [line for line in found.splitlines() if line.startswith("|")]
    assert head.count("nearest") == 2
    assert all(line.count("|") == rule.count("|") for line in (head, *rows))
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["none", "rotate"]
    assert cells[0][1] == "100, 100"
    # The other model has no report of this one.
    assert cells[0][4:] == ["", "", ""]
    assert "`signature`" in cells[1][3]
    assert cells[1][1:4] == cells[1][4:]
    assert found.count("300 tokens, 32 wide; 30 texts, 60 known") == 2


def test_the_page_is_written_between_its_marks_alone() -> None:
    page = privacy_tables.PAGE.read_text(encoding="utf-8")
    other = privacy_tables.written(page, "| a |")
    before, after = page.split(privacy_tables.BEGIN)[0], page.split(privacy_tables.END)[1]
    assert other.startswith(before)
    assert other.endswith(after)
    assert privacy_tables.written(other, "| b |") == privacy_tables.written(page, "| b |")


def test_a_published_model_stands_beside_the_demo_on_the_page() -> None:
    page = privacy_tables.PAGE.read_text(encoding="utf-8")
    part = page.split(privacy_tables.BEGIN)[1].split(privacy_tables.END)[0]
    rows = [line for line in part.splitlines() if line.startswith("|")]
    assert "the demo: nearest" in rows[0]
    assert "Gemma 3 270M: nearest" in rows[0]
    words = {name.partition(":")[0] for name in NAMES.split(", ")}
    shown = {re.split(r"[:| ]+", row.strip("| "))[0] for row in rows[2:]}
    assert {"none", "noise", "rotate"} <= shown <= words

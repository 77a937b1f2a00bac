r"""Write the table of docs/privacy.md: one transform a row, one model a group of columns.

    inlay embeds audit --model MODEL --texts src/inlay/demo/texts.jsonl --most-texts 30 \
        --transform noise:4 --attackers nearest resends context -o json > report.json
    python -m scripts.privacy_tables "the demo=demo.json" "Gemma 3 270M=report.json"

Attackers of the page beside `nearest`: `resends` and `context` of noise, `gram` of a rotation,
`sorted` of a permutation, `reordered` of a shuffle, `least-squares` of a projection. Of hidden
states `ridge` and `hidden-search` of the demo, `fast` of Gemma. Upper limits are wider the more
attackers run.

A model may be named several times, with a report of some transforms each. Of each transform and
model the table has what `_SHOWN` read, and the most that any attacker reads, with its upper limit:
percent of tokens, and of names.
"""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

PAGE = Path(__file__).parents[1] / "docs" / "privacy.md"
BEGIN, END = "<!-- made by scripts.privacy_tables -->\n", "<!-- end -->\n"

_SHOWN = ("nearest", "context")
"""Attackers of a column each."""

Report = dict[str, Any]
"""A report as `inlay embeds audit -o json` writes it."""


def table(reports: Mapping[str, Sequence[Report]]) -> str:
    """The table of reports by model, and a line about the texts of each model."""
    found = {
        model: {each["transform"]: each for report in some for each in report["transforms"]}
        for model, some in reports.items()
    }
    transforms = list(dict.fromkeys(name for each in found.values() for name in each))
    heads = [
        f"{model}: {head}" if head == _SHOWN[0] else head
        for model in found
        for head in (*_SHOWN, "most, by")
    ]
    lines = [_row(["transform", *heads]), "|---" * (1 + len(heads)) + "|"]
    for name in transforms:
        cells = [cell for each in found.values() for cell in _cells(each.get(name))]
        lines.append(_row([name, *cells]))
    return "\n".join([*lines, "", *_about(reports)]) + "\n"


def _cells(transform: Report | None) -> list[str]:
    if transform is None:
        return [""] * (len(_SHOWN) + 1)
    shares = {each["attacker"]: each["shares"] for each in transform["attackers"]}
    worst = transform["worst"]
    most = ", ".join(
        f"{_percent(worst[metric]['value'])} (to {_percent(worst[metric]['high'])})"
        for metric in ("tokens", "names")
        if metric in worst
    )
    shown = [_both(shares[name]) if name in shares else "" for name in _SHOWN]
    return [*shown, f"{most} `{worst['tokens']['attacker']}`"]


def _both(shares: Report) -> str:
    return ", ".join(_percent(shares[metric]["value"]) for metric in ("tokens", "names"))


def _percent(share: float | None) -> str:
    # A trailing zero says no more, and none of n is no proof of none.
    return "-" if share is None else f"{100 * share:.1f}".removesuffix(".0")


def _about(reports: Mapping[str, Sequence[Report]]) -> Iterator[str]:
    for model, some in reports.items():
        first = some[0]
        size = first["table"]
        guessed = first["transforms"][0]["attackers"][0]["shares"]
        said = (
            f"- {model}: {size['rows']:,} tokens, {size['width']} wide; {first['texts']} texts, "
            f"{first['public_texts']} known to attackers; guessed without the rows: "
            f"{_both(guessed)}; noise:1x is noise:{size['natural_level']:.1f}."
        )
        yield textwrap.fill(said, 100, subsequent_indent="  ")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def written(page: str, made: str) -> str:
    """The page with what stands between its marks replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> None:
    """Read the reports that the arguments name, and write the page."""
    reports: dict[str, list[Report]] = {}
    for argument in sys.argv[1:]:
        model, _, file = argument.partition("=")
        reports.setdefault(model, []).append(msgspec.json.decode(Path(file).read_bytes()))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(written(page, table(reports)), encoding="utf-8")


if __name__ == "__main__":
    main()

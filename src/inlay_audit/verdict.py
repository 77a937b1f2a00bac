"""A transform's verdict in one line: what was read, by whom, and what was not tried."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from inlay_audit.run import Audited, Worst

READ, PARTLY = 0.20, 0.05
"""Shares of tokens beyond what is guessed without the rows, of names or of others, above which a
transform counts as read, or as read in part. The second is held against the upper limit."""

_METRICS = ("tokens", "names", "others")


@dataclass(frozen=True)
class Verdict:
    """The finding of an audit about a transform.

    Attributes:
        transform: its name.
        word: READ by an attacker without pairs, READ WITH PAIRS, PARTLY, or NOT READ BY THESE,
            which says nothing about attackers that were not tried; NOT TRIED if none was in time.
        metric: that decided it.
        share: of it, with its limits `low` and `high`.
        low: lower limit.
        high: upper limit.
        attacker: that read it.
        knows: its needs.
        seconds: it took.
        answers_kept: share of answers that stayed the same; None where they were not compared.
        not_run: attackers that read nothing before the time was over.
        stopped: attackers that did not read all texts in time, and how many they did.
        texts: that were to be read.
        of_texts: that these were taken from by chance.
    """

    transform: str
    word: str
    metric: str
    share: float
    low: float
    high: float
    attacker: str
    knows: str
    seconds: float
    answers_kept: float | None
    not_run: tuple[str, ...]
    stopped: dict[str, int]
    texts: int
    of_texts: int

    def line(self) -> str:
        """For people."""
        said = (
            f"{self.transform}: {self.word}. {100 * self.share:.0f} % of {self.metric} "
            f"[{100 * self.low:.0f}, {100 * self.high:.0f}] by {self.attacker}, which knows "
            f"{_KNOWS[self.knows]}, in {self.seconds:.0f} s."
        )
        if self.answers_kept is not None:
            said += f" Answers kept: {100 * self.answers_kept:.0f} %."
        if self.texts < self.of_texts:
            said += f" Read: {self.texts} of {self.of_texts} texts, drawn at random."
        for name, count in self.stopped.items():
            said += f" Stopped after {count} of {self.texts} texts: {name}."
        if self.not_run:
            said += f" Not run: {', '.join(self.not_run)}."
        return said

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


_KNOWS = {
    "nothing": "no row",
    "table": "the table",
    "model": "the model",
    "pairs": "rows of known texts",
    "weights": "the model and rows of known texts",
}


def verdict(each: Audited) -> Verdict:
    """The verdict of an audited transform: of its tokens, names and others what was read most."""
    metric, unpaired = _most(each, each.worst_unpaired)
    word = "READ"
    if unpaired <= READ:
        metric, most = _most(each, each.worst)
        high = max(_beyond(each, name, worst.share.high) for name, worst in _found(each.worst))
        word = (
            "READ WITH PAIRS" if most > READ else "PARTLY" if high > PARTLY else "NOT READ BY THESE"
        )
    if each.untried:
        word = "NOT TRIED"
    worst = (each.worst_unpaired if word == "READ" else each.worst)[metric]
    (read,) = (read for read in each.reads if read.attacker == worst.attacker)
    return Verdict(
        each.transform,
        word,
        metric,
        worst.share.value,
        worst.share.low,
        worst.share.high,
        read.attacker,
        read.knows,
        read.seconds,
        None if each.answers is None else each.answers.same.value,
        each.not_run,
        {read.attacker: read.texts for read in each.reads if read.texts < each.texts},
        each.texts,
        each.of_texts,
    )


def _found(worst: dict[str, Worst]) -> list[tuple[str, Worst]]:
    return [(name, worst[name]) for name in _METRICS if name in worst]


def _most(each: Audited, worst: dict[str, Worst]) -> tuple[str, float]:
    """The metric of which most was read, and its share beyond the prior's."""
    beyond = {name: _beyond(each, name, one.share.value) for name, one in _found(worst)}
    metric = max(beyond, key=lambda name: beyond[name])
    return metric, beyond[metric]


def _beyond(each: Audited, metric: str, share: float) -> float:
    """Of what is not guessed without the rows, the share that was read."""
    guessed = each.reads[0].shares[metric].value
    return (share - guessed) / max(1 - guessed, 1e-9)


def compared(reports: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Lines of a table: each transform of each report, those with the same name side by side.

    Args:
        reports: (name, report as `as_data` makes it).
    """
    rows = [
        (each["transform"], name, each["verdict"])
        for name, report in reports
        for each in report["transforms"]
    ]
    order = list(dict.fromkeys(transform for transform, *_ in rows))
    rows.sort(key=lambda row: order.index(row[0]))
    cells = [("transform", "report", "verdict", "most read", "by", "answers kept")]
    for transform, name, said in rows:
        kept = said["answers_kept"]
        cells.append(
            (
                transform,
                name,
                said["word"],
                f"{100 * said['share']:.0f} % of {said['metric']}",
                said["attacker"],
                "-" if kept is None else f"{100 * kept:.0f} %",
            )
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]

"""The findings of an audit: as a table, JSON and a picture (SVG)."""

from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from inlay_audit.interval import Share
from inlay_audit.run import Audit, Audited
from inlay_audit.score import METRICS
from inlay_audit.transform import natural_level
from inlay_audit.verdict import verdict

_SHOWN = 90
"""Characters of a sample."""

NOTES = (
    "These attackers are a lower bound of what can be read: others may read more.",
    "The server also sees the answers, and whoever reads them learns from them.",
)


def begun(audit: Audit) -> str:
    """The lines that are above all transforms, for people."""
    words, width = audit.table.shape
    return (
        f"{_read(audit)} texts were read, {len(audit.public)} are known to attackers; "
        f"percent [95 % interval]\n{words} tokens, {width} wide: noise:1x is noise:"
        f"{natural_level(audit.table):.2f}; around it the nearest token begins to fail"
    )


def _read(audit: Audit) -> str:
    if audit.of_texts <= len(audit.prompts):
        return str(len(audit.prompts))
    return f"{len(audit.prompts)} of {audit.of_texts}"


def described(each: Audited) -> Iterator[str]:
    """Lines about a transform, for people."""
    yield verdict(each).line()
    width = max(len(read.attacker) for read in each.reads)
    yield f"  {'':<{width}}  needs  " + "".join(f"{name:>10}" for name in METRICS)
    for read in each.reads:
        cells = "".join(f"{_percent(read.shares[name]):>10}" for name in METRICS)
        only = "" if read.texts == each.texts else f"  of {read.texts} texts alone"
        yield f"  {read.attacker:<{width}}  {read.knows:<7}{cells}{only}"
    for name, worst in each.worst.items():
        (read,) = (read for read in each.reads if read.attacker == worst.attacker)
        more = f", advantage {100 * (read.advantage[name] or 0):.1f}"
        yield f"  worst {name}: {_interval(worst.share)} by {worst.attacker}{more}"
    if each.worst["tokens"].attacker == each.reads[0].attacker:
        yield (
            "  nothing was read that cannot be guessed: rows of other texts, in another order or "
            "of another model look the same"
        )
    if each.answers is not None:
        yield f"  answers the same: {_interval(each.answers.same)}"
        if each.answers.right.of:
            yield f"  answers right: {_interval(each.answers.right)}"
        if each.answers.divergence is not None:
            yield f"  answers diverge by {each.answers.divergence:.2f} nats a token"
    if each.unanswered is not None:
        yield f"  answers: none: {each.unanswered}"
    if each.not_run:
        yield f"  not run for --budget: {', '.join(each.not_run)}"
    for name, why in each.left_out.items():
        yield f"  {name} is not applicable: {why}"
    for sample in each.samples:
        yield f"  text  {_cut(sample.text)}"
        yield f"  read  {_cut(sample.read)}"


def as_data(audit: Audit, found: Sequence[Audited]) -> dict[str, Any]:
    """The same for programs; shares are from 0 to 1."""
    return {
        "texts": len(audit.prompts),
        "of_texts": max(audit.of_texts, len(audit.prompts)),
        "public_texts": len(audit.public),
        "resends": audit.resends,
        "seed": audit.seed,
        "wire": {"dtype": audit.dtype},
        "table": {
            "rows": len(audit.table),
            "width": audit.table.shape[1],
            "natural_level": natural_level(audit.table),
        },
        "notes": NOTES,
        "transforms": [_transform(each) for each in found],
    }


def _transform(each: Audited) -> dict[str, Any]:
    return {
        "transform": each.transform,
        "verdict": verdict(each).as_json(),
        "attackers": [
            {
                "attacker": read.attacker,
                "needs": read.knows,
                "seconds": read.seconds,
                "texts": read.texts,
                "shares": {name: share.as_json() for name, share in read.shares.items()},
                "advantage": read.advantage,
            }
            for read in each.reads
        ],
        "not_applicable": each.left_out,
        "not_run": each.not_run,
        **{
            name: {
                metric: {"attacker": one.attacker, **one.share.as_json()}
                for metric, one in worst.items()
            }
            for name, worst in (("worst", each.worst), ("worst_unpaired", each.worst_unpaired))
        },
        "answers": None
        if each.answers is None
        else {
            "same": each.answers.same.as_json(),
            "right": each.answers.right.as_json(),
            "divergence": each.answers.divergence,
        },
        "unanswered": each.unanswered,
        "samples": [{"text": sample.text, "read": sample.read} for sample in each.samples],
    }


def _percent(share: Share) -> str:
    return f"{100 * share.value:.1f}" if share.of else "-"


def _interval(share: Share) -> str:
    return f"{_percent(share)} [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _cut(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."


_LEFT, _WIDTH, _RIGHT = 190, 400, 150
_BAR, _GAP = 14, 10
_METRICS = ("tokens", "names")
_COLOURS = {"guessed without the rows": "#9aa4b2", "nearest token": "#5b8def", "worst": "#d1495b"}
_ANSWERED = "answers the same"
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1c2430}.t{font-weight:600}"
    "line{stroke:#1c2430}.grid{stroke:#d8dee6}rect.page{fill:#fff}"
)


def chart(found: Sequence[Audited]) -> str:
    """An SVG document: for each transform the shares of tokens and names that were read."""
    lines: list[str] = []
    top = 40
    for each in found:
        lines.append(_text(10, top + 12, each.transform, "t"))
        top += 20
        for metric in _METRICS:
            for name, share, by in _bars(each, metric):
                lines += _bar(top, f"{metric}, {name}", share, _COLOURS[name], by)
                top += _BAR + 3
        if each.answers is not None and each.answers.same.of:
            lines += _bar(top, _ANSWERED, each.answers.same, "#3c9d6b", "")
            top += _BAR + 3
        top += _GAP
    width = _LEFT + _WIDTH + _RIGHT
    head = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 10}" '
            f'width="{width}" height="{top + 10}" role="img" aria-label="Shares that were read">'
        ),
        f"<style>{_STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        _text(10, 18, "Read by known attacks: a lower bound, with 95 % intervals", "t"),
    ]
    grid = [
        f'<line class="grid" x1="{x}" y1="30" x2="{x}" y2="{top}"/>'
        + _text(x - 8, top + 6, f"{share} %")
        for share in (0, 25, 50, 75, 100)
        for x in [_LEFT + _WIDTH * share // 100]
    ]
    return "\n".join([*head, *grid, *lines, "</svg>"]) + "\n"


def _bars(each: Audited, metric: str) -> Iterator[tuple[str, Share, str]]:
    for read in each.reads:
        name = {"prior": "guessed without the rows", "nearest": "nearest token"}.get(read.attacker)
        if name is not None and read.shares[metric].of:
            yield name, read.shares[metric], ""
    if metric in each.worst:
        worst = each.worst[metric]
        yield "worst", worst.share, f"by {worst.attacker}"


def _bar(top: int, name: str, share: Share, colour: str, by: str) -> list[str]:
    low, high = (_LEFT + _WIDTH * each for each in (share.low, share.high))
    middle = top + _BAR / 2
    said = f"{100 * share.value:.1f} % {by}".rstrip()
    return [
        _text(10, top + 11, name),
        (
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH * share.value:.1f}" height="{_BAR}" '
            f'fill="{colour}"/>'
        ),
        f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>',
        _text(_LEFT + _WIDTH + 12, top + 11, said),
    ]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'

"""The findings of an audit as a picture: bars with intervals, in SVG."""

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from inlay.audit.interval import Share
from inlay.audit.run import Audited

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

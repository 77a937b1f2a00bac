"""A report that an auditor can keep: one HTML file that reaches for nothing elsewhere."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import inlay
from inlay_audit.report import NOTES, chart
from inlay_audit.run import Audited
from inlay_audit.score import METRICS
from inlay_audit.verdict import verdict

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse;margin:.5rem 0}"
    "th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #8886}"
    "svg{max-width:100%;height:auto}"
)
_ATTACKERS = {
    "nothing": "public text and the number of rows",
    "table": "the embedding table, the template and public text",
    "model": "the same, and the whole model",
    "pairs": "rows of texts that they know, sent through the same transform",
    "weights": "such rows and the whole model",
}
_NOT_COVERED = (
    "the answers, which the server sees too",
    "the time and length of requests, and who sends them",
    "caches, keys and values, logs and metadata at the server",
    "rounding of rows on their way, such as to 16 bits",
    "attackers that are not named here",
)


def document(data: dict[str, Any], found: Sequence[Audited], model: str, texts: str) -> str:
    """The report as HTML; of the texts it holds their number and digest alone.

    Args:
        data: the report for programs.
        found: the same, as it was found.
        model: as it was named.
        texts: digest of the file of texts.
    """
    table = data["table"]
    facts = {
        "model": model,
        "embedding table": f"{table['rows']} tokens, {table['width']} wide",
        "noise:1x": f"noise:{table['natural_level']:.2f}, in units of the median norm",
        "texts": f"{data['texts']} of {data['of_texts']} read, {data['public_texts']} known to "
        "attackers",
        "file of texts": f"SHA-256 {texts}",
        "sent again": f"{data['resends']} times",
        "seed": str(data["seed"]),
        "inlay": inlay.__version__,
        "complete": "yes" if data["complete"] else "no: it was interrupted",
    }
    lines = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>Audit of rows for {escape(model)}</title><style>{_STYLE}</style>",
        f"<h1>What known attacks read from rows for {escape(model)}</h1>",
        "<ul>",
        *(f"<li>{escape(verdict(each).line())}</li>" for each in found),
        "</ul>",
        *(f"<p>{escape(note)}</p>" for note in NOTES),
        chart(found),
        "<h2>Setting</h2><table>",
        *(f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in facts.items()),
        "</table><h2>Who knew what</h2><ul>",
        *(f"<li>{name}: {escape(said)}</li>" for name, said in _ATTACKERS.items()),
        "</ul>",
    ]
    for each in found:
        lines += _transform(each)
    lines += ["<h2>Not covered</h2><ul>", *(f"<li>{each}</li>" for each in _NOT_COVERED), "</ul>"]
    return "\n".join(lines) + "\n"


def _transform(each: Audited) -> Iterator[str]:
    heads = ("attacker", "knows", *METRICS, "seconds")
    yield f"<h2>{escape(each.transform)}</h2><table>"
    yield "<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"
    for read in each.reads:
        shares = [read.shares[metric] for metric in METRICS]
        cells = [
            "-"
            if not share.of
            else f"{100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"
            for share in shares
        ]
        name = read.attacker
        if read.texts < each.texts:
            name += f", stopped after {read.texts} texts"
        cells = [name, read.knows, *cells, f"{read.seconds:.1f}"]
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"
    for name in each.not_run:
        yield f"<p>{escape(name)} was not run: the time did not suffice.</p>"
    for name, why in each.left_out.items():
        yield f"<p>{escape(name)} is not applicable: {escape(why)}.</p>"

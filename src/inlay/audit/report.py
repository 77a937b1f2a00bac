"""The findings of an audit: as a table, as JSON, and as a gate for CI."""

from collections.abc import Iterator, Sequence
from typing import Any

from inlay.audit.interval import Share
from inlay.audit.run import Audit, Audited
from inlay.audit.score import METRICS
from inlay.errors import InvalidRequestError

_SHOWN = 90
"""Characters of a sample."""

NOTES = (
    "These attackers are a lower bound of what can be read: others may read more.",
    "The server also sees the answers, and whoever reads them learns from them.",
)


def begun(audit: Audit) -> str:
    """The line that is above all transforms, for people."""
    return (
        f"{len(audit.prompts)} texts were read, {len(audit.public)} are known to attackers; "
        "percent [95 % interval]"
    )


def described(each: Audited) -> Iterator[str]:
    """Lines about a transform, for people."""
    yield f"transform {each.transform}"
    width = max(len(read.attacker) for read in each.reads)
    yield f"  {'':<{width}}  needs  " + "".join(f"{name:>10}" for name in METRICS)
    for read in each.reads:
        cells = "".join(f"{_percent(read.shares[name]):>10}" for name in METRICS)
        yield f"  {read.attacker:<{width}}  {read.knows:<7}{cells}"
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
    for name, why in each.left_out.items():
        yield f"  {name} is not applicable: {why}"
    for sample in each.samples:
        yield f"  text  {_cut(sample.text)}"
        yield f"  read  {_cut(sample.read)}"


def as_data(audit: Audit, found: Sequence[Audited]) -> dict[str, Any]:
    """The same for programs; shares are from 0 to 1."""
    return {
        "texts": len(audit.prompts),
        "public_texts": len(audit.public),
        "resends": audit.resends,
        "seed": audit.seed,
        "notes": NOTES,
        "transforms": [_transform(each) for each in found],
    }


def limits(words: Sequence[str]) -> dict[str, float]:
    """The limits of a gate, by metric.

    Raises:
        InvalidRequestError: no such metric, or no share.
    """
    read = {}
    for word in words:
        metric, _, number = word.partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = float("nan")
        if metric not in METRICS or not 0 <= limit <= 1:
            raise InvalidRequestError(
                f"--fail-above {word}: it is METRIC=SHARE, with a metric of {', '.join(METRICS)} "
                "and a share from 0 to 1"
            )
        read[metric] = limit
    return read


def failures(gate: dict[str, float], found: Sequence[Audited]) -> list[str]:
    """Lines about upper limits of worst cases that are above those of the gate.

    Raises:
        InvalidRequestError: a metric of the gate has nothing to read in these texts.
    """
    said = []
    for metric, limit in gate.items():
        for each in found:
            if metric not in each.worst:
                raise InvalidRequestError(
                    f"--fail-above {metric}={limit:g} cannot be judged: the texts that were read "
                    f"have no {metric}"
                )
            worst = each.worst[metric]
            if worst.share.high > limit:
                said.append(
                    f"{each.transform}: {metric}: up to {100 * worst.share.high:.1f} % can be read "
                    f"(most by {worst.attacker}), allowed: {100 * limit:.1f} %"
                )
    return said


def _transform(each: Audited) -> dict[str, Any]:
    return {
        "transform": each.transform,
        "attackers": [
            {
                "attacker": read.attacker,
                "needs": read.knows,
                "seconds": read.seconds,
                "shares": {name: share.as_json() for name, share in read.shares.items()},
                "advantage": read.advantage,
            }
            for read in each.reads
        ],
        "not_applicable": each.left_out,
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

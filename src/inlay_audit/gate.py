"""A gate: bounds that an audit must keep to, from words of the command line or from a file."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from inlay.base.errors import InvalidRequestError
from inlay_audit.attackers import ALL
from inlay_audit.run import Audited
from inlay_audit.score import METRICS
from inlay_tools.files import read


class Gate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Bounds of an audit; the keys of a file have hyphens or underscores.

    Attributes:
        fail_above: share from 0 to 1 by metric, above which the upper limit of the worst case may
            not be.
        answers_kept_at_least: share of answers that must stay the same; unset: any.
        least_texts: texts that must have been read.
        attackers_required: that must have run, or said that they do not apply.
    """

    fail_above: dict[str, float] = {}
    answers_kept_at_least: float | None = None
    least_texts: int = 0
    attackers_required: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str], path: Path | None) -> "Gate":
        """The gate of `--thresholds` with that of `--fail-above`, whose words go first.

        Raises:
            InvalidRequestError: no such metric or attacker, or no share.
            FileError: the file cannot be read.
        """
        gate = cls() if path is None else _read(path)
        return msgspec.structs.replace(gate, fail_above={**gate.fail_above, **_limits(words)})

    def unjudged(self, found: Sequence[Audited], texts: int) -> list[str]:
        """Reasons why the findings are too few to be judged, a line each."""
        said = []
        if texts < self.least_texts:
            said.append(f"{texts} texts were read, least-texts is {self.least_texts}")
        for each in found:
            if self.fail_above and each.untried:
                said.append(f"{each.transform}: no attacker read a row in time (--budget)")
            ran = {read.attacker for read in each.reads if read.texts == each.texts}
            missing = [
                name for name in self.attackers_required if name not in ran | set(each.left_out)
            ]
            if missing:
                names = ", ".join(missing)
                said.append(
                    f"{each.transform}: {names} did not run to the end (--attackers, --budget)"
                )
            if self.answers_kept_at_least is not None and each.answers is None:
                said.append(f"{each.transform}: answers were not compared (--answers, --url)")
            said += [
                f"{each.transform}: the texts that were read have no {metric}"
                for metric in self.fail_above
                if metric not in each.worst
            ]
        return said

    def failures(self, found: Sequence[Audited]) -> list[str]:
        """Bounds that are passed, a line each."""
        said = []
        for each in found:
            for metric, limit in self.fail_above.items():
                worst = each.worst.get(metric)
                if worst is not None and worst.share.high > limit:
                    said.append(
                        f"{each.transform}: {metric}: up to {100 * worst.share.high:.1f} % can be "
                        f"read (most by {worst.attacker}), allowed: {100 * limit:.1f} %"
                    )
            least = self.answers_kept_at_least
            if least is not None and each.answers is not None and each.answers.same.value < least:
                kept = 100 * each.answers.same.value
                said.append(
                    f"{each.transform}: {kept:.1f} % of answers stay, least: {100 * least:.1f} %"
                )
        return said


def _read(path: Path) -> Gate:
    try:
        found = yaml.safe_load(read(path)) or {}
        if isinstance(found, dict):
            found = {str(key).replace("_", "-"): value for key, value in found.items()}
        gate = msgspec.convert(found, Gate)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise InvalidRequestError(f"--thresholds {path}: {error}") from error
    for metric, limit in gate.fail_above.items():
        _check(f"--thresholds {path}: fail-above", metric, limit)
    least = gate.answers_kept_at_least
    if least is not None and not 0 <= least <= 1:
        raise InvalidRequestError(
            f"--thresholds {path}: answers-kept-at-least is a share from 0 to 1, got {least:g}"
        )
    unknown = [name for name in gate.attackers_required if name not in ALL]
    if unknown:
        raise InvalidRequestError(
            f"--thresholds {path}: no attacker {unknown[0]!r}; there are {', '.join(ALL)}"
        )
    return gate


def _limits(words: Sequence[str]) -> dict[str, float]:
    found = {}
    for word in words:
        metric, _, number = word.partition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = float("nan")
        _check(f"--fail-above {word}", metric, limit)
        found[metric] = limit
    return found


def _check(where: str, metric: str, limit: float) -> None:
    if metric not in METRICS or not 0 <= limit <= 1:
        raise InvalidRequestError(
            f"{where}: it is METRIC=SHARE, with a metric of {', '.join(METRICS)} and a share from "
            "0 to 1"
        )

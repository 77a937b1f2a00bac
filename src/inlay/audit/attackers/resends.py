"""The same text sent again: chat histories, retries, samples. Fresh noise averages out."""

from collections.abc import Sequence

import numpy as np

from inlay.audit.attacker import Attacker, Known, Knows, NotApplicableError, Sent
from inlay.audit.prompts import Ids


class Averaged:
    """The mean of all times that a prompt was sent, read by another attacker."""

    def __init__(self, name: str, inner: Attacker) -> None:
        self.name = name
        self._inner = inner
        self.knows: Knows = inner.knows

    def fit(self, known: Known) -> None:
        """Fit the other attacker. Raises `NotApplicableError` as it does, or without new noise."""
        if known.send is None:
            raise NotApplicableError("no prompt was sent twice")
        again = known.send()
        if all(
            mine.shape == other.shape and np.array_equal(mine, other)
            for mine, other in zip(known.sent, again, strict=True)
        ):
            raise NotApplicableError("the same text always has the same rows")
        if not all(
            mine.shape == other.shape for mine, other in zip(known.sent, again, strict=True)
        ):
            raise NotApplicableError("the same text has another number of rows each time")
        self._inner.fit(known)

    def guess(self, sent: Sent) -> Sequence[Ids]:
        """Tokens read from the means."""
        if not sent.resends:
            raise NotApplicableError("no prompt was sent twice")
        means = [
            np.mean(np.stack(times), axis=0) for times in zip(sent.rows, *sent.resends, strict=True)
        ]
        return self._inner.guess(Sent(means))

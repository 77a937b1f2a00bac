"""Progress of loading weights, as log lines that suit terminals and files alike."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils.logging import set_tqdm_hook

from inlay.tensors.table import stored_tensors

_logger = logging.getLogger(__name__)

SECONDS = 3.0
"""Seconds between two lines."""

_LOADING = "Loading weights"
"""Description of the loop that reads weights in transformers (5.16 to 5.23)."""


class Progress:
    """Counts the bytes of a checkpoint while they are loaded.

    Args:
        sizes: bytes of each tensor, by its name in the checkpoint.
        tell: receives a line, at most every `SECONDS`, and at the end if it was called before.
        clock: returns seconds.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes = sizes
        self._tell = tell
        self._clock = clock

    def over(self, items: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the items of `items`, one for each loaded parameter.

        The time between two items is the loading of the first.
        """
        total = sum(self._sizes.values())
        known = {name: self._sizes[name] for name in items if name in self._sizes}
        # Parameters made of several tensors share the remaining bytes.
        other = (total - sum(known.values())) / max(1, len(items) - len(known))
        begun = last = self._clock()
        done = 0.0
        for name, item in items.items():
            yield name, item
            done += known.get(name, other)
            now = self._clock()
            if now - last >= SECONDS:
                last = now
                self._tell(
                    f"loading weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB, "
                    f"{done / max(1, total):.0%}"
                )
        if last > begun:
            self._tell(
                f"loaded {total / 1e9:.1f} GB of weights in {self._clock() - begun:.0f} s; "
                "preparing them"
            )


@contextmanager
def log_progress(directory: Path) -> Iterator[None]:
    """Log transformers' loading of the weights in `directory` within this context."""
    progress = Progress(
        {tensor.name: tensor.nbytes for tensor in stored_tensors(directory)}, _logger.info
    )

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") != _LOADING or not args:
            return factory(*args, **kwargs)
        return progress.over(dict(args[0]))

    before = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(before)

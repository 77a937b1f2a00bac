"""Named arrays of each prompt, as payloads between worker and frontend.

A bundle has `dense` or `labels` [n], `tokens` or `token_labels` [positions, n], and of sparse
vectors `sparse.indices` and `sparse.values` [k], by ascending index. A payload has those of all
prompts, one after the other; where their lengths differ, a port `NAME.counts` has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from inlay.base.errors import EngineError
from inlay.embedding.cache import Bundle
from inlay.messages.prompt import Buffer
from inlay.messages.request import PORTS, Payload, Task

STACKED = ("dense", "labels")
"""Outputs with one vector of each input; others have one of each position, or are sparse."""

COUNTS = ".counts"

FIRST_PORTS = {"dense": PORTS[Task.EMBED], "labels": PORTS[Task.SCORE]}
"""Ports of what a request gets that names no outputs."""


def payloads_of(bundles: Sequence[Bundle], ports: Mapping[str, str]) -> tuple[Payload, ...]:
    """Return the payloads of bundles that all have the same names.

    Args:
        bundles: of the prompts, in order; at least one.
        ports: port of a name in the place of the name itself.
    """
    found = []
    for name in bundles[0]:
        arrays = [bundle[name] for bundle in bundles]
        if name in STACKED:
            found.append(_payload(ports.get(name, name), np.stack(arrays)))
            continue
        found.append(_payload(name, np.concatenate(arrays)))
        counts = np.array([len(array) for array in arrays], np.int32)
        found.append(_payload(name + COUNTS, counts))
    return tuple(found)


def bundles_of(
    payloads: Sequence[Payload], count: int, names: Sequence[str], ports: Mapping[str, str]
) -> list[Bundle]:
    """Return the bundles of `count` prompts.

    Args:
        payloads: of a request that has ended.
        count: number of prompts.
        names: outputs that must be there.
        ports: as for `payloads_of`.

    Raises:
        EngineError: one is missing, or its sizes are not those of the prompts.
    """
    arrays = {payload.port: _array(payload) for payload in payloads}
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in names:
        parts = ("sparse.indices", "sparse.values") if name == "sparse" else (name,)
        for part in parts:
            array = arrays.get(ports.get(part, part))
            if array is None:
                raise EngineError(f"the worker ended the request without {ports.get(part, part)}")
            if name in STACKED:
                rows = list(array)
            else:
                counts = arrays.get(part + COUNTS, np.zeros(0, np.int32))
                if counts.sum() != len(array):
                    raise EngineError(f"the worker's {part} are not as many as it says")
                rows = np.split(array, np.cumsum(counts)[:-1])
            if len(rows) != count:
                raise EngineError(f"the worker gave {part} of {len(rows)} prompts, not {count}")
            for bundle, row in zip(found, rows, strict=True):
                bundle[part] = row
    return list(found)


def parts_of(bundle: Bundle, name: str) -> Bundle:
    """Return the arrays of one output."""
    return {key: array for key, array in bundle.items() if key.partition(".")[0] == name}


def _payload(port: str, array: "np.ndarray[Any, Any]") -> Payload:
    own = np.ascontiguousarray(array)
    # Memory without an element cannot be viewed as bytes.
    return Payload(port, str(own.dtype), own.shape, Buffer(own.data if own.size else b""))


def _array(payload: Payload) -> "np.ndarray[Any, Any]":
    return np.frombuffer(payload.data.view, payload.dtype).reshape(payload.shape)

"""What a small request waits, and what memory a server takes, while somebody sends it hostile files without a pause.

The files are those of `tests/security`: each is refused, one after the other, over and over. In turns with that nothing is sent, or, in its place, well-made
prompts of the same size as most of the files: what being busy costs by itself.

    python -m benchmarks.attacks [--seconds 4] [--rounds 3]
"""

import argparse
import contextlib
import json
import warnings
from base64 import b64encode

import numpy as np
from tests.frontend.payloads import HIDDEN
from tests.models import tiny
from tests.security.test_hostile_files import BOMBS, FILES, made

from benchmarks import _serving, memory, stalls
from inlay.tensors import write


def hostile() -> list[bytes]:
    """A request with each file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        data = [*map(made, FILES), *(make() for make, _ in BOMBS.values())]
    return [json.dumps({"model": "m", "max_tokens": 1, "prompt_embeds": one}).encode() for one in data]


def well_made() -> list[bytes]:
    """A request with four rows."""
    rows = b64encode(write(np.full((4, HIDDEN), 0.5, np.float32), "torch")).decode()
    return [json.dumps({"model": "m", "max_tokens": 1, "prompt_embeds": rows}).encode()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    files = hostile()
    turns = {"quiet": ([], 200), "attacked": (files, 400), "busy": (well_made(), 200)}
    found: dict[tuple[str, str], stalls.Found] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_serving.inlay(tiny("llama")))
        bystander = stack.enter_context(stalls.sink_at(0))
        for bodies, status in turns.values():
            with stalls.arriving(server.port if bodies else None, bodies, status):
                stalls.small_requests(server, bystander, 2.0)
        for _ in range(options.rounds):
            for turn, (bodies, status) in turns.items():
                with (
                    memory.Watch(server) as watch,
                    stalls.arriving(server.port if bodies else None, bodies, status) as sent,
                ):
                    small = stalls.small_requests(server, bystander, options.seconds)
                before = found.get(("inlay", turn), stalls.Found([], 0))
                found["inlay", turn] = stalls.Found([*before.rounds, small], before.num_large + sum(sent))
                print(
                    f"{turn:8} front process {watch.front / memory.MIB:+.1f} MiB, others {watch.others / memory.MIB:+.1f} MiB",
                    flush=True,
                )
    print(f"a small request while {len(files)} hostile files are sent again and again: ms")
    stalls.show(found)


if __name__ == "__main__":
    main()

"""The store of prompt embeddings.

Uploads, repeated references, spills and read-backs, over one memcpy of the tensor.

    python -m benchmarks.store [--mib 10] [--dtype bfloat16]

A tensor of 10 MiB with rows of 2048 elements, unless told otherwise. Ratios of medians in one
process; a memcpy is one into memory that is already mapped.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by it)
import numpy as np

from benchmarks._options import parser_of
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.store import PromptStore, Target
from inlay.tensors import ReadLimits, read, write

MIB = 1024 * 1024
HIDDEN = 2048


def median(
    request: Callable[[], object], before: Callable[[], object] = lambda: None, rounds: int = 15
) -> float:
    """Seconds."""
    times = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        request()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args()
    dtype = np.dtype(arguments.dtype)
    num_rows = arguments.mib * MIB // (HIDDEN * dtype.itemsize)
    array = np.random.default_rng(0).standard_normal((num_rows, HIDDEN), np.float32).astype(dtype)
    data = write(array, "safetensors")
    tensor = read(data, limits=ReadLimits(max_bytes=len(data)))
    secret, capacity = Secret.random(), 4 * len(data)
    same = Target(hidden_size=HIDDEN, dtype=arguments.dtype, max_abs=100.0)
    cast = Target(
        hidden_size=HIDDEN,
        dtype="float16" if arguments.dtype != "float16" else "bfloat16",
        max_abs=100.0,
    )

    target, source = np.ones(len(tensor.data), np.uint8), np.frombuffer(tensor.data.view, np.uint8)
    memcpy = median(lambda: np.copyto(target, source), rounds=50)
    print(
        f"{arguments.mib} MiB of {arguments.dtype}, {num_rows} rows; memcpy {memcpy * 1e3:.2f} ms"
    )

    def report(name: str, seconds: float) -> None:
        print(f"{name:58} {seconds * 1e3:9.3f} ms {seconds / memcpy:9.3f} memcpys")

    store = PromptStore(secret, memory_bytes=capacity, ttl=3600)

    def put(into: PromptStore) -> str:
        return into.put("tenant", Buffer(data), tensor).id

    def forget() -> None:
        if store.stats().count:
            store.delete("tenant", id_)

    id_ = put(store)
    report("put, new", median(lambda: put(store), before=forget))
    report("put, the same bytes again", median(lambda: put(store)))

    def afresh() -> None:
        forget()
        put(store)

    report(
        "first use: checks, digests", median(lambda: store.rows("tenant", id_, same), before=afresh)
    )
    report(
        "first use in another dtype: checks, cast, digests",
        median(lambda: store.rows("tenant", id_, cast), before=afresh),
    )
    store.rows("tenant", id_, cast)
    report("repeated use, cast kept", median(lambda: store.rows("tenant", id_, cast), rounds=1000))
    store.rows("tenant", id_, same)
    report(
        "repeated use: get and rows",
        median(lambda: (store.get("tenant", id_), store.rows("tenant", id_, same)), rounds=1000),
    )
    report("repeated use: ready", median(lambda: store.ready("tenant", id_, same), rounds=1000))
    store.close()

    for name, key in (("", None), (", sealed", bytes(32))):
        with tempfile.TemporaryDirectory() as room:
            on_disk = PromptStore(
                secret,
                memory_bytes=0,
                disk_bytes=capacity,
                directory=Path(room) / "store",
                ttl=3600,
                encryption_key=key,
            )

            def remove(store: PromptStore = on_disk) -> None:
                if store.stats().count:
                    store.delete("tenant", id_)

            report(f"put to disk, synced{name}", median(partial(put, on_disk), before=remove))
            on_disk.rows("tenant", id_, same)
            report(f"read back{name}", median(partial(on_disk.rows, "tenant", id_, same)))
            on_disk.close()


if __name__ == "__main__":
    main()

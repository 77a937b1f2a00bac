"""What memory a prompt of embeddings takes on its way in, over the bytes of its tensor.

A fresh server is asked for several of one size at once, and the kernel's high-water marks say what
its processes took beyond what they had before. Of inlay, the memory that frontend and worker share
is counted once, with the frontend.

    python -m benchmarks.memory [--mb 64] [--at-once 1 2 4] [--forms value multipart]
"""

import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from benchmarks import _serving
from benchmarks._options import parser_of
from benchmarks._serving import HIDDEN, Server, rows_of, takes
from benchmarks.cached_prompt import Form, forms_of

MIB = 1 << 20


def _status(pid: int, field: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


class Watch:
    """Peak memory of a server's processes while a block runs.

    Attributes:
        front: bytes by which the resident memory of the process that takes requests grew.
        others: bytes by which the private memory of all its other processes together grew, looked
            at every 5 ms.
    """

    def __init__(self, server: Server) -> None:
        self._front = server.pids[0]
        self._others = [pid for pid in server.every_pid() if pid != self._front]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._before = (0, 0)
        self._most = 0
        self.front = self.others = 0

    def _private(self) -> int:
        return sum(_status(pid, "RssAnon") for pid in self._others)

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, self._private())

    def __enter__(self) -> "Watch":
        # 5 resets the high-water mark (proc(5)).
        Path(f"/proc/{self._front}/clear_refs").write_text("5", encoding="ascii")
        self._before = (_status(self._front, "VmRSS"), self._private())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.front = _status(self._front, "VmHWM") - self._before[0]
        self.others = self._most - self._before[1]

    def left(self) -> int:
        """Bytes by which the resident memory of the process that takes requests is larger now than before the block."""
        return _status(self._front, "VmRSS") - self._before[0]


def ask_at_once(server: Server, form: Form, count: int) -> None:
    """Send `form` on `count` connections; raises when one is refused."""
    failures: list[str] = []

    def ask() -> None:
        status, answer = server.post("/v1/completions", form.body, form.content_type)
        if status != 200:
            failures.append(f"{status} {answer[:300]!r}")

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"{server.name}: {failures[0]}")


@dataclass(frozen=True)
class Growth:
    """What prompts took.

    Attributes:
        front: bytes of the process that takes requests.
        share: the same over the bytes of the prompts' tensors.
        others: bytes of the private memory of all its other processes.
    """

    front: int
    share: float
    others: int


def growth(
    server: Server, table: torch.Tensor, megabytes: int, form: str = "value", at_once: int = 1
) -> Growth | None:
    """Of a fresh server that is asked `at_once` prompts of so many megabytes.

    None where it has no such form.
    """
    rows = rows_of(megabytes)
    forms = forms_of(server, table, rows, stored=False)
    if form not in forms:
        return None
    for _ in range(5):
        server.post("/v1/completions", b'{"model": "m", "prompt": [3, 4, 5], "max_tokens": 1}')
    time.sleep(1)
    with Watch(server) as watch:
        ask_at_once(server, forms[form], at_once)
    return Growth(watch.front, watch.front / at_once / (rows * 2 * HIDDEN), watch.others)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--forms", nargs="+", default=["value", "multipart"])
    options = parser.parse_args()
    print("server   form       at once   front process   per tensor   its other processes")
    with TemporaryDirectory() as directory:
        model = _serving.wide_model(Path(directory) / "model")
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]

        def measure(launch: AbstractContextManager[Server] | None, form: str, at_once: int) -> None:
            if launch is None:
                return
            with launch as server:
                if not takes(server.name, rows_of(options.mb)):
                    return
                found = growth(server, table, options.mb, form, at_once)
                if found is not None:
                    print(
                        f"{server.name:8} {form:10} {at_once:7} {found.front / MIB:11.0f} MiB {found.share:11.2f}x "
                        f"{found.others / MIB:17.0f} MiB",
                        flush=True,
                    )

        for form in options.forms:
            for at_once in options.at_once:
                measure(_serving.inlay(model, *_serving.wide_limits(options.mb)), form, at_once)
                if form == "value":
                    measure(_serving.vllm(model, *_serving.VLLM_ARGUMENTS), form, at_once)
                    measure(_serving.dynamo(model, *_serving.VLLM_ARGUMENTS), form, at_once)


if __name__ == "__main__":
    main()

"""The same GGUF file by inlay and by llama.cpp, turn by turn in one run.

    python -m benchmarks.gguf MODEL.gguf --llama PYTHON      PYTHON of an environment with
                                                             llama-cpp-python, compiled natively
    python -m benchmarks.gguf MODEL.gguf --llama PYTHON --threads 2 --rounds 5
    python -m benchmarks.gguf MODEL.gguf --llama PYTHON --starts 3     loading alone
    python -m benchmarks.gguf MODEL.gguf --llama PYTHON --text FILE    perplexity and KL alone
    python -m benchmarks.gguf --products                     products alone, without a model

Prints CPU seconds a thread (other work on the machine adds less to them than to seconds of a
clock), the least of all rounds, and llama.cpp's over ours: above 1, inlay takes less. Steps of
llama.cpp are without sampling, ours with it. Memory is that of the process: all, and what is not
of mapped files. Loading is without imports, ours as of a second start, with and without the check
of the model's numbers, which llama.cpp has not; right before it memory is given back, as virtual
machines have to ask their host for it, at a second for a gigabyte.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # what torch imports for its first tensor on meta

from benchmarks.engine import Ours, prompt
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native.integers import integers
from inlay.engine.torch.quality import logprobs
from inlay.engine.torch.threads import environment
from inlay.tensors.blocks import TYPES
from inlay_tools.model_check import WINDOW, windows_of

CASES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("decode", (1, 24)), ("decode", (8, 8)), ("decode", (32, 6)), ("prompt", (512,)),
    ("prompt", (2048,)),
)  # fmt: skip


class Peer:
    """The model in inlay's engine; what it answers is as of `_llama_cpp.Peer`."""

    def __init__(self, path: str, threads: int, self_check: str = "start") -> None:
        settings = EngineSettings.of(
            model=path, device="cpu", num_threads=threads, max_model_len=4096,
            self_check=self_check,
        )  # fmt: skip
        self.model = CausalModel.load(settings)
        self._engine = Ours(Path(path), threads, 32, 8192, model=self.model)

    def decode(self, batch: int, steps: int) -> dict[str, float]:
        self._engine.begin([prompt(16, index) for index in range(batch)])
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._engine.core.step()
        found = {
            "wall": (time.perf_counter() - begun) / steps,
            "cpu": (time.process_time() - cpu) / steps,
        }
        self._engine.core.abort_all()
        return found

    def prompt(self, tokens: int) -> dict[str, float]:
        begun, cpu = time.perf_counter(), time.process_time()
        self._engine.load([(prompt(tokens, tokens), 1)])
        return {"wall": time.perf_counter() - begun, "cpu": time.process_time() - cpu}


def quality(path: str, text: str, llama: "Process | None") -> None:
    """Print perplexity and KL of a text: exact, with activations of eight bits, llama.cpp."""
    windows = windows_of(path, text)
    settings = {"device": "cpu", "max_model_len": 512, "self_check": "off", "dtype": "float32"}
    models = {
        activations: CausalModel.load(
            EngineSettings.of(model=path, activations=activations, **settings)
        )
        for activations in ("exact", "int8")
    }
    sums, divergence, equal, count = dict.fromkeys([*models, "llama.cpp"], 0.0), 0.0, 0, 0
    for window in windows:
        found = {name: logprobs(model, window)[:-1] for name, model in models.items()}
        nexts = torch.tensor(window[1:])[:, None]
        for name, own in found.items():
            sums[name] -= float(own.gather(1, nexts).sum())
        exact, ours = found["exact"], found["int8"]
        divergence += float((exact.exp() * (exact - ours)).sum())
        equal += int((exact.argmax(-1) == ours.argmax(-1)).sum())
        count += len(nexts)
        if llama is not None:
            sums["llama.cpp"] -= sum(llama.ask("scores", window)["logprobs"])
    print(f"{count} tokens in windows of {WINDOW}, float32")
    base = sums["exact"]
    for name in [*models, *(["llama.cpp"] if llama else [])]:
        own = torch.tensor(sums[name] / count).exp()
        loss = torch.tensor((sums[name] - base) / count).expm1()
        print(f"  {name:10} perplexity {float(own):8.4f}  {float(loss):+.3%}")
    print(f"  int8: KL {divergence / count:.5f} nats a token, same first token {equal / count:.4f}")


class Process:
    """A peer in a process of its own."""

    def __init__(self, command: list[str], memory: int = 0) -> None:
        """Start it, and have it load once it has imported all and `memory` bytes are free."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, **environment(os.environ)},
        )  # fmt: skip
        self._answer()
        with mmap.mmap(-1, memory + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            held.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, memory, mmap.PAGESIZE):
                held[at] = 1
        self.started = self.ask("load")

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def memory(self) -> dict[str, float]:
        """Megabytes resident: all, and those that are not of files."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        names = {"rss": "VmRSS", "own": "RssAnon"}
        return {name: int(found[key].split()[0]) / 1e3 for name, key in names.items()}

    def ask(self, *words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return self._answer()


def serve(path: str, threads: int, self_check: str) -> None:
    """Answer lines of the benchmark."""
    print("{}", flush=True)
    sys.stdin.readline()
    begun, cpu = time.perf_counter(), time.process_time()
    peer = Peer(path, threads, self_check)
    took = {"wall": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    print(json.dumps(took), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, name)(*arguments)), flush=True)


def products(shapes: tuple[str, ...] = ("Q4_K:1536:8960", "Q6_K:8960:1536")) -> None:
    """Print the time of a product by rows, its weights rotated through more than the caches."""
    native = integers()
    if native is None:
        raise SystemExit("there are no products in integers here")
    torch.set_num_threads(1)
    for name, inputs, outputs in (shape.split(":") for shape in shapes):
        kind, columns, rows = TYPES[name], int(inputs), int(outputs)
        raw = torch.randint(
            0, 60, (rows * columns // kind.elements, kind.nbytes), dtype=torch.uint8
        )
        one = native.panels(kind.number, [raw.view(rows, -1)], rows, columns)
        copies = [one._replace(data=one.data.clone()) for _ in range(12)]
        for count in (1, 2, 4, 8, 32, 512):
            x, best = torch.randn(count, columns), float("inf")
            for _ in range(5):
                begun = time.thread_time()
                for panels in copies:
                    native.product(x, [panels], None)
                best = min(best, (time.thread_time() - begun) / len(copies))
            print(
                f"  {name} {columns} x {rows}, {count:3} rows: {best * 1e3:7.3f} ms, "
                f"{2 * count * columns * rows / best / 1e9:4.0f} GOP/s, "
                f"{one.data.nbytes / best / 1e9:5.1f} GB/s"
            )


def compare(model: str, ours: Process, theirs: Process, threads: int, rounds: int) -> None:
    """Print the least CPU seconds of each case, taken in turns."""
    print(
        f"{Path(model).name}, {threads} threads, least of {rounds}, load {os.getloadavg()[0]:.1f}"
    )
    for label, peer in (("inlay", ours), ("llama.cpp", theirs)):
        took = peer.started
        print(f"  {label} loads in {took['wall']:.1f} s, {took['cpu']:.1f} of CPU")
    for name, arguments in CASES:
        found: list[list[float]] = [[], []]
        for _ in range(rounds):
            for peer, own in zip((ours, theirs), found, strict=True):
                own.append(peer.ask(name, *arguments)["cpu"] / threads)
        one, two = (min(own) for own in found)
        print(
            f"  {name} {arguments[0]:5}: {one * 1e3:9.1f} ms, llama.cpp {two * 1e3:9.1f} ms: {two / one:5.2f}",
            flush=True,
        )
    for label, peer in (("inlay", ours), ("llama.cpp", theirs)):
        held = peer.memory()
        print(f"  {label}: {held['rss']:.0f} MB resident, {held['own']:.0f} of them not of files")


def starts(model: str, commands: dict[str, list[str]], rounds: int) -> None:
    """Print the time to load, of the clock and of CPUs, taken in turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for turn in range(1 + rounds):
        for name, command in commands.items():
            process = Process(command, 2 * Path(model).stat().st_size)
            process.end()
            # The first start is not one that a user sees again.
            found[name] += [process.started] if turn else []
    for kind in ("wall", "cpu"):
        least = {name: min(each[kind] for each in own) for name, own in found.items()}
        named = ", ".join(
            f"{name} {seconds:.2f} s ({seconds / least['llama.cpp']:.2f})"
            for name, seconds in least.items()
        )
        print(f"  loads ({kind}, least of {rounds}): {named}")


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--llama")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--serve", choices=("start", "off"))
    asked = parser.parse_args()
    if asked.products:
        return products()
    if not asked.model:
        raise SystemExit("name a GGUF file")
    if asked.serve:
        return serve(asked.model, asked.threads, asked.serve)
    model, threads = asked.model, str(asked.threads)
    own = [sys.executable, "-m", "benchmarks.gguf", model, "--threads", threads, "--serve"]
    checked, unchecked = [*own, "start"], [*own, "off"]
    peer = [asked.llama, str(Path(__file__).with_name("_llama_cpp.py")), model, threads]
    if asked.text:
        theirs = Process(peer) if asked.llama else None
        return quality(model, asked.text.read_text(), theirs)
    if not asked.llama:
        raise SystemExit("--llama: name the Python of an environment with llama-cpp-python")
    if asked.starts:
        ours = {"inlay": checked, "without its check": unchecked}
        return starts(model, {**ours, "llama.cpp": peer}, asked.starts)
    return compare(model, Process(checked), Process(peer), asked.threads, asked.rounds)


if __name__ == "__main__":
    main()

"""Where a step of the torch engine goes.

A decoding one beside the machine's bandwidth, or a whole prompt beside its peak of products.

    python -m benchmarks.engine_profile                    a random model of Qwen3-0.6B's shape in bfloat16, batch 1
    python -m benchmarks.engine_profile --layers 4 --batch 32 --contexts 64 512
    python -m benchmarks.engine_profile --loras 4          adapters in every linear, dealt out to the sequences in turn
    python -m benchmarks.engine_profile --layers 4 --prompts 512 4096
                                                           prompts, read in 2,048 positions at a
                                                           time; with BENCH_VLLM beside vLLM

One thread, CPU seconds of the process, the step that took least. It is taken in turns as it is,
with every product left to oneDNN, and, where there are adapters, with them in the native kernel and
in products of torch; a prompt only as it is. The time of a part is its own: what it calls and is
listed too is taken off.

Tried without gain (one thread, shape of Qwen3-0.6B):
- Attention: SDPA per sequence over gathered keys (945 us at 2,048 keys, two batched products 343);
  SDPA over padded buckets (116 ms against 73); the context before a chunk as a second product,
  merged by log-sum-exp (62 ms against 39); slices of keys instead of whole pages (379 us against
  58: the product copies them transposed); sums of a tile's product copied by `memcpy` (700 ms a
  layer against 300); the next 32 columns asked for beside each product (98 ms against 91).
- Linear layers: gate and up as oneDNN epilogues; `F.rms_norm` (4.8 ms against 0.7); AMX tiles for
  prompts, which oneDNN does as fast or faster; seven rows of a product at a time instead of six;
  inputs cut so that a panel's piece stays in the first cache (2 to 12% longer).
- Codes of 4 and 8 bits: torch's own products (slower from 8 rows on, int8 always); panels of 16
  outputs; half a panel for six rows; eight bits looked up by bytes or by halves.
- Logits: `aminmax` to find what is not finite (13.4 ms against 1.7); `argmax` of bfloat16.
"""

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import torch

from benchmarks._options import parser_of
from benchmarks._random_models import write_model
from benchmarks.engine import Ours, Vllm, bandwidth, gemm_peak, prompt
from inlay.engine.torch import lora, prompt_logprobs
from inlay.engine.torch.batch import Batch
from inlay.engine.torch.in_flight_step import InFlightStep
from inlay.engine.torch.lora import AdaptedLinear, LowRankPair
from inlay.engine.torch.native import Kernels, Products
from inlay.engine.torch.step import Core
from inlay.engine.torch.threads import environment
from inlay.engine.torch.weights.linear import RMSNorm
from inlay.engine.torch.weights.linear_methods import LinearMethod

Call = Callable[..., Any]


class Clock:
    """CPU seconds by part of a step."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, call: Call) -> Call:
        """`call`, whose own time is `name`'s."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = process_time()
            try:
                return call(*args, **kwargs)
            finally:
                took = process_time() - start
                self.seconds[name] += took - self._inner.pop()
                self._inner[-1] += took

        return run


@contextmanager
def watched(ours: Ours, clock: Clock) -> Iterator[None]:
    """Within it, steps are told apart by `clock`."""
    core = ours.core
    kernels = (
        "paged_attention",
        "prepare",
        "rms_norm",
        "silu_and_multiply",
        "argmax",
        "finite",
    )
    places: list[tuple[Any, str, str]] = [(Kernels, name, f"kernel {name}") for name in kernels]
    places += [
        (core.scheduler, "schedule", "scheduler"),
        (core.scheduler, "commit", "scheduler"),
        (Batch, "of", "batch"),
        (core.sampler, "draw", "sampler"),
        (prompt_logprobs, "score", "flight"),
        (InFlightStep, "read", "flight"),
        (core.model, "hidden", "layers, all else"),
        (core.model, "logits", "head, all else"),
        (lora.Selection, "of", "adapters, selection"),
    ]
    for name, module in core.model._model.named_modules():
        if isinstance(module, LinearMethod):
            places.append((module, "forward", f"product {kind_of(name)}"))
        elif isinstance(module, AdaptedLinear):
            places.append((module, "_add", "adapters"))
        elif isinstance(module, RMSNorm):
            places.append((module, "forward", "norms, Python"))
    with ExitStack() as stack:
        for owner, attribute, name in places:
            stack.enter_context(
                patch.object(owner, attribute, clock.timed(name, getattr(owner, attribute)))
            )
        yield


def kind_of(path: str) -> str:
    """Which of a layer's products a module at `path` is."""
    kinds = {
        "_project": "qkv",
        "_out": "out",
        "_gate_up": "gate and up",
        "_down": "down",
        "lm_head": "head",
    }
    return next((kind for part, kind in kinds.items() if part in path.split(".")), "other")


@dataclass
class Variant:
    """A way to take a step.

    Attributes:
        name: of its columns.
        ours: the engine.
        adapters: dealt out to the sequences.
        native_positions: up to which adapters go through the native kernel.
        whole: seconds of a step that nobody watches, the least.
        parts: seconds of the parts of the watched step that took least.
    """

    name: str
    ours: Ours
    adapters: Sequence[str] = ()
    native_positions: int = lora.NATIVE_POSITIONS
    whole: float = float("inf")
    parts: dict[str, float] | None = None

    def take(self, prompts: list[list[int]], steps: int) -> None:
        """Some steps watched and some not."""
        with patch.object(lora, "NATIVE_POSITIONS", self.native_positions):
            self._take(prompts, steps)

    def read_in(self, ids: list[int]) -> None:
        """One prompt unwatched and watched."""
        self.whole = min(self.whole, self.ours.load([(ids, 1)]))
        clock = Clock()
        with watched(self.ours, clock):
            clock.timed("step, all else", self.ours.load)([(ids, 1)])
        self._keep(clock)

    def _take(self, prompts: list[list[int]], steps: int) -> None:
        core = self.ours.core
        self.ours.begin(prompts, self.adapters)
        for _ in range(steps):
            start = process_time()
            core.step()
            self.whole = min(self.whole, process_time() - start)
        clock = Clock()
        with watched(self.ours, clock):
            for _ in range(steps):
                clock.seconds.clear()
                clock.timed("step, all else", core.step)()
                self._keep(clock)
        core.abort_all()

    def _keep(self, clock: Clock) -> None:
        if self.parts is None or sum(clock.seconds.values()) < sum(self.parts.values()):
            self.parts = dict(clock.seconds)


def put_adapters(core: Core, count: int, rank: int) -> list[str]:
    """Put random adapters in every linear; return their names."""
    bank = core.model.lora
    assert bank is not None
    names = []
    for index in range(count):
        lows = {
            name: LowRankPair(
                (torch.randn(rank, inputs) / inputs).bfloat16(),
                (torch.randn(rank, outputs) / rank).bfloat16(),
            )
            for name, (outputs, inputs) in bank.shapes().items()
        }
        names.append(f"adapter-{index}")
        core.adapters.put(names[-1], f"{index:032x}", lows)
    return names


def sizes_of(ours: Ours, batch: int, context: int) -> dict[str, int]:
    """Bytes each part that reads weights, keys or values reads."""
    found: defaultdict[str, int] = defaultdict(int)
    for name, module in ours.model._model.named_modules():
        if isinstance(module, LinearMethod):
            found[f"product {kind_of(name)}"] += module.nbytes
    found["kernel paged_attention"] = batch * context * ours.model.page_bytes(1)
    return found


def flops_of(ours: Ours, positions: int) -> dict[str, int]:
    """FLOPs of each part of a prompt of `positions` that forms products.

    A position sees half of them on average.
    """
    found: defaultdict[str, int] = defaultdict(int)
    for name, module in ours.model._model.named_modules():
        if isinstance(module, LinearMethod):
            kind = kind_of(name)
            # Two FLOPs for each weight of two bytes; the head sees the last position only.
            found[f"product {kind}"] += module.nbytes * (1 if kind == "head" else positions)
    query_heads, size = 16, 128
    # Of scores and of values.
    seen = positions * positions
    found["kernel paged_attention"] = 2 * len(ours.model.layers) * query_heads * size * seen
    return found


def report(
    variants: Sequence[Variant], sizes: dict[str, int], speed: float, unit: str = "B"
) -> None:
    """`sizes` of the parts and `speed` a second, in `unit`."""
    out = sys.stdout.write
    out(
        f"{f'ms, share of the step, G{unit}/s':28}"
        + "".join(f"{variant.name:>28}" for variant in variants)
        + "\n"
    )
    first = variants[0].parts or {}
    names = sorted(
        {name for variant in variants for name in variant.parts or {}},
        key=lambda name: -first.get(name, 0),
    )
    for name in names:
        out(f"{name:28}")
        for variant in variants:
            seconds = (variant.parts or {}).get(name, 0.0)
            share = seconds / sum((variant.parts or {"": 1.0}).values())
            read = f"{sizes[name] / seconds / 1e9:7.1f}" if name in sizes and seconds else f"{'':7}"
            out(f"{seconds * 1e3:>13.2f}{share:>8.1%}{read}")
        out("\n")
    floor = sum(sizes.values()) / speed
    for title, wholes in (
        ("watched", [sum((variant.parts or {}).values()) for variant in variants]),
        ("unwatched, share of floor", [variant.whole for variant in variants]),
    ):
        out(
            f"{title:28}"
            + "".join(f"{whole * 1e3:>13.2f}{floor / whole:>8.1%}{'':7}" for whole in wholes)
            + "\n"
        )
    out(
        f"floor: {sum(sizes.values()) / 1e6:.0f} M{unit} at {speed / 1e9:.1f} G{unit}/s, {floor * 1e3:.1f} ms\n"
    )


def profile_prompts(directory: Path, layers: int, lengths: Sequence[int], rounds: int) -> None:
    """Prompts of some lengths, beside vLLM where BENCH_VLLM names its Python."""
    room = max(lengths) + 2048
    ours = Ours(directory, 1, 32, room)
    python = os.environ.get("BENCH_VLLM")
    vllm = Vllm(python, directory, 1, 32, room * ours.model.page_bytes(1)) if python else None
    for positions in lengths:
        variant = Variant("inlay", ours)
        ids, peak, theirs = prompt(positions, positions), 0.0, float("inf")
        for _ in range(rounds):
            peak = max(peak, gemm_peak())
            variant.read_in(ids)
            if vllm is not None:
                theirs = min(theirs, vllm.load([(ids, 1)]))
        sys.stdout.write(f"\nprompt of {positions}, {layers} layers\n")
        report([variant], flops_of(ours, positions), peak, "FLOP")
        if vllm is not None:
            sys.stdout.write(f"vLLM: {theirs * 1e3:.1f} ms, {theirs / variant.whole:.2f}x\n")
    if vllm is not None:
        vllm.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512])
    parser.add_argument(
        "--prompts", type=int, nargs="+", help="Lengths of whole prompts, in place of decoding."
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--loras", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    wanted = environment(os.environ)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # libgomp reads its environment when it is loaded, which has happened.
        module = [sys.executable, "-m", "benchmarks.engine_profile", *sys.argv[1:]]
        os.execve(sys.executable, module, {**os.environ, **wanted})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, options.layers)
        if options.prompts:
            profile_prompts(directory, options.layers, options.prompts, options.rounds)
            return
        positions = options.batch * (max(options.contexts) + 128) + 2048

        def load() -> Ours:
            return Ours(directory, 1, options.batch, positions, max_loras=options.loras)

        ours = load()
        with patch.object(Products, "product_rows", lambda *_: 0):
            peer = load()
    names = put_adapters(ours.core, options.loras, options.rank) if options.loras else []
    for context in options.contexts:
        variants = [Variant("inlay", ours), Variant("products by oneDNN", peer)]
        if names:
            variants.append(Variant(f"{len(names)} adapters", ours, names))
            variants.append(Variant("adapters by products", ours, names, native_positions=0))
        prompts = [prompt(context, index) for index in range(options.batch)]
        speed = 0.0
        for _ in range(options.rounds):
            speed = max(speed, bandwidth())
            for variant in variants:
                variant.take(prompts, options.steps)
        sys.stdout.write(f"\nbatch {options.batch}, context {context}, {options.layers} layers\n")
        report(variants, sizes_of(ours, options.batch, context), speed)


if __name__ == "__main__":
    main()

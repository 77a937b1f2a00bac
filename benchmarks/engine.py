"""The torch engine beside transformers' own loop and vLLM's engine, and how far each is from the machine's floors.

    python -m benchmarks.engine                     a random model of Qwen3-0.6B's shape in bfloat16
    python -m benchmarks.engine --layers 4 --rounds 3 --long
    python -m benchmarks.engine --only 'decode .* at 64|prefill 512'
    BENCH_VLLM=venv/bin/python python -m benchmarks.engine
    python -m benchmarks.engine --quantised --no-transformers
    python -m benchmarks.engine --quantised int4 --no-transformers --shape 4B --only 'decode 1 at 64'
    python -m benchmarks.engine --batch-invariant --no-transformers --layers 4

vLLM runs in the Python that `BENCH_VLLM` names, its engine's own loop without a server. All take
turns for `--rounds` rounds; the table shows the best of each, because what a shared machine adds to
a time is never negative. With one thread, times are each process's own CPU seconds. Floors: a
decode step must read every weight once (bytes over measured read bandwidth) and do its products, a
prompt must do these (FLOPs over the measured peak of a bfloat16 product).
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks._environment import ensure
from benchmarks._options import parser_of
from benchmarks._random_models import (
    HEAD_SIZE,
    SHAPES,
    VOCABULARY,
    Shape,
    write_model,
    write_quantised,
)
from inlay.engine.settings import EngineSettings
from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.loading import draft_source_of, speculator_of, usual_positions
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar, Request, Sampling

PAGE_SIZE = 32
QUANTISED = {"int8": (8, False), "int4": (4, False), "int4-and-head": (4, True)}
"""Bits of the weights, and whether the head has as many."""

LASTING = 256
"""Tokens a prompt that decodes may have.

Enough that the first still goes on when the last has been read in.
"""


_clock = time.process_time


CaseRequest = tuple[list[int], int]
"""Token ids of a prompt, and how many tokens are wanted."""


class Contender(Protocol):
    """An engine; both methods answer with seconds."""

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """A step in which every prompt gets its next token, mean of `steps`."""
        ...

    def load(self, requests: list[CaseRequest]) -> float:
        """All requests, sent at once, until the last has ended."""
        ...


@dataclass
class Case:
    """One workload: a step that decodes where there are `steps`, else whole requests.

    Attributes:
        name: of the line.
        requests: what is asked.
        items: tokens that count.
        floor: least time in seconds, or 0 where none is stated.
        positions: whose keys and values a step reads.
        steps: to decode, or None.
        alone: whether `transformers` cannot do it.
        times: seconds by contender.
    """

    name: str
    requests: list[CaseRequest]
    items: int
    floor: float
    positions: int = 0
    steps: int | None = None
    alone: bool = False
    times: dict[str, list[float]] = field(default_factory=dict)

    def run(self, contender: Contender) -> float:
        if self.steps is not None:
            return contender.decode([ids for ids, _ in self.requests], self.steps)
        return contender.load(self.requests)


def best_of(repeats: int, run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = _clock()
        run()
        best = min(best, _clock() - start)
    return best


def bandwidth() -> float:
    """Bytes a second that can be read, best of several."""
    data = torch.ones(256 << 18, dtype=torch.float32)
    return data.nbytes / best_of(6, lambda: data.sum())


def gemm_peak() -> float:
    """FLOPs a second of a bfloat16 product of a prompt's shape."""
    left = torch.randn(512, 1024).bfloat16()
    right = torch.randn(1024, 3072).bfloat16()
    return 2 * 512 * 1024 * 3072 / best_of(10, lambda: left @ right)


class Ours:
    """The engine's own loop: schedule, compute, sample, tell. Only its thread is left out."""

    def __init__(
        self,
        directory: Path,
        threads: int,
        max_num_seqs: int,
        num_positions: int,
        *,
        max_loras: int = 0,
        speculation: SpeculativeConfig | None = None,
        page_size: int = PAGE_SIZE,
        batch_invariant: bool | None = None,
        model: CausalModel | None = None,
    ) -> None:
        """An engine of its own, with the weights of `model` if there is one."""
        settings = EngineSettings.of(
            model=str(directory),
            dtype="bfloat16",
            device="cpu",
            num_threads=threads,
            enable_lora=max_loras > 0,
            max_loras=max(1, max_loras),
            batch_invariant=batch_invariant,
        )
        self.model = CausalModel.load(settings) if model is None else model
        bounds = EngineLimits(
            num_pages=num_positions // page_size,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            max_model_len=4608,
            # As it is served.
            usual_positions=usual_positions(
                len(self.model.layers), self.model.hidden_size, threads
            ),
        )
        source = None if speculation is None else draft_source_of(settings, speculation, self.model)
        self.core = Core(
            self.model,
            bounds,
            Secret.random(),
            prefix_caching=False,
            max_cpu_loras=max_loras,
            speculator=speculator_of(speculation, source, bounds, self.model),
        )
        self._works = 0
        self._grammar: Grammar | None = None
        self._grammars: Grammars | None = None

    def bind(self, grammar: Grammar | None, grammars: Grammars) -> None:
        """Hold all outputs from now on to `grammar`, or to none."""
        self._grammar, self._grammars = grammar, grammars

    def admit(self, ids: list[int], max_tokens: int, adapter: str | None = None) -> None:
        self._works += 1
        grammar, state = self._grammar, None
        if grammar is not None and self._grammars is not None:
            state = self._grammars.start(grammar, (), ()).state.result()
        sampling = Sampling(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, grammar=grammar
        )
        prompt = Prompt.of(Tokens(ids))
        request = Request(id=str(self._works), prompts=(prompt,), params=sampling, adapter=adapter)
        for delta in self.core.admit(request, grammar=state):
            raise RuntimeError(f"a work ended before it began: {delta}")

    def begin(self, prompts: list[list[int]], adapters: Sequence[str] = ()) -> None:
        """Read prompts in, with the adapters dealt out in turn, until each has its first token."""
        for index, ids in enumerate(prompts):
            self.admit(ids, LASTING, adapters[index % len(adapters)] if adapters else None)
        told: set[str] = set()
        while len(told) < len(prompts):
            told.update(delta.request_id for delta in self.core.step())

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        self.begin(prompts)
        start = _clock()
        for _ in range(steps):
            self.core.step()
        took = (_clock() - start) / steps
        self.core.abort_all()
        return took

    def load(self, requests: list[CaseRequest]) -> float:
        for ids, max_tokens in requests:
            self.admit(ids, max_tokens)
        start = _clock()
        while len(self.core):
            self.core.step()
        return _clock() - start


class Transformers:
    """The loop `generate` runs: sdpa attention, a dynamic cache, one forward a step, argmax."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> float:
        cache = DynamicCache()
        self.model(torch.tensor(prompts), past_key_values=cache, logits_to_keep=1)
        ids = torch.tensor(prompts)[:, -1:]
        start = _clock()
        for _ in range(steps):
            logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
        return (_clock() - start) / steps

    @torch.inference_mode()
    def load(self, requests: list[CaseRequest]) -> float:
        ((ids, _),) = requests
        start = _clock()
        self.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return _clock() - start


class Vllm:
    """vLLM's engine in a process of another Python (`benchmarks/_vllm_engine.py`)."""

    def __init__(
        self,
        python: str,
        directory: Path,
        threads: int,
        max_num_seqs: int,
        cache_bytes: int,
        max_model_len: int = 4608,
    ) -> None:
        """Start it; `threads` is 0 on a GPU, where it sizes its cache itself."""
        environment = {**os.environ}
        if threads:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(-(-cache_bytes >> 30))
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(threads)))
        script = Path(__file__).with_name("_vllm_engine.py")
        self._process = subprocess.Popen(
            [python, str(script), str(directory), *map(str, (threads, max_num_seqs, max_model_len))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        if self._answer() != "ready":
            raise RuntimeError(
                f"vLLM's engine did not start; {script.name} says why when it is run by hand"
            )

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _ask(self, *command: object) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        return self._ask("decode", prompts, steps)

    def load(self, requests: list[CaseRequest]) -> float:
        return self._ask("load", requests)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def prompt(length: int, index: int) -> list[int]:
    return [(11 * position + 7919 * index) % 151000 + 1 for position in range(length)]


def cases_of(weights: int, shape: Shape, layers: int, steps: int, *, long: bool) -> list[Case]:
    """Floors are in bytes of weights and in FLOPs here.

    `main` adds keys and values, and divides by what the machine does a second.
    """
    linear = weights - 2 * VOCABULARY * shape.hidden_size
    shapes = [(batch, context) for context in (64, 512) for batch in (1, 8, 32)]
    shapes += [(batch, 4096) for batch in (1, 8, 32)] if long else []
    found = [
        Case(
            f"decode {batch} at {context}",
            [(prompt(context, index), 0) for index in range(batch)],
            batch,
            float(weights),
            batch * context,
            steps,
        )
        for batch, context in shapes
    ]
    for length in (512, 2048, 4096) if long else (512, 2048):
        flops = length * linear + layers * 2 * shape.num_heads * HEAD_SIZE * length * length
        found.append(Case(f"prefill {length}", [(prompt(length, length), 1)], length, float(flops)))
    draw = random.Random(1)
    mixed = [
        (prompt(draw.randint(16, 512), 100 + index), draw.randint(8, 64)) for index in range(64)
    ]
    found.append(
        Case("64 mixed requests", mixed, sum(wanted for _, wanted in mixed), 0.0, alone=True)
    )
    return found


def report(cases: list[Case], names: list[str]) -> None:
    out = sys.stdout.write
    out(f"{'':20}{'floor':>11}" + "".join(f"{name:>28}" for name in names))
    out("".join(f"{'over ' + name:>19}" for name in names[1:]) + "\n")
    for case in cases:
        best = {name: min(times) for name, times in case.times.items()}
        cells = f"{case.name:20}" + (f"{case.floor * 1e3:>8.1f} ms" if case.floor else f"{'-':>11}")
        for name in names:
            if name in best:
                share = f"{case.floor / best[name]:>5.0%}" if case.floor else f"{'':5}"
                cells += f"{best[name] * 1e3:>11.1f} ms {case.items / best[name]:>6.1f}/s{share}"
            else:
                cells += f"{'-':>28}"
        for name in names[1:]:
            ratio = f"{best[name] / best['inlay']:.2f}x" if name in best else "-"
            cells += f"{ratio:>19}"
        out(cells + "\n")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="0.6B",
        help="Of Qwen3; 4B takes 8 GB and as much of disk.",
    )
    parser.add_argument("--layers", type=int, help="All of the shape's when not given.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--long", action="store_true", help="Contexts of 4096 too; take few layers for them."
    )
    parser.add_argument(
        "--only", default="", help="Cases whose name this regular expression finds."
    )
    parser.add_argument(
        "--quantised",
        nargs="*",
        choices=QUANTISED,
        help="Weights of these kinds, or of all, of the same shape, too.",
    )
    parser.add_argument(
        "--page-sizes", type=int, nargs="*", default=[], help="Pages of these sizes too, in turns."
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="With the flag too, beside without it."
    )
    parser.add_argument("--no-transformers", action="store_true", help="Leave transformers out.")
    options = parser.parse_args()
    ensure("benchmarks.engine")
    shape = SHAPES[options.shape]
    layers = shape.layers if options.layers is None else options.layers
    global _clock
    _clock = time.process_time if options.threads == 1 else time.perf_counter
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, layers, shape=shape)
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        wanted = [
            case
            for case in cases_of(weights, shape, layers, options.steps, long=options.long)
            if re.search(options.only, case.name)
        ]
        # Room for what each prompt decodes, and not for requests that wait.
        positions = (
            max(sum(len(ids) + 128 for ids, _ in case.requests[:32]) for case in wanted) + 2048
        )
        started = time.perf_counter()
        without = False if options.batch_invariant else None
        ours = Ours(directory, options.threads, 32, positions, batch_invariant=without)
        loaded = time.perf_counter() - started
        key_bytes = ours.model.page_bytes(1)
        contenders: dict[str, Contender] = {"inlay": ours}
        for size in options.page_sizes:
            contenders[f"pages of {size}"] = Ours(
                directory, options.threads, 32, positions, page_size=size
            )
        if options.batch_invariant:
            contenders["batch-invariant"] = Ours(
                directory, options.threads, 32, positions, batch_invariant=True
            )
        if not options.no_transformers:
            contenders["transformers"] = Transformers(directory)
        if options.quantised is not None:
            for kind in options.quantised or QUANTISED:
                bits, head = QUANTISED[kind]
                smaller = write_quantised(directory, directory / kind, bits, head=head)
                contenders[kind] = Ours(smaller, options.threads, 32, positions)
        python = os.environ.get("BENCH_VLLM")
        vllm = (
            Vllm(python, directory, options.threads, 32, positions * key_bytes) if python else None
        )
        if vllm is not None:
            contenders["vLLM"] = vllm
        speeds, peaks = [bandwidth()], [gemm_peak()]
        cases = [replace(case, floor=case.floor + case.positions * key_bytes) for case in wanted]
        for _ in range(options.rounds):
            for case in cases:
                for contender, runner in contenders.items():
                    if not (case.alone and contender == "transformers"):
                        case.times.setdefault(contender, []).append(case.run(runner))
            speeds.append(bandwidth())
            peaks.append(gemm_peak())
        if vllm is not None:
            vllm.close()
        for case in cases:
            if case.steps is None:
                case.floor /= max(peaks)
            else:
                # Two FLOPs for each weight of two bytes, and row.
                case.floor = max(case.floor / max(speeds), case.items * weights / max(peaks))
        sys.stdout.write(
            f"{weights / 1e6:.0f} MB of weights, {options.threads} threads, loaded in {loaded:.1f} s; "
            f"read {max(speeds) / 1e9:.1f} GB/s (least {min(speeds) / 1e9:.1f}), "
            f"bfloat16 product {max(peaks) / 1e9:.0f} GFLOP/s\n"
        )
        report(cases, list(contenders))


if __name__ == "__main__":
    main()

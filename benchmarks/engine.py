"""Decode and prefill of the torch engine beside transformers' own loop, and how far both are from the machine's floors.

    python benchmarks/engine.py                     a random model of Qwen3-0.6B's shape in bfloat16
    python benchmarks/engine.py --layers 4 --rounds 3

All variants run in one process, in turn, for `--rounds` rounds; the table shows the best of each, because what a shared
machine adds to a time is never negative. With one thread, times are the process's own CPU seconds. Floors: a decode step must read every weight once (bytes over measured read
bandwidth); a prompt must do its products (FLOPs over the measured peak of a bfloat16 product).
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.scheduler import Bounds
from inlay.engine.torch.step import Core
from inlay.engine.torch.threads import environment
from inlay.prompt import Prompt, Tokens
from inlay.protocol.work import Sampling, Work

PAGE_SIZE = 16


_clock = time.process_time


@dataclass
class Case:
    """One workload. `floor` is its least time in seconds; `unit` items are done each time."""

    name: str
    floor: float
    items: int
    unit: str
    times: dict[str, list[float]] = field(default_factory=dict)


def write_model(directory: Path, layers: int) -> None:
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    noise = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for start in range(0, len(flat), len(noise)):
            part = flat[start : start + len(noise)]
            # Rotated, so that no two blocks are equal.
            part.copy_(noise.roll(start >> 20)[: len(part)])
        if parameter.ndim == 1:
            parameter.data.fill_(1)
    model.tie_weights()
    model.save_pretrained(directory)


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

    def __init__(self, directory: Path, threads: int) -> None:
        self.model = CausalModel.load(
            EngineSettings(model=str(directory), dtype="bfloat16", device="cpu", num_threads=threads)
        )
        bounds = Bounds(
            num_pages=600,
            page_size=PAGE_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=self.model.max_model_len,
        )
        self._core = Core(self.model, bounds, Secret.random())
        self._works = 0

    def _admit(self, ids: list[int], max_tokens: int) -> None:
        self._works += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        work = Work(id=str(self._works), prompt=Prompt.of(Tokens(ids)), sampling=sampling)
        for delta in self._core.admit(work):
            raise RuntimeError(f"a work ended before it began: {delta}")

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Seconds a step."""
        for index in range(batch):
            self._admit([(11 * position + index) % 151000 + 1 for position in range(context)], steps + 8)
        told = 0
        while told < batch:
            # Prompts are in, and every work has its first token.
            told += len(self._core.step())
        start = _clock()
        for _ in range(steps):
            self._core.step()
        took = _clock() - start
        self._core.abort_all()
        return took / steps

    def prefill(self, length: int) -> float:
        """Seconds for a prompt nothing of which is cached, and its first token."""
        self._admit([(11 * position + self._works) % 151000 + 1 for position in range(length)], 1)
        start = _clock()
        while len(self._core):
            self._core.step()
        return _clock() - start


class Transformers:
    """The loop `generate` runs: sdpa attention, a dynamic cache, one forward a step, argmax."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._caches: dict[tuple[int, int], DynamicCache] = {}

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> float:
        """Seconds a step."""
        cache = self._caches.get((batch, context))
        ids = torch.arange(batch)[:, None] * 7 + 1
        if cache is None:
            cache = DynamicCache()
            self.model(ids.expand(-1, context), past_key_values=cache, logits_to_keep=1)
            self._caches[batch, context] = cache
        start = _clock()
        for _ in range(steps):
            ids = (
                self.model(ids, past_key_values=cache, logits_to_keep=1)
                .logits[:, -1]
                .argmax(-1, keepdim=True)
            )
        took = _clock() - start
        cache.crop(-steps)
        return took / steps

    @torch.inference_mode()
    def prefill(self, length: int) -> float:
        ids = torch.arange(length)[None] * 11 % 151000
        start = _clock()
        self.model(ids, use_cache=True, logits_to_keep=1)
        return _clock() - start


def report(cases: list[Case]) -> None:
    out = sys.stdout.write
    out(f"{'':24}{'floor':>12}{'transformers':>24}{'inlay':>24}{'faster':>9}\n")
    for case in cases:
        best = {name: min(times) for name, times in case.times.items()}
        cells = f"{case.name:24}{case.floor * 1e3:>9.1f} ms"
        for name in ("transformers", "inlay"):
            if name in best:
                rate = case.items / best[name]
                cells += f"{best[name] * 1e3:>9.1f} ms {rate:>6.1f}/s {case.floor / best[name]:>4.0%}"
            else:
                cells += f"{'-':>24}"
        ratio = f"{best['transformers'] / best['inlay']:.2f}x" if "transformers" in best else "-"
        out(f"{cells}{ratio:>9}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-ours", action="store_true", help="Leave transformers out.")
    options = parser.parse_args()
    missing = {
        name: value for name, value in environment(os.environ).items() if os.environ.get(name) != value
    }
    if missing:
        # libgomp reads its environment when it is loaded, which has happened.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **missing})
    global _clock
    _clock = time.process_time if options.threads == 1 else time.perf_counter
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, options.layers)
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        started = time.perf_counter()
        ours = Ours(directory, options.threads)
        loaded = time.perf_counter() - started
        contenders: dict[str, Ours | Transformers] = {"inlay": ours}
        if not options.only_ours:
            contenders["transformers"] = Transformers(directory)
        speeds, peaks = [bandwidth()], [gemm_peak()]
        key_bytes = ours.model.page_bytes(1)
        linear = 2 * (weights // 2 - 151936 * 1024)
        cases = [
            Case(
                f"decode {batch} at {context}", float(weights + batch * context * key_bytes), batch, "tokens"
            )
            for batch in (1, 8)
            for context in (64, 512)
        ]
        prompt = Case(
            "prefill 512", 512.0 * linear + options.layers * 4 * 16 * 128 * 512 * 256, 512, "tokens"
        )
        for _ in range(options.rounds):
            for case in cases:
                batch, context = int(case.name.split()[1]), int(case.name.split()[3])
                for contender, runner in contenders.items():
                    case.times.setdefault(contender, []).append(runner.decode(batch, context, options.steps))
            for contender, runner in contenders.items():
                prompt.times.setdefault(contender, []).append(runner.prefill(512))
            speeds.append(bandwidth())
            peaks.append(gemm_peak())
        for case in cases:
            case.floor /= max(speeds)
        prompt.floor /= max(peaks)
        sys.stdout.write(
            f"{weights / 1e6:.0f} MB of weights, {options.threads} threads, loaded in {loaded:.1f} s; "
            f"read {max(speeds) / 1e9:.1f} GB/s (least {min(speeds) / 1e9:.1f}), "
            f"bfloat16 product {max(peaks) / 1e9:.0f} GFLOP/s\n"
        )
        report([*cases, prompt])


if __name__ == "__main__":
    main()

"""The torch engine on a GPU: decode steps and prompts, over the floors of the memory and the products.

    python -m benchmarks.gpu                     a random model of Qwen3-0.6B's shape in bfloat16
    python -m benchmarks.gpu --model DIR         a model of your own
    python -m benchmarks.gpu --device cpu --layers 1 --batches 1 --contexts 64    here, to try it

Each decode step is measured with CUDA graphs and eagerly, in one run. Floors: a decode step reads
all weights once, and the keys and values of its sequences (bytes over measured read bandwidth); a
prompt does its products (FLOPs over the measured peak of a large bfloat16 product).
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.engine import prompt, write_model
from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.decode_graphs import CudaCapture
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.prompt import Prompt, Tokens
from inlay.request import Request, Sampling

STEPS = 32


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """The least of several runs, of which a first does not count."""
    best = float("inf")
    for _ in range(1 + repeats):
        wait()
        began = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - began) if _ else best
    return best


def bandwidth(device: torch.device) -> float:
    """Bytes a second that can be read."""
    data = torch.ones((1 << 30) if device.type == "cuda" else (1 << 26), device=device)
    return data.nbytes / seconds(data.sum)


def peak(device: torch.device) -> float:
    """FLOPs a second of a large bfloat16 product."""
    size = 8192 if device.type == "cuda" else 1024
    left = torch.randn(size, size, device=device).bfloat16()
    return 2 * size**3 / seconds(lambda: left @ left)


def core_of(model: CausalModel, most: int, positions: int, *, graphs: bool) -> Core:
    bounds = EngineLimits(
        num_pages=most * positions // 16 + 64,
        page_size=16,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        max_model_len=positions,
    )
    capture = CudaCapture() if graphs else None
    overlap = model.device.type == "cuda"
    return Core(
        model, bounds, Secret.random(), prefix_caching=False, capture=capture, overlap=overlap
    )


def admit(core: Core, batch: int, context: int, max_tokens: int) -> None:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        ids = Prompt.of(Tokens(prompt(context, number)))
        core.admit(Request(id=str(number), prompts=(ids,), params=sampling))


def decode(core: Core, batch: int, context: int) -> float:
    """Seconds of a step in which every sequence gets its next token."""
    admit(core, batch, context, 8 * STEPS)
    told: set[str] = set()
    while len(told) < batch:
        told.update(output.request_id for output in core.step() if output.token_ids)
    for _ in range(4):
        core.step()
    wait()
    began = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    wait()
    took = (time.perf_counter() - began) / STEPS
    core.abort_all()
    return took


def prefill(core: Core, context: int) -> float:
    """Seconds from a prompt to its only token."""

    def run() -> None:
        admit(core, 1, context, 1)
        while len(core):
            core.step()

    return seconds(run, 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024, 8192])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as directory:
        path = arguments.model
        if path is None:
            path = directory
            write_model(Path(directory), arguments.layers)
        model = CausalModel.load(
            EngineSettings(model=path, dtype="bfloat16", device=arguments.device)
        )
    body = sum(value.nbytes for value in model._model.parameters())
    token = model.page_bytes(16) // 16
    reads, products = bandwidth(device), peak(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}: reads {reads / 1e9:.0f} GB/s, ", end="")
    print(f"{products / 1e12:.1f} TFLOP/s in bfloat16; weights {body / 1e9:.2f} GB, ", end="")
    print(f"{token / 1e3:.1f} KB a position\n")
    print(f"{'decode':26} {'floor':>9} {'graphs':>9} {'eager':>9} {'share':>6} {'tokens/s':>9}")
    positions = max(arguments.contexts) + 16 * STEPS
    ways = [True, False] if device.type == "cuda" else [False]
    for context in arguments.contexts:
        for batch in arguments.batches:
            found = []
            for graphs in ways:
                core = core_of(model, batch, positions, graphs=graphs)
                found.append(decode(core, batch, context))
                del core
            floor = (body + batch * context * token) / reads
            shown = [f"{took * 1e3:6.2f} ms" for took in (floor, *found)]
            shown.insert(2, "-" if len(found) == 1 else shown.pop(2))
            label = f"batch {batch} at {context}"
            share, rate = floor / found[0], batch / found[0]
            print(f"{label:26} {' '.join(shown):>29} {share:6.0%} {rate:9.0f}", flush=True)
    print(f"\n{'prompt':26} {'floor':>9} {'took':>9} {'share':>6} {'tokens/s':>9}")
    core = core_of(model, 1, positions, graphs=False)
    for context in arguments.contexts:
        took = prefill(core, context)
        floor = body * context / products
        share, rate = floor / took, context / took
        label = f"{context} positions"
        print(f"{label:26} {floor * 1e3:6.2f} ms {took * 1e3:6.2f} ms {share:6.0%} {rate:9.0f}")


if __name__ == "__main__":
    main()

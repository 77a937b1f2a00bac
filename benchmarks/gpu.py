"""The torch engine on a GPU: decode steps and prompts over the floors and beside vLLM, and the rest.

    python -m benchmarks.gpu                     a random model of Qwen3-0.6B's shape in bfloat16
    python -m benchmarks.gpu --model DIR         a model of your own
    BENCH_VLLM=venv/bin/python python -m benchmarks.gpu --only decode,prompt
    python -m benchmarks.gpu --only images --vision DIR
    python -m benchmarks.gpu --device cpu --layers 1 --batches 1 --contexts 64    here, to try it

Each decode step is measured with CUDA graphs and steps that overlap (one is launched before the
last is read), with graphs alone, and eagerly, in one run; then by vLLM, in the Python that
`BENCH_VLLM` names, with its own graphs. Of one eager step kernels are counted. Floors: a decode
step reads all weights once, and the keys and values of its sequences (bytes over measured read
bandwidth); a prompt does its products (FLOPs over the measured peak of a large bfloat16 product).
Then adapters, four dealt out to the sequences;
sleep of both levels, waking, and the first token after it; images of 448 x 448 for the model that
`--vision` names, small ones for a tiny Qwen2.5-VL without it.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import _gpu_features
from benchmarks._options import parser_of
from benchmarks._random_models import write_model
from benchmarks.engine import Vllm, prompt
from benchmarks.engine_profile import put_adapters
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.decode_graphs import CudaCapture
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling

STEPS = 32
ADAPTERS, RANK = 4, 16
SECTIONS = ("decode", "prompt", "adapters", "sleep", "images")


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


def bytes_read(directory: Path) -> tuple[int, int]:
    """Return the bytes of the weights of all layers, and of those of the output head."""
    layers, others = 0, dict[str, int]()
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]
                if "layers." in name:
                    layers += stop - start
                else:
                    others[name.rsplit(".", 2)[-2]] = stop - start
    return layers, others.get("lm_head", others.get("embed_tokens", 0))


def core_of(
    model: CausalModel, most: int, positions: int, *, graphs: bool, overlap: bool = False
) -> Core:
    bounds = EngineLimits(
        num_pages=most * positions // 16 + 64,
        page_size=16,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        max_model_len=positions,
    )
    return Core(
        model,
        bounds,
        Secret.random(),
        prefix_caching=False,
        capture=CudaCapture() if graphs else None,
        overlap=overlap,
        max_cpu_loras=ADAPTERS,
    )


def admit(
    core: Core, batch: int, context: int, max_tokens: int, adapters: Sequence[str] = ()
) -> None:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        ids = Prompt.of(Tokens(prompt(context, number)))
        adapter = adapters[number % len(adapters)] if adapters else None
        request = Request(id=str(number), prompts=(ids,), params=sampling, adapter=adapter)
        core.admit(request)


def decode(core: Core, batch: int, context: int, adapters: Sequence[str] = ()) -> float:
    """Seconds of a step in which every sequence gets its next token."""
    admit(core, batch, context, 8 * STEPS, adapters)
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


class Table:
    """What is measured of one model.

    Args:
        model: on the device, in bfloat16.
        peer: vLLM's engine, or None.
        options: of the command.
    """

    def __init__(self, model: CausalModel, peer: Vllm | None, options: argparse.Namespace) -> None:
        self._model = model
        self._peer = peer
        self._batches, self._contexts = options.batches, options.contexts
        self._positions = max(options.contexts) + 16 * STEPS
        self._on_gpu = model.device.type == "cuda"
        self._layers, self._head = bytes_read(Path(model.path))
        self._token = model.page_bytes(16) // 16
        self._reads, self._products = bandwidth(model.device), peak(model.device)

    def head(self) -> None:
        """Print the device, and what it can do at most."""
        name = torch.cuda.get_device_name(self._model.device) if self._on_gpu else "CPU"
        print(
            f"{name}, torch {torch.__version__}: reads {self._reads / 1e9:.0f} GB/s, "
            f"{self._products / 1e12:.1f} TFLOP/s in bfloat16; weights {(self._layers + self._head) / 1e9:.2f} GB, "
            f"{self._token / 1e3:.1f} KB a position"
        )

    def decode(self) -> None:
        """Print steps of each batch and context, by each way of stepping."""
        ways = {"overlap": (True, True), "graphs": (True, False), "eager": (False, False)}
        if not self._on_gpu:
            ways = {"overlap": (False, True), "eager": (False, False)}
        names = ["floor", *ways, *(["vLLM"] if self._peer else [])]
        heads = " ".join(f"{name:>9}" for name in names)
        print(f"\n{'decode':26} {heads} {'share':>6} {'tokens/s':>9}")
        for context in self._contexts:
            for batch in self._batches:
                read = self._layers + self._head + batch * context * self._token
                found = [read / self._reads]
                for graphs, overlap in ways.values():
                    core = core_of(
                        self._model, batch, self._positions, graphs=graphs, overlap=overlap
                    )
                    found.append(decode(core, batch, context))
                    core.close()
                    del core
                if self._peer is not None:
                    prompts = [prompt(context, number) for number in range(batch)]
                    found.append(self._peer.decode(prompts, STEPS))
                shown = " ".join(f"{took * 1e3:6.2f} ms" for took in found)
                label, share, rate = f"batch {batch} at {context}", found[0] / found[1], batch
                print(f"{label:26} {shown} {share:6.0%} {rate / found[1]:9.0f}", flush=True)

    def kernels(self) -> None:
        """Print how many kernels an eager step launches, and what they take."""
        context, layers = min(self._contexts), len(self._model.layers)
        core = core_of(self._model, 1, self._positions, graphs=False)
        admit(core, 1, context, STEPS)
        for _ in range(8):
            core.step()
        with torch.profiler.profile() as trace:
            core.step()
            wait()
        core.close()
        found = [event for event in trace.events() or [] if event.device_type.name == "CUDA"]
        took = sum(event.self_device_time_total for event in found) / 1e3
        each = len(found) / layers
        print(f"\nan eager step: {len(found)} kernels, {each:.1f} a layer, in {took:.2f} ms")

    def prompts(self) -> None:
        """Print the time of prompts."""
        peer = f" {'vLLM':>9}" if self._peer else ""
        print(f"\n{'prompt':26} {'floor':>9} {'took':>9}{peer} {'share':>6} {'tokens/s':>9}")
        core = core_of(self._model, 1, self._positions, graphs=False)
        for context in self._contexts:
            # Two FLOPs a weight of two bytes; only the last position has logits.
            floor = (self._layers * context + self._head) / self._products
            found = [floor, prefill(core, context)]
            if self._peer is not None:
                asked = [(prompt(context, context), 1)]
                found.append(min(self._peer.load(asked) for _ in range(4)))
            shown = " ".join(f"{took * 1e3:6.2f} ms" for took in found)
            share, rate = found[0] / found[1], context / found[1]
            print(f"{f'{context} positions':26} {shown} {share:6.0%} {rate:9.0f}", flush=True)
        core.close()

    def adapters(self) -> None:
        """Print steps with adapters beside the same without; the model has slots for them."""
        print(f"\n{'adapters':26} {'without':>9} {'with':>9} {'ratio':>7}")
        context = min(self._contexts)
        for batch in self._batches:
            core = core_of(self._model, batch, self._positions, graphs=False, overlap=True)
            names = put_adapters(core, ADAPTERS, RANK)
            without = decode(core, batch, context)
            held = decode(core, batch, context, names)
            label = f"batch {batch} at {context}"
            print(
                f"{label:26} {without * 1e3:6.2f} ms {held * 1e3:6.2f} ms {held / without:6.2f}x",
                flush=True,
            )
            for name in names:
                core.adapters.remove(name)
            core.close()


def load(path: str, device: str, *, adapters: bool) -> CausalModel:
    """Return a model in bfloat16, with slots for adapters or without."""
    settings = {"model": path, "dtype": "bfloat16", "device": device, "enable_lora": adapters}
    settings |= {"max_loras": ADAPTERS, "max_lora_rank": RANK}
    return CausalModel.load(EngineSettings.of(**settings))


def measure(path: str, wanted: Sequence[str], options: argparse.Namespace) -> None:
    """Print the tables of the model in `path`."""
    if {"decode", "prompt"} & {*wanted}:
        python = os.environ.get("BENCH_VLLM")
        model = load(path, options.device, adapters=False)
        positions = max(options.contexts) + 16 * STEPS
        on_gpu = model.device.type == "cuda"
        peer = None
        if python is not None:
            batch = max(options.batches)
            cache = batch * positions * model.page_bytes(16) // 16
            peer = Vllm(python, Path(path), 0 if on_gpu else 1, batch, cache, positions)
        table = Table(model, peer, options)
        table.head()
        if "decode" in wanted:
            table.decode()
            if on_gpu:
                table.kernels()
        if "prompt" in wanted:
            table.prompts()
        if peer is not None:
            peer.close()
        del table, model
    if "adapters" in wanted:
        Table(load(path, options.device, adapters=True), None, options).adapters()
    if "sleep" in wanted:
        asyncio.run(_gpu_features.sleep(path, options.device))
    if "images" in wanted:
        asyncio.run(_gpu_features.images(options.vision, options.device))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--vision", help="A model that takes images.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 1024, 8192])
    parser.add_argument("--only", default=",".join(SECTIONS), help="Of " + ", ".join(SECTIONS))
    options = parser.parse_args()
    if unknown := {*options.only.split(",")} - {*SECTIONS}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(SECTIONS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU that torch can use is here: nothing is measured (try --device cpu)")
        return
    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            write_model(Path(directory), options.layers)
        measure(options.model or directory, options.only.split(","), options)


if __name__ == "__main__":
    main()

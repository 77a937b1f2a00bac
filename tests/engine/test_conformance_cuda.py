"""The conformance suite on a GPU.

In float32 the tokens are those of the reference. In bfloat16 a first difference is allowed only
where the reference itself hardly prefers one token.
"""

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.decode_graphs import CudaCapture
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling
from tests.engine.reference import embedded, greedy
from tests.engine.torch import kernel_scenes, layer_scenes
from tests.equality.reference import model_of
from tests.models import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BOUND = 0.25
"""Largest gap between the reference's two best logits at which bfloat16 may choose otherwise."""

PROMPTS = [Prompt.of(Tokens(range(3, 3 + length))) for length in (1, 7, 40, 200)]


def rows_instead(directory: Path, prompt: Prompt, dtype: str) -> Prompt:
    """The same prompt as rows."""
    values = embedded(directory, prompt)[0].to(getattr(torch, dtype)).contiguous()
    data = values.view(torch.uint8).numpy().tobytes()
    return Prompt.of(Rows(Buffer(data), dtype, (values.shape[0], values.shape[1])))


async def answers(engine: TorchEngine, requests: list[Request]) -> list[list[int]]:
    done = {request.id: asyncio.get_running_loop().create_future() for request in requests}
    ids: dict[str, list[int]] = {request.id: [] for request in requests}

    def emit(output: Output) -> None:
        ids[output.request_id].extend(output.token_ids)
        if output.finish_reason is not None:
            done[output.request_id].set_result(None)

    for request in requests:
        engine.submit(request, emit)
    await asyncio.gather(*done.values())
    return [ids[request.id] for request in requests]


@torch.no_grad()
def gap_at(directory: Path, prompt: Prompt, output: list[int]) -> float:
    """The reference's top-2 gap where it chooses the token after `output`."""
    inputs = embedded(directory, Prompt.of(*prompt.segments, Tokens(output)))
    best = model_of(directory)(inputs_embeds=inputs).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
async def test_text_and_rows_decode_as_the_reference_does(
    family: str, budget: int, dtype: str, enforce_eager: bool
) -> None:
    directory = tiny(family)
    settings = EngineSettings.of(
        model=str(directory),
        device="cuda",
        dtype=dtype,
        max_num_batched_tokens=budget,
        enforce_eager=enforce_eager,
        kv_cache_memory_bytes=64 << 20,
    )
    engine = TorchEngine(settings, Secret(bytes(32)))
    await engine.start()
    try:
        sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
        forms = [
            form for prompt in PROMPTS for form in (prompt, rows_instead(directory, prompt, dtype))
        ]
        requests = [
            Request(id=str(n), prompts=(form,), params=sampling) for n, form in enumerate(forms)
        ]
        found = await answers(engine, requests)
    finally:
        await engine.close()
    for number, prompt in enumerate(PROMPTS):
        want = greedy(directory, prompt, 24)
        for got in found[2 * number : 2 * number + 2]:
            first = next(
                (i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]),
                None,
            )
            if first is not None:
                assert dtype == "bfloat16"
                assert gap_at(directory, prompt, want[:first]) < BOUND


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_attention_kernel_agrees_with_gathered_pages(dtype: str) -> None:
    kernel_scenes.compare(dtype, "cuda")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernels_of_layers_agree_with_operations_of_torch(dtype: str) -> None:
    layer_scenes.compare(dtype, "cuda")


def test_captured_graphs_hold_all_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.cuda.graph
    monkeypatch.setattr(torch.cuda, "graph", partial(graph, check_input_liveness=True))
    model = CausalModel.load(
        EngineSettings.of(model=str(tiny("llama")), device="cuda", dtype="bfloat16")
    )
    bounds = EngineLimits(
        max_model_len=96, max_num_seqs=5, max_num_batched_tokens=32, page_size=16, num_pages=40
    )
    engine = Core(model, bounds, Secret(bytes(32)), capture=CudaCapture())
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS[:3]):
        engine.admit(Request(id=str(number), prompts=(prompt,), params=sampling))
    while len(engine):
        engine.step()
    assert engine.graphs is not None

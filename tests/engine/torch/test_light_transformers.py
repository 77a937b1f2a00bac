"""A worker on a CPU imports, loads and answers without torch's compiler; who asks for it has it."""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.commands import run
from tests.embedding_models import tiny_embedding
from tests.gguf_models import llama_in_blocks
from tests.models import tiny
from tests.vision_models import vision

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("torchvision") is not None,
    reason="imports are in full here",
)

_SERVED = """
import asyncio, json, sys
from inlay import engine as engines
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Pooling, Request, Sampling, Task

async def serve():
    settings = engines.EngineSettings.of(model=sys.argv[1], device="cpu", num_threads=1)
    engine = engines.create(settings, Secret(bytes(32)))
    await engine.start()
    task, prompt = engine.card.tasks[0], Prompt.of(Tokens([5, 6, 7]))
    params = Pooling() if task == Task.EMBED else Sampling(max_tokens=2)
    ended = asyncio.Event()
    def take(output):
        assert output.error is None
        if output.finish_reason is not None:
            ended.set()
    engine.submit(Request(id="a", task=task, prompts=(prompt,), params=params), take)
    await asyncio.wait_for(ended.wait(), 60)
    await engine.close()

asyncio.run(serve())
import torch
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp")
found = [name for name in heavy if name in sys.modules]
assert torch.distributed.is_available()
compiled = torch.compile(lambda x: torch.compiler.disable(torch.neg)(x) + 1, backend="eager")
assert compiled(torch.ones(1)).item() == 0
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "made",
    [
        lambda _: tiny("qwen2"),
        lambda directory: llama_in_blocks(directory)[1],
        lambda _: tiny_embedding("bert"),
        lambda _: vision("qwen2_vl"),
    ],
    ids=["directory", "gguf", "embedding", "images"],
)
def test_a_worker_imports_no_compiler_and_leaves_it_as_it_is(
    made: Callable[[Path], Path], tmp_path: Path
) -> None:
    said = run(sys.executable, "-c", _SERVED, made(tmp_path))
    assert json.loads(said.splitlines()[-1]) == []


def test_what_fails_is_told_and_imported_in_full() -> None:
    code = """
import logging, sys
from unittest import mock
from inlay.engine.torch import light_transformers
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
with mock.patch.object(light_transformers, "_IMPORTED", ("modeling_utils", "of_another_release")):
    light_transformers.import_light()
from transformers import LlamaForCausalLM, generation
"""
    said = run(sys.executable, "-c", code)
    assert "takes longer" in said
    assert "No module named 'transformers.of_another_release'" in said


def test_whoever_asks_for_more_of_the_compiler_gets_all_of_it() -> None:
    code = """
import sys, torch
from inlay.engine.torch.light_transformers import import_light, without_compiler
import_light()
with without_compiler():
    @torch.compiler.disable(recursive=False)
    def two(): return 2
    assert two() == 2 and "torch._dynamo.config" not in sys.modules
    from torch._dynamo import optimize
    assert "torch._dynamo.config" in sys.modules
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.optimize is optimize
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex() as mode:
    assert isinstance(mode, torch.overrides.TorchFunctionMode)
"""
    run(sys.executable, "-c", code)

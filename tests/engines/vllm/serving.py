"""Models vLLM runs on a CPU, and vLLM with them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM

from tests.equality.reference import tokenizer_of
from tests.models import add_thinking, make, models_root
from tests.serving import Served, free_port

FLAGS: dict[str, Any] = {
    "engine": "vllm",
    "block_size": 32,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 8 << 20,
    "enforce_eager": True,
    "num_threads": 1,
    "engine_arguments": ["--enable-prompt-embeds"],
}
"""Settings of a small vLLM.

Its attention on a CPU takes blocks of 32 positions and heads of 32 elements.
"""

START_SECONDS = 400.0
"""Most that vLLM's own server takes to start."""

_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "qwen3": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


@cache
def model(family: str, dtype: str = "float32") -> Path:
    """A directory with a tiny model of `family`, made once."""
    return make(family, models_root() / f"vllm-{family}-{dtype}", dtype=dtype, **_SHAPES[family])


@cache
def speaking_model() -> Path:
    """A Llama that puts out whole ASCII texts alone, with tags of reasoning.

    What two servers make of broken characters differs.
    """
    directory = add_thinking(
        make("llama", models_root() / "vllm-speaking", dtype="float32", **_SHAPES["llama"])
    )
    tokenizer = tokenizer_of(directory)
    speaking = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for id_, row in enumerate(speaking.lm_head.weight):
            text = tokenizer.decode([id_])
            if id_ in tokenizer.all_special_ids or not (
                text.isascii() and text.isprintable() and text
            ):
                # A logit of about 0: there always are larger ones.
                row.mul_(1e-3)
    speaking.save_pretrained(directory)
    return directory


@cache
def loud_model() -> Path:
    """A Llama in float16 whose layers add hundreds to their input, as large models' do."""
    directory = models_root() / "vllm-loud"
    loud = AutoModelForCausalLM.from_pretrained(model("llama", "float16"), dtype=torch.float16)
    with torch.no_grad():
        for name, parameter in loud.named_parameters():
            if name.endswith("down_proj.weight"):
                parameter.mul_(256)
    loud.save_pretrained(directory)
    tokenizer_of(model("llama", "float16")).save_pretrained(directory)
    return directory


@contextmanager
def vllm_server(path: Path, *words: object) -> Iterator[Served]:
    """vLLM's own server of a model called `m`, once it answers."""
    port = free_port()
    flags: tuple[object, ...] = (
        *("--model", path, "--served-model-name", "m", "--host", "127.0.0.1", "--port", port),
        *("--dtype", "float32", "--enforce-eager", "--block-size", 32),
        *("--max-num-seqs", 16, "--max-num-batched-tokens", 512, *words),
    )
    # vLLM for CPU has no command of its own: its package has another name than the one it asks for.
    module = "vllm.entrypoints.openai.api_server"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, flags)],
        env={
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    served = Served(f"http://127.0.0.1:{port}", process)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(served.url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield served
    finally:
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):  # a test has killed it
            started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
        for child in started:
            # A server whose engine died leaves some of them behind.
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def frozen(llm: Any) -> Iterator[None]:
    """All processes of a vLLM stand still."""
    cores = [psutil.Process(one.pid) for one in llm.engine_core.resources.engine_manager.processes]
    stopped = [one for core in cores for one in (core, *core.children(recursive=True))]
    for one in stopped:
        one.suspend()
    try:
        yield
    finally:
        for one in stopped:
            one.resume()

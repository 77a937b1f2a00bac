"""Harm that clients can do to vLLM alone.

Each scenario runs here, in a process of its own, as some end it.

    python -m tests.engines.vllm.bare SCENARIO,SCENARIO... MODEL DTYPE [ADAPTER]
    python -m tests.engines.vllm.bare containers HIDDEN ROWS PARTS

Prints what came out as JSON, a line for each thing that did. Everything goes through vLLM's own
asynchronous engine, in the form its own server brings such requests into.
"""

import asyncio
import base64
import io
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import torch

TEXT_A = list(range(10, 42))
TEXT_B = list(range(60, 92))
ROWS = 24


def rows(hidden: int, count: int = ROWS) -> torch.Tensor:
    """Rows no token has, float32 (count, hidden)."""
    return 0.5 * torch.randn(count, hidden, generator=torch.Generator().manual_seed(7))


class Bare:
    """vLLM's engine, asked without any care."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._count = 0
        self.hidden = llm.model_config.get_hidden_size()
        self.vocab = llm.model_config.get_vocab_size()

    async def ask(self, prompt: dict[str, Any], lora: Any = None, **sampling: Any) -> list[int]:
        """Greedy ids for a prompt in vLLM's form."""
        return list((await self.whole(prompt, lora, **sampling)).token_ids)

    async def whole(self, prompt: dict[str, Any], lora: Any = None, **sampling: Any) -> Any:
        """All that vLLM says of its output."""
        from vllm import SamplingParams

        self._count += 1
        params = SamplingParams(
            **{
                "max_tokens": 6,
                "temperature": 0.0,
                "ignore_eos": True,
                "detokenize": False,
                **sampling,
            }
        )
        answers = [
            answer
            async for answer in self._llm.generate(
                prompt, params, str(self._count), lora_request=lora
            )
        ]
        return answers[-1].outputs[0]

    def text(self, ids: list[int]) -> dict[str, Any]:
        return {"type": "token", "prompt_token_ids": ids}

    def embeds(self, values: torch.Tensor) -> dict[str, Any]:
        return {"type": "embeds", "prompt_embeds": values}

    def mixed(self, ids: list[int], values: torch.Tensor, placeholder: int) -> dict[str, Any]:
        """Tokens, then rows, as a chat with a part of embeddings becomes."""
        embeds = torch.zeros(len(ids) + len(values), values.shape[1], dtype=values.dtype)
        embeds[len(ids) :] = values
        return {
            "type": "embeds",
            "prompt_embeds": embeds,
            "prompt_token_ids": [*ids, *[placeholder] * len(values)],
            "is_token_ids": [True] * len(ids) + [False] * len(values),
        }


def told(name: str, value: object) -> None:
    print("TOLD " + json.dumps({name: value}), flush=True)


async def penalties(bare: Bare) -> None:
    """The same rows with a repetition penalty, after two different clients."""
    prompt = bare.embeds(rows(bare.hidden))
    for name, before in (("after a", TEXT_A), ("after b", TEXT_B)):
        await bare.ask(bare.text(before))
        told(name, await bare.ask(prompt, repetition_penalty=5.0))


async def not_finite(bare: Bare) -> None:
    """A text alone, and the same texts after rows of NaN."""
    told("before", await bare.ask(bare.text(TEXT_A[:5])))
    await bare.ask(bare.embeds(torch.full((480, bare.hidden), float("nan"))), max_tokens=1)
    await bare.ask(bare.embeds(torch.full((480, bare.hidden), float("nan"))), max_tokens=1)
    told("after", [await bare.ask(bare.text(TEXT_A[:5])) for _ in range(3)])


async def prompt_logprobs(bare: Bare) -> None:
    """The logprobs of a prompt with rows, whose placeholder is beyond the model's vocabulary."""
    told("alive", await bare.ask(bare.text(TEXT_A)))
    told(
        "answer",
        await bare.ask(bare.mixed(TEXT_A, rows(bare.hidden), bare.vocab), prompt_logprobs=1),
    )


async def overflow(bare: Bare) -> None:
    """The logprob of what follows finite rows that a float16 model cannot add up."""
    large = 65504 * torch.sign(rows(bare.hidden, 480))
    answer = await bare.whole(bare.embeds(large.half()), max_tokens=1, logprobs=1)
    chosen = answer.logprobs[0][answer.token_ids[0]]
    told("answer", list(answer.token_ids))
    told("logprob", chosen.logprob)


async def adapters(bare: Bare) -> None:
    """Rows and text at once with an adapter: what its own server makes of such requests."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("a", 1, sys.argv[4])
    told("alive", await bare.ask(bare.text(TEXT_A), lora=lora))
    asked = [
        bare.ask(bare.mixed(TEXT_A[: 3 + n], rows(bare.hidden, 9), 0), lora=lora) for n in range(16)
    ]
    asked += [bare.ask(bare.text(TEXT_A[: 5 + n]), lora=lora) for n in range(16)]
    told("answer", await asyncio.gather(*asked))


async def unknown_ids(bare: Bare) -> None:
    """An id the model does not have, beside rows."""
    told("alive", await bare.ask(bare.text(TEXT_A)))
    told("unknown", await bare.ask(bare.mixed([5, 10**6], rows(bare.hidden), 0)))


async def drafts(bare: Bare) -> None:
    """Rows in the place of ids that no token has, while a layer of the model drafts."""
    told("alive", await bare.ask(bare.text(TEXT_A)))
    told("answer", await bare.ask(bare.mixed(TEXT_A, rows(bare.hidden), bare.vocab)))


def containers(hidden: int, count: int) -> dict[str, bytes]:
    """Files of a few KB that torch reads as float32 (count, hidden)."""
    sparse = torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (count, hidden)
    )
    found: dict[str, bytes] = {}
    for name, tensor in (
        ("sparse", sparse),
        ("stride 0", torch.ones(1, 1).half().expand(count, hidden)),
    ):
        file = io.BytesIO()
        torch.save(tensor, file)
        found[name] = file.getvalue()
    return found


def read_containers(hidden: int, count: int, parts: int) -> None:
    """Memory that vLLM's own reader takes for them.

    Bytes sent, and bytes of memory while it holds `parts` of each.
    """
    from types import SimpleNamespace

    from vllm.renderers.embed_utils import safe_load_prompt_embeds

    config = SimpleNamespace(
        enable_prompt_embeds=True, dtype=torch.float32, get_hidden_size=lambda: hidden
    )
    process = psutil.Process()
    for name, container in containers(hidden, count).items():
        before = process.memory_info().rss
        held = [safe_load_prompt_embeds(config, base64.b64encode(container)) for _ in range(parts)]
        told(name, [parts * len(container), process.memory_info().rss - before])
        del held


async def named_logprobs(bare: Bare) -> None:
    """The ids beside a chosen one whose logprobs are told.

    Alone, and while another request names ids of its own.
    """

    async def beside() -> list[list[int]]:
        answer = await bare.whole(bare.text(TEXT_A), logprobs=2, max_tokens=12)
        return [sorted(position) for position in answer.logprobs]

    told("logprobs alone", await beside())
    named = bare.whole(bare.text(TEXT_B), logprob_token_ids=[1, 2, 3, 4], max_tokens=24)
    told("logprobs beside", (await asyncio.gather(beside(), named))[0])


SCENARIOS: dict[str, Callable[[Bare], Awaitable[None]]] = {
    scenario.__name__: scenario
    for scenario in (
        penalties,
        not_finite,
        prompt_logprobs,
        overflow,
        unknown_ids,
        adapters,
        drafts,
        named_logprobs,
    )
}


async def main(names: str, model: str, dtype: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    more: dict[str, Any] = {}
    if "adapters" in names:
        more = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    if "drafts" in names:
        own = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}
        more = {"speculative_config": own, "attention_backend": "CPU_MLA", "max_model_len": 512}
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            enable_prompt_embeds=True,
            enable_prefix_caching=False,
            block_size=32,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=(16 if "drafts" in names else 1) << 20,
            **more,
        )
    )
    for name in names.split(","):
        await SCENARIOS[name](Bare(llm))
    llm.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "containers":
        read_containers(*map(int, sys.argv[2:5]))
    else:
        asyncio.run(main(*sys.argv[1:4]))

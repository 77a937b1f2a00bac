"""What clients can do to vLLM alone: each scenario runs here, in a process of its own, as some end it.

    python -m tests.engines.vllm.bare SCENARIO,SCENARIO... MODEL DTYPE [ADAPTER]

Prints what came out as JSON, a line for each thing that did. Everything goes through vLLM's own asynchronous engine, in the form
its own server brings such requests into.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

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
            **{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "detokenize": False, **sampling}
        )
        answers = [
            answer async for answer in self._llm.generate(prompt, params, str(self._count), lora_request=lora)
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
    told("answer", await bare.ask(bare.mixed(TEXT_A, rows(bare.hidden), bare.vocab), prompt_logprobs=1))


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
    asked = [bare.ask(bare.mixed(TEXT_A[: 3 + n], rows(bare.hidden, 9), 0), lora=lora) for n in range(16)]
    asked += [bare.ask(bare.text(TEXT_A[: 5 + n]), lora=lora) for n in range(16)]
    told("answer", await asyncio.gather(*asked))


SCENARIOS: dict[str, Callable[[Bare], Awaitable[None]]] = {
    scenario.__name__: scenario for scenario in (penalties, not_finite, prompt_logprobs, overflow, adapters)
}


async def main(names: str, model: str, dtype: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    more: dict[str, Any] = {}
    if "adapters" in names:
        more = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
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
            kv_cache_memory_bytes=1 << 20,
            **more,
        )
    )
    for name in names.split(","):
        await SCENARIOS[name](Bare(llm))
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))

"""Harm that `kv_transfer_params` do to a bare pair of vLLMs with NixlConnector.

    python -m tests.engines.vllm.bare_pair MODEL

Prints what came out as JSON, a line for each thing that did; the last scenario ends an engine.
"""

import asyncio
import os
import sys
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from tests.engines.vllm.bare import told
from tests.engines.vllm.serving import frozen
from tests.serving import free_port

SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
LEASE_SECONDS = 2
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(first: int) -> list[int]:
    """96 ids that no other prompt begins with."""
    return [first, *range(10, 105)]


class Failures(StatLoggerBase):  # type: ignore[misc]
    """Counts the transfers and handshakes of a vLLM that have failed."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.count = 0

    def log_engine_initialized(self) -> None: ...

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        stats = None if scheduler_stats is None else scheduler_stats.kv_connector_stats
        for name in ("num_failed_transfers", "num_failed_handshakes"):
            self.count += len((stats or {}).get(name, []))


class BareWorker:
    """One of the engines, asked without any care. Its cache holds 31 blocks of 32 positions."""

    def __init__(self, model: str, block_size: int = 32) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # The engine's process takes them over.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        made: list[Failures] = []

        def failures(*given: Any) -> Failures:
            made.append(Failures(*given))
            return made[-1]

        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
        }
        self.llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model,
                dtype="float32",
                enforce_eager=True,
                block_size=block_size,
                max_num_seqs=8,
                max_num_batched_tokens=512,
                kv_cache_memory_bytes=512 << 10,
                kv_transfer_config=transfer,
            ),
            stat_loggers=[failures],
        )
        (self.failures,) = made
        self._count = 0

    async def ask(self, ids: list[int], params: dict[str, Any] | None, most: int = 6) -> Any:
        """The last output to a prompt that comes with `kv_transfer_params`."""
        from vllm import SamplingParams

        self._count += 1
        extra = None if params is None else {"kv_transfer_params": dict(params)}
        sampling = SamplingParams(max_tokens=most, extra_args=extra, **SAMPLING)
        given = {"type": "token", "prompt_token_ids": ids}
        answers = [each async for each in self.llm.generate(given, sampling, str(self._count))]
        return answers[-1]

    async def tokens(self, ids: list[int], params: dict[str, Any] | None = None) -> list[int]:
        """Greedy ids."""
        return list((await self.ask(ids, params)).outputs[0].token_ids)

    async def prefilled(self, ids: list[int]) -> dict[str, Any]:
        """What a prefill worker gives for a decode worker."""
        return dict((await self.ask(ids, TO_PREFILL, most=1)).kv_transfer_params)

    async def death(self, ids: list[int], params: dict[str, Any]) -> str:
        """The error that ends the engine; empty where it answers."""
        try:
            await self.tokens(ids, params)
        except Exception as error:
            return type(error).__name__
        return ""


async def main(model: str) -> None:
    prefill, decode = BareWorker(model), BareWorker(model)
    # The blocks of one prompt for another.
    told("alone", await prefill.tokens(prompt(1)))
    alien = await prefill.prefilled(prompt(2))
    told("with the blocks of another prompt", await decode.tokens(prompt(1), alien))
    told("of everybody after that", await decode.tokens(prompt(1)))
    # Blocks of another size than its own.
    wide = BareWorker(model, block_size=64)
    told("of one size", await decode.tokens(prompt(5)))
    told("of two sizes", await wide.tokens(prompt(5), await prefill.prefilled(prompt(5))))
    # One wrong number: the transfers that have failed with it, and with right ones after it.
    for first, (name, wrong) in enumerate((("wrong", {"tp_size": 2}), ("right", {})), 20):
        ids = prompt(first)
        params = {**await decode.prefilled(ids), **wrong}
        told(f"answer {name}", await prefill.tokens(ids, params))
        told(f"failed {name}", prefill.failures.count)
    # A decode worker that stands still while the lease ends and the blocks become others'.
    ids = prompt(6)
    params = await prefill.prefilled(ids)
    with frozen(decode.llm):
        late = asyncio.create_task(decode.tokens(ids, params))
        await asyncio.sleep(LEASE_SECONDS + 1)
        for first in range(30, 42):
            await prefill.tokens(prompt(first))
    told("read after its lease", await late)
    told("of everybody after that lease", await decode.tokens(ids))
    told("in time", await prefill.tokens(ids))
    # Blocks of its own size, one too few.
    ids = prompt(7)
    params = await prefill.prefilled(ids)
    ((*some, _),) = params["remote_block_ids"]
    told("of too few blocks", await decode.death(ids, {**params, "remote_block_ids": [some]}))
    # One word without the others.
    told("alive", await prefill.tokens(prompt(3)))
    told("answer", await prefill.tokens(prompt(4), {"do_remote_prefill": True}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

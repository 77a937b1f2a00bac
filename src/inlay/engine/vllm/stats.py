"""vLLM's counters as inlay's `Stats`."""

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from inlay.engine.slots import EngineSlots
from inlay.messages.card import Stats


class Counters(StatLoggerBase):  # type: ignore[misc]
    """A stat logger that keeps sums.

    One serves all data-parallel ranks; `Counters` itself is the factory vLLM asks.

    Attributes:
        rows_served: rows of admitted prompts.
        transfers: prompts whose blocks came from another vLLM.
    """

    def __init__(self) -> None:
        self._num_blocks = 0
        self._by_rank: dict[int, tuple[int, int, float]] = {}
        self._prompt = self._generated = self._cached = self._preemptions = self._steps = 0
        self._fetched = self._given = 0
        self.rows_served = self.transfers = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "Counters":
        """As vLLM makes a logger of each rank: the same one."""
        return self

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take what a step of a rank says."""
        self._steps += 1
        if scheduler_stats is not None:
            self._by_rank[engine_idx] = (
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )
            self._cached += scheduler_stats.prefix_cache_stats.hits
            moved = scheduler_stats.kv_connector_stats or {}
            self.transfers += len(moved.get("bytes_transferred", ()))
        if iteration_stats is not None:
            self._prompt += iteration_stats.num_prompt_tokens
            self._generated += iteration_stats.num_generation_tokens
            self._preemptions += iteration_stats.num_preempted_reqs

    def stats(self, places: EngineSlots, *, idle: bool, num_blocks: int) -> Stats:
        """The sums now.

        Args:
            places: where requests wait before vLLM has them.
            idle: nothing is under way; vLLM reports nothing more once the last request is gone.
            num_blocks: of each rank.
        """
        ranks = [] if idle else list(self._by_rank.values())
        return Stats(
            running=sum(running for running, _, _ in ranks),
            waiting=places.num_waiting + sum(waiting for _, waiting, _ in ranks),
            blocks_used=round(sum(usage * num_blocks for _, _, usage in ranks)),
            blocks_total=num_blocks * max(1, len(self._by_rank)),
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            rows_served=self.rows_served,
            generated_tokens=self._generated,
            preemptions=places.num_preemptions + self._preemptions,
            steps=self._steps,
            progress=self._prompt + self._generated + self._steps,
        )

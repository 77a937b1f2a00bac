"""vLLM's engine in its own Python, driven over standard input by `benchmarks/engine.py`.

A JSON command a line, seconds back.

Runs where inlay is not installed: `VLLM_PYTHON _vllm_engine.py MODEL THREADS MAX_NUM_SEQS MAX_MODEL_LEN`. On a GPU THREADS is 0, and
it decodes with CUDA graphs.
"""

import json
import os
import sys
import time

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

LASTING = 256
"""As in `benchmarks/engine.py`."""


class Engine:
    def __init__(self, model: str, threads: int, max_num_seqs: int, max_model_len: int) -> None:
        # Not installed where types are checked.
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams
        self._engine = LLM(
            model,
            enforce_eager=threads > 0,
            dtype="bfloat16",
            max_model_len=max_model_len,
            skip_tokenizer_init=True,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048 if threads else 8192,
            enable_prefix_caching=False,
            disable_log_stats=True,
            # Another process has its model on the GPU too.
            **({} if threads else {"gpu_memory_utilization": 0.4}),
        ).llm_engine
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._works = 0

    def _admit(self, ids: list[int], max_tokens: int) -> None:
        self._works += 1
        sampling = self._sampling(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(str(self._works), {"prompt_token_ids": ids}, sampling)

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        first = self._works + 1
        for ids in prompts:
            self._admit(ids, LASTING)
        told: set[str] = set()
        while len(told) < len(prompts):
            told.update(output.request_id for output in self._engine.step())
        start = self._clock()
        for _ in range(steps):
            self._engine.step()
        took = (self._clock() - start) / steps
        self._engine.abort_request([str(request) for request in range(first, self._works + 1)])
        self._finish()
        return took

    def load(self, requests: list[tuple[list[int], int]]) -> float:
        for ids, max_tokens in requests:
            self._admit(ids, max_tokens)
        start = self._clock()
        self._finish()
        return self._clock() - start


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # What libraries print must not mix with the answers.
    os.dup2(2, 1)
    engine = Engine(sys.argv[1], *map(int, sys.argv[2:5]))
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(engine, name)(*arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

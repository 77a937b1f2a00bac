"""Settings every engine understands.

The flags, environment variables and config keys of a worker.
"""

import os.path
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from inlay.embedding.config import PoolingMode

_SYNONYMS = {"half": "float16", "float": "float32"}

DtypeName = Annotated[
    Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
    AfterValidator(lambda name: _SYNONYMS.get(name, name)),
]
"""As vLLM has them; half becomes float16, and float float32."""


class EngineSettings(BaseModel):
    """What is served and how much of the machine it may use.

    Names are vLLM's where vLLM has one.
    """

    model_config = ConfigDict(frozen=True)

    model: str = Field(description="Directory of a model, or its name on the hub.")
    engine: Literal["torch", "vllm", "sglang", "echo"] = Field(
        default="torch",
        description="What runs the model: the built-in engine, vLLM, or SGLang; echo runs none: it repeats the prompt, to measure "
        "everything else.",
    )
    engine_python: Path | None = Field(
        default=None,
        description="Python of the environment the engine is installed in, where that is not inlay's own; it needs not have "
        "inlay, which it is lent.",
    )
    engine_arguments: list[str] = Field(
        default=[],
        description="Words for vLLM's or SGLang's own command line, as after --; in a file they are easier to give.",
    )
    kv_transfer_config: str | None = Field(
        default=None,
        description="How vLLM moves keys and values between machines and caches; its own JSON.",
    )
    connector: list[Literal["lmcache", "nixl", "kvbm", "pd", "none"]] = Field(
        default=[],
        description="Short for kv_transfer_config: where vLLM keeps or moves keys and values; what it stands for is printed.",
    )
    task: Literal["auto", "generate", "embed", "score"] = Field(
        default="auto",
        description="What the model is asked for: text, embeddings of texts, or what a classification head makes of them: "
        "scores of pairs, classes of texts. auto is what the model's files say.",
    )
    served_model_name: list[str] = Field(
        default=[],
        description="Names clients may use; the first is shown. The last part of the model's directory, or its name on the hub, unless set.",
    )
    revision: str | None = Field(default=None, description="Revision of a hub model.")
    dtype: DtypeName = Field(
        default="auto",
        description="Activation dtype; auto takes the checkpoint's, half is float16, float is float32.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        description="Longest prompt and output together, in positions; the model's own unless set.",
    )
    max_num_seqs: int = Field(
        default=64, ge=1, le=4096, description="Sequences in one step at most."
    )
    max_num_batched_tokens: int = Field(
        default=2048,
        ge=16,
        description="Positions computed in one step at most; longer prompts are chunked.",
    )
    block_size: int = Field(
        default=16, ge=16, multiple_of=16, description="Positions in a page of the KV cache."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Size of the KV cache; what max_num_seqs short prompts or one full context need, within a quarter of free memory, unless set.",
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a GPU's memory that weights and KV cache take together, where kv_cache_memory_bytes does not say the size "
        "of the cache; what a step computes with needs some beside it.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Reuse the keys and values of equal prefixes."
    )
    enforce_eager: bool = Field(
        default=False, description="Do not capture decoding as CUDA graphs, which only a GPU does."
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="Launch a step before the results of the last are read; on a GPU only unless set.",
    )
    kv_events_config: str | None = Field(
        default=None,
        description="Where to publish what the KV cache gains and loses, as JSON with vLLM's keys: enable_kv_cache_events, publisher "
        "(zmq, null), endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic.",
    )
    kv_events_token_ids: bool = Field(
        default=False,
        description="Publish the token ids of cached blocks, which tell what users wrote; keyed digests alone unless set.",
    )
    max_logprobs: int = Field(
        default=20, ge=0, le=1000, description="Alternatives a token that logprobs may ask for."
    )
    max_prompt_embeds_abs: float | None = Field(
        default=None,
        gt=0,
        description="Largest absolute value in a row; 100 times the embedding table's largest unless set.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of the engine; the cores less one, at least one, unless set.",
    )
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Data-parallel ranks: engines of the same model, each in a process of its own, among which requests are routed.",
    )
    data_parallel_rank: int | None = Field(
        default=None,
        ge=0,
        description="Run this rank alone; the others run elsewhere. All unless set.",
    )
    enable_lora: bool = Field(
        default=False, description="Make room for LoRA adapters in the model."
    )
    max_loras: int = Field(
        default=8, ge=1, le=1024, description="LoRA adapters in one step at most."
    )
    max_cpu_loras: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Adapters loaded at a time at most; they are kept in CPU memory, and copied into the model in turns. 64, or "
        "max_loras where that is more, unless set; with vLLM max_loras.",
    )
    max_lora_rank: int = Field(
        default=16, ge=1, le=512, description="Rank of a LoRA adapter at most."
    )
    lora_modules: list[str] = Field(
        default=[],
        description='Adapters loaded at the start: name=path, or {"name": ..., "path": ...} as JSON; a path may be an address '
        "that allowed_lora_sources allows.",
    )
    allowed_lora_sources: list[str] = Field(
        default=["file:///"],
        description="What addresses of adapters may begin with: file:///directory/, https://host/path/, s3://bucket/prefix/, "
        "hf://owner/. Any local directory unless set.",
    )
    lora_cache_dir: Path | None = Field(
        default=None,
        description="Directory for adapters that are fetched; a temporary one unless set.",
    )
    lora_cache_bytes: int = Field(
        default=10 * 1024**3,
        ge=1024**2,
        description="Bytes of adapters kept in lora_cache_dir at most; the least recently used go first.",
    )
    max_lora_bytes: int = Field(
        default=2 * 1024**3, ge=1024, description="Bytes of one adapter's files at most."
    )
    lora_drain_timeout: float = Field(
        default=30.0,
        ge=0,
        description="Seconds running requests get to end when their adapter is unloaded; then they are aborted.",
    )
    pooling: Literal["auto", PoolingMode] = Field(
        default="auto",
        description="What an embedding is made of; auto is what the model says, else the mean of an encoder's states or the last of a "
        "decoder's.",
    )
    matryoshka_dimensions: list[int] = Field(
        default=[],
        description="The numbers of elements that requests may shorten embeddings to, for models trained for it whose config.json does "
        "not say so.",
    )
    float32_matmul_precision: Literal["highest", "high"] = Field(
        default="highest",
        description="How exact products of float32 are, as in torch: highest keeps all 24 bits, high about 16 where that is faster, "
        "which it is for embeddings and scores of BERT's kind on a CPU with AMX.",
    )
    max_num_queued_tokens: int = Field(
        default=1_000_000,
        ge=1,
        description="Positions that may wait to be embedded; more are refused with 503.",
    )
    enable_sleep_mode: bool = Field(
        default=False,
        description="Let admins put the worker to sleep, in which it gives its memory back, and wake it.",
    )
    health_probe_interval: float = Field(
        default=30.0,
        ge=0,
        description="Seconds between requests that a worker makes to its own engine, the first before it is ready; 0 makes none.",
    )
    health_probe_timeout: float = Field(
        default=60.0,
        gt=0,
        description="Seconds after which an engine that has not answered such a request is stuck.",
    )

    @property
    def cpu_loras(self) -> int:
        """Adapters loaded at a time at most."""
        if self.max_cpu_loras is not None:
            return self.max_cpu_loras
        return self.max_loras if self.engine == "vllm" else max(64, self.max_loras)

    @property
    def step_loras(self) -> int:
        """LoRA adapters in one step at most."""
        return min(self.max_loras, self.cpu_loras)

    @property
    def names(self) -> list[str]:
        """The names clients may use, the one that is shown first."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model).expanduser()
        # A link is called what its owner called it, not what it points to.
        last = Path(os.path.abspath(path)).name if path.is_dir() else ""  # noqa: PTH100 (`resolve` follows links)
        return [last or self.model]

"""Settings of all engines, by what they are about: flags, environment variables, config keys.

Names are vLLM's where vLLM has the same setting.
"""

import json
import os.path
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticKnownError

from inlay.base.errors import InvalidRequestError
from inlay.embedding.plan import OutputName, PoolingMode
from inlay.engine.spec import known
from inlay.extension import OneOf
from inlay.media.spec import Kind, max_items_of
from inlay.messages.card import Phase

_SYNONYMS = {"half": "float16", "float": "float32"}

DtypeName = Annotated[
    Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
    AfterValidator(lambda name: _SYNONYMS.get(name, name)),
]
"""As in vLLM; half means float16, and float means float32."""


def _tasks() -> Collection[str]:
    """The tasks of the core, and those of engines that have one alone."""
    alone = [spec.task for spec in known().values() if spec.task]
    return dict.fromkeys(["auto", "generate", "embed", "score", "encode", *alone])


def _one_of(names: Callable[[], Collection[str]]) -> AfterValidator:
    """Check a name as a `Literal` of these would.

    One of an extension that is not loaded is refused when it is used, by a message that says so.
    """

    def check(name: str) -> str:
        allowed = [*map(repr, names())]
        if repr(name) not in allowed:
            expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return name

    return AfterValidator(check)


EngineName = Annotated[str, _one_of(known), OneOf(known)]
"""A name in the registry of engines."""

TaskName = Annotated[str, _one_of(_tasks), OneOf(_tasks)]
"""A task of some engine."""


def _with_media_limits(value: str | None) -> str | None:
    """The limits as JSON, also where they are written as vLLM once took them: image=4,video=1."""
    if value is None:
        return None
    pairs = re.fullmatch(r"\s*(\w+=\d+)(\s*,\s*\w+=\d+)*\s*", value, re.ASCII)
    if pairs is not None:
        named = (pair.split("=") for pair in value.split(","))
        value = json.dumps({kind.strip(): int(count) for kind, count in named})
    try:
        max_items_of(json.loads(value))
    except (InvalidRequestError, RecursionError) as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        raise ValueError(f'must be JSON, {{"image": 2}}, or image=2 ({error})') from error
    return value


def _with_processor_kwargs(value: str | None) -> str | None:
    if value is not None:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError("settings of an image processor are an object")
    return value


def _interleaved(value: bool) -> bool:
    if not value:
        raise ValueError("images always stay where they are in a message")
    return value


class ModelOptions(BaseModel, frozen=True, defer_build=True):
    """The model that is served, and the engine that runs it."""

    model: str
    """Directory of a model, its GGUF file, or its name on the hub."""
    engine: EngineName = "torch"
    """Engine that runs the model: the built-in one, vLLM, SGLang, or for models that make images
    diffusers, which is chosen for a directory with model_index.json, or vllm-omni. speech runs
    stages of a graph that speak. echo runs no model and repeats the prompt, to measure everything
    else."""
    task: TaskName = "auto"
    """Task of the model: generate text, embed texts, score pairs and classify texts with a
    classification head, encode media without the language model, or make images. auto is derived
    from the model's files and is never encode."""
    served_model_name: list[str] = []
    """Model names for clients; the first is the displayed one. Unless set, the last part of the
    model's directory, or its name on the hub."""
    revision: str | None = None
    """Revision of a hub model."""
    generation_config: str = "auto"
    """Source of sampling's defaults and of end tokens: auto is the model's generation_config.json,
    a directory is the one in it. With vllm or none sampling has the API's own defaults, and the
    model's end tokens stay."""
    dtype: DtypeName = "auto"
    """Activation dtype; auto takes the checkpoint's, half is float16, float is float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device the model runs on."""

    @property
    def names(self) -> list[str]:
        """Names clients may use; the first is the displayed one."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model).expanduser()
        # Keep the name of a symbolic link, not of its target.
        last = Path(os.path.abspath(path))  # noqa: PTH100
        if path.is_dir():
            return [last.name or self.model]
        return [last.stem if path.is_file() else self.model]


class LibraryOptions(BaseModel, frozen=True, defer_build=True):
    """Engines of other libraries."""

    engine_python: Path | None = None
    """Python of the environment the engine is installed in, if it is not inlay's own; inlay is made
    importable there."""
    engine_arguments: list[str] = []
    """Arguments of vLLM's, SGLang's or vLLM-Omni's own command line, as after --; for use in
    configuration files."""
    kv_transfer_config: str | None = None
    """vLLM's JSON configuration for KV transfer between machines and caches."""
    connector: list[Literal["lmcache", "nixl", "kvbm", "pd", "none"]] = []
    """Short form of kv_transfer_config: vLLM's KV connectors; the resulting configuration is
    printed."""


class BatchOptions(BaseModel, frozen=True, defer_build=True):
    """Sizes of sequences and of steps."""

    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum length of prompt and output together, in positions; unless set, the model's own."""
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Maximum number of sequences in one step."""
    max_num_batched_tokens: int = Field(default=2048, ge=16)
    """Maximum number of positions computed in one step; longer prompts are chunked. Unless set, the
    torch engine on a CPU takes 64 to 512, the fewer the larger the model, and more only for what
    must not be split."""


class CacheOptions(BaseModel, frozen=True, defer_build=True):
    """Pages of keys and values in the engine."""

    block_size: int = Field(default=32, ge=16, multiple_of=16)
    """Positions in a page of the KV cache."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache. Unless set, on a CPU enough for max_num_seqs short prompts or one full
    context, within a quarter of free memory; on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for weights, activations and KV cache together, if
    kv_cache_memory_bytes is not set; 0.9 unless given. Without effect on a CPU."""
    enable_prefix_caching: bool = True
    """Reuse the keys and values of equal prefixes."""


class KvOptions(BaseModel, frozen=True, defer_build=True):
    """Keys and values that come from elsewhere than the model."""

    enable_kv_fetch: bool = False
    """Give cached keys and values to the fleet's other workers of the model, and fetch theirs where
    that takes less time than computing them (engine torch)."""
    kv_offloading_size: float | None = Field(default=None, gt=0)
    """GiB of host memory for keys and values that the cache evicts; they outlive a crash of the
    engine, and are read back where that takes less time than computing them (engine torch)."""
    kv_offloading_dir: Path | None = None
    """Directory for keys and values that host memory, or without it the cache, has no room for;
    they are encrypted, and found again after a restart with the same secret (engine torch)."""
    kv_offloading_disk_size: float = Field(default=10, gt=0)
    """GiB of files in kv_offloading_dir at most."""
    role: Phase = "both"
    """Part of requests that the fleet's routers prefer this worker for: prefill computes prompts,
    decode makes tokens and fetches the prompts' keys and values. Each takes whole requests too, but
    for sglang's. prefill and decode imply --enable-kv-fetch, with vllm --connector nixl, with
    sglang --disaggregation-mode."""

    @property
    def kv_offloading_bytes(self) -> int:
        """Host memory for keys and values that the cache evicts."""
        return int((self.kv_offloading_size or 0) * 1024**3)


class ComputeOptions(BaseModel, frozen=True, defer_build=True):
    """Ways to compute a step."""

    enforce_eager: bool = False
    """Do not capture decoding as CUDA graphs (GPU only)."""
    async_scheduling: bool | None = None
    """Launch a step before the results of the last are read; unless set, on a GPU only."""
    batch_invariant: bool | None = None
    """Equal outputs in bfloat16, bit by bit, whatever is computed beside a request, its chunks, or
    where it was resumed. Torch engine: some models, CPUs with AVX512-BF16; unless set, where it
    costs nothing (no AMX, no LoRA). vllm: its own VLLM_BATCH_INVARIANT, on GPUs."""
    activations: Literal["auto", "exact", "int8"] = "auto"
    """Rounding of what a GGUF file's blocks are multiplied with, on a CPU (torch engine). int8: to
    integers of eight bits with a scale for each 32; weights stay in their blocks, in memory too.
    exact: none; weights are dequantised when the model is loaded. auto: int8 where there are
    kernels for this CPU (AVX2), else exact."""
    quantization: Literal["int8", "q4_k"] | None = None
    """Round the weights of a plain checkpoint's linear layers as it is loaded, on a CPU (torch
    engine): to 8.5 or 4.5 bits (a head always to 8.5), with activations in int8; embedding tables
    stay. `inlay doctor --quality` measures the loss. vLLM's other values go after `--`."""
    speculative_config: str | None = None
    """Speculative decoding, as vLLM's JSON: {"method": "ngram", "num_speculative_tokens": 8,
    "prompt_lookup_min": 2, "prompt_lookup_max": 5}. Methods of the torch engine: ngram (unless set,
    on a CPU), eagle3 with {"model": "HEAD"}, mtp, grammar, none; or a smaller model by
    {"model": "DIRECTORY"} alone. It computes as many drafts as pay, and ids a grammar forces."""


class EventOptions(BaseModel, frozen=True, defer_build=True):
    """Events of the KV cache for those outside."""

    kv_events_config: str | None = None
    """Endpoints to publish KV cache events on, as JSON with vLLM's keys: enable_kv_cache_events,
    publisher (zmq, null), endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic."""
    kv_events_token_ids: bool = False
    """Publish the token ids of cached blocks, which disclose users' texts; unless set, keyed
    digests only."""


class MediaOptions(BaseModel, frozen=True, defer_build=True):
    """Media in prompts, and their encoder."""

    limit_mm_per_prompt: Annotated[str | None, AfterValidator(_with_media_limits)] = None
    """Maximum images of one prompt as JSON: {"image": 2}, or {"image": {"count": 2}}, or as
    image=2,video=1; unlimited unless set."""
    mm_processor_kwargs: Annotated[str | None, AfterValidator(_with_processor_kwargs)] = None
    """Settings of the image processor in place of the model's own, as JSON: {"max_pixels": 602112}.
    Those that decide how many rows an image has, by family: max_pixels, min_pixels, size,
    max_patches, min_patches, do_image_splitting, max_soft_tokens."""
    interleave_mm_strings: Annotated[bool, AfterValidator(_interleaved)] = True
    """Images stay where they are in a message, for every chat template. It cannot be switched
    off."""
    enable_mm_embeds: bool = False
    """Accept embeddings of images that a client's own encoder made (image_embeds)."""
    language_model_only: bool = False
    """Do not load the encoder of images: workers of the fleet with --task encode encode them for
    this one."""
    encoder_cache_bytes: int = Field(default=1 << 30, ge=0)
    """Maximum size of the rows of encoded images that are kept, in bytes."""

    @property
    def max_media_items(self) -> dict[Kind, int]:
        """Maximum items of each kind of media in one prompt."""
        if self.limit_mm_per_prompt is None:
            return {}
        return max_items_of(json.loads(self.limit_mm_per_prompt))

    @property
    def processor_kwargs(self) -> dict[str, Any]:
        """Settings of the image processor in place of the model's own."""
        found: dict[str, Any] = json.loads(self.mm_processor_kwargs or "{}")
        return found


class LimitOptions(BaseModel, frozen=True, defer_build=True):
    """Bounds of what one request asks for."""

    max_logprobs: int = Field(default=20, ge=-1)
    """Maximum number of alternatives per token that logprobs may ask for; -1 for the vocabulary's
    size. 512 bytes of a frontend's memory are reserved for each alternative of a token."""
    max_prompt_embeds_abs: float | None = Field(default=None, gt=0)
    """Largest allowed absolute value in an embedding vector; unless set, 100 times the embedding
    table's largest."""

    def most_logprobs(self, vocab_size: int) -> int:
        """Alternatives per token that may be asked for, of a model with that vocabulary."""
        return vocab_size if self.max_logprobs < 0 else min(self.max_logprobs, vocab_size)


class DeviceOptions(BaseModel, frozen=True, defer_build=True):
    """Cores, devices and the processes that share them."""

    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine; unless set, the number of cores less one, at least one."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Number of processes that have a share of the model's weights and KV cache each; on GPUs each
    has a device of its own, on a CPU a part of the cores."""
    data_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Number of data-parallel ranks: engines of the same model, each in a process of its own, among
    which requests are routed."""
    data_parallel_rank: int | None = Field(default=None, ge=0)
    """Run this rank only; the others run elsewhere. Unless set, all."""


class AdapterOptions(BaseModel, frozen=True, defer_build=True):
    """LoRA adapters."""

    enable_lora: bool = False
    """Reserve room for LoRA adapters in the model."""
    max_loras: int = Field(default=8, ge=1, le=1024)
    """Maximum number of LoRA adapters in one step."""
    max_cpu_loras: int | None = Field(default=None, ge=1, le=65536)
    """Maximum number of loaded adapters, kept in CPU memory. Unless set, 64, or max_loras if that
    is more; with vLLM max_loras."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Maximum rank of a LoRA adapter."""
    lora_modules: list[str] = []
    """Adapters to load at the start: name=path, or {"name": ..., "path": ...} as JSON; a path may
    be an address that allowed_lora_sources allows."""
    allowed_lora_sources: list[str] = ["file:///"]
    """Allowed prefixes of adapters' addresses: file:///directory/, https://host/path/,
    s3://bucket/prefix/, hf://owner/. Unless set, any local directory."""
    lora_cache_dir: Path | None = None
    """Directory for fetched adapters; unless set, a temporary one."""
    lora_cache_bytes: int = Field(default=10 * 1024**3, ge=1024**2)
    """Maximum size of lora_cache_dir in bytes; the least recently used adapters are evicted."""
    max_lora_bytes: int = Field(default=2 * 1024**3, ge=1024)
    """Maximum size of one adapter's files in bytes."""
    lora_drain_timeout: float = Field(default=30.0, ge=0)
    """Seconds that running requests may take to end when their adapter is unloaded; then they are
    aborted."""


class PoolingOptions(BaseModel, frozen=True, defer_build=True):
    """Vectors and scores: of models that embed, and hidden states of those that generate."""

    pooling: Literal["auto", PoolingMode] = "auto"
    """Pooling of hidden states to an embedding. auto is the model's own, else the mean for encoders
    and the last state for decoders."""
    outputs: list[OutputName] = []
    """Outputs of a model that embeds which requests may name, the first where they name none:
    dense, sparse, tokens, token_labels. Unless given, all that its files have."""
    score_tokens: list[str] = []
    """Tokens by which a decoder scores with --task score: two, as no,yes, score the probability of
    the second against the first, one scores its logit. Unless given, those that its files name."""
    matryoshka_dimensions: list[int] = []
    """Dimensions that requests may shorten embeddings to, for models trained for it whose
    config.json does not say so."""
    float32_matmul_precision: Literal["highest", "high"] = "highest"
    """Precision of float32 products, as in torch: highest keeps all 24 bits, high about 16 where
    that is faster: embeddings and scores of BERT-like models on a CPU with AMX."""
    hidden_projector: str | None = None
    """Safetensors file of linear layers that make hidden states rows of another model: those of a
    stage, whose graph sets it, and those that a request asks for with project. torch engine."""
    max_num_queued_tokens: int = Field(default=1_000_000, ge=1, title="Checks, sleep and health")
    """Maximum number of positions queued for embedding at a worker. Further requests wait in the
    router."""


class HealthOptions(BaseModel, frozen=True, defer_build=True):
    """Checks of the model, its sleep, and probes of the engine."""

    self_check: Literal["off", "start", "full", "strict"] = "start"
    """Compare the loaded model with its own code in transformers before it is ready. start: leave
    out modules that differ, refuse wrong numbers, and use what an earlier start or the fleet keeps;
    full: compare everything again; strict: also refuse where anything had to be left out; off:
    compare modules on made inputs alone, if no earlier start did. vLLM and SGLang are compared with
    what is kept: start marks one that differs, strict refuses it, and one that has nothing to be
    compared with. vLLM-Omni, and an SGLang that only decodes, are compared in no mode, and start in
    each."""
    self_check_interval: float = Field(default=600.0, ge=0)
    """Seconds between requests of a worker to itself whose answer must be that of the start, also
    sent after a wake-up and changes of adapters; 0, and self_check off, disable them."""
    enable_sleep_mode: bool = False
    """Let admins put the worker to sleep, which releases its memory, and wake it."""
    health_probe_interval: float = Field(default=30.0, ge=0)
    """Seconds between a worker's probe requests to its own engine, the first before it is ready; 0
    disables them."""
    health_probe_timeout: float = Field(default=60.0, gt=0)
    """Seconds without an answer to a probe after which the engine counts as stuck."""

"""Flags of `vllm serve` that `inlay serve` does not have, and what becomes of them.

`REMOVED` apart, tests/engines/vllm/test_flags.py compares the lists with the parser of vLLM 0.32.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inlay.engine.ranks import SHORT

ENGINE_VALUES = frozenset(
    """
    additional-config all2all-backend attention-backend attention-config aux-output-config
    code-revision collect-detailed-traces compilation-config config-format
    cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params
    cudagraph-capture-sizes custom-histogram-buckets data-parallel-address data-parallel-backend
    data-parallel-rpc-port dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
    dcp-kv-cache-interleave-size decode-context-parallel-size default-mm-loras device-ids
    diffusion-config distributed-executor-backend distributed-timeout-seconds dp-sync-interval
    ec-manager-config ec-transfer-config elastic-ep-max-dp-size engram-config eplb-config
    expert-placement-strategy fault-tolerance-config gdn-prefill-backend hf-config-path hf-overrides
    ignore-patterns io-processor-plugin ir-op-priority jit-monitor-mode kda-decode-backend
    kda-prefill-backend kernel-config kv-cache-dtype kv-cache-dtype-skip-layers
    kv-cache-metrics-sample kv-offloading-backend linear-backend load-format log-config-file
    logging-config logits-processors logprobs-mode long-prefill-token-threshold lora-dtype
    lora-target-modules mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode
    mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr master-port
    max-cudagraph-capture-size max-lora-cls-labels max-num-active-seqs max-num-scheduled-tokens
    max-parallel-loading-workers media-io-kwargs mm-encoder-attn-backend mm-encoder-attn-dtype
    mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path
    mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb
    mm-processor-cache-type mm-processor-device mm-shm-cache-max-object-size-mb mm-tensor-ipc
    model-class-overrides model-impl model-loader-extra-config moe-backend nnodes node-rank
    num-gpu-blocks-override numa-bind-cpus numa-bind-nodes offload-backend offload-group-size
    offload-num-in-group offload-params offload-prefetch-step optimization-level
    override-generation-config per-request-spec-decode-metrics performance-mode
    pipeline-parallel-size prefill-context-parallel-size prefill-schedule-interval
    prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit profiler-config
    pt-load-map-location quantization-config reasoning-config reasoning-parser-plugin
    renderer-num-workers replayssm-buffer-len safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls
    show-hidden-metrics-for-version sleep-preserve-parameter-names sparse-indexer-topk-backend
    spec-method spec-model spec-tokens stream-interval structured-outputs-config tokenizer
    tokenizer-mode tokenizer-revision ubatch-size video-pruning-method video-pruning-rate watermark
    watermark-config weight-transfer-config worker-cls
    """.split()  # noqa: SIM905 (as a list, a line for each)
)
"""Engine flags with a value that only `--engine vllm` serves, after `--`."""

ENGINE_SWITCHES = frozenset(
    """
    aggregate-engine-logging allow-deprecated-quantization cudagraph-metrics dcp-q-replicate
    disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
    disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization disable-sliding-window
    enable-batch-sharded-sampling enable-cumem-allocator enable-dbo enable-elastic-ep
    enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance
    enable-flashinfer-autotune enable-hc-sp enable-layerwise-nvtx-tracing
    enable-logging-iteration-details enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-mfu-metrics enable-mixed-moe-lora-format
    enable-moe-shared-loras enable-nccl-comm-suspend enable-return-routed-experts
    enable-shm-tensor-arena enable-tower-connector-lora enable-trace-replay
    fail-on-environ-validation fully-sharded-loras jit-monitor-verbose kv-cache-metrics
    kv-sharing-fast-prefill long-prefill-token-threshold-adaptive mm-device-do-normalize
    mm-encoder-only numa-bind ray-workers-use-nsight return-sampling-mask scheduler-reserve-full-isl
    skip-mm-profiling sleep-mode-offload-cudagraph specialize-active-lora swa-bounded-replay
    trust-remote-code use-fp64-gumbel use-replayssm use-tqdm-on-load
    """.split()  # noqa: SIM905 (as a list, a line for each)
)
"""Engine flags without a value that only `--engine vllm` serves, after `--`."""

_ALWAYS = "it is always so"
_TEMPLATE = "requests give it in chat_template_kwargs"
_RANKS = (
    "one rank on each machine is `inlay worker --data-parallel-rank`; frontends route among them"
)
_NONE = "there is nothing like it"

INSTEAD: Mapping[str, str] = {
    "--allow-credentials": _NONE + ": keys travel in the Authorization header",
    "--allowed-headers": _ALWAYS + ": every header that the API reads is allowed",
    "--allowed-methods": _ALWAYS + ": every method of the API is allowed",
    "--anthropic-disabled-thinking-effort": "requests ask for it: thinking",
    "--api-server-count": "more than one frontend is a fleet: `inlay frontend`",
    "--chat-template-content-format": "the template is tried with both",
    "--cohere-format": "there is no Cohere API",
    "--cohere-is-reasoning-model": "there is no Cohere API",
    "--convert": "see --task: generate, embed or score",
    "--data-parallel-external-lb": _RANKS,
    "--data-parallel-hybrid-lb": _RANKS,
    "--data-parallel-multi-port-external-lb": _RANKS,
    "--data-parallel-size-local": _RANKS,
    "--data-parallel-start-rank": _RANKS,
    "--data-parallel-supervisor-port": _RANKS,
    "--default-chat-template-kwargs": _TEMPLATE,
    "--disable-access-log-for-endpoints": "see --no-log-requests",
    "--disable-fastapi-docs": "leave it out: /docs shows what the API takes, nothing of the server",
    "--disable-log-stats": "nothing but requests is logged; see /metrics",
    "--download-dir": "set HF_HUB_CACHE in the environment",
    "--dp-supervisor-probe-failure-threshold": "see --health-probe-timeout",
    "--dp-supervisor-probe-interval-s": "see --health-probe-interval",
    "--dp-supervisor-probe-timeout-s": "see --health-probe-timeout",
    "--enable-chunked-prefill": _ALWAYS + "; --max-num-batched-tokens is the size of a chunk",
    "--enable-flash-late-interaction": _NONE,
    "--enable-force-include-usage": 'requests ask for it: stream_options {"include_usage": true}',
    "--enable-log-deltas": "outputs are never logged",
    "--enable-log-outputs": "outputs are never logged",
    "--enable-offline-docs": _ALWAYS + ": /docs loads nothing from elsewhere",
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-request-id-headers": _ALWAYS,
    "--enable-scale-out": _NONE + "; a fleet is `inlay worker` and `inlay frontend`",
    "--enable-server-load-tracking": _ALWAYS,
    "--enable-ssl-refresh": "certificates are read again whenever they change",
    "--exclude-tools-when-tool-choice-none": _NONE,
    "--fingerprint-mode": _NONE,
    "--fingerprint-value": _NONE,
    "--grpc": "there is no gRPC",
    "--grpc-port": "there is no gRPC",
    "--h11-max-header-count": "headers have bounds of their own, which are fixed",
    "--h11-max-incomplete-event-size": "headers have bounds of their own, which are fixed",
    "--headless": "a worker without HTTP is `inlay worker`",
    "--hf-token": "set HF_TOKEN in the environment",
    "--log-error-stack": "errors inside the server are logged with their stack",
    "--max-log-len": "prompts are never logged",
    "--max-num-queued-reqs": "see --max-inflight-requests",
    "--middleware": "put a proxy in front",
    "--pooler-config": "see --pooling and --matryoshka-dimensions",
    "--response-role": "the role of answers is assistant",
    "--return-tokens-as-token-ids": "requests ask for it",
    "--runner": "see --task: generate, embed or score",
    "--seed": "requests give their own seed",
    "--skip-tokenizer-init": "every server has text to read or to write",
    "--sse-keep-alive-interval": _NONE,
    "--ssl-ciphers": "put a proxy in front",
    "--tokens-only": _NONE,
    "--tool-parser-plugin": "see --tool-call-parser",
    "--tool-server": "the server runs no tools",
    "--tool-strict-level": 'requests ask for it: "strict" of a function',
    "--trust-request-chat-template": "templates of clients are never run; see --chat-template",
    "--trust-request-mm-kwargs": "requests do not set an image processor",
    "--uds": "listen on 127.0.0.1 and put a proxy in front",
    "--uvicorn-log-level": "see --log-level and --no-log-requests",
    "--worker-extension-cls": "inlay's own is used",
}
"""Advice for flags that go to no engine."""

REMOVED: Mapping[str, str] = {
    "--collect-model-forward-time": "see --otlp-traces-endpoint",
    "--disable-async-output-proc": "see --async-scheduling",
    "--disable-frontend-multiprocessing": "the engine always has a process of its own",
    "--enable-lora-bias": _NONE,
    "--enable-reasoning": "see --reasoning-parser",
    "--guided-decoding-backend": "grammars are llguidance's",
    "--max-seq-len-to-capture": "the length of a sequence has no effect on CUDA graphs",
    "--multi-step-stream-outputs": _ALWAYS,
    "--num-scheduler-steps": "see --async-scheduling",
    "--num-speculative-tokens": "see --speculative-config",
    "--preemption-mode": "preempted requests are computed again",
    "--speculative-model": "see --speculative-config",
    "--swap-space": "preempted requests are computed again",
    "--use-v2-block-manager": _ALWAYS,
}
"""Advice for flags that vLLM had before 0.32, and that old commands still have."""

_LOGGED = "--log-requests"
_UNLOGGED = "--no-log-requests"

OURS: Mapping[str, str] = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--disable-log-requests": _UNLOGGED,
    "--disable-uvicorn-access-log": _UNLOGGED,
    "--enable-log-requests": _LOGGED,
    "--no-disable-log-requests": _LOGGED,
    "--no-disable-uvicorn-access-log": _LOGGED,
    "--no-enable-log-requests": _UNLOGGED,
    "--shutdown-timeout": "--drain-timeout",
}
"""Flags that are read as another of inlay's, which means the same."""

HARMLESS_SWITCHES = frozenset(
    """
    --disable-async-output-proc --disable-frontend-multiprocessing --disable-log-stats
    --enable-chunked-prefill --enable-log-deltas --enable-log-outputs --enable-offline-docs
    --enable-prompt-tokens-details --enable-reasoning --enable-request-id-headers
    --enable-server-load-tracking --log-error-stack --multi-step-stream-outputs
    --use-v2-block-manager
    """.split()  # noqa: SIM905 (as a list, a line for each)
)
"""Of `INSTEAD` and `REMOVED`, flags without a value that the server starts without."""

HARMLESS_VALUES = frozenset(
    """
    --chat-template-content-format --disable-access-log-for-endpoints --guided-decoding-backend
    --max-log-len --max-seq-len-to-capture --num-scheduler-steps --preemption-mode
    --seed --swap-space --uvicorn-log-level
    """.split()  # noqa: SIM905 (as a list, a line for each)
)
"""The same of flags with a value."""

_TUNES = "it tunes vLLM, and answers are the same without it"

WITHOUT_VLLM: Mapping[str, str] = {
    **dict.fromkeys(
        """
        --aggregate-engine-logging --attention-backend --compilation-config --cudagraph-metrics
        --disable-cascade-attn --disable-custom-all-reduce --distributed-executor-backend
        --enable-flashinfer-autotune --kv-cache-metrics --max-cudagraph-capture-size
        --max-parallel-loading-workers --mm-processor-cache-gb --mm-processor-cache-type
        --moe-backend --optimization-level --performance-mode --safetensors-load-strategy
        --stream-interval --use-tqdm-on-load
        """.split(),  # noqa: SIM905 (as a list, a line for each)
        _TUNES,
    ),
    "--trust-remote-code": "code in a model's directory is never run",
}
"""Of the engine's flags, those that a server with another engine than vLLM starts without."""

NEUTRAL: Mapping[str, frozenset[str]] = {
    "--api-server-count": frozenset({"1"}),
    "--config-format": frozenset({"auto"}),
    "--convert": frozenset({"auto", "none"}),
    "--cpu-offload-gb": frozenset({"0"}),
    "--data-parallel-size-local": frozenset({"1"}),
    "--decode-context-parallel-size": frozenset({"1"}),
    "--kv-cache-dtype": frozenset({"auto"}),
    "--load-format": frozenset({"auto", "safetensors"}),
    "--model-impl": frozenset({"auto"}),
    "--nnodes": frozenset({"1"}),
    "--node-rank": frozenset({"0"}),
    "--pipeline-parallel-size": frozenset({"1"}),
    "--prefill-context-parallel-size": frozenset({"1"}),
    "--response-role": frozenset({"assistant"}),
    "--runner": frozenset({"auto"}),
    "--tokenizer-mode": frozenset({"auto", "hf"}),
}
"""Values of flags that ask for nothing but what holds here anyway."""

FORMS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "awq", "bitsandbytes", "compressed-tensors", "experts_int8", "fbgemm_fp8", "fp8",
            "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "fp_quant", "gguf", "gptq",
            "humming", "int8_per_channel_weight_only", "modelopt", "moe_wna16", "mxfp4", "mxfp8",
            "nvfp4_per_token", "online", "quark", "torchao",
        )
    },
    **dict.fromkeys(("auto_awq", "awq_marlin"), "awq"),
    **dict.fromkeys(("auto_gptq", "gptq_marlin"), "gptq"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"), "modelopt"),
    "deepseek_v4_fp8": "fp8",
    "gpt_oss_mxfp4": "mxfp4",
    "inc": "auto-round",
}  # fmt: skip
"""Values of vLLM's `--quantization`, and the form of a checkpoint that has no need of them.

What files say is vLLM's to refine: of `modelopt` it finds the kind in their `quant_algo`.
"""


class Unknown(NamedTuple):
    """A flag that a command does not have.

    Attributes:
        name: as it was written, without its value.
        value: the word that follows it or stands behind its `=`, or None.
    """

    name: str
    value: str | None


def num_values(name: str, following: int) -> int:
    """The number of the `following` words that are values of a flag, by its long name."""
    key = "--" + name.removeprefix("--").removeprefix("no-")
    if key in HARMLESS_SWITCHES or key[2:] in ENGINE_SWITCHES:
        return 0
    # Values of the others are not known from MODEL: the command will not run.
    passes = key in HARMLESS_VALUES or key in WITHOUT_VLLM or key in NEUTRAL
    return min(following, 1) if passes else following


def passed_over(flag: Unknown, engine: str | None) -> str | None:
    """The reason that a server may start without a flag it does not have; None where it may not.

    Args:
        flag: as it was written.
        engine: that the command runs, or None.
    """
    name, value = _long(flag)
    key = "--" + name.removeprefix("--").removeprefix("no-")
    if key in HARMLESS_SWITCHES or key in HARMLESS_VALUES:
        return INSTEAD[key] if key in INSTEAD else REMOVED[key]
    if value is not None and value in NEUTRAL.get(key, ()):
        return f"{value} asks for what holds anyway"
    return None if engine == "vllm" else WITHOUT_VLLM.get(key)


def advice(unknown: Sequence[Unknown], engine: str | None) -> tuple[list[str], list[Unknown]]:
    """Sentences about those that are vLLM's, and the others."""
    said: list[str] = []
    others: list[Unknown] = []
    names: list[str] = []
    words: list[str] = []
    for flag in unknown:
        name, value = _long(flag)
        key = name.partition(".")[0].removeprefix("--").removeprefix("no-")
        if f"--{key}" in INSTEAD:
            said.append(f"{flag.name} is an option of vLLM: {INSTEAD[f'--{key}']}")
        elif f"--{key}" in REMOVED:
            said.append(
                f"{flag.name} is an option of earlier versions of vLLM: {REMOVED[f'--{key}']}"
            )
        elif key in ENGINE_SWITCHES or key in ENGINE_VALUES:
            names.append(flag.name)
            words.append(name)
            if key in ENGINE_VALUES:
                words.append(shlex.quote("VALUE" if value is None else value))
        elif name in OURS or flag.name in SHORT:
            said.append(f"{flag.name} is {OURS.get(name, name)}, which this command does not have")
        else:
            others.append(flag)
    if names:
        said.append(_for_engine(names, " ".join(words), engine))
    return said, others


def _for_engine(names: Sequence[str], words: str, engine: str | None) -> str:
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    are = "is" if len(names) == 1 else "are"
    if engine == "vllm":
        return (
            f"{listed} {are} vLLM's own, and go{'es' if are == 'is' else ''} after --: -- {words}"
        )
    if engine is None:
        return f"{listed} {are} for a worker with vLLM: inlay worker MODEL --engine vllm -- {words}"
    return (
        f"{listed} {are} not supported by the {engine} engine; with vLLM: --engine vllm -- {words}"
    )


def _long(flag: Unknown) -> tuple[str, str | None]:
    """Its long name with dashes, and its value."""
    head, dot, tail = SHORT.get(flag.name, flag.name).partition(".")
    return head.replace("_", "-") + dot + tail, flag.value

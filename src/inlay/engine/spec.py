"""The registry of engines: what each takes, needs and is made of. It knows no settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import importing
from inlay.extension import Extension, extensions, merged, parts
from inlay.extension import known as known_extensions


@dataclass(frozen=True)
class EngineSpec:
    """One kind of engine. Modules are imported when they are used.

    Attributes:
        generate: class of the engine that generates, as "module:name"; made of settings and secret.
        pooling: class of the model that embeds and scores behind `EmbedEngine`; empty: `generate`.
        encode: class of the engine that encodes images alone; empty: none.
        environment: function of (settings, inherited variables) that returns those to add.
        check: function of settings that raises `InvalidRequestError`.
        library: module that must be installed.
        first: function without arguments that is called before classes are imported; empty: none.
        missing: message where it is not.
        title: name of the library for people.
        task: the only task, whatever the files of the model say; empty: see `engine.task`.
        options: of `OPTIONS` and those of extensions, those that this engine takes.
        hints: by option, what to use instead.
    """

    generate: str
    pooling: str = ""
    encode: str = ""
    environment: str = ""
    check: str = ""
    library: str = ""
    first: str = ""
    missing: str = ""
    title: str = "torch"
    task: str = ""
    options: frozenset[str] = frozenset()
    hints: Mapping[str, str] = field(default_factory=dict)

    def load(self, path: str) -> Callable[..., Any]:
        """Import "module:name".

        Raises:
            InvalidRequestError: the library of the engine is not installed.
        """
        with importing():
            if self.library:
                try:
                    import_module(self.library)
                except ModuleNotFoundError as error:
                    if error.name != self.library:
                        raise
                    raise InvalidRequestError(self.missing) from error
            if self.first:
                imported(self.first)()
            return imported(path)


def imported(path: str) -> Callable[..., Any]:
    """Return what a path, "module:name", names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


_PAGES = frozenset({"enable_kv_fetch", "kv_offloading_size", "kv_offloading_dir"})
"""Options about pages that others keep."""

_MEDIA = frozenset({"encoder_cache_bytes", "task encode", "language_model_only"})
"""Options of an encoder of media."""

_LIBRARY = frozenset({"engine_arguments", "kv_transfer_config", "connector"})
"""Options that another library reads."""

_BLOCKS = frozenset({"activations", "quantization"})
"""Options of weights in the blocks of GGUF."""

_WORDS = frozenset({"score_tokens"})
"""Options of decoders that score."""

OPTIONS = (
    _BLOCKS | _PAGES | _MEDIA | _LIBRARY | _WORDS
    | {
        "enable_lora", "task score", "gpu_memory_utilization", "mm_processor_kwargs", "role",
        "speculative_config", "batch_invariant", "tensor_parallel_size",
    }
)  # fmt: skip
"""Settings, or values of `task`, that not every engine takes; and all that extensions declare."""

ELSEWHERE = (
    "is not installed in this environment; --engine-python names the Python of one where it is"
)

HERE = "is not installed in this environment:"

_CORE: Mapping[str, EngineSpec] = {
    "torch": EngineSpec(
        generate="inlay.engine.torch.engine:TorchEngine",
        pooling="inlay.engine.embed.local:LocalModel",
        encode="inlay.engine.torch.media.engine:EncodeEngine",
        check="inlay.engine.speculation:speculative_config",
        environment="inlay.engine.torch.threads:engine_environment",
        library="torch",
        first="inlay.engine.torch.light_transformers:import_light",
        missing=f"torch {HERE} {extras.install('torch')}",
        options=OPTIONS - _LIBRARY,
    ),
    "vllm": EngineSpec(
        generate="inlay.engine.vllm.engine:VllmEngine",
        pooling="inlay.engine.vllm.pooling:VllmPooling",
        environment="inlay.engine.vllm.environment:environment",
        check="inlay.engine.vllm.connectors:transfer_config",
        library="vllm",
        title="vLLM",
        missing=f"vLLM {ELSEWHERE}",
        options=OPTIONS - _BLOCKS - _MEDIA - _PAGES - _WORDS,
        hints={
            "enable_kv_fetch": "; it has --connector",
            "kv_offloading_size": "; after -- it is vLLM's own",
            "language_model_only": "; after -- it is vLLM's own, which refuses images",
        },
    ),
    "sglang": EngineSpec(
        generate="inlay.engine.sglang.engine:SglangEngine",
        pooling="inlay.engine.sglang.embedding:SglangEmbedding",
        environment="inlay.engine.sglang.environment:environment",
        check="inlay.engine.sglang.rooms:check",
        library="sglang",
        title="SGLang",
        missing=f"SGLang {ELSEWHERE}",
        options=frozenset(
            {"engine_arguments", "tensor_parallel_size", "role", "mm_processor_kwargs"}
        ),
        hints={
            "gpu_memory_utilization": "; --mem-fraction-static after -- is its own",
            "language_model_only": "; after -- it is SGLang's own, which refuses images",
            "batch_invariant": "; --enable-deterministic-inference after -- is its own",
        },
    ),
    "echo": EngineSpec(
        generate="inlay.engine.echo:EchoEngine",
        options=frozenset({"enable_lora", "task score"}),
    ),
}


def engines() -> Mapping[str, EngineSpec]:
    """Return the engines by the name of `--engine`, with those of extensions.

    Raises:
        InvalidRequestError: two have one name.
    """
    return _with_those_of(extensions())


def known() -> Mapping[str, EngineSpec]:
    """Return the engines of all that comes with inlay, loaded or not, and of what is loaded."""
    return _with_those_of(known_extensions())


def _with_those_of(given: tuple[Extension, ...]) -> Mapping[str, EngineSpec]:
    found: list[tuple[str, Mapping[str, EngineSpec]]] = [("inlay", _CORE)]
    found += ((f"extension {name!r}", some) for name, some in parts("engines", given))
    joined = merged("engine", found)
    # The one that runs no model is named last.
    echo = joined.pop("echo")
    return {**joined, "echo": echo}

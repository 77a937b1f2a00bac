"""The registry of engines: what each takes, needs and is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from inlay import extras
from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError
from inlay.pace import importing


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
        missing: message where it is not.
        options: of `_OPTIONS`, those that this engine takes.
        hints: by option, what to use instead.
    """

    generate: str
    pooling: str = ""
    encode: str = ""
    environment: str = ""
    check: str = ""
    library: str = ""
    missing: str = ""
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
            return _import(path)


def environment(
    settings: EngineSettings, inherited: Mapping[str, str], host: str = "localhost"
) -> dict[str, str]:
    """Return the environment variables to add to those the engine's process inherits.

    `host` is a name of this machine by which other workers reach it.
    """
    # The library may be in another Python only.
    path = ENGINES[settings.engine].environment
    return dict(_import(path)(settings, inherited, host)) if path else {}


def check_options(settings: EngineSettings) -> None:
    """Refuse settings that the engine does not take, or that contradict each other.

    Raises:
        InvalidRequestError: as said.
    """
    spec = ENGINES[settings.engine]
    exchanges = settings.role != "both" and settings.engine != "sglang"
    if exchanges and not settings.enable_prefix_caching:
        raise InvalidRequestError(
            f"--role {settings.role} needs prefix caching: what other workers fetch is what it has "
            "cached",
            param="role",
        )
    if spec.check:
        _import(spec.check)(settings)
    for option in sorted(_OPTIONS - spec.options):
        if not _is_set(settings, option):
            continue
        takers = [name for name, other in ENGINES.items() if option in other.options]
        raise InvalidRequestError(
            f"--{option.replace('_', '-')} is for the {' and '.join(takers)} "
            f"engine{'s' if len(takers) > 1 else ''}, not for {settings.engine}"
            f"{spec.hints.get(option, '')}",
            param=option.partition(" ")[0],
        )


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _is_set(settings: EngineSettings, option: str) -> bool:
    name, _, task = option.partition(" ")
    value = getattr(settings, name)
    default = EngineSettings.model_fields[name].default
    return value == task if task else value is not False and value not in (default, None, "")


_IMAGES = frozenset(
    {"task image", "part", "max_generated_image_size", "max_image_cost", "max_inference_steps"}
)
"""Options of engines that make images."""

_PAGES = frozenset({"enable_kv_fetch", "kv_offloading_size", "kv_offloading_dir"})
"""Options about pages that others keep."""

_MEDIA = frozenset({"encoder_cache_bytes", "task encode", "language_model_only"})
"""Options of an encoder of media."""

_LIBRARY = frozenset({"engine_arguments", "kv_transfer_config", "connector"})
"""Options that another library reads."""

_OPTIONS = (
    _IMAGES | _PAGES | _MEDIA | _LIBRARY
    | {
        "enable_lora", "task score", "gpu_memory_utilization", "mm_processor_kwargs", "role",
        "speculative_config", "batch_invariant", "tensor_parallel_size",
    }
)  # fmt: skip
"""Settings, or values of `task`, that not every engine takes."""

_ELSEWHERE = (
    "is not installed in this environment; --engine-python names the Python of one where it is"
)

_HERE = "is not installed in this environment:"

ENGINES: Mapping[str, EngineSpec] = {
    "torch": EngineSpec(
        generate="inlay.engine.torch.engine:TorchEngine",
        pooling="inlay.engine.embed.encoder:LocalModel",
        encode="inlay.engine.torch.media.engine:EncodeEngine",
        check="inlay.engine.speculation:speculative_config",
        environment="inlay.engine.torch.threads:engine_environment",
        library="torch",
        missing=f"torch {_HERE} {extras.install('torch')}",
        options=_OPTIONS - _IMAGES - _LIBRARY,
    ),
    "vllm": EngineSpec(
        generate="inlay.engine.vllm.engine:VllmEngine",
        pooling="inlay.engine.vllm.pooling:VllmPooling",
        environment="inlay.engine.vllm.environment:environment",
        check="inlay.engine.vllm.connectors:transfer_config",
        library="vllm",
        missing=f"vLLM {_ELSEWHERE}",
        options=_OPTIONS - _IMAGES - _MEDIA - _PAGES,
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
        missing=f"SGLang {_ELSEWHERE}",
        options=frozenset(
            {"engine_arguments", "tensor_parallel_size", "role", "mm_processor_kwargs"}
        ),
        hints={
            "gpu_memory_utilization": "; --mem-fraction-static after -- is its own",
            "language_model_only": "; after -- it is SGLang's own, which refuses images",
            "batch_invariant": "; --enable-deterministic-inference after -- is its own",
        },
    ),
    "diffusers": EngineSpec(
        generate="inlay.engine.diffusers.engine:DiffusersEngine",
        environment="inlay.engine.torch.threads:engine_environment",
        library="diffusers",
        missing=f"diffusers {_HERE} {extras.install('torch', 'diffusers')}",
        options=_IMAGES | {"enable_lora"},
    ),
    "vllm-omni": EngineSpec(
        generate="inlay.engine.vllm_omni.engine:VllmOmniEngine",
        environment="inlay.engine.vllm_omni.environment:environment",
        library="vllm_omni",
        missing=f"vLLM-Omni {_ELSEWHERE}",
        options=_IMAGES - {"part"} | {"engine_arguments"},
        hints={
            "part": "; it runs whole pipelines",
            "tensor_parallel_size": "; after -- it is vLLM-Omni's own",
        },
    ),
    "speech": EngineSpec(
        generate="inlay.engine.speech.engine:SpeechEngine",
        environment="inlay.engine.torch.threads:engine_environment",
        library="torch",
        missing=f"torch {_HERE} {extras.install('torch')}",
        options=frozenset({"task image", "part"}),
    ),
    "echo": EngineSpec(
        generate="inlay.engine.echo:EchoEngine",
        options=frozenset({"enable_lora", "task score"}),
    ),
}
"""The engines by the name of `--engine`."""

"""The registry of engines: what each takes, needs and is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

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


def environment_of(
    settings: EngineSettings, inherited: Mapping[str, str], host: str
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
    for option, is_set in _OPTIONS.items():
        if option in spec.options or not is_set(settings):
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


def _changed(settings: EngineSettings, option: str) -> bool:
    return bool(getattr(settings, option) != EngineSettings.model_fields[option].default)


_IMAGES = frozenset({"task image", "part", "max_generated_image_size", "max_inference_steps"})
"""Options of engines that make images."""

_OPTIONS: Mapping[str, Callable[[EngineSettings], object]] = {
    "enable_lora": lambda settings: settings.enable_lora,
    "task score": lambda settings: settings.task == "score",
    "task encode": lambda settings: settings.task == "encode",
    "gpu_memory_utilization": lambda settings: settings.gpu_memory_utilization is not None,
    "engine_arguments": lambda settings: settings.engine_arguments,
    "kv_transfer_config": lambda settings: settings.kv_transfer_config,
    "connector": lambda settings: settings.connector,
    "mm_processor_kwargs": lambda settings: settings.mm_processor_kwargs is not None,
    "speculative_config": lambda settings: settings.speculative_config is not None,
    "batch_invariant": lambda settings: settings.batch_invariant,
    "enable_kv_fetch": lambda settings: settings.enable_kv_fetch,
    "kv_offloading_size": lambda settings: settings.kv_offloading_size is not None,
    "kv_offloading_dir": lambda settings: settings.kv_offloading_dir is not None,
    "role": lambda settings: settings.role != "both",
    "tensor_parallel_size": lambda settings: settings.tensor_parallel_size > 1,
    "language_model_only": lambda settings: settings.language_model_only,
    "task image": lambda settings: settings.task == "image",
    "part": lambda settings: settings.part != "pipeline",
    "max_generated_image_size": lambda settings: _changed(settings, "max_generated_image_size"),
    "max_inference_steps": lambda settings: _changed(settings, "max_inference_steps"),
    "encoder_cache_bytes": lambda settings: _changed(settings, "encoder_cache_bytes"),
}
"""Settings that not every engine takes, and functions that say if they are set."""

_ELSEWHERE = (
    "is not installed in this environment; --engine-python names the Python of one where it is"
)

ENGINES: Mapping[str, EngineSpec] = {
    "torch": EngineSpec(
        generate="inlay.engine.torch.engine:TorchEngine",
        pooling="inlay.engine.embed.local_model:LocalModel",
        encode="inlay.engine.torch.media.engine:EncodeEngine",
        check="inlay.engine.speculation:speculative_config",
        environment="inlay.engine.torch.threads:engine_environment",
        library="torch",
        missing="torch is not installed in this environment: pip install 'inlay[torch]'",
        options=frozenset(
            {
                "enable_lora",
                "task score",
                "task encode",
                "gpu_memory_utilization",
                "enable_kv_fetch",
                "kv_offloading_size",
                "kv_offloading_dir",
                "role",
                "encoder_cache_bytes",
                "mm_processor_kwargs",
                "language_model_only",
                "speculative_config",
                "tensor_parallel_size",
                "batch_invariant",
            }
        ),
    ),
    "vllm": EngineSpec(
        generate="inlay.engine.vllm.engine:VllmEngine",
        pooling="inlay.engine.vllm.pooling:VllmPooling",
        environment="inlay.engine.vllm.environment:environment",
        check="inlay.engine.vllm.connectors:transfer_config",
        library="vllm",
        missing=f"vLLM {_ELSEWHERE}",
        options=frozenset(_OPTIONS)
        - {"encoder_cache_bytes", "task encode", "language_model_only"}
        - {"enable_kv_fetch", "kv_offloading_size", "kv_offloading_dir"}
        - _IMAGES,
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
        options=frozenset({"engine_arguments", "tensor_parallel_size", "role"}),
        hints={
            "gpu_memory_utilization": "; --mem-fraction-static after -- is its own",
            "batch_invariant": "; --enable-deterministic-inference after -- is its own",
        },
    ),
    "diffusers": EngineSpec(
        generate="inlay.engine.diffusers.engine:DiffusersEngine",
        environment="inlay.engine.torch.threads:engine_environment",
        library="diffusers",
        missing="diffusers is not installed in this environment: pip install "
        "'inlay[torch,diffusers]'",
        options=_IMAGES,
    ),
    "speech": EngineSpec(
        generate="inlay.engine.speech.engine:SpeechEngine",
        environment="inlay.engine.torch.threads:engine_environment",
        library="torch",
        missing="torch is not installed in this environment: pip install 'inlay[torch]'",
        options=frozenset({"task image", "part"}),
    ),
    "echo": EngineSpec(
        generate="inlay.engine.echo:EchoEngine",
        options=frozenset({"enable_lora", "task score"}),
    ),
}
"""The engines by the name of `--engine`."""

"""The settings of an engine: sections of options, which users meet as one flat list."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, Field

from inlay.engine.extension_options import with_extensions
from inlay.engine.sections import (
    AdapterOptions,
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    DeviceOptions,
    EventOptions,
    HealthOptions,
    KvOptions,
    LibraryOptions,
    LimitOptions,
    MediaOptions,
    ModelOptions,
    PoolingOptions,
)


@with_extensions("engine")
class EngineSettings(BaseModel, frozen=True, defer_build=True):
    """The served model, and the resources an engine may use.

    An option is declared once, in its section. No two have one name: flags, variables and keys of
    files name no section. Extensions have sections of their own (`extension_options`).
    """

    model: ModelOptions = Field(title="Model and engine")
    library: LibraryOptions = Field(default_factory=LibraryOptions, title="vLLM, SGLang and others")
    batch: BatchOptions = Field(default_factory=BatchOptions, title="Batches and memory")
    cache: CacheOptions = Field(default_factory=CacheOptions, title="Batches and memory")
    kv: KvOptions = Field(default_factory=KvOptions, title="Keys and values")
    compute: ComputeOptions = Field(default_factory=ComputeOptions, title="Computation")
    events: EventOptions = Field(default_factory=EventOptions, title="Events")
    media: MediaOptions = Field(default_factory=MediaOptions, title="Images in prompts")
    limits: LimitOptions = Field(default_factory=LimitOptions, title="Limits of requests")
    devices: DeviceOptions = Field(default_factory=DeviceOptions, title="Cores and GPUs")
    adapters: AdapterOptions = Field(default_factory=AdapterOptions, title="LoRA")
    pooling: PoolingOptions = Field(default_factory=PoolingOptions, title="Vectors and scores")
    health: HealthOptions = Field(default_factory=HealthOptions, title="Checks, sleep and health")

    @classmethod
    def of(cls, **options: Any) -> "EngineSettings":
        """Check options that are given by their names.

        Raises:
            ValueError: there is no such option, or it may not have this value.
        """
        return cls.model_validate(_by_section(options))

    def replace(self, **options: Any) -> "EngineSettings":
        """Return a copy with other values of some options, which are not checked."""
        changed = {
            section: getattr(self, section).model_copy(update=values)
            for section, values in _by_section(options).items()
        }
        return self.model_copy(update=changed)

    def value(self, option: str) -> Any:
        """Look an option up, in whatever section it is."""
        return getattr(getattr(self, sections()[option]), option)

    @staticmethod
    def default(option: str) -> Any:
        """Return what an option is unless it is set."""
        section: Any = EngineSettings.model_fields[sections()[option]].annotation
        return section.model_fields[option].default

    def given(self) -> dict[str, Any]:
        """Return the options that were set, be it to their default, by name."""
        return {
            option: getattr(section, option)
            for _, section in self
            for option in section.__class__.model_fields
            if option in section.model_fields_set
        }

    @property
    def keeps_evicted_kv(self) -> bool:
        """True if keys and values are kept that the cache evicts."""
        kept = self.kv.kv_offloading_size is not None or self.kv.kv_offloading_dir is not None
        return self.cache.enable_prefix_caching and kept

    @property
    def moves_kv(self) -> bool:
        """True if keys and values come from elsewhere than the model."""
        return self.exchanges_pages or self.keeps_evicted_kv

    @property
    def exchanges_pages(self) -> bool:
        """True if pages of the cache go to other workers and come from them."""
        return self.cache.enable_prefix_caching and (
            self.kv.enable_kv_fetch or self.kv.role != "both"
        )

    @property
    def cpu_loras(self) -> int:
        """Maximum number of loaded adapters."""
        adapters = self.adapters
        if adapters.max_cpu_loras is not None:
            return adapters.max_cpu_loras
        return adapters.max_loras if self.model.engine == "vllm" else max(64, adapters.max_loras)

    @property
    def step_loras(self) -> int:
        """Maximum number of LoRA adapters in one step."""
        return min(self.adapters.max_loras, self.cpu_loras)


@cache
def sections() -> Mapping[str, str]:
    """Return the section of each option, by name."""
    found: dict[str, str] = {}
    for name, field in EngineSettings.model_fields.items():
        section: Any = field.annotation
        found |= dict.fromkeys(section.model_fields, name)
    return found


def _by_section(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for option, value in options.items():
        if option not in sections():
            raise ValueError(f"{option!r} is no option of an engine")
        found.setdefault(sections()[option], {})[option] = value
    return found

"""`--speculative-config`: settings of speculative decoding, with vLLM's keys."""

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings


class SpeculativeConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Speculation of the torch engine. Names and meaning are vLLM's, but for two methods.

    With "grammar" nothing is drafted but what a grammar forces, which all other methods draft too;
    with "none" nothing is.
    """

    method: Literal["ngram", "draft_model", "eagle3", "mtp", "grammar", "none"] = "draft_model"
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int = Field(default=8, ge=1, le=64)
    prompt_lookup_min: int = Field(default=2, ge=1, le=16)
    prompt_lookup_max: int = Field(default=5, ge=1, le=16)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Take a model with "eagle3" in its name for a head, and older names, as vLLM does."""
        if isinstance(given, dict) and given.get("method") == "deepseek_mtp":
            return {**given, "method": "mtp"}
        named = isinstance(given, dict) and "eagle3" in str(given.get("model")).lower()
        return {"method": "eagle3", **given} if named else given

    @model_validator(mode="after")
    def _check(self) -> "SpeculativeConfig":
        if self.method in ("draft_model", "eagle3") and self.model is None:
            raise ValueError(f"{self.method} needs model, a directory or a name on the hub")
        if self.method not in ("draft_model", "eagle3") and self.model is not None:
            raise ValueError(f"{self.method} has no model of its own")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is more than prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        return self

    @property
    def reads_states(self) -> bool:
        """True if the drafts are those of a head that reads hidden states of the served model."""
        return self.method in ("eagle3", "mtp")


def speculative_config(settings: EngineSettings) -> SpeculativeConfig | None:
    """Return the speculation of the torch engine, None if none is set.

    Raises `InvalidRequestError` if the setting is not JSON, or not what this engine does.
    """
    if settings.compute.speculative_config is None:
        return None
    try:
        return SpeculativeConfig.model_validate_json(settings.compute.speculative_config)
    except ValidationError as error:
        faults = "; ".join(
            ".".join(map(str, fault["loc"])) + (": " if fault["loc"] else "") + fault["msg"]
            for fault in error.errors(include_url=False, include_context=False)
        )
        raise InvalidRequestError(
            f"--speculative-config: {faults}", param="speculative_config"
        ) from None

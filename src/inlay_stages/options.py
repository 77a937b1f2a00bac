"""Options of stages: of their engines, and of the commands that serve a graph."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


class StageOptions(BaseModel, frozen=True, defer_build=True, title="Images, sound and stages"):
    """Parts of pipelines, and sizes of what they make."""

    part: Literal["pipeline", "text_encoder", "denoiser", "vae", "talker", "token2wav"] = "pipeline"
    """Part of a model that is loaded: all of it, or one stage of it, of a diffusers pipeline
    (text_encoder, denoiser, vae) or of a model that speaks (talker, token2wav)."""
    max_generated_image_size: int | None = Field(default=None, ge=64)
    """Maximum number of pixels of a generated image. Unless set, four times those of the model's
    own size, but at least 64x64 and no more than 2048x2048."""
    max_image_cost: float | None = Field(default=None, gt=0)
    """Maximum cost of a generated image in steps of the model's own size: its steps, times its
    pixels over those of the model's own size. Unless set, max_inference_steps, and more where that
    size is below 32x32."""
    max_inference_steps: int = Field(default=200, ge=1, le=1000)
    """Maximum number of steps of a generated image."""


class GraphOptions(BaseModel, frozen=True, defer_build=True, title="Model and engine"):
    """The start of a graph by `inlay serve`."""

    deploy: Path | None = None
    """Deployment of the stages of a pipeline, where the model is a graph, GRAPH.yaml: engine,
    workers, device and the like of each stage."""


class OneStageOptions(GraphOptions, frozen=True, title="Model and engine"):
    """The start of one of its stages by `inlay worker`."""

    stage: str | None = None
    """Stage of the pipeline that the worker is, where the model is a graph, GRAPH.yaml."""


OPTIONS: Mapping[str, type[BaseModel]] = {
    "engine": StageOptions,
    "serve": GraphOptions,
    "worker": OneStageOptions,
}

"""Pipelines of several models, and what they make beside text: images and speech."""

from inlay.extension import Extension, TaskSpec

extension = Extension(
    "stages",
    tasks=(
        TaskSpec("stage", "speaks", "makes no images", ("/v1/audio/speech",), field="audio"),
        TaskSpec("stage", "makes images", "makes no images", ("/v1/images/generations",)),
    ),
    chat="inlay.api.openai.chat.stages:CHATS",
    facts="inlay.api.openai.stage_models:describe",
    models="inlay.cli.pipeline:MODELS",
    worker="inlay.worker.stage_part:StagePart",
    fleet="inlay.router.graphs:Graphs",
    engines="inlay.engine.stage_engines:ENGINES",
    routes="inlay.api.openai.stage_routes:ROUTES",
)

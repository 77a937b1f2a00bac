"""Pipelines of several models, and what they make beside text: images and speech."""

from inlay.extension import Extension, TaskSpec

extension = Extension(
    "stages",
    tasks=(
        TaskSpec("stage", "speaks", "makes no images", ("/v1/audio/speech",), field="audio"),
        TaskSpec("stage", "makes images", "makes no images", ("/v1/images/generations",)),
    ),
    chat="inlay.api.openai.chat.stages:CHATS",
    models="inlay.api.openai.stage_models:describe",
    routes="inlay.api.openai.stage_routes:ROUTES",
)

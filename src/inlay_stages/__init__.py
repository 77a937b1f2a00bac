"""Pipelines of several models, and what they make beside text: images and speech."""

from inlay.extension import Extension

extension = Extension(
    "stages",
    chat="inlay.api.openai.chat.stages:CHATS",
    models="inlay.api.openai.stage_models:describe",
    routes="inlay.api.openai.stage_routes:ROUTES",
)

"""Pipelines of several models, and what they make beside text: images and speech.

walk.py             a request's way through the stages; stage_result.py: what one of them makes
options.py          flags of engines and commands
pipeline.py         GRAPH.yaml and its deployment, as models to serve
graph.py, kinds.py  a pipeline as data; cards.py, feeds.py: what messages have of it
fleet.py            the one graph of each pipeline in a fleet
api/                /v1/images/generations, /v1/audio/speech; facts for /v1/models
chat/               models in a row; an image or a sound behind the text of a chat
worker/             payloads that are kept for other stages, inputs that are fetched from them
engines/            diffusers, vLLM-Omni, speech
"""

from inlay.extension import Extension, TaskSpec

extension = Extension(
    "stages",
    tasks=(
        TaskSpec("stage", "speaks", "makes no images", ("/v1/audio/speech",), field="audio"),
        TaskSpec("stage", "makes images", "makes no images", ("/v1/images/generations",)),
    ),
    chat="inlay_stages.chat.kinds:CHATS",
    types="inlay_stages.cards:TYPES",
    params="inlay_stages.params:PARAMS",
    adapters="inlay_stages.cards:check_adapter",
    facts="inlay_stages.api.facts:describe",
    models="inlay_stages.pipeline:MODELS",
    worker="inlay_stages.worker.part:StagePart",
    fleet="inlay_stages.fleet:Graphs",
    engines="inlay_stages.engines.specs:ENGINES",
    options="inlay_stages.options:OPTIONS",
    routes="inlay_stages.api.routes:ROUTES",
)

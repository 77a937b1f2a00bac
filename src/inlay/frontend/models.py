"""`GET /v1/models` and `GET /v1/models/{id}`."""

from inlay.frontend.server import Call
from inlay.protocol.openai.models import ModelEntry, ModelLimits, ModelList
from inlay.protocol.work import ModelCard, Task


async def list_models(call: Call) -> None:
    """Answer with every model, each under all its names."""
    entries = [
        _entry(call, card, name)
        for card in call.server.router.models()
        for name in (card.name, *card.aliases)
    ]
    await call.json(ModelList(data=entries))


async def one_model(call: Call) -> None:
    """Answer with the model the path names."""
    name = str(call.path_params["id"])
    await call.json(_entry(call, call.server.router.card(name), name))


def _entry(call: Call, card: ModelCard, name: str) -> ModelEntry:
    settings = call.server.settings
    capabilities = []
    if Task.GENERATE in card.tasks:
        capabilities += ["completions", "chat", "responses"]
        if settings.enable_prompt_embeds and card.prompt_embeds is None:
            capabilities.append("prompt_embeds")
    if Task.EMBED in card.tasks:
        capabilities.append("embeddings")
    return ModelEntry(
        id=name,
        created=call.server.created,
        root=card.name,
        max_model_len=card.limits.max_model_len,
        hidden_size=card.hidden_size,
        vocab_size=card.vocab_size,
        dtype=card.dtype,
        embedding_table_id=card.embedding_table_id,
        embedding_abs_max=card.embedding_abs_max,
        weights_id=card.weights_id,
        engine=f"{card.engine} {card.engine_version}",
        capabilities=capabilities,
        limits=ModelLimits(
            max_model_len=card.limits.max_model_len,
            max_logprobs=card.limits.max_logprobs,
            max_choices=settings.max_choices,
            max_prompt_embeds_bytes=call.server.limits.of(card).max_bytes,
            max_prompt_embeds_abs=card.limits.max_prompt_embeds_abs,
            max_body_bytes=settings.max_body_bytes,
        ),
        adapters=[adapter.name for adapter in card.adapters],
    )

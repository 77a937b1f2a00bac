"""Routes of each task, and the check that a model serves a route."""

from inlay.card import ModelCard
from inlay.errors import InvalidRequestError
from inlay.request import Task

ROUTES: dict[Task, tuple[str, ...]] = {
    Task.GENERATE: ("/v1/completions", "/v1/chat/completions", "/v1/responses"),
    Task.EMBED: ("/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank"),
    Task.SCORE: ("/v1/score", "/v1/rerank", "/classify", "/pooling"),
}
"""Routes of each task, the usual one first."""

_DOES = {
    Task.GENERATE: "generates text",
    Task.EMBED: "makes embeddings",
    Task.SCORE: "scores or classifies",
}
_DOES_NOT = {
    Task.GENERATE: "does not generate text",
    Task.EMBED: "makes no embeddings",
    Task.SCORE: "has no classification head",
}


def check_task(card: ModelCard, *tasks: Task) -> None:
    """Check that a model does one of `tasks`.

    Raises:
        InvalidRequestError: it does none; names the routes that serve it.
    """
    if set(tasks) & set(card.tasks):
        return
    served = sorted(card.tasks)
    does = " and ".join(_DOES[task] for task in served)
    routes = list(dict.fromkeys(route for task in served for route in ROUTES[task]))
    raise InvalidRequestError(
        f"The model `{card.name}` {does}, and {_DOES_NOT[tasks[0]]}: use POST {', '.join(routes)}. "
        f"This route needs a model served with --task {' or '.join(tasks)}.",
        param="model",
    )


__all__ = ["ROUTES", "check_task"]

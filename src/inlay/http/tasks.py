"""Tasks of models, and the routes that serve them, as errors name them."""

from collections.abc import Sequence

from inlay.base.errors import InvalidRequestError
from inlay.extension import TaskSpec, extensions
from inlay.messages.card import ModelCard
from inlay.messages.request import Task

_TASKS = (
    TaskSpec(
        Task.GENERATE,
        "generates text",
        "does not generate text",
        ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    ),
    TaskSpec(
        Task.EMBED,
        "makes embeddings",
        "makes no embeddings",
        ("/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank"),
    ),
    TaskSpec(
        Task.SCORE,
        "scores or classifies",
        "has no classification head",
        ("/v1/score", "/v1/rerank", "/classify", "/pooling"),
    ),
    TaskSpec(Task.ENCODE, "encodes media", "does not encode media", ("/v1/encode",)),
)


def wrong_task(card: ModelCard, *tasks: Task) -> InvalidRequestError:
    """Return the error of a model that does none of `tasks`: it names the routes that serve it."""
    known = [*_TASKS, *(spec for each in extensions() for spec in each.tasks)]
    found = {task: _spec_of(card, task, known) for task in sorted(card.tasks)}
    does = " and ".join(spec.does if spec else f"does {task}" for task, spec in found.items())
    routes = dict.fromkeys(route for spec in found.values() if spec for route in spec.routes)
    wanted = next((spec.does_not for spec in known if spec.task == tasks[0]), f"not {tasks[0]}")
    where = f": use POST {', '.join(routes)}" if routes else ""
    return InvalidRequestError(
        f"The model `{card.name}` {does}, and {wanted}{where}. "
        f"This route needs a model served with --task {' or '.join(tasks)}.",
        param="model",
    )


def _spec_of(card: ModelCard, task: Task, known: Sequence[TaskSpec]) -> TaskSpec | None:
    fits = (spec for spec in known if spec.task == task)
    return next((one for one in fits if not one.field or getattr(card, one.field)), None)

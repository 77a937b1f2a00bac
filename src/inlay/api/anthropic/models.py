"""`GET /v1/models` and `GET /v1/models/{id}` for Anthropic's clients."""

from datetime import UTC, datetime
from itertools import islice

from inlay.api.anthropic.errors import ANTHROPIC
from inlay.api.anthropic.route import check_version
from inlay.api.anthropic.schema import ModelInfo, ModelPage
from inlay.api.listed import listed
from inlay.api.parameters import MOST, USUAL
from inlay.base.errors import InvalidRequestError
from inlay.http.paging import whole_number
from inlay.http.server import Call
from inlay.messages.request import Task
from inlay.router import ServedModel


async def list_models(call: Call) -> None:
    """Answer with a page of the models that `/v1/messages` serves.

    Raises:
        InvalidRequestError: `limit` is not from 1 to 1000, `after_id` and `before_id` are both
            given, or name no model.
    """
    call.answers_with(ANTHROPIC)
    check_version(call)
    query = call.query()
    limit = whole_number(call, "limit", USUAL, 1, MOST)
    after, before = query.get("after_id", [None])[-1], query.get("before_id", [None])[-1]
    if after is not None and before is not None:
        raise InvalidRequestError("after_id and before_id cannot both be given", param="after_id")
    found = {
        name: model
        for name, model in listed(call.server.router)
        if Task.GENERATE in model.card.tasks
    }
    names = list(found)
    if before is not None:
        names.reverse()
    cursor = after if before is None else before
    if cursor is not None:
        if cursor not in found:
            param = "after_id" if before is None else "before_id"
            raise InvalidRequestError(f"{param}: no model is named {cursor[:80]!r}", param=param)
        names = names[names.index(cursor) + 1 :]
    page = list(islice(names, limit))
    more = len(page) < len(names)
    if before is not None:
        page.reverse()
    ends = (page[0], page[-1]) if page else (None, None)
    data = [_info(call, name, found[name]) for name in page]
    await call.json(ModelPage(data=data, first_id=ends[0], last_id=ends[1], has_more=more))


async def one_model(call: Call) -> None:
    """Answer with the model the path names."""
    call.answers_with(ANTHROPIC)
    check_version(call)
    name = str(call.path_params["id"])
    await call.json(_info(call, name, call.server.router.model(name)))


def _info(call: Call, name: str, model: ServedModel) -> ModelInfo:
    created = datetime.fromtimestamp(call.server.created, UTC)
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=created,
        max_input_tokens=model.max_len,
        max_tokens=model.max_len,
    )

"""Thinking budgets by vLLM's own parameter.

As the torch engine holds to them, also where an output is gone on with.
"""

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from inlay.base.errors import InvalidRequestError
from inlay.engine.api import GenerateEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, ThinkingBudget
from tests.engine.conformance import ids, make_request, run
from tests.engines.starting import started
from tests.engines.vllm.cases import THINK
from tests.engines.vllm.serving import FLAGS, speaking_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

END = THINK + 1


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker() -> AsyncIterator[GenerateEngine]:
    async with started(EngineSettings.of(model=str(speaking_model()), **FLAGS)) as engine:
        yield engine


def thinking(tokens: int, *prompt: int, spent: int | None) -> Request:
    budget = ThinkingBudget(tokens, (THINK,), (END,), spent)
    return make_request(f"{tokens} {prompt}", Prompt.of(Tokens(prompt)), 12, thinking=budget)


async def test_thinking_ends_when_its_budget_is_spent_also_where_an_output_is_gone_on_with(
    thinker: GenerateEngine,
) -> None:
    before = ids(1, 20)
    for spent in (0, 2):
        asked = thinking(4, *before, THINK, *[40] * spent, spent=spent)
        (found,) = await run(thinker, asked)
        assert found.output.index(END) == 4 - spent
        for done in (1, 4 - spent, 5 - spent, 8):
            again = msgspec.structs.replace(asked, prior_output=tuple(found.output[:done]))
            (rest,) = await run(thinker, again)
            assert found.output[:done] + rest.output == found.output
    (free,) = await run(thinker, thinking(0, *before, spent=None))
    assert END not in free.output


async def test_what_vllm_would_not_count_is_refused(thinker: GenerateEngine) -> None:
    with pytest.raises(InvalidRequestError, match="vLLM would not count it"):
        await run(thinker, thinking(4, 40, 41, spent=0))
    other = ThinkingBudget(4, (5,), (6,))
    with pytest.raises(InvalidRequestError, match="reads another form"):
        await run(thinker, make_request("other", Prompt.of(Tokens((40,))), 4, thinking=other))


async def test_a_model_without_tags_has_no_budget(shared: GenerateEngine) -> None:
    with pytest.raises(InvalidRequestError, match="--reasoning-config"):
        await run(shared, thinking(4, 40, 41, spent=None))

"""langchain-openai, unchanged: chats, responses with state, completions, embeddings."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

from tests.serving import Served

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

ASK = "count the lanterns"
Chat = Callable[..., ChatOpenAI]


@pytest.fixture
def chat(server: Served) -> Chat:
    def make(**more: Any) -> ChatOpenAI:
        return ChatOpenAI(
            model="m", base_url=server.v1, api_key="k", temperature=0, max_tokens=8, **more
        )

    return make


def test_chats_are_answered_streamed_and_counted(chat: Chat) -> None:
    model = chat()
    whole = model.invoke(ASK)
    assert whole.text
    assert whole.usage_metadata["input_tokens"] > 0
    assert "".join(piece.text for piece in model.stream(ASK)) == whole.text
    assert [each.text for each in model.batch([ASK, ASK])] == [whole.text] * 2


def test_responses_go_on_by_their_id(chat: Chat) -> None:
    model = chat(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke([HumanMessage(ASK)])
    assert first.text == chat().invoke(ASK).text
    assert first.response_metadata["id"].startswith("resp_")
    said = [HumanMessage(ASK), first, HumanMessage("go on")]
    second = model.invoke(said)
    # Only the last message was sent; the answer is as of all of them.
    alone = chat(use_responses_api=True)
    plain = [HumanMessage(ASK), AIMessage(first.text), HumanMessage("go on")]
    assert second.text == alone.invoke(plain).text
    assert second.usage_metadata == alone.invoke(plain).usage_metadata | {
        "input_token_details": second.usage_metadata["input_token_details"]
    }
    assert "".join(piece.text for piece in model.stream(said)) == second.text


def test_completions_are_answered(server: Served) -> None:
    model = OpenAI(
        model="m", base_url=server.v1, api_key="k", temperature=0, max_tokens=8, max_retries=0
    )
    assert isinstance(model.invoke(ASK), str)


def test_texts_are_embedded(embedder: Served) -> None:
    # By itself it sends the ids of a tokenizer of OpenAI's.
    model = OpenAIEmbeddings(
        model="m", base_url=embedder.v1, api_key="k", check_embedding_ctx_length=False
    )
    first, second = model.embed_documents(["a lantern", "a harbour"])
    assert first != second
    assert model.embed_query("a lantern") == pytest.approx(first, abs=1e-5)


def test_decisions_of_the_three_kinds_are_read(server: Served) -> None:
    model = OpenAIDecisions(model="m", base_url=server.v1, api_key="k", max_retries=0)
    questions = {
        "urgent": Predicate(instructions="Is it urgent?"),
        "team": Choice(instructions="Which?", choices={"a": "one", "b": "two"}),
        "mood": Score(instructions="How upset?", levels=["calm", "angry"]),
    }
    found = model.invoke({"input": "a lantern is broken", "questions": questions})
    assert 0 < found.predicates["urgent"].probability < 1
    assert found.choices["team"].choice in ("a", "b")
    assert 0 < found.scores["mood"].score < 1

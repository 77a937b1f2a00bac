"""The bundled pipeline: a question is answered with a caption, and the caption drawn."""

import base64
import io
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from scripts.vision_demo.questions import QUESTIONS
from scripts.vision_demo.training import DEVIATION, MEAN, answers
from tokenizers import Tokenizer
from transformers import LlavaForConditionalGeneration

from inlay import demo
from inlay.client import PromptEmbedder
from tests.serving import Served, serving

pytestmark = pytest.mark.slow
FLAGS = ("--dtype", "float32", "--enable-prompt-embeds")
FIELDS = {
    "modalities": ["text", "image"],
    "num_inference_steps": demo.drawn_examples().steps,
    "guidance_scale": demo.drawn_examples().guidance,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(demo.pipeline_dir() / "graph.yaml", *FLAGS) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    # A stage that is not ready yet is a 503.
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60) as made:
        yield made


def messages(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


@cache
def eyes() -> tuple[Any, Tokenizer]:
    model = LlavaForConditionalGeneration.from_pretrained(demo.vision_dir(), dtype=torch.float32)
    return model.eval(), Tokenizer.from_file(str(demo.vision_dir() / "tokenizer.json"))


def seen(urls: list[str]) -> list[tuple[str, str]]:
    """The digit and the colour that the model with images sees in each picture."""
    files = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])
    rows = (torch.tensor(pixels).permute(0, 3, 1, 2) / 255 - MEAN) / DEVIATION
    model, tokenizer = eyes()
    told = [answers(model, tokenizer, QUESTIONS[name], rows) for name in ("digit", "colour")]
    return list(zip(*told, strict=True))


def test_what_is_written_is_drawn_and_seen(client: openai.OpenAI) -> None:
    examples = demo.drawn_examples().examples
    right, urls = [], []
    for example in examples:
        for seed in range(2):
            answer = client.chat.completions.create(
                model="inlay-demo", messages=messages(example.question), temperature=0, seed=seed,
                extra_body=FIELDS,
            )  # fmt: skip
            content: Any = answer.choices[0].message.content
            text, image = content
            assert text == {"type": "text", "text": example.answer}
            assert answer.choices[0].finish_reason == "stop"
            urls.append(image["image_url"]["url"])
            right.append((str(example.digit), example.colour))
    # 0.993 in 300; by chance 1 in 60.
    assert sum(a == b for a, b in zip(seen(urls), right, strict=True)) > 0.9 * len(right)
    assert len(set(urls)) == len(urls)


def test_what_is_asked_by_embeddings_is_drawn_as_what_is_asked_by_text(
    client: openai.OpenAI,
) -> None:
    example = demo.drawn_examples().examples[0]
    embedder = PromptEmbedder.from_pretrained(demo.pipeline_dir() / "writer")
    cut = example.question.index(" ")
    first, second = example.question[:cut], example.question[cut:]
    parts = [embedder.chat_part(first), {"type": "text", "text": second}]

    def drawn(content: object) -> Any:
        answer = client.chat.completions.create(
            model="inlay-demo", messages=[{"role": "user", "content": content}],  # type: ignore[misc, list-item]
            temperature=0, seed=3, extra_body=FIELDS,
        )  # fmt: skip
        return answer.choices[0].message.content

    text, image = drawn(parts)
    assert [text, image] == drawn(example.question)
    assert text["text"] == example.answer


def test_a_stream_has_the_text_then_the_image_then_one_end(client: openai.OpenAI) -> None:
    example = demo.drawn_examples().examples[0]
    stream = client.chat.completions.create(
        model="inlay-demo", messages=messages(example.question), temperature=0, seed=0, stream=True,
        stream_options={"include_usage": True}, extra_body=FIELDS,
    )  # fmt: skip
    chunks = [chunk.model_dump(warnings=False) for chunk in stream]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["stop"]
    assert choices[-1]["finish_reason"] == "stop"
    texts = [one["delta"]["content"] for one in choices if isinstance(one["delta"]["content"], str)]
    assert "".join(texts) == example.answer
    (image,) = [chunk for chunk in chunks if chunk.get("modality") == "image"]
    assert image["stage"] == "inlay-demo/painter"
    others = [chunk for chunk in chunks if chunk["choices"] and chunk is not image]
    assert {(chunk["modality"], chunk["stage"]) for chunk in others} == {("text", "inlay-demo")}
    (part,) = image["choices"][0]["delta"]["content"]
    assert seen([part["image_url"]["url"]]) == [(str(example.digit), example.colour)]
    assert [chunk["usage"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks.index(image) == len(chunks) - 3
    used = chunks[-1]["usage"]
    stages = used["stages"]
    assert set(stages) == {"writer", "painter"}
    assert stages["writer"] == {name: used[name] for name in ("prompt_tokens", "completion_tokens")}
    assert min(stages["painter"].values()) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_calls_a_tool_is_the_call_without_an_image(
    served: Served, stream: bool
) -> None:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
    }
    parameters["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "count", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "count"}}
    body = {"messages": messages("Draw two in the colour of ink."), "temperature": 0, **FIELDS}
    body |= {"tools": [tool], "tool_choice": named, "stream": stream, "max_tokens": 60}
    answer = httpx.post(f"{served.v1}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    said = [choice["delta"] if "delta" in choice else choice["message"] for choice in choices]
    calls = [call["function"] for one in said for call in one.get("tool_calls") or ()]
    assert calls[0]["name"] == "count"
    assert "".join(call["arguments"] for call in calls).replace(" ", "") == '{"a":1}'
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["stop"]
    assert "image_url" not in answer.text


def test_a_drawn_answer_is_sent_back_as_it_came_and_is_its_text(
    served: Served, client: openai.OpenAI
) -> None:
    """The model cannot see the image, which was drawn from what it wrote."""
    first, then = demo.drawn_examples().examples[:2]
    answer = client.chat.completions.create(
        model="inlay-demo", messages=messages(first.question), temperature=0, extra_body=FIELDS
    )

    def ids(said: object) -> Any:
        turns = [*messages(first.question), said, *messages(then.question)]
        found: Any = client.chat.completions.create(
            model="inlay-demo", messages=turns, extra_body={"return_token_ids": True}, max_tokens=1
        )
        return found.prompt_token_ids

    as_text = ids({"role": "assistant", "content": first.answer})
    # The client's type of a content is text, so it warns.
    assert ids(answer.choices[0].message.model_dump(warnings=False)) == as_text
    # The client's own images stay refused.
    content: Any = answer.choices[0].message.content
    body = {"messages": [{"role": "user", "content": content[1:]}]}
    refused = httpx.post(f"{served.v1}/chat/completions", json=body, timeout=60)
    assert "takes no images" in refused.json()["error"]["message"]


def test_text_alone_is_a_chat_as_any_other(client: openai.OpenAI) -> None:
    example = demo.drawn_examples().examples[1]
    answer = client.chat.completions.create(
        model="inlay-demo", messages=messages(example.question), temperature=0
    )
    assert answer.choices[0].message.content == example.answer
    assert [found.id for found in client.models.list()] == ["inlay-demo"]


def test_a_drawn_message_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    asked = messages(demo.drawn_examples().examples[1].question)
    answer = client.chat.completions.with_raw_response.create(
        model="inlay-demo", messages=asked, temperature=0, extra_body=FIELDS
    )
    drawn = answer.http_response.json()["choices"][0]["message"]
    assert {part["type"] for part in drawn["content"]} == {"text", "image_url"}
    again = client.chat.completions.create(
        model="inlay-demo", messages=[*asked, drawn, *asked], temperature=0
    )
    assert again.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"modalities": ["audio"]}, "modalities", "allowed: "),
        ({"modalities": ["image"]}, "modalities", "allowed: "),
        ({"modalities": ["text", "image"], "n": 2}, "n", "an answer with an image is one"),
        ({"size": "16x16"}, "size", "of an image"),
        ({"modalities": ["text", "image"], "size": "17x16"}, "size", "multiples of 8"),
        ({"modalities": ["text", "image"], "num_inference_steps": 0}, "num_inference_steps", "1"),
    ],
)
def test_what_cannot_be_drawn_is_a_400_that_names_the_field(
    served: Served, fields: dict[str, Any], param: str, said: str
) -> None:
    body = {"messages": messages("Draw two in the colour of ink."), "temperature": 0, **fields}
    answer = httpx.post(f"{served.v1}/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


def test_images_of_a_prompt_that_a_language_model_reads_first_are_asked_for_in_a_chat(
    served: Served,
) -> None:
    body = {"model": "inlay-demo", "prompt": "x"}
    answer = httpx.post(f"{served.v1}/images/generations", json=body, timeout=60)
    assert answer.status_code == 400

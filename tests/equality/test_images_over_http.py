"""Images in prompts over HTTP: the tokens of `transformers.generate`, however an image comes.

Every request goes through the real `openai` client to a real server in float32.
"""

import base64
import io
import json
import shutil
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from transformers import AutoTokenizer

from inlay.client import MediaEncoder, PromptEmbedder
from inlay.media.families import spec_of
from tests.certificates import certificate
from tests.engine.torch.vision_reference import Parts, Picture, Truth, generated, model_of, pixels
from tests.scratch import scratch
from tests.serving import Served, serving
from tests.vision_models import vision

TOKENS = 8
ONE, TWO = Picture(3, 50, 60), Picture(4, 33, 70)
FLAGS = (
    "--served-model-name", "m", "--enable-prompt-embeds", "--enable-mm-embeds",
    "--limit-mm-per-prompt", '{"image": 3}', "--interleave-mm-strings",
)  # fmt: skip

_TURNS = (
    "{{% for m in messages %}}{{{{ '<|im_start|>' + m['role'] + '\n' }}}}"
    "{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}"
    "{{% for part in m['content'] %}}{{% if part['type'] == 'image' %}}{{{{ '{image}' }}}}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "{{{{ '<|im_end|>\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
)
TEMPLATES = {
    "llava": _TURNS.format(image="<image>\n"),
    "qwen2_5_vl": _TURNS.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
}
MORE_TEMPLATES = {
    "llava_next": _TURNS.format(image="<image>\n"),
    "llava_onevision": _TURNS.format(image="<image>"),
    "internvl": _TURNS.format(image="<IMG_CONTEXT>"),
    "mistral3": _TURNS.format(image="[IMG]"),
    "pixtral": _TURNS.format(image="[IMG]"),
    "idefics3": _TURNS.format(image="<image>"),
    "smolvlm": _TURNS.format(image="<image>"),
    "gemma3": _TURNS.format(image="<start_of_image>"),
    "gemma4": _TURNS.format(image="<|image|>"),
    "qwen2_vl": _TURNS.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl": _TURNS.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl_moe": _TURNS.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_5": _TURNS.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_5_moe": _TURNS.format(image="<|vision_start|><|image_pad|><|vision_end|>"),
    "glm4v": _TURNS.format(image="<|begin_of_image|><|image|><|end_of_image|>"),
    "glm4v_moe": _TURNS.format(image="<|begin_of_image|><|image|><|end_of_image|>"),
    "llama4": _TURNS.format(image="<|image|>"),
}


@cache
def directory(family: str) -> Path:
    """A tiny model of `family` with a template that writes its images, as released ones have."""
    there = scratch("image-models") / family
    shutil.copytree(vision(family), there)
    (there / "chat_template.jinja").write_text(
        {**TEMPLATES, **MORE_TEMPLATES}[family], encoding="utf-8"
    )
    return there


@pytest.fixture(scope="module", params=list(TEMPLATES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(family: str) -> Iterator[Served]:
    with serving(directory(family), *FLAGS) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(picture: Picture, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture.data), **more}}


def saved(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def rows_of(family: str, words: str) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(directory(family))(words, return_tensors="pt").input_ids[0]
    rows: torch.Tensor = model_of(vision(family)).get_input_embeddings()(ids).detach()
    return rows


def embeds(family: str, words: str) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": saved(rows_of(family, words))}


def image_embeds(family: str, picture: Picture) -> dict[str, Any]:
    """The image as a client's own encoder has it."""
    inputs = pixels(family, [picture])
    with torch.no_grad():
        found = model_of(vision(family)).model.get_image_features(**inputs, return_dict=True)
    rows = torch.cat([part.flatten(0, -2) for part in found.pooler_output])
    value: Any = saved(rows)
    if "image_grid_thw" in inputs:
        value = {"image_embeds": value, "image_grid_thw": inputs["image_grid_thw"][0].tolist()}
    return {"type": "image_embeds", "image_embeds": value}


def chat(client: openai.OpenAI, *content: Any, **more: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True, **more.pop("extra_body", {})}
    return client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": list(content)}],
        max_tokens=TOKENS,
        temperature=0,
        extra_body=extra,
        **more,
    )


def ids_of(answer: Any) -> list[int]:
    return list(answer.choices[0].token_ids)


def expected(family: str, *content: str | Picture) -> list[int]:
    """The tokens of transformers for one user's message of texts and pictures."""
    return truth(family, *content).ids


def truth(family: str, *content: str | Picture) -> Truth:
    """What transformers generates for one user's message of texts and pictures."""
    tokenizer = AutoTokenizer.from_pretrained(directory(family))
    parts = [text(each) if isinstance(each, str) else {"type": "image"} for each in content]
    written = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    spec = spec_of(directory(family))
    assert spec is not None
    token = spec.placeholders["image"]
    written = written.replace(token.text, token.before + token.text + token.after)
    ids = tokenizer(written, add_special_tokens=False).input_ids
    pictures = iter([each for each in content if isinstance(each, Picture)])
    split: list[list[int] | Picture] = [[]]
    for id_ in ids:
        if id_ == token.id:
            split += [next(pictures), []]
        else:
            split[-1].append(id_)  # type: ignore[union-attr]
    whole: Parts = [part for part in split if part != []]
    return generated(family, whole, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(MORE_TEMPLATES))
def test_images_of_every_kind_of_family_are_answered_as_by_transformers(family: str) -> None:
    """Tiles, learnt rows, tokens between rows, atomic masks, DeepStack and three axes.

    As files, and as the rows that a server encoded for the client.
    """
    before, words = "counts its lanterns", "and writes"
    # Layers of Gemma 4 need ids, so it takes no embeddings.
    takes_rows = family != "gemma4"
    opening = embeds(family, before) if takes_rows else text(before)
    with (
        serving(directory(family), *FLAGS) as served,
        openai.OpenAI(base_url=served.v1, api_key="unused", max_retries=0) as client,
    ):
        there = chat(client, opening, image(ONE), text(words), image(TWO), logprobs=True)
        back = chat(client, image(TWO), text(words), image(ONE), opening, logprobs=True)
        one = PromptEmbedder.from_pretrained(directory(family)).image_part(
            ONE.data, encoder=MediaEncoder(served.v1, model="m")
        )
        assert one["type"] == "image_embeds"
        sent = one if takes_rows else image(ONE)
        own = chat(client, text(words), sent, text(before), image(TWO), logprobs=True)
    assert_equal(there, truth(family, before, ONE, words, TWO))
    assert_equal(back, truth(family, TWO, words, ONE, before))
    assert_equal(own, truth(family, words, ONE, before, TWO))


def assert_equal(answer: Any, wanted: Truth) -> None:
    """Assert that an answer has the tokens of transformers, and their logprobs."""
    assert ids_of(answer) == wanted.ids
    logprobs = wanted.logits.log_softmax(-1)
    for at, (id_, token) in enumerate(
        zip(wanted.ids, answer.choices[0].logprobs.content, strict=True)
    ):
        assert abs(token.logprob - float(logprobs[at, id_])) < 2e-4


def test_one_image_is_answered_as_by_transformers(client: openai.OpenAI, family: str) -> None:
    answer = chat(client, text("What is on the hill?"), image(ONE), text("It is"))
    assert ids_of(answer) == expected(family, "What is on the hill?", ONE, "It is")


def test_swapped_images_swap_the_answers(client: openai.OpenAI, family: str) -> None:
    words = "the harbour town"
    there = ids_of(chat(client, image(ONE), text(words), image(TWO)))
    back = ids_of(chat(client, image(TWO), text(words), image(ONE)))
    assert there == expected(family, ONE, words, TWO)
    assert back == expected(family, TWO, words, ONE)
    assert there != back


def test_images_mix_with_embeddings_and_text(client: openai.OpenAI, family: str) -> None:
    before, after = "counts its lanterns", " every night"
    answer = chat(
        client,
        embeds(family, before),
        image(ONE),
        text("and writes"),
        image(TWO),
        embeds(family, after),
    )
    assert ids_of(answer) == expected(family, before, ONE, "and writes", TWO, after)


def test_the_clients_own_encoder_gives_the_same(client: openai.OpenAI, family: str) -> None:
    words = "writes the number in a book"
    made = chat(client, image_embeds(family, ONE), text(words), image(TWO), embeds(family, " It"))
    assert ids_of(made) == expected(family, ONE, words, TWO, " It")


def test_text_that_names_the_placeholder_stays_text(client: openai.OpenAI, family: str) -> None:
    placeholder = "<image>" if family == "llava" else "<|image_pad|>"
    words = f"what is {placeholder}?"
    answer = chat(client, text(words), image(ONE))
    plain = chat(client, text(words))
    alone = chat(client, text(words.replace(placeholder, "")), image(ONE))
    # One position more than without the word, in a chat with an image as in one without.
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens + 1
    assert plain.usage.prompt_tokens < answer.usage.prompt_tokens


def counters(server: Served) -> dict[str, float]:
    with urllib.request.urlopen(server.url + "/metrics") as response:
        lines = response.read().decode().splitlines()
    return {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("inlay:image_cache")
    }


def test_a_second_request_encodes_nothing(client: openai.OpenAI, server: Served) -> None:
    picture = Picture(11, 64, 64)
    content = text("the town on the hill " * 6), image(picture, detail="high"), text("is it?")
    first = chat(client, *content)
    before = counters(server)
    second = chat(client, *content)
    assert ids_of(first) == ids_of(second)
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    misses = [name for name in before if "misses" in name]
    assert misses
    after = counters(server)
    assert [after[name] for name in misses] == [before[name] for name in misses]


def test_completions_and_responses_take_images(client: openai.OpenAI, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory(family))
    ids = tokenizer("the harbour").input_ids
    # Ids after it: `generate` numbers on from each axis of an image that ends a prompt.
    given = {"type": "token_ids", "token_ids": ids}
    parts: Any = [given, image(ONE), given]
    made: Any = client.completions.create(
        model="m",
        prompt=parts,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert ids_of(made) == generated(family, [ids, ONE, ids], TOKENS).ids
    asked: Any = {"type": "input_image", "image_url": data_url(ONE.data), "detail": "auto"}
    response = client.responses.create(
        model="m",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "It is"}, asked]}],
        max_output_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    wanted = expected(family, "It is", ONE)
    assert response.output_text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert response.usage is not None
    whole = chat(client, text("It is"), image(ONE)).usage
    assert response.usage.input_tokens == whole.prompt_tokens


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """An https server of pictures on this machine: its port, and who signed its certificate."""
    files, key = certificate(tmp_path_factory.mktemp("https"), "localhost")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(ONE.data)))
            self.end_headers()
            self.wfile.write(ONE.data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files, key)
        http.socket = context.wrap_socket(http.socket, server_side=True)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield http.server_port, files
        http.shutdown()


@pytest.mark.thorough
def test_an_image_by_https_is_the_image(pictures: tuple[int, Path]) -> None:
    port, authority = pictures
    with (
        serving(
            directory("llava"), *FLAGS, "--allowed-media-domains", "localhost",
            "--allowed-media-networks", "127.0.0.0/8", "::1/128",
            environment={"SSL_CERT_FILE": str(authority)},
        ) as served,
        openai.OpenAI(base_url=served.v1, api_key="unused", max_retries=0) as client,
    ):  # fmt: skip
        url = f"https://localhost:{port}/a.png"
        answer = chat(client, {"type": "image_url", "image_url": url}, text("It is"))
        assert ids_of(answer) == expected("llava", ONE, "It is")
        with pytest.raises(openai.BadRequestError, match="--allowed-media-domains"):
            chat(client, {"type": "image_url", "image_url": "https://127.0.0.1/a.png"})


def test_json_numbers_of_a_grid_are_read(server: Served, family: str) -> None:
    """The grid may be base64 too, as vLLM's clients send it."""
    if family != "qwen2_5_vl":
        pytest.skip("this family has no grid")
    part = image_embeds(family, ONE)
    grid = torch.tensor(part["image_embeds"]["image_grid_thw"])
    part["image_embeds"]["image_grid_thw"] = saved(grid)
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        assert ids_of(chat(client, part)) == expected(family, ONE)


def test_an_image_in_a_message_of_anthropics_form_gives_the_tokens_of_a_chat(
    server: Served, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"model": "m", "max_tokens": TOKENS}
    greedy: dict[str, Any] = {"temperature": 0}
    content: Any = [text("look: "), image(ONE), text(" and tell")]
    chat = client.chat.completions.create(
        **asked, **greedy, messages=[{"role": "user", "content": content}]
    )
    encoded = base64.b64encode(ONE.data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    stored = urllib.request.Request(
        server.v1 + "/prompt_embeds", ONE.data, {"content-type": "image/png"}
    )
    with urllib.request.urlopen(stored) as answer:
        ref = json.load(answer)["id"]
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as other:
        for given in (
            source,
            {"type": "url", "url": data_url(ONE.data)},
            {"type": "file", "file_id": ref},
        ):
            blocks: Any = [content[0], {"type": "image", "source": given}, content[2]]
            found = other.messages.create(
                **asked, extra_body=greedy, messages=[{"role": "user", "content": blocks}]
            )
            assert found.content[0].text == chat.choices[0].message.content
            assert chat.usage is not None
            assert (
                found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
                == chat.usage.prompt_tokens
            )

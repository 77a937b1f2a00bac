"""Audio and videos in prompts over HTTP: the tokens of `transformers.generate`.

Every request goes through the real `openai` client to a real server in float32.
"""

import base64
import io
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from inlay.cli import main
from inlay.client import MediaEncoder, audio_part, load_media
from tests.engine.torch.vision_reference import (
    Clip,
    Item,
    Parts,
    Picture,
    Sound,
    directory_of,
    generated,
    model_of,
)
from tests.equality.test_images_over_http import _TURNS, ids_of, saved, text
from tests.media.clips import drawn, video
from tests.scratch import scratch
from tests.serving import Served, serving
from tests.vision_models import IMAGE, VIDEO

TOKENS = 6
TEMPLATES = {
    "qwen2_audio": _TURNS.replace("'image'", "'audio'").format(
        image="<|audio_bos|><|AUDIO|><|audio_eos|>"
    ),
    "voxtral": _TURNS.replace("'image'", "'audio'").format(image="[BEGIN_AUDIO][AUDIO]"),
    "qwen2_5_vl+video": _TURNS.replace("'image'", "'video'").format(
        image="<|vision_start|><|video_pad|><|vision_end|>"
    ),
    "qwen3_vl+video": _TURNS.replace("'image'", "'video'").format(
        image="<|vision_start|><|video_pad|><|vision_end|>"
    ),
}
ITEMS: dict[str, tuple[Item, Item]] = {
    "qwen2_audio": (Sound(5, 16_000), Sound(6, 9_999)),
    "voxtral": (Sound(5, 40_000), Sound(6, 9_999)),
    "qwen2_5_vl+video": (Clip(5, 3, 40, 56), Clip(6, 4, 33, 40)),
    "qwen3_vl+video": (Clip(5, 3, 40, 56), Clip(6, 4, 33, 40)),
}


@cache
def directory(case: str) -> Path:
    there = scratch("media-models") / case
    shutil.copytree(directory_of(case), there)
    (there / "chat_template.jinja").write_text(TEMPLATES[case], encoding="utf-8")
    return there


@pytest.fixture(scope="module", params=list(TEMPLATES))
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(case: str) -> Iterator[Served]:
    with serving(
        directory(case), "--served-model-name", "m", "--enable-prompt-embeds",
        "--enable-mm-embeds", "--limit-mm-per-prompt", '{"audio": 2, "video": 2}',
    ) as served:  # fmt: skip
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(item: Item, *, openai_form: bool = False) -> dict[str, Any]:
    if isinstance(item, Clip):
        frames = ",".join(encoded(picture.data) for picture in item.pictures)
        return {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + frames}}
    if openai_form:
        return {"type": "input_audio", "input_audio": {"data": encoded(item.data), "format": "wav"}}
    url = {"url": "data:audio/wav;base64," + encoded(item.data)}
    return {"type": "audio_url", "audio_url": url, "uuid": "u1"}


def chat(client: openai.OpenAI, *content: Any) -> Any:
    return client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": list(content)}],
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )


def expected(case: str, *content: str | Item) -> list[int]:
    """The tokens of transformers for one user's message of texts and items."""
    tokenizer = AutoTokenizer.from_pretrained(directory(case))
    row, kind = (VIDEO, "video") if case.endswith("+video") else (IMAGE, "audio")
    parts = [text(each) if isinstance(each, str) else {"type": kind} for each in content]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, return_dict=False
    )
    items = iter([each for each in content if not isinstance(each, str)])
    split: list[list[int] | Item] = [[]]
    for id_ in ids:
        if id_ == row:
            split += [next(items), []]
        else:
            split[-1].append(id_)  # type: ignore[union-attr]
    whole: Parts = [each for each in split if each != []]
    return generated(case, whole, TOKENS).ids


def test_items_mix_with_text_and_embeddings(client: openai.OpenAI, case: str) -> None:
    one, two = ITEMS[case]
    words = "writes the number in a book"
    ids = AutoTokenizer.from_pretrained(directory(case))(words, return_tensors="pt").input_ids[0]
    rows: torch.Tensor = model_of(directory_of(case)).get_input_embeddings()(ids).detach()
    answer = chat(
        client,
        text("the harbour"),
        part(one, openai_form=True),
        {"type": "prompt_embeds", "data": saved(rows)},
        part(two),
        text("it is"),
    )
    assert ids_of(answer) == expected(case, "the harbour", one, words, two, "it is")


def test_swapped_items_swap_the_answers(client: openai.OpenAI, case: str) -> None:
    one, two = ITEMS[case]
    there = ids_of(chat(client, part(one), text("the town"), part(two)))
    back = ids_of(chat(client, part(two), text("the town"), part(one)))
    assert there == expected(case, one, "the town", two)
    assert back == expected(case, two, "the town", one)
    assert there != back


def test_completions_and_responses_take_items(client: openai.OpenAI, case: str) -> None:
    one, two = ITEMS[case]
    tokenizer = AutoTokenizer.from_pretrained(directory(case))
    ids = tokenizer("the harbour").input_ids
    given = {"type": "token_ids", "token_ids": ids}
    parts: Any = [given, part(one), given, part(two, openai_form=True), given]
    made: Any = client.completions.create(
        model="m",
        prompt=parts,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert ids_of(made) == generated(case, [ids, one, ids, two, ids], TOKENS).ids
    asked: Any = [{"type": "input_text", "text": "It is"}, part(one, openai_form=True)]
    response = client.responses.create(
        model="m",
        input=[{"role": "user", "content": asked}],
        max_output_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    wanted = expected(case, "It is", one)
    assert response.output_text == tokenizer.decode(wanted, skip_special_tokens=True)
    whole = chat(client, text("It is"), part(one)).usage
    assert response.usage is not None
    assert response.usage.input_tokens == whole.prompt_tokens


def test_encoded_audio_is_the_audio(server: Served, client: openai.OpenAI, case: str) -> None:
    one, two = ITEMS[case]
    answer = encoded_by(server, part(one, openai_form=True), part(two))
    if isinstance(one, Clip):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input[0].type"
        return
    first, second = answer.json()["data"]
    assert (first["object"], second["index"]) == ("audio_embeds", 1)
    assert answer.json()["usage"]["total_tokens"] == first["num_tokens"] + second["num_tokens"]
    by_element = {"type": "audio_embeds", "audio_embeds": first}
    by_file = {"type": "audio_embeds", "audio_embeds": second["audio_embeds"], "uuid": "u"}
    found = ids_of(chat(client, by_element, text("the town"), by_file))
    assert found == expected(case, one, "the town", two)
    (numbers,) = encoded_by(server, part(two), encoding_format="float").json()["data"]
    assert len(numbers["audio_embeds"]) == second["num_tokens"]


def encoded_by(server: Served, *items: Any, **more: Any) -> httpx.Response:
    body = {"input": list(items), **more}
    return httpx.post(server.url + "/v1/encode", json=body, timeout=180, trust_env=False)


def test_the_client_and_the_command_encode_audio(
    server: Served, client: openai.OpenAI, case: str, tmp_path: Path
) -> None:
    one, _ = ITEMS[case]
    if isinstance(one, Clip):
        pytest.skip("a model of videos")
    made = MediaEncoder(server.v1, model="m").encode(one.data, kind="audio")
    file, rows = tmp_path / "one.wav", tmp_path / "one.safetensors"
    file.write_bytes(one.data)
    words = ["embeds", "encode", "--audio", str(file), "--model", str(directory(case))]
    assert main([*words, "--output", str(rows)], {}) == 0
    wanted = expected(case, one, "a")
    for sent in (made, load_media(rows, "audio")):
        assert ids_of(chat(client, sent.chat_part(), text("a"))) == wanted
    assert ids_of(chat(client, audio_part(file), text("a"))) == wanted


BAD_EMBEDS = {
    "width": (torch.zeros(25, 3), "wide"),
    "NaN": (torch.full((25, 64), float("nan")), "finite"),
    "no rows": (torch.zeros(0, 64), "at least"),
}


def test_rows_that_are_no_audio_of_the_model_are_refused(client: openai.OpenAI, case: str) -> None:
    one, _ = ITEMS[case]
    for tensor, message in BAD_EMBEDS.values():
        sent = {"type": "audio_embeds", "audio_embeds": saved(tensor)}
        wrong = "takes no audio" if isinstance(one, Clip) else message
        assert wrong in refused(client, sent)


def animation(clip: Clip) -> dict[str, Any]:
    """A clip as an animation, of half a second a frame."""
    file = io.BytesIO()
    first, *rest = [picture.image for picture in clip.pictures]
    first.save(file, "WEBP", save_all=True, append_images=rest, duration=500, lossless=True)
    return {"type": "video_url", "video_url": "data:image/webp;base64," + encoded(file.getvalue())}


def test_an_animation_is_its_frames(client: openai.OpenAI, case: str) -> None:
    one, _ = ITEMS[case]
    if not isinstance(one, Clip):
        pytest.skip("a model of audio")
    answer = chat(client, animation(one), text("the town"))
    assert ids_of(answer) == expected(case, one, "the town")


def by_file(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + encoded(data)}}


@pytest.mark.parametrize("kind", ["mp4", "matroska"])
def test_a_file_of_video_is_its_frames(client: openai.OpenAI, case: str, kind: str) -> None:
    if not isinstance(ITEMS[case][0], Clip):
        pytest.skip("a model of audio")
    clip = Clip(6, 4, 33, 40)
    frames = [np.asarray(picture.image.convert("RGB")) for picture in clip.pictures]
    sent = by_file(video(frames, kind=kind, fps=2))
    assert ids_of(chat(client, sent, text("the town"))) == expected(case, clip, "the town")


def test_a_longer_file_is_its_sampled_frames(client: openai.OpenAI, case: str) -> None:
    if not isinstance(ITEMS[case][0], Clip):
        pytest.skip("a model of audio")
    frames = drawn(60, 40, 56)
    indices = [0, 15, 30, 45] if case.startswith("qwen2") else [0, 20, 39, 59]
    pictures = []
    for index in indices:
        file = io.BytesIO()
        Image.fromarray(frames[index]).save(file, "PNG")
        pictures.append(encoded(file.getvalue()))
    ready = "data:video/jpeg;base64," + ",".join(pictures)
    made = chat(client, by_file(video(frames, fps=30)), text("the town"))
    if case.startswith("qwen2"):  # Qwen3-VL writes the times, which differ
        same = chat(client, {"type": "video_url", "video_url": ready}, text("the town"))
        assert ids_of(made) == ids_of(same)
    assert (
        made.usage.prompt_tokens
        == chat(
            client, {"type": "video_url", "video_url": ready}, text("the town")
        ).usage.prompt_tokens
    )
    lossy = by_file(video(frames, "libvpx-vp9", "yuv420p", kind="webm", fps=30, options={}))
    assert chat(client, lossy, text("a")).usage.prompt_tokens > 4


def refused(client: openai.OpenAI, *content: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, *content)
    return caught.value.message


def test_what_a_model_does_not_take_is_named(client: openai.OpenAI, case: str) -> None:
    one, two = ITEMS[case]
    other = Sound(1, 5000) if isinstance(one, Clip) else Clip(1, 2, 32, 32)
    kind = "audio" if isinstance(one, Clip) else "video"
    message = refused(client, part(other))
    assert f"the model `m` takes no {kind}; kinds of media it takes: " in message
    assert "at most 2" in refused(client, part(one), part(two), part(one))
    if not isinstance(one, Clip):
        assert "takes no images" in refused(
            client, {"type": "image_url", "image_url": "data:;base64,AA"}
        )


def webm() -> bytes:
    return b"\x1aE\xdf\xa3" + bytes(60)


def uneven() -> str:
    return ",".join(encoded(Picture(1, side, 40).data) for side in (40, 48))


BAD_VIDEOS = {
    "uneven": ("data:video/jpeg;base64," + uneven(), "must have one size"),
    "mp4": (
        "data:video/mp4;base64," + encoded(b"\0\0\0\x08ftypisom" + bytes(40)),
        "malformed MP4",
    ),
    "webm": ("data:video/webm;base64," + encoded(webm()), "malformed WEBM"),
    "playlist": ("data:video/mp4;base64," + encoded(b"#EXTM3U\nfile:///etc/passwd"), "ready-made"),
    "png": ("data:image/png;base64," + encoded(Picture(1, 40, 40).data), "not one PNG"),
    "no base64": ("data:video/jpeg;base64,AAAA,!", "frame 1 of a video does not hold valid base64"),
    "no frame": ("data:video/jpeg;base64,", "frame 0 of a video"),
    "100,000 frames": ("data:video/jpeg;base64," + "AAAA," * 99_999 + "AAAA", "100000 frames"),
    "fps": ("data:video/jpeg;fps=1e9;base64,AAAA", "allowed: 0.01 to 240"),
    "no fps": ("data:video/jpeg;fps=x;base64,AAAA", "fps of a video is a number"),
}
BAD_SOUNDS = {
    "empty": ("data:audio/wav;base64,", "is empty"),
    "ogg": ("data:audio/ogg;base64," + encoded(b"OggS" + bytes(40)), "cannot be decoded"),
    "cut": ("data:audio/wav;base64," + encoded(Sound(1, 9000).data[:30]), "truncated"),
    "long": ("data:audio/wav;base64," + encoded(Sound(1, 40_000).data), "at most 2 s"),
}


def test_files_that_no_client_should_send_are_refused(client: openai.OpenAI, case: str) -> None:
    one, _ = ITEMS[case]
    name = "video_url" if isinstance(one, Clip) else "audio_url"
    bad = BAD_VIDEOS if isinstance(one, Clip) else BAD_SOUNDS
    if case == "voxtral":  # hears long audio in chunks
        bad = {what: value for what, value in bad.items() if what != "long"}
    for url, message in bad.values():
        assert message in refused(client, {"type": name, name: {"url": url}})
    assert "not kept by its uuid" in refused(client, {"type": name, name: None, "uuid": "a"})
    assert "must be a string" in refused(client, {"type": name, name: {"url": 5}})
    assert ids_of(chat(client, part(one), text("a"))) == expected(case, one, "a")

"""`inlay demo --images`: the bundled model with images, shown by requests about its pictures."""

import base64
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inlay import demo
from inlay.client import PromptEmbedder, load
from inlay.demo import DigitPicture, VisionExample


def asked() -> VisionExample:
    """The question about one picture that is shown."""
    return demo.vision_examples().examples[0]


def compared() -> Sequence[VisionExample]:
    """The comparison of two pictures that is shown, and the same the other way round."""
    found = demo.vision_examples().examples
    return [each for each in found if each.answer in ("first", "second")]


def demonstration(chat: Callable[[object], str]) -> Iterator[str]:
    """Lines that show requests and their answers."""
    embedder = PromptEmbedder.from_pretrained(demo.vision_dir())
    one = asked()
    (picture,) = _pictures(one)
    question = {"type": "text", "text": one.question}

    yield "\n1. A picture and a question in text"
    yield f"   > [{picture.path.name}] {one.question}"
    yield f"   < {chat([_image(picture), question])}"

    rows = load(picture.rows_path)
    part = {"type": "image_embeds", "image_embeds": rows.to_base64()}
    yield "\n2. The same picture as embeddings, made by a client's own encoder: no file is sent"
    size = f"{rows.num_tokens} rows of {rows.hidden_size}"
    yield f"   > [image_embeds: {size}] {one.question}"
    yield f"   < {chat([part, question])}"

    yield "\n3. Two pictures compared, then the other way round"
    for pair in compared():
        shown = _pictures(pair)
        yield f"   > {''.join(f'[{each.path.name}]' for each in shown)} {pair.question}"
        which = {"type": "text", "text": pair.question}
        yield f"   < {chat([*map(_image, shown), which])}"

    yield "\n4. A picture beside prompt embeddings: the question is not sent as text"
    yield f"   > [{picture.path.name}][embeddings of {one.question!r}]"
    yield f"   < {chat([_image(picture), embedder.chat_part(one.question)])}"


def _pictures(shown: VisionExample) -> Sequence[DigitPicture]:
    return [demo.vision_examples().picture(name) for name in shown.pictures]


def _image(picture: DigitPicture) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture.path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def curl(url: str, model: str) -> str:
    """A command that asks about a picture."""
    one = asked()
    (picture,) = _pictures(one)
    return (
        f'printf \'{{"model": "{model}", "temperature": 0, "max_tokens": 8, "messages": '
        '[{"role": "user", "content": [\n'
        '  {"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}},\n'
        f'  {{"type": "text", "text": "{one.question}"}}]}}]}}\' "$(base64 <'
        f"{shlex.quote(str(picture.path))} | tr -d '\\n')\" |\n"
        f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @-"
    )


def python(url: str, model: str, interpreter: str) -> str:
    """A script that encodes a picture itself and sends its rows with the `openai` client."""
    one = asked()
    (picture,) = _pictures(one)
    return textwrap.dedent(f"""\
        {interpreter} - <<'EOF'
        import base64, io
        import torch
        from openai import OpenAI
        from PIL import Image
        from transformers import AutoImageProcessor, LlavaForConditionalGeneration

        there = {str(demo.vision_dir())!r}
        encoder = LlavaForConditionalGeneration.from_pretrained(there, dtype=torch.float32)
        picture = Image.open({str(picture.path)!r}).convert("RGB")
        pixels = AutoImageProcessor.from_pretrained(there)(images=picture, return_tensors="pt")
        with torch.no_grad():
            (rows,) = encoder.get_image_features(**pixels).pooler_output
        file = io.BytesIO()
        torch.save(rows.clone(), file)
        embeds = base64.b64encode(file.getvalue()).decode()
        content = [
            {{"type": "image_embeds", "image_embeds": embeds}},
            {{"type": "text", "text": {one.question!r}}},
        ]
        answer = OpenAI(base_url="{url}/v1", api_key="unused").chat.completions.create(
            model="{model}", temperature=0, max_tokens=8,
            messages=[{{"role": "user", "content": content}}],
        )
        print(answer.choices[0].message.content)
        EOF""")

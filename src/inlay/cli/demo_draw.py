"""`inlay demo --draw`: the bundled pipeline, which answers a question and draws the answer."""

import base64
import io
import json
import os
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from inlay import demo

SHOWN = 2
"""Questions that are asked."""

_UPPER_HALF = "\u2580"


def fields() -> dict[str, Any]:
    """The fields of a request for text and an image, as the pipeline was measured."""
    known = demo.drawn_examples()
    return {
        "modalities": ["text", "image"],
        "num_inference_steps": known.steps,
        "guidance_scale": known.guidance,
        "seed": 0,
    }


def demonstration(
    chat: Callable[[str, Mapping[str, Any]], Any], stdout: TextIO, folder: Path
) -> Iterator[str]:
    """Lines that show requests and their answers; pictures are written to `folder`.

    Args:
        chat: the content of the answer to one user message, with further fields.
        stdout: pictures are shown where it is a terminal of many colours.
        folder: made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(demo.drawn_examples().examples[:SHOWN], 1):
        text, image = chat(example.question, fields())
        file = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        path = folder / f"{text['text'].replace(' ', '-')}.png"
        path.write_bytes(file)
        yield f"\n{number}. One request, two models: a writer answers, a painter draws"
        yield f"   > {example.question}"
        yield f"   < {text['text']}"
        yield f"   < [{path}]"
        if stdout.isatty() and os.environ.get("COLORTERM") in ("truecolor", "24bit"):
            yield from (f"     {line}" for line in blocks(file))


def blocks(file: bytes) -> Iterator[str]:
    """Lines of a terminal that show an image: a character is two pixels, one above the other."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).tolist()
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=False):
        shown = "".join(
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]}m\x1b[48;2;{b[0]};{b[1]};{b[2]}m{_UPPER_HALF}"
            for a, b in zip(upper, lower, strict=True)
        )
        yield shown + "\x1b[0m"


def curl(url: str, model: str) -> str:
    """A command that has an answer drawn and writes the picture."""
    question = demo.drawn_examples().examples[0].question
    body = {"model": model, "temperature": 0, **fields()}
    body["messages"] = [{"role": "user", "content": question}]
    return (
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))} |\n"
        "  grep -o 'base64,[^\"]*' | cut -d, -f2 | base64 -d > drawn.png"
    )


def python(url: str, model: str, interpreter: str) -> str:
    """A script that has an answer drawn with the `openai` client and writes the picture."""
    question = demo.drawn_examples().examples[0].question
    return textwrap.dedent(f"""\
        {interpreter} - <<'EOF'
        import base64
        from openai import OpenAI

        answer = OpenAI(base_url="{url}/v1", api_key="unused").chat.completions.create(
            model="{model}", temperature=0, messages=[{{"role": "user", "content": {question!r}}}],
            extra_body={fields()!r},
        )
        text, image = answer.choices[0].message.content
        print(text["text"])
        with open("drawn.png", "wb") as file:
            file.write(base64.b64decode(image["image_url"]["url"].partition(",")[2]))
        EOF""")

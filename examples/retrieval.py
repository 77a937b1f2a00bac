"""Retrieve with one model's vectors, prompt another with rows: it never sees documents as text.

    inlay serve sentence-transformers/all-MiniLM-L6-v2 --served-model-name minilm --port 8001
    inlay demo
    python examples/retrieval.py

Each sentence of the notes is embedded once (`/v1/embeddings`). A question is embedded too, and the
nearest sentences go into the chat as rows of the answering model's own embeddings
(`prompt_embeds`), which here are looked up. A trained compressor, which makes a few rows of a whole
document, takes the place of `compress` and changes nothing else; rows that are used again are
better uploaded once and named by reference (docs/client.md).
"""

import argparse
import re

import numpy as np
from openai import OpenAI
from openai.types.chat import ChatCompletionContentPartParam

from inlay import demo
from inlay.client import PromptEmbedder

NEAREST = 2


def vectors(client: OpenAI, model: str, texts: list[str]) -> np.ndarray:
    """A vector of length 1 for each text; they travel as base64."""
    answer = client.embeddings.create(model=model, input=texts)
    return np.array([item.embedding for item in answer.data], np.float32)


def compress(embedder: PromptEmbedder, sentences: list[str]) -> ChatCompletionContentPartParam:
    """What stands for the sentences in a chat: the rows of their tokens."""
    return embedder.chat_part(" ".join(sentences))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--embedding-url", default="http://127.0.0.1:8001/v1")
    parser.add_argument("--embedding-model", default="minilm")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--model", default=str(demo.model_dir()), help="directory of the answering model"
    )
    parser.add_argument("--name", default="inlay-demo", help="its served name")
    arguments = parser.parse_args()

    finder = OpenAI(base_url=arguments.embedding_url, api_key="unused")
    client = OpenAI(base_url=arguments.base_url, api_key="unused")
    embedder = PromptEmbedder.from_pretrained(arguments.model)
    notes = demo.examples().mixed
    sentences = [each for note in notes for each in re.findall(r"[^.]+\.", note.document)]
    known = vectors(finder, arguments.embedding_model, [each.strip() for each in sentences])
    right = 0
    for note in notes:
        (question,) = vectors(finder, arguments.embedding_model, [note.after.strip()])
        nearest = np.argsort(-(known @ question))[:NEAREST]
        found = [sentences[index].strip() for index in sorted(nearest)]
        answer = client.chat.completions.create(
            model=arguments.name,
            max_tokens=16,
            temperature=0,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": note.before},
                        compress(embedder, found),
                        {"type": "text", "text": note.after},
                    ],
                }
            ],
        )
        said = answer.choices[0].message.content
        right += said == note.answer
        print(f"{note.after.strip()}  <- {' '.join(found)}  -> {said}")
    print(f"{right} of {len(notes)} right")


if __name__ == "__main__":
    main()

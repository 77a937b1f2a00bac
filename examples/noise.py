"""How much noise hides a prompt's tokens, and how much of the answer survives it.

    inlay demo
    python examples/noise.py

For each level of Gaussian noise, as a share of the rows' median norm: how many rows are still
nearest to their own token, which is the least that someone who has the rows would try, and what the
model answers. With the demo model noise first spoils the answer and only then hides the tokens:
where the answer is already wrong, every token can still be read, and where most tokens are hidden,
nothing of the question is left either.
"""

import argparse

import numpy as np
from openai import OpenAI

from inlay import demo
from inlay.client import EmbeddedPrompt, PromptEmbedder, nearest

LEVELS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "question", nargs="?", default=demo.examples().chats[0].messages[-1].content
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--model", default=str(demo.model_dir()), help="directory of the served model"
    )
    parser.add_argument("--name", default="inlay-demo", help="its served name")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key="unused")
    embedder = PromptEmbedder.from_pretrained(arguments.model)
    prompt = embedder.embed_messages([{"role": "user", "content": arguments.question}])
    clean = prompt.rows.astype(np.float32)
    own = [row[0].token_id for row in nearest(clean, embedder.table)]
    random = np.random.default_rng(0)
    deviation = np.median(np.linalg.norm(clean, axis=1)) / np.sqrt(clean.shape[1])

    print(f"> {arguments.question}\n\n{'noise':>6}  {'tokens read':>11}  answer")
    for level in LEVELS:
        noisy = clean + level * deviation * random.standard_normal(clean.shape, dtype=np.float32)
        read = [row[0].token_id for row in nearest(noisy, embedder.table)]
        share = np.mean([mine == found for mine, found in zip(own, read, strict=True)])
        sent = EmbeddedPrompt(noisy, prompt.table_id)
        answer = client.completions.create(
            model=arguments.name, temperature=0, max_tokens=24, **sent.completion_args()
        )
        print(f"{level:>6.2f}  {share:>11.0%}  {answer.choices[0].text.strip()!r}")


if __name__ == "__main__":
    main()

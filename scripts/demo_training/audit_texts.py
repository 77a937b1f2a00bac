"""Texts for `inlay embeds audit` of the demo model: questions, half of them about a passage.

python -m scripts.demo_training.audit_texts > texts.jsonl
inlay embeds audit --model src/inlay/demo/model --texts texts.jsonl

The first 300 are in `src/inlay/demo/texts.jsonl`.
"""

import json
import random
import re
import sys

from scripts.demo_training.corpus import QUESTION_FRAMES, READING_FRAMES, Corpus
from scripts.demo_training.world import World, build_world

WORLD_SEED = 7
"""Of the world that the model knows."""

SEED = 71
"""Of no documents that the model was trained on."""

COUNT = 900


def lines(world: World, seed: int, count: int) -> list[str]:
    """One JSON object each: text, names in it, the right answer."""
    corpus = Corpus(world, seed)
    rng = random.Random(seed + 1)
    found = []
    for index in range(count):
        if index % 2:
            passage, facts = corpus.passage()
            asked = rng.choice(facts)
            exchange = corpus.ask(asked)
            text = rng.choice(READING_FRAMES).format(p=passage, q=exchange.user)
        else:
            asked = corpus.fact()
            facts = (asked,)
            exchange = corpus.ask(asked)
            text = rng.choice(QUESTION_FRAMES).format(q=exchange.user)
        words = {word for fact in facts for word in (fact.subject, fact.value)}
        names = sorted(
            word for word in words if word[0].isupper() and re.search(rf"\b{word}\b", text)
        )
        found.append(json.dumps({"text": text, "names": names, "answer": exchange.answer}))
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(build_world(WORLD_SEED), SEED, COUNT)) + "\n")

"""Eight rows instead of a prompt: a frozen model learns a task as 8 rows of embeddings.

    python examples/eight_rows.py train MODEL --task section
    python examples/eight_rows.py train MODEL --task language
    inlay serve MODEL --served-model-name gemma --enable-prompt-embeds
    python examples/eight_rows.py ask section language

MODEL is a directory of a small base model: Gemma 3 270M is what this was made with. Training takes
some minutes on two cores and touches no weight: it looks for 8 rows that make the model give the
right label after a text. They are uploaded once, 10 to 20 KB; a request then names them by a
reference of 35 bytes. Both tasks are asked at once, and the server mixes their rows in its batches.

The data are the one-line descriptions of Debian's packages, which `apt-cache dumpavail` has on
every Debian and Ubuntu, and a label that people gave each: its section, or the language it is for.
`--csv FILE` takes lines of TEXT,LABEL in their place. README.md beside this file has the result.
Rows that PEFT has trained are served in the same way: examples/peft_prompt.py.
"""

import argparse
import asyncio
import csv
import json
import math
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from inlay.client import AsyncUploader, EmbeddedPrompt, load

TASKS = {
    "section": "games science sound graphics net text mail database",
    "language": "python perl haskell rust golang javascript java ruby",
}
ROWS, HELD_OUT, MOST, SHOTS = 8, 25, 175, 3
"""Rows; of each label: texts that are asked, texts to learn from at most, examples in a text."""
AT_ONCE, TIMED = 32, 20
"""Requests in flight; requests whose time is taken, one after the other."""


FAIR = """
right: the likeliest of all tokens is the label. among: the label is the likeliest of the labels.
Not a contest of equals: the rows were trained on hundreds of labelled texts, and a prompt holds a
few. Wording and order of the text were not tuned. A base model of 270M learns little from examples
in its prompt; the gap shrinks with size. LoRA was not compared: it would likely do as well, in a
larger file that the engine loads. The rows are for this model alone. Times are of one request at a
time, with the beginning of the text in the prefix cache."""


@dataclass
class Task:
    """A text's label is asked for as `TEXT\\nNAME:`. Pairs are (text, label).

    `begin` is the model's begin token, if any; `tokens` are the labels' first, `said` their texts.
    """

    name: str
    labels: list[str]
    held_out: list[tuple[str, str]]
    known: list[tuple[str, str]]
    begin: list[int] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    seen: int = 0

    def question(self, text: str) -> str:
        return f"{text}\n{self.name}:"

    def text_prompt(self, shots: int) -> str:
        """An instruction, and this many examples of each label."""
        told = f"Give the {self.name} of each software package: {', '.join(self.labels)}.\n\n"
        examples = [
            pair
            for label in self.labels
            for pair in [known for known in self.known if known[1] == label][:shots]
        ]
        random.Random(0).shuffle(examples)
        return told + "".join(f"{self.question(text)} {label}\n\n" for text, label in examples)


def packages() -> Iterator[tuple[str, str, str]]:
    """Source package, description and section of each package that this machine knows."""
    index = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True)
    for stanza in index.stdout.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line[:24])
        if {"Package", "Section", "Description"} <= fields.keys():
            source = fields.get("Source", fields["Package"]).split()[0]
            yield source, fields["Description"], fields["Section"]


def lines_of(path: Path) -> Iterator[tuple[str, str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        for number, (text, label) in enumerate(csv.reader(file)):
            yield str(number), text, label


def read_task(name: str, source: Path | None) -> Task:
    """Texts of one source package are never both asked and learned from: one of each is taken."""
    found = sorted(packages() if source is None else lines_of(source))
    labels = TASKS[name].split() if source is None else sorted({label for *_, label in found})
    random.Random(1).shuffle(found)
    texts: dict[str, list[str]] = {label: [] for label in labels}
    taken: set[str] = set()
    for package, text, label in found:
        if label in texts and package not in taken and text not in texts[label]:
            taken.add(package)
            texts[label].append(text)
    held_out, known = [], []
    for label, own in texts.items():
        if len(own) < HELD_OUT + SHOTS:
            raise SystemExit(f"{name}: {label!r} has {len(own)} texts, {HELD_OUT + SHOTS} needed")
        held_out += [(text, label) for text in own[:HELD_OUT]]
        known += [(text, label) for text in own[HELD_OUT : HELD_OUT + MOST]]
    random.Random(2).shuffle(held_out)
    random.Random(3).shuffle(known)
    return Task(name, labels, held_out, known)


def train(model_directory: Path, name: str, source: Path | None, steps: int, out: Path) -> None:
    """Write `rows.safetensors` and `task.json`: rows, data, what was seen."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    model.requires_grad_(False)
    table = model.get_input_embeddings()
    task = read_task(name, source)
    print(f"{name}: {len(task.known)} to learn from, {len(task.held_out)} held out", flush=True)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    # What the tokenizer puts before a text: many have no begin token, or use none.
    task.begin = [each for each in tokenizer("").input_ids if each == tokenizer.bos_token_id]
    task.tokens = {label: ids(f" {label}")[0] for label in task.labels}
    task.said = {label: tokenizer.decode(token) for label, token in task.tokens.items()}
    if len(set(task.said.values())) < len(task.said):
        raise SystemExit(f"labels must differ in their first token: {task.said}")
    words = ids(f"Give the {name} of this software package. One word.")[:ROWS]
    rows = table(torch.tensor(words)).detach().clone().requires_grad_()
    begin = table(torch.tensor(task.begin, dtype=torch.long))
    optimizer = torch.optim.Adam([rows], lr=0.5)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    drawn = random.Random(4)
    started = time.monotonic()
    for step in range(steps):
        batch = drawn.sample(task.known, 8)
        # Behind the begin token: models expect it first. Padding stands last and is not looked at.
        texts = [table(torch.tensor(ids(task.question(text)))) for text, _ in batch]
        inputs = [torch.cat([begin, rows, text]) for text in texts]
        ends = torch.tensor([len(each) - 1 for each in inputs])
        padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        mask = torch.arange(padded.shape[1]) <= ends[:, None]
        # The inner model, and the head at the last positions alone: the vocabulary is large.
        states = model.model(inputs_embeds=padded, attention_mask=mask.long(), use_cache=False)
        logits = model.lm_head(states.last_hidden_state[torch.arange(len(batch)), ends])
        wanted = torch.tensor([task.tokens[label] for _, label in batch])
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([rows], 1.0)
        optimizer.step()
        rate.step()
        if step % 10 == 0 or step == steps - 1:
            spent = time.monotonic() - started
            print(
                f"  step {step + 1:>3}/{steps}  loss {loss.item():5.2f}  {spent:4.0f} s", flush=True
            )
    task.seen = 8 * steps
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.safetensors").write_bytes(EmbeddedPrompt(rows.detach().numpy()).to_bytes())
    (out / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
    print(f"{out}: {ROWS} rows of {rows.shape[1]}, {rows.numel() * 4} bytes")


def interval(right: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z = right / of, 1.96
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + (z / of) ** 2 / 4) / (1 + z * z / of)
    return middle - half, middle + half


class Way:
    """One way to ask a task: what stands before a text, and how it went."""

    def __init__(self, task: Task, name: str, before: list[Any] | str) -> None:
        self.task, self.name, self._before = task, name, before
        self.right: list[bool] = []
        self.among: list[bool] = []
        self.positions: list[int] = []
        self.bytes: list[int] = []
        self.seconds: list[float] = []

    def prompt(self, text: str) -> Any:
        question = self.task.question(text)
        if isinstance(self._before, str):
            return self._before + question
        return [*self._before, {"type": "text", "text": question}]

    async def ask(self, client: AsyncOpenAI, model: str, text: str, label: str) -> None:
        labels = {"logprob_token_ids": list(self.task.tokens.values())}
        answer = await client.completions.with_raw_response.create(
            model=model, prompt=self.prompt(text), max_tokens=1, temperature=0, logprobs=1,
            extra_body=labels,
        )  # fmt: skip
        completion = answer.parse()
        choice = completion.choices[0]
        assert completion.usage is not None
        assert choice.logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        of = choice.logprobs.top_logprobs[0]
        said = self.task.said
        self.right.append(choice.text == said[label])
        self.among.append(max(said, key=lambda each: of.get(said[each], -math.inf)) == label)
        self.positions.append(completion.usage.prompt_tokens)

    async def time(self, client: AsyncOpenAI, model: str, text: str) -> None:
        started = time.monotonic()
        answer = await client.completions.with_raw_response.create(
            model=model, prompt=self.prompt(text), max_tokens=1, temperature=0
        )
        self.seconds.append(time.monotonic() - started)
        self.bytes.append(len(answer.http_request.content))

    def line(self) -> str:
        right, of = sum(self.right), len(self.right)
        low, high = interval(right, of)
        share = f"{right / of:.0%} [{low:.0%}, {high:.0%}] of {of}"
        among = sum(self.among) / of
        return (
            f"{self.task.name:<10}{self.name:<26}{share:<23}{among:>5.0%}{max(self.positions):>11}"
            f"{statistics.mean(self.bytes):>8.0f}{1000 * statistics.median(self.seconds):>9.0f} ms"
        )


async def compare(base_url: str, model: str, directories: list[Path], most: int) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key="unused", timeout=600)
    uploader = AsyncUploader(base_url, upload_from=1024)
    tuned: list[Way] = []
    told: list[Way] = []
    for directory in directories:
        task = Task(**json.loads((directory / "task.json").read_text(encoding="utf-8")))
        part = await load(directory / "rows.safetensors").chat_part_async(uploader)
        print(f"{directory}: uploaded once, now {part['ref']!r}")
        begin = [{"type": "token_ids", "token_ids": task.begin}] if task.begin else []
        tuned.append(Way(task, f"{ROWS} rows, {task.seen} texts seen", [*begin, part]))
        for shots in (0, 1, SHOTS):
            name = f"text, {shots * len(task.labels)} texts seen"
            told.append(Way(task, name, task.text_prompt(shots)))
    # All of both tenants at once: the server mixes them in its batches.
    pairs = [(way, *pair) for way in tuned for pair in way.task.held_out[:most]]
    random.Random(5).shuffle(pairs)
    pairs += [(way, *pair) for way in told for pair in way.task.held_out[:most]]
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(way: Way, text: str, label: str) -> None:
        async with free:
            await way.ask(client, model, text, label)

    await asyncio.gather(*(ask(*pair) for pair in pairs))
    for way in [*told, *tuned]:
        for text, _ in way.task.held_out[: min(TIMED, most)]:
            await way.time(client, model, text)
    print(
        f"\n{'task':<10}{'prompt':<26}{'right [95 %]':<23}{'among':>5}{'positions':>11}"
        f"{'bytes':>8}{'first token':>12}"
    )
    for way in sorted([*told, *tuned], key=lambda way: way.task.name):
        print(way.line())
    print(FAIR)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="find the rows of a task")
    training.add_argument("model", type=Path, help="directory of the model")
    training.add_argument("--task", default="section", help=f"{' or '.join(TASKS)}; any with --csv")
    training.add_argument("--csv", type=Path, help="lines of TEXT,LABEL in place of packages")
    training.add_argument("--steps", type=int, default=150, help="of 8 texts each")
    training.add_argument("--out", type=Path, help="directory to write; the task's name")
    asking = commands.add_parser("ask", help="ask a running server, print the table")
    asking.add_argument("tasks", nargs="+", type=Path, help="directories that train wrote")
    asking.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    asking.add_argument("--model", default="gemma", help="its served name")
    asking.add_argument("--most", type=int, default=200, help="texts of each task to ask")
    given = parser.parse_args()
    if given.command == "train":
        train(given.model, given.task, given.csv, given.steps, given.out or Path(given.task))
    else:
        asyncio.run(compare(given.base_url, given.model, given.tasks, given.most))


if __name__ == "__main__":
    main()

"""Acceptance of an EAGLE-3 head that is trained for the demo model in a few minutes.

    python -m benchmarks.draft_head

The head learns from 270 of the demo's questions and answers, by the loss of EAGLE-3: the model's
own next tokens after one and two of the head's steps. Acceptance is measured over what the model
says to the other 30 with three guesses a step, whatever they cost. How often a head is right for
another model is another question: this one has 3,072 tokens and an invented world.
"""

import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks._environment import ensure
from benchmarks._options import parser_of
from inlay import demo
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.speculation.draft_head import HeadDrafter
from inlay.engine.torch.speculation.eagle import EagleHead, load_eagle
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling
from inlay.render import Renderer

LAYERS, GUESSES, HELD_OUT, LENGTH, BATCH = (1, 2, 3), 3, 30, 24, 8
BOUNDS = EngineLimits(
    max_model_len=512, max_num_seqs=1, max_num_batched_tokens=512, page_size=16, num_pages=64
)


class Always(Speculator):
    """Takes all steps for equally long, so that all guesses are made."""

    def timed(self, chunks: Iterable[ScheduledChunk], seconds: float) -> None:
        super().timed(chunks, 0.001)


def questions() -> list[tuple[list[int], list[int]]]:
    """Return the demo's questions as chats and their right answers, as ids."""
    renderer = Renderer.load(demo.model_dir())
    lines = (demo.model_dir().parent / "texts.jsonl").read_text().splitlines()
    shape = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [
        (
            list(renderer.encode(shape.format(each["text"]), add_special_tokens=False)),
            list(renderer.encode(each["answer"] + "<|im_end|>\n", add_special_tokens=False)),
        )
        for each in map(json.loads, filter(None, lines))
    ]


def answered(core: Core, ids: list[int]) -> list[int]:
    """Return what the model says to `ids`, greedily, its end and what comes after it included."""
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    core.admit(Request(id="q", prompts=(Prompt.of(Tokens(ids)),), params=sampling))
    found: list[int] = []
    while len(core):
        found += [id_ for output in core.step() for id_ in output.token_ids]
    return found


def train(texts: list[list[int]], steps: int) -> tuple[EagleHead, LlamaConfig]:
    """Train a head on texts of the model."""
    served = AutoModelForCausalLM.from_pretrained(demo.model_dir(), dtype=torch.float32).eval()
    own = served.config
    config = LlamaConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        rms_norm_eps=own.rms_norm_eps,
        max_position_embeddings=own.max_position_embeddings,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    head = EagleHead(config, LAYERS, own.vocab_size)
    head.rotary = LlamaRotaryEmbedding(config)
    table = served.get_input_embeddings().weight.detach()
    with torch.no_grad():
        head.lm_head.weight.copy_(table)
    samples = []
    for text in texts:
        with torch.no_grad():
            ids = torch.tensor(text)
            found = served(ids[None], output_hidden_states=True)
        states = [found.hidden_states[layer][0] for layer in LAYERS]
        samples.append((states, table[ids], found.logits[0].argmax(-1)))
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    order = torch.Generator().manual_seed(2)
    for step in range(steps):
        picked = torch.randint(len(samples), (BATCH,), generator=order).tolist()
        loss = torch.stack([loss_of(head, *samples[index]) for index in picked]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
    return head, config


def loss_of(head: EagleHead, states: list[Tensor], embeds: Tensor, told: Tensor) -> Tensor:
    """Return the loss of one and two steps on a text.

    `told`: the model's next token after each position.
    """
    hidden = head.combine([each[:-1] for each in states])
    losses = []
    for ahead in (1, 2):
        after = embeds[ahead:]
        positions = torch.arange(len(after))
        hidden = head.advance(after, hidden[: len(after)], positions, None)  # type: ignore[arg-type]
        losses.append(F.cross_entropy(head.lm_head(head.norm(hidden)), told[ahead:]))
    return torch.stack(losses).mean()


def write(head: EagleHead, config: LlamaConfig, directory: Path) -> None:
    """Write a head in the layout of SafeAILab's EAGLE."""
    whole = ("fc.", "norm.", "lm_head.")
    save_file(
        {
            name if name.startswith(whole) else f"midlayer.{name}": weight.contiguous()
            for name, weight in head.state_dict().items()
        },
        directory / "model.safetensors",
    )
    layers = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    (directory / "config.json").write_text(json.dumps(config.to_dict() | layers))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    ensure("benchmarks.draft_head")
    torch.set_num_threads(1)
    began = time.process_time()
    settings = EngineSettings.of(model=str(demo.model_dir()), device="cpu", num_threads=1)
    model = CausalModel.load(settings)
    asked = questions()
    texts = [question + answer for question, answer in asked[:-HELD_OUT]]
    head, config = train(texts, options.steps)
    with tempfile.TemporaryDirectory() as name:
        write(head, config, Path(name))
        drafter = HeadDrafter(load_eagle(Path(name), model), model, BOUNDS.num_pages, 16)
    core = Core(model, BOUNDS, Secret.random(), speculator=Always(drafter, GUESSES, drafter))
    plain = Core(model, BOUNDS, Secret.random())
    held = [question for question, _ in asked[-HELD_OUT:]]
    same = sum(answered(core, question) == answered(plain, question) for question in held)
    stats = core.stats()
    print(
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses accepted "
        f"({stats.num_accepted_tokens / stats.num_draft_tokens:.0%}); "
        f"{1 + stats.num_accepted_tokens / stats.num_drafts:.2f} tokens a step with guesses; "
        f"{same} of {HELD_OUT} outputs are those without; "
        f"{time.process_time() - began:.0f} CPU seconds"
    )


if __name__ == "__main__":
    main()

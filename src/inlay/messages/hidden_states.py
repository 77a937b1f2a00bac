"""Hidden states that a request to generate asks for beside its tokens."""

import msgspec


class HiddenStates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hidden states that come with an output, as payloads "hidden_states.LAYER" [positions, size].

    The positions asked for are consecutive: the last `prompt` ones of the prompt, then, with
    `output`, one for each further token: that from which it was chosen. Output alone begins with
    the prompt's last position, so that there are as many as tokens.

    Attributes:
        layers: as transformers numbers its `hidden_states`: 0 is what the first layer reads, the
            number of layers what comes behind the last norm.
        prompt: positions at the prompt's end; -1 for all of it.
        output: those of the output too.
        given: positions that earlier attempts have shown already.
        projected: they go through the worker's projector, where it has one.
    """

    layers: tuple[int, ...]
    prompt: int = 0
    output: bool = False
    given: int = 0
    projected: bool = True

    def positions(self, prompt: int, output: int) -> range:
        """Return the positions that are left to show of a prompt and an output of these lengths."""
        kept = prompt if self.prompt < 0 else min(self.prompt, prompt)
        start = prompt - max(kept, self.output)
        return range(start + self.given, max(prompt, prompt - 1 + output * self.output))


def hidden_port(layer: int) -> str:
    """Return the port of the payloads of a layer's hidden states."""
    return f"hidden_states.{layer}"

"""Pipelines that speak: their stages behind the language model, and the sound that they make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import asdict, replace

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.http.quoting import shown_value
from inlay.http.server import Server
from inlay.messages.card import ModelCard
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.prompt import Media
from inlay.router import Router
from inlay_stages.api.sound_files import FinishedFile, SampledFile, SoundFile
from inlay_stages.cards import AudioCard, audio_card, graph_of
from inlay_stages.graph import Graph
from inlay_stages.params import Speech
from inlay_stages.walk import Step, plan

_SPEECH_POSITIONS = 3
"""Of a talker, behind the prompt: the beginning of its speech and one code."""
_BYTES_PER_SAMPLE = 8
"""Of sound while it is answered: as it comes from the worker, as 16 bits, and in base64."""


def speaks(card: ModelCard) -> bool:
    """Return True if a model that clients see is a pipeline that speaks."""
    return card.stage is not None and "audio" in card.stage.outputs


@dataclass(frozen=True, slots=True)
class SpeechPlan:
    """The stages of a pipeline that make the sound.

    Attributes:
        graph: the pipeline.
        steps: in their order; the first has no edges where it is the language model.
        card: of the sound.
        talker: card of the stage that reads the language model's states.
        thinker: card of the language model.
    """

    graph: Graph
    steps: Sequence[Step]
    card: AudioCard
    talker: ModelCard
    thinker: ModelCard

    @classmethod
    def of(cls, router: Router, model: ModelCard, *, reads: bool) -> "SpeechPlan":
        """Plan the sound of a pipeline for which `speaks` is true.

        Args:
            router: knows the workers.
            model: card of the stage that clients see.
            reads: the steps begin with the language model, which reads a text; else it is asked
                beside them.

        Raises:
            OverloadedError: a stage has no worker that is ready.
            EngineError: the workers are of another kind.
        """
        graph = graph_of(model)
        if graph is None:
            raise EngineError(f"the model `{model.name}` is no pipeline")
        thinker = next(name for name in graph.needed(["audio"]) if graph.gives_states(name))
        steps = plan(router, model, "audio", text=not reads, reader=thinker if reads else None)
        cards = [router.card(step.model) for step in steps]
        audio, reader = audio_card(cards[-1]), router.card(graph.served_name(thinker))
        if audio is None or reader.hidden_layers is None:
            raise EngineError(f"the workers of the pipeline `{graph.name}` do not speak")
        return cls(graph, steps, audio, cards[1 if reads else 0], reader)

    @property
    def states(self) -> HiddenStates:
        """The hidden states of the language model that the talker hears."""
        layers = 0, self.thinker.hidden_layers or 0
        return HiddenStates(layers=layers, prompt=-1, output=True)

    def check_voice(self, voice: str, param: str) -> None:
        """Raise `InvalidRequestError` for a voice that the model has not."""
        if voice not in self.card.voices:
            raise InvalidRequestError(
                f"{param} is {shown_value(voice)}; allowed: {', '.join(self.card.voices)}",
                param=param,
            )

    def codes(self, positions: int, param: str, asked: int | None = None) -> int:
        """Return the codes of sound at most behind a prompt.

        Args:
            positions: of the prompt.
            param: field of the request that the prompt is of.
            asked: codes at most that the request says, or None.

        Raises:
            InvalidRequestError: the talker has no room behind the prompt.
        """
        most = self.talker.limits.max_model_len - _SPEECH_POSITIONS
        if positions > most:
            raise InvalidRequestError(
                f"the prompt has {positions} positions; `{self.talker.name}` speaks behind at most "
                f"{most}",
                param=param,
            )
        stages = (self.graph.stages[str(step.stage)] for step in self.steps)
        limit = next(stage.max_tokens for stage in stages if stage.kind == "talk")
        limits = (limit or Speech(voice="").max_tokens, most + 1 - positions, asked)
        return min(one for one in limits if one is not None)

    def params(
        self,
        voice: str,
        *,
        prompt_tokens: int,
        media: tuple[tuple[int, Media], ...],
        seed: int,
        max_tokens: int,
        format_: str,
    ) -> Mapping[str, Speech]:
        """Return the parameters of each stage that speaks, by the name that it is served under.

        Args:
            voice: one of the card's.
            prompt_tokens: positions before the text that is spoken.
            media: runs of media among them.
            seed: of the talker and of the vocoder.
            max_tokens: codes at most, of `codes`.
            format_: of the file, where the last stage makes that.
        """
        stages = {step.model: self.graph.stages[str(step.stage)] for step in self.steps}
        found = {
            model: Speech(
                voice=voice,
                prompt_tokens=prompt_tokens,
                seed=seed,
                max_tokens=max_tokens,
                **asdict(stage.speech),
            )
            for model, stage in stages.items()
            if stage.kind != "generate"
        }
        talker, last = self.talker.name, self.steps[-1].model
        return found | {
            talker: replace(found[talker], media=media),
            last: replace(found[last], port=self._port, format=format_),
        }

    @property
    def _port(self) -> str:
        """The port that the sound comes from."""
        return self.graph.output_port("audio").name

    def file(self, server: Server, name: str, param: str, *, whole: bool) -> SoundFile:
        """Return the file that the sound becomes; arguments and errors as of `SampledFile`."""
        if self._port == "file":
            return FinishedFile(whole=whole)
        return SampledFile(server, name, self.card.sample_rate, param, whole=whole)

    def num_bytes(self, codes: int) -> int:
        """Return the memory that the sound of so many codes takes in the frontend, at most."""
        return codes * self.card.samples_per_code * _BYTES_PER_SAMPLE

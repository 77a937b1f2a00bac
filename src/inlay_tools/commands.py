"""The commands of this extension, in the order help lists them."""

from inlay.cli.command import Command
from inlay.transport.nats.settings import NatsSettings
from inlay_tools.settings import (
    BenchSettings,
    BenchWriteSettings,
    ChatSettings,
    CompletionSettings,
    ConvertModelSettings,
    ConvertSettings,
    DoctorSettings,
    EncodeSettings,
    InspectSettings,
    PlanSettings,
    UploadSettings,
)

COMMANDS = (
    Command(
        name="doctor",
        summary="Look at this machine: versions, processor, GPU, limits, clock, network, a model.",
        details="Starts no engine. NATS is tried where --nats says where it is. With MODEL its "
        "numbers are compared with those of its own code. Exit status 1 when something would keep "
        "a server from working.",
        module="inlay_tools.doctor",
        settings=DoctorSettings,
        positional=("model",),
        borrows=frozenset(NatsSettings.model_fields) | {"ssl_certfile", "ssl_keyfile"},
    ),
    Command(
        name="convert",
        summary="Make safetensors of a model's weights: pytorch_model.bin, .pt, .pth, GGUF.",
        details="Pickled files are read as data and never unpickled, tensor by tensor; all tensors "
        "and all other files stay as they are, in every folder of the model. GGUF of a causal "
        "language model is dequantised. Nothing is overwritten.",
        module="inlay_tools.convert_model",
        settings=ConvertModelSettings,
        positional=("source",),
    ),
    Command(
        name="chat",
        summary="Talk to a model, with pictures and embeddings.",
        details="Asks a server that runs already, or serves MODEL while the chat lasts; words "
        "after -- are then options of inlay serve. Where standard input is no terminal, all of it "
        "is one question and only the answer is printed. Ctrl-C ends an answer, Ctrl-D the chat; "
        "/help lists the commands within it.",
        module="inlay_tools.chat",
        settings=ChatSettings,
        positional=("model",),
        extra_args="SERVE OPTIONS",
    ),
    Command(
        name="bench",
        summary="Measure a server under load, or compare two.",
        details="Sends requests at a rate or so many at a time, and reports times to the first "
        "token, between tokens and to the end, by the names and definitions of vllm bench serve.",
        module="inlay_tools.bench",
        settings=BenchSettings,
    ),
    Command(
        name="bench write",
        summary="Write the bodies of a measurement's requests, for inlay bench and other tools.",
        details="One JSON object a line, as inlay bench --bodies reads it.",
        module="inlay_tools.bench.writing",
        settings=BenchWriteSettings,
    ),
    Command(
        name="plan",
        summary="Say how many workers a load needs, and in which roles.",
        details="Measures the one worker of a server, and simulates fleets of such workers until "
        "the smallest that keeps the targets is found. Exit status 1 when none does.",
        module="inlay_tools.plan",
        settings=PlanSettings,
    ),
    Command(
        name="embeds encode",
        summary="Make prompt embeddings from text or chat messages, or rows of an image.",
        details="Looks the tokens up in the model's own embedding table, after the model's own "
        "scale. Only the tokenizer and that table are read. The rows of an image are a value of "
        "image_embeds.",
        module="inlay_tools.encode",
        settings=EncodeSettings,
    ),
    Command(
        name="embeds inspect",
        summary="Show what prompt embeddings hold: shape, norms, and each row's nearest token.",
        details="A row that was taken straight from the table is shown as exact: with the file "
        "and the model anyone can read its text.",
        module="inlay_tools.inspect",
        settings=InspectSettings,
        positional=("file",),
    ),
    Command(
        name="embeds upload",
        summary="Store prompt embeddings or an image on a server, to be used by reference.",
        details='Prints the id, which requests name as {"ref": ID}. The same bytes always get the '
        "same id.",
        module="inlay_tools.upload",
        settings=UploadSettings,
        positional=("file",),
    ),
    Command(
        name="embeds convert",
        summary="Write prompt embeddings in another format or data type.",
        details="What was written is read again and compared. The table id is kept where the "
        "format has room for it.",
        module="inlay_tools.convert",
        settings=ConvertSettings,
        positional=("file",),
    ),
    Command(
        name="completion",
        summary="Print a script that completes commands, options and values in a shell.",
        details='bash: eval "$(inlay completion bash)" in ~/.bashrc. zsh: eval "$(inlay completion '
        'zsh)" in ~/.zshrc, after compinit. fish: inlay completion fish | source in config.fish.',
        module="inlay_tools.completion",
        settings=CompletionSettings,
        positional=("shell",),
    ),
)

"""All commands."""

from inlay.cli.command import Command
from inlay.cli.settings import (
    AuditSettings,
    BenchSettings,
    BenchWriteSettings,
    ChatSettings,
    CompletionSettings,
    ConvertModelSettings,
    ConvertSettings,
    DemoSettings,
    DoctorSettings,
    EncodeSettings,
    FleetFrontendSettings,
    InspectSettings,
    NatsServerSettings,
    ServeSettings,
    StatusSettings,
    UploadSettings,
    WorkerSettings,
)

COMMANDS = (
    Command(
        name="serve",
        summary="Serve a model over HTTP.",
        details="Stops on Ctrl-C or SIGTERM: open requests get --drain-timeout seconds to end, a "
        "second Ctrl-C ends at once. Words after -- go to the engine untouched.",
        settings=ServeSettings,
        positional=("model",),
        rest="ENGINE ARGUMENTS",
    ),
    Command(
        name="demo",
        summary="Serve a small bundled model with everything enabled, and show what it does.",
        details="Needs no network. Shows a text question, the same as embeddings, a chat that "
        "mixes both and a soft prompt, each with the server's answer, then keeps serving. With "
        "--images, the same for pictures.",
        settings=DemoSettings,
    ),
    Command(
        name="nats",
        summary="Run a NATS server set up for a fleet.",
        details="The real server, with JetStream and messages of up to 15 MB. Words after -- go to "
        "it untouched: users, TLS, clusters. Stops on Ctrl-C or SIGTERM.",
        settings=NatsServerSettings,
        rest="NATS-SERVER ARGUMENTS",
    ),
    Command(
        name="worker",
        summary="Run one engine in a fleet.",
        details="On Ctrl-C or SIGTERM it takes no more requests, and running ones get "
        "--drain-timeout seconds to end; what has not ended then goes on at another worker, as it "
        "does when a worker dies. A second Ctrl-C ends at once.",
        settings=WorkerSettings,
        needs_nats=True,
        positional=("model",),
        rest="ENGINE ARGUMENTS",
    ),
    Command(
        name="frontend",
        summary="Serve a fleet over HTTP.",
        details="Any number of frontends may serve one fleet. Each needs the models' tokenizers "
        "where the workers have them: the same directories, or names on the hub. Stops as inlay "
        "serve does.",
        settings=FleetFrontendSettings,
        needs_nats=True,
    ),
    Command(
        name="status",
        summary="Show the workers of a fleet: model, state, load, cache, adapters.",
        details="What their heartbeats say, asked for when it starts; and who is there but "
        "refused, and why.",
        settings=StatusSettings,
        needs_nats=True,
    ),
    Command(
        name="doctor",
        summary="Look at this machine: versions, processor, GPU, limits, clock, network, a model.",
        details="Starts no engine. NATS is tried where --nats says where it is. With MODEL its "
        "numbers are compared with those of its own code. Exit status 1 when something would keep "
        "a server from working.",
        settings=DoctorSettings,
        positional=("model",),
    ),
    Command(
        name="convert",
        summary="Make safetensors of a model's weights: pytorch_model.bin, .pt, .pth, GGUF.",
        details="Pickled files are read as data and never unpickled, tensor by tensor; all tensors "
        "and all other files stay as they are, in every folder of the model. GGUF of a causal "
        "language model is dequantised by transformers. Nothing is overwritten.",
        settings=ConvertModelSettings,
        module="convert_model",
        positional=("source",),
    ),
    Command(
        name="chat",
        summary="Talk to a model, with pictures and embeddings.",
        details="Asks a server that runs already, or serves MODEL while the chat lasts; words "
        "after -- are then options of inlay serve. Where standard input is no terminal, all of it "
        "is one question and only the answer is printed. Ctrl-C ends an answer, Ctrl-D the chat; "
        "/help lists the commands within it.",
        settings=ChatSettings,
        positional=("model",),
        rest="SERVE OPTIONS",
    ),
    Command(
        name="bench",
        summary="Measure a server under load, or compare two.",
        details="Sends requests at a rate or so many at a time, and reports times to the first "
        "token, between tokens and to the end, by the names and definitions of vllm bench serve.",
        settings=BenchSettings,
    ),
    Command(
        name="bench write",
        summary="Write the bodies of a measurement's requests, for inlay bench and other tools.",
        details="One JSON object a line, as inlay bench --bodies reads it.",
        settings=BenchWriteSettings,
        module="bench.writing",
    ),
    Command(
        name="embeds encode",
        summary="Make prompt embeddings from text or chat messages, or rows of an image.",
        details="Looks the tokens up in the model's own embedding table, after the model's own "
        "scale. Only the tokenizer and that table are read. The rows of an image are a value of "
        "image_embeds.",
        settings=EncodeSettings,
    ),
    Command(
        name="embeds inspect",
        summary="Show what prompt embeddings hold: shape, norms, and each row's nearest token.",
        details="A row that was taken straight from the table is shown as exact: with the file "
        "and the model anyone can read its text.",
        settings=InspectSettings,
        positional=("file",),
    ),
    Command(
        name="embeds upload",
        summary="Store prompt embeddings or an image on a server, to be used by reference.",
        details='Prints the id, which requests name as {"ref": ID}. The same bytes always get the '
        "same id.",
        settings=UploadSettings,
        positional=("file",),
    ),
    Command(
        name="embeds convert",
        summary="Write prompt embeddings in another format or data type.",
        details="What was written is read again and compared. The table id is kept where the "
        "format has room for it.",
        settings=ConvertSettings,
        positional=("file",),
    ),
    Command(
        name="embeds audit",
        summary="Measure how much known attacks read from prompt embeddings.",
        details="Sends texts through each transform and has attackers guess the tokens: a lower "
        "bound of what rows reveal, beside what could be guessed without them. More texts give "
        "narrower intervals.",
        settings=AuditSettings,
    ),
    Command(
        name="completion",
        summary="Print a script that completes commands, options and values in a shell.",
        details='bash: eval "$(inlay completion bash)" in ~/.bashrc. zsh: eval "$(inlay completion '
        'zsh)" in ~/.zshrc, after compinit. fish: inlay completion fish | source in config.fish.',
        settings=CompletionSettings,
        positional=("shell",),
    ),
)
"""In the order help lists them."""


def known_variables() -> set[str]:
    """Every `INLAY_*` variable that some command reads."""
    return {variable for command in COMMANDS for variable in command.options.variables}

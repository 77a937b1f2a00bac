"""Generation for every API: from a parsed request to engine requests, from outputs to pieces.

The way in, in the order in which a route calls it:

    sampling        checks of fields that need no model
    grammars, tools, output_format   grammar of the outputs, and the parser that reads them
    parts, messages, truncation      prompts of chats, and what is cut off
    sampling        the settings of each choice
    generation      one engine request for each choice
    chat            all of these in turn, for APIs with chats
    respond         sends them

The way out: `respond.respond` runs a `Generation`, which reads the router's streams;
`choices.ChoiceState` makes pieces of text, tool calls and reasoning from outputs; a
`respond.ResponseShape` (`CompletionShape`, `ChatShape`, `ResponsesShape`) makes the API's JSON.
These are made once the requests are at a worker, which computes meanwhile. A stream is read no
faster than its client takes the events.

Outputs with nothing but the next ids, the usual case of one choice, wake no task. They are taken
where they have come, all streams of a connection in one loop (`OutputQueue.set_inline_reader`,
`ResumingStream.set_inline_reader`, `Generation.each`), while the `Sink` is ready. What is not taken
so is left
to the task: first and last outputs, errors, and all that comes while the client reads slowly.

Prompt logprobs: the engine sends them in `Output.prompt_logprobs`, in chunks, before the first
output id. Only the first choice of each prompt requests them; `logprobs.PromptScores` serves them
to all choices.

Invariant: everything that can be refused is refused before the first event of a stream.
"""

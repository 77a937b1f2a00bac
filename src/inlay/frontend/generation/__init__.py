"""Completions and chats: from a parsed request to engine requests, and from outputs to responses.

`completions.completions` and `chat.chat_completions` are the handlers. `prompts` and `messages`
make prompts; `sampling`, `grammars`, `tools` and `thinking` check fields and make a `Sampling`;
`respond.generation_of` makes one engine request for each choice; `generation.Generation` sends them
and merges their streams; `choices.ChoiceState` turns outputs into text, tool calls and reasoning;
a `respond.ResponseShape` (`CompletionShape`, `ChatShape`, `ResponsesShape`) makes the API's JSON.

Prompt logprobs: the engine sends them in `Output.prompt_logprobs`, in chunks, before the first
output id. Only the first choice of each prompt requests them; `prompt_logprobs.PromptScores` serves
them to all choices.

Invariant: everything that can be refused is refused before the first event of a stream.
"""

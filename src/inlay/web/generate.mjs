// One generation: what is sent, and what comes back with its times and tokens.

import { stream } from "./api.mjs";

// Fields of every request, from the settings; what is unset is left to the server.
export function sampling(settings) {
  const fields = { model: settings.model };
  for (const [name, value] of [["temperature", settings.temperature],
    ["max_tokens", settings.maxTokens], ["top_p", settings.topP], ["seed", settings.seed]]) {
    if (value !== "" && Number.isFinite(Number(value))) fields[name] = Number(value);
  }
  return fields;
}

const chatLogprobs = { logprobs: true, top_logprobs: 5 };
const completionLogprobs = { logprobs: 5 };

const ofChat = (entry) => ({
  text: entry.token, logprob: entry.logprob,
  others: entry.top_logprobs.map((other) => [other.token, other.logprob]),
});

function ofCompletion(logprobs) {
  return logprobs.tokens.map((text, index) => ({
    text, logprob: logprobs.token_logprobs[index],
    others: Object.entries(logprobs.top_logprobs[index] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

// An answer that grows: `grow(answer)` is called after each event. Resolves with it at its end.
export async function generate({ path, body, key, headers, signal, logprobs }, grow) {
  const chat = path.endsWith("chat/completions");
  const full = { ...body, stream: true, return_token_ids: true,
    stream_options: { include_usage: true },
    ...(logprobs ? (chat ? chatLogprobs : completionLogprobs) : {}) };
  const answer = { text: "", reasoning: "", tokens: [], ids: [], pieces: [], pictures: [],
    usage: null,
    first: null, took: null, finish: null, sent: new Blob([JSON.stringify(full)]).size };
  const began = performance.now();
  let worker = null;
  await stream(path, { method: "POST", body: full, key, headers, signal }, (event) => {
    const choice = event.choices?.[0];
    if (event.usage) answer.usage = event.usage;
    if (choice) {
      const delta = choice.delta ?? {};
      // A drawn picture comes as parts of the content, behind the text.
      const drawn = Array.isArray(delta.content) ? delta.content : [];
      const text = choice.text ?? (drawn.length ? "" : delta.content ?? "");
      answer.pictures.push(...drawn.filter((part) => part.type === "image_url"
        && part.image_url.url.startsWith("data:image/")).map((part) => part.image_url.url));
      answer.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
      if (choice.token_ids) answer.ids.push(...choice.token_ids);
      if (answer.first === null && (text || choice.token_ids?.length)) {
        answer.first = performance.now() - began;
      }
      answer.text += text;
      if (text) {
        const last = answer.pieces.at(-1);
        if (last?.worker === worker) last.text += text;
        else answer.pieces.push({ worker, text });
      }
      if (choice.logprobs) {
        answer.tokens.push(...(choice.logprobs.content
          ? choice.logprobs.content.map(ofChat) : ofCompletion(choice.logprobs)));
      }
      answer.finish = choice.finish_reason ?? answer.finish;
    }
    answer.took = performance.now() - began;
    grow(answer);
  }, (comment) => {
    const named = /^worker (\S+)/.exec(comment);
    if (named) worker = named[1];
  });
  answer.took = performance.now() - began;
  return answer;
}

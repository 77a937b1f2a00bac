// The same prompt as text and as embeddings, side by side.

import { ask } from "./api.mjs";
import { Answer } from "./chat.mjs";
import { bytes, html, millis, visible } from "./dom.mjs";
import { generate, sampling } from "./generate.mjs";
import { Questions } from "./questions.mjs";

const messagesOf = (text) => [{ role: "user", content: text }];

// Stores the embeddings of a question in the model's chat, as the server's own table has them.
export const encode = (settings, text, noise = 0) => ask("v1/prompt_embeds/encode", {
  method: "POST", key: settings.key,
  body: { model: settings.model, messages: messagesOf(text), noise, seed: 7 },
});

export const forget = (settings, ref) =>
  ask(`v1/prompt_embeds/${ref}`, { method: "DELETE", key: settings.key });

async function compare(app) {
  const { state, set } = app;
  const { settings, compare: { text } } = state;
  const controller = new AbortController();
  const update = (change) => set({ compare: { ...state.compare, ...change } });
  update({ asText: null, asRows: null, stored: null, whole: false });
  set({ running: controller, problem: null });
  const common = { key: settings.key, signal: controller.signal, logprobs: true };
  const fields = { ...sampling(settings), temperature: 0 };
  try {
    const stored = await encode(settings, text);
    update({ stored });
    await generate({ ...common, path: "v1/chat/completions",
      body: { ...fields, messages: messagesOf(text) } }, (asText) => update({ asText }));
    // A chat's default is what the context leaves, a completion's is 16.
    const most = fields.max_tokens ?? state.compare.asText.usage.completion_tokens + 1;
    await generate({ ...common, path: "v1/completions",
      body: { ...fields, max_tokens: most, prompt_embeds: { ref: stored.id } } },
    (asRows) => update({ asRows }));
    const { asText, asRows } = state.compare;
    asText.differs = asRows.differs = difference(asText.ids, asRows.ids);
    update({ whole: true });
    await forget(settings, stored.id);
  } catch (error) {
    if (error.name !== "AbortError") app.failed(error);
  }
  set({ running: null });
}

// Index of the first token that differs; null where none does.
export function difference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let index = 0; index < length; index += 1) if (one[index] !== other[index]) return index;
  return null;
}

function Verdict({ asText, asRows }) {
  const at = difference(asText.ids, asRows.ids);
  if (at === null) {
    return html`<p class="verdict same" role="status">The same ${asText.ids.length} tokens.</p>`;
  }
  const token = ({ ids, tokens }) => (at < ids.length
    ? `${visible(tokens[at]?.text ?? "")} (${ids[at]})` : "none");
  return html`<p class="verdict differs" role="status">The first differing token is number ${
    at + 1}: ${token(asText)} as text, ${token(asRows)} as embeddings.
    In 16 bits nearly equal choices may fall either way.</p>`;
}

// One of two answers; `waits` stands in its place until it comes, `ended` says why it is not whole.
export function Side({ app, title, answer, size, sent, waits = "Not yet.", ended }) {
  return html`<div class="side"><h3>${title}</h3>
    ${answer ? html`<${Answer} app=${app} answer=${answer} figures=${false} hint=${false} />
      <dl class="facts"><dt>request</dt><dd>${bytes(answer.sent)}${sent}</dd>
        <dt>prompt</dt><dd>${answer.usage?.prompt_tokens ?? size} positions</dd>
        <dt>first token</dt><dd>${millis(answer.first)}</dd>
        <dt>in all</dt><dd>${millis(answer.took)}</dd></dl>`
      : !ended && html`<div class="hint">${waits}</div>`}
    ${ended}
  </div>`;
}

export function NeedsLookup({ what }) {
  return html`<p class="notice">${what} needs embeddings of a text, which this server does not make
    for its clients. Its operator switches it on with <code>--enable-embedding-lookup</code>;
    <code>inlay embeds encode</code> makes a file that you can drop into a chat.</p>`;
}

export function Compare({ app }) {
  const { state, set } = app;
  const { text, asText, asRows, stored, whole } = state.compare;
  if (!app.lookup()) return html`<${NeedsLookup} what="The comparison" />`;
  return html`<section aria-label="Text against embeddings">
    <p class="hint">One question, sent as text and as the embeddings of its tokens, at temperature
      0. The answers are the same tokens: an embedding is what a model makes of a token first.</p>
    <${Questions} app=${app} ask=${(question) => {
      set({ compare: { ...state.compare, text: question.text } });
      compare(app);
    }} />
    <form class="composer" onSubmit=${(event) => {
      event.preventDefault();
      if (!state.running && text.trim()) compare(app);
    }}>
      <label for="question">Question</label>
      <textarea id="question" rows="2" value=${text} onInput=${(event) => set({
        compare: { ...state.compare, text: event.target.value } })}></textarea>
      <div class="row">${state.running
        ? html`<button type="button" class="main" onClick=${() => state.running.abort()}>
          Stop</button>`
        : html`<button class="main" disabled=${!text.trim()}>Compare</button>`}</div>
    </form>
    ${whole && !state.running && html`<${Verdict} asText=${asText} asRows=${asRows} />`}
    ${asText && html`<div class="sides">
      <${Side} app=${app} title="As text" answer=${asText} sent="" />
      <${Side} app=${app} title="As embeddings" answer=${asRows} size=${stored?.num_tokens}
        sent=${stored ? `, and ${bytes(stored.bytes)} of rows, stored before` : ""} />
    </div>
    <p class="hint">Point at a token, or use the arrow keys, to see what else it might have been.
      The warmer its colour, the less sure the model was.</p>`}
  </section>`;
}

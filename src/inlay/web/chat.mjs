// Chat and completion: a prompt, its answer as it comes, and what it cost.

import { ApiError, ask } from "./api.mjs";
import { Chip, Composer, parts } from "./composer.mjs";
import { html } from "./dom.mjs";
import { generate, sampling } from "./generate.mjs";
import { Figures, Heat, Positions } from "./heat.mjs";
import { Questions, pictureOf } from "./questions.mjs";
import { Snippets } from "./snippets.mjs";

// True where the chosen model is a pipeline that draws what it writes.
export const draws = ({ models, settings }) => models?.some((model) =>
  model.id === settings.model && model.capabilities.includes("image_output")) ?? false;

// The request that the page would send: {path, body}.
export function requestOf(state) {
  const { settings, turns, draft, chips } = state;
  const fields = sampling(settings);
  if (state.tab === "complete") {
    return { path: "v1/completions", body: { ...fields, prompt: parts(draft, chips) } };
  }
  if (settings.draw && draws(state)) fields.modalities = ["text", "image"];
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) {
    messages.push({ role: "user", content: turn.content });
    if (turn.answer) messages.push({ role: "assistant", content: turn.answer.text });
  }
  if (draft.trim() || chips.length) {
    messages.push({ role: "user", content: parts(draft, chips) });
  }
  return { path: "v1/chat/completions", body: { ...fields, messages } };
}

// Spellings of the prompt's tokens, where it is text alone and the server tells them.
async function names(request, key) {
  const { model, messages, prompt } = request.body;
  const texts = messages ? messages.map((message) => message.content) : [prompt];
  if (!texts.every((text) => typeof text === "string")) return null;
  try {
    const found = await ask("tokenize", { method: "POST", key,
      body: { model, ...(messages ? { messages } : { prompt }), return_token_strs: true } });
    return found.token_strs;
  } catch (error) {
    // The answer has come: positions without names are worth no alarm.
    if (error instanceof ApiError) return null;
    throw error;
  }
}

async function run(app, turn, list) {
  const { state, set } = app;
  const { key, logprobs } = state.settings;
  const controller = new AbortController();
  const changed = () => set({ [list]: [...state[list]] });
  let whole = false;
  set({ running: controller, problem: null });
  try {
    await generate({ ...turn.request, key, logprobs, signal: controller.signal }, (answer) => {
      turn.answer = answer;
      changed();
    });
    whole = true;
  } catch (error) {
    if (error.name !== "AbortError") app.failed(error);
    if (turn.answer) {
      turn.answer.stopped = true;
    } else {
      // Nothing has come: the prompt goes back to where it was written.
      set({ [list]: state[list].filter((other) => other !== turn),
        draft: state.draft || turn.text, chips: state.chips.length ? state.chips : turn.chips });
    }
  }
  // The next prompt may be sent while the names of this one's tokens are still asked for.
  set({ running: null });
  if (whole) turn.names = await names(turn.request, key);
  changed();
}

export function sendPrompt(app) {
  const { state, set } = app;
  const list = state.tab === "complete" ? "completions" : "turns";
  if (!state.draft.trim() && !state.chips.length) return;
  const turn = { request: requestOf(state), text: state.draft, chips: state.chips,
    content: parts(state.draft, state.chips), answer: null, names: null };
  // A completion stays where it is, to be sent again; a chat goes on.
  set({ [list]: list === "turns" ? [...state.turns, turn] : [turn], inspected: null,
    ...(list === "turns" ? { draft: "", chips: [] } : {}) });
  run(app, turn, list);
}

// Asks one of the questions to click; what was written meanwhile makes room for it.
async function askKnown(app, question) {
  app.state.chips.forEach((chip) => app.actions.remove(chip));
  if (question.picture) {
    // The demo knows a chat about one picture, or two that are asked about together.
    app.set({ turns: [] });
    await app.actions.attach([pictureOf(question)]);
    if (!app.state.chips.length) return;
  }
  app.set({ draft: question.text });
  sendPrompt(app);
}

export function Answer({ app, answer, figures = true, names, hint }) {
  const choose = (index) => {
    answer.chosen = index;
    app.set({});
  };
  return html`<div class="answer">
    ${answer.reasoning && html`<details><summary>Reasoning</summary>
      <p class="text">${answer.reasoning}</p></details>`}
    ${answer.tokens.length ? html`<${Heat} answer=${answer} choose=${choose}
      hint=${hint} />`
      : html`<p class="text">${answer.text}</p>`}
    ${answer.pictures.map((url) => html`<a href=${url} download="image"><img class="drawn"
      src=${url} alt=${`Image: ${answer.text}`} /></a>`)}
    ${figures && html`<${Figures} answer=${answer} />`}
    <${Positions} usage=${answer.usage} names=${names} />
  </div>`;
}

function Turn({ app, turn, last }) {
  return html`<article class="turn">
    <h3 class="who">You</h3>
    ${turn.chips.length > 0 && html`<div class="chips">${turn.chips.map((chip) => html`
      <${Chip} chip=${chip} />`)}</div>`}
    <p class="text">${turn.text}</p>
    <h3 class="who">${turn.request.body.model}</h3>
    ${turn.answer ? html`<${Answer} app=${app} answer=${turn.answer} names=${turn.names}
      hint=${last} />`
      : html`<p class="hint" role="status">Waiting for the first token …</p>`}
  </article>`;
}

export function Chat({ app }) {
  const { state, set } = app;
  const complete = state.tab === "complete";
  const turns = complete ? state.completions : state.turns;
  return html`<section aria-label=${complete ? "Completion" : "Chat"}>
    ${!turns.length && html`<p class="hint">${complete
      ? "The model goes on from exactly what you write."
      : "Ask something. The prompt may be text, a file of embeddings, or both."}</p>`}
    <div role="log" aria-live="off">${turns.map((turn) => html`
      <${Turn} app=${app} turn=${turn} last=${turn === turns.at(-1)} />`)}</div>
    <p class="hidden" role="status">${state.running ? "Answering" : turns.length
      && turns.at(-1).answer ? `Answer: ${turns.at(-1).answer.text}` : ""}</p>
    <${Questions} app=${app} ask=${(question) => askKnown(app, question)} />
    <${Composer} app=${app} label=${complete ? "Prompt" : "Message"}
      send=${() => sendPrompt(app)} running=${state.running}
      stop=${() => state.running?.abort()} />
    <div class="row">
      <${Snippets} request=${requestOf(state)} withKey=${Boolean(state.settings.key)} />
      ${turns.length > 0 && !state.running && html`<button class="quiet" onClick=${() => set(
        complete ? { completions: [] } : { turns: [] })}>Clear</button>`}
    </div>
  </section>`;
}

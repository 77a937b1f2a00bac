// One question to two models at once, side by side.

import { problemOf } from "./api.mjs";
import { Side } from "./compare.mjs";
import { Problem, html } from "./dom.mjs";
import { generate, sampling } from "./generate.mjs";
import { Questions } from "./questions.mjs";

// The model beside the chosen one: as it was chosen, else the first of the others.
export function otherOf({ models, settings, beside }) {
  const others = models.map((model) => model.id).filter((id) => id !== settings.model);
  return others.includes(beside.other) ? beside.other : others[0];
}

async function ask(app) {
  const { state, set } = app;
  const { settings, beside: { text } } = state;
  const controller = new AbortController();
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const update = (change) => set({ beside: { ...state.beside, ...change } });
  const sides = [settings.model, otherOf(state)].map((model) => ({ model }));
  const put = (place, found) => {
    sides[place] = { ...sides[place], ...found };
    update({ sides: [...sides] });
  };
  update({ sides });
  set({ running: controller, problem: null });
  await Promise.all(sides.map(async ({ model }, place) => {
    try {
      await generate({ path: "v1/chat/completions", key: settings.key, signal: controller.signal,
        logprobs: settings.logprobs, body: { ...sampling(settings), model,
          messages: [...system, { role: "user", content: text }] } },
      (answer) => put(place, { answer }));
      put(place, { whole: true });
    } catch (error) {
      // The other model goes on: what failed is said on its own side.
      put(place, error.name === "AbortError" ? { stopped: true } : { problem: problemOf(error) });
    }
  }));
  set({ running: null });
}

// What stands below an answer, or in its place, that did not come whole.
function endOf({ problem, stopped }) {
  if (problem) return html`<${Problem} problem=${problem} />`;
  return stopped && html`<p class="hint">Stopped.</p>`;
}

function Verdict({ sides }) {
  if (!sides.every(({ whole }) => whole)) return null;
  const [one, other] = sides.map(({ answer }) => answer?.text);
  return html`<p class=${one === other ? "verdict same" : "notice"} role="status">${
    one === other ? "Both answer with the same text." : "The answers differ."}</p>`;
}

export function Beside({ app }) {
  const { state, set } = app;
  const { text, sides } = state.beside;
  const other = otherOf(state);
  if (!other) {
    return html`<p class="notice">One model is served here. A fleet has several: start a worker of
      another, and refresh the list of models.</p>`;
  }
  const update = (change) => set({ beside: { ...state.beside, ...change } });
  const idle = !state.running;
  return html`<section aria-label="Two models">
    <p class="hint">One question to two models at the same time, with the same settings.</p>
    <${Questions} app=${app} ask=${(question) => {
      update({ text: question.text });
      ask(app);
    }} />
    <form class="composer" onSubmit=${(event) => {
      event.preventDefault();
      if (idle && text.trim()) ask(app);
    }}>
      <label for="both">Question</label>
      <textarea id="both" rows="2" value=${text}
        onInput=${(event) => update({ text: event.target.value })}></textarea>
      <label class="slider">Beside ${state.settings.model}<select value=${other}
        onChange=${(event) => update({ other: event.target.value, sides: [] })}>
        ${state.models.filter((model) => model.id !== state.settings.model).map((model) => html`
          <option value=${model.id}>${model.id}</option>`)}</select></label>
      <div class="row">${idle
        ? html`<button class="main" disabled=${!text.trim()}>Ask both</button>`
        : html`<button type="button" class="main" onClick=${() => state.running.abort()}>
          Stop</button>`}</div>
    </form>
    ${idle && sides.length > 0 && html`<${Verdict} sides=${sides} />`}
    ${sides.length > 0 && html`<div class="sides">${sides.map((side) =>
      html`<${Side} key=${side.model} app=${app} title=${side.model} answer=${side.answer} sent=""
        waits="Waiting for the first token …" ended=${endOf(side)} />`)}</div>`}
  </section>`;
}

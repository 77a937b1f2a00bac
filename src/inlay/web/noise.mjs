// Noise on the rows of a prompt: what can still be read from them, and what is still answered.

import { ask } from "./api.mjs";
import { NeedsLookup, encode, forget } from "./compare.mjs";
import { html, visible } from "./dom.mjs";
import { rows } from "./files.mjs";
import { generate, sampling } from "./generate.mjs";
import { Questions } from "./questions.mjs";

export const LEVELS = [0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16];
const SWEPT = [0, 0.25, 0.5, 1, 2, 4, 8, 16];

// The level that is looked at; the slider stands on it.
const showing = (noise) => ({ shown: noise, level: LEVELS.indexOf(noise) });

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);

// One level: the nearest token of each row, and the answer with its mean logprob.
async function measure(settings, text, noise, own, signal) {
  const stored = await encode(settings, text, noise);
  try {
    const { rows: found } = await rows(stored.id, settings.model, settings.key, 1);
    const read = found.map((row) => row.nearest[0]);
    const fields = { ...sampling(settings), temperature: 0 };
    fields.max_tokens ??= 32;
    const answer = await generate({ path: "v1/completions", key: settings.key, signal,
      logprobs: true, body: { ...fields, prompt_embeds: { ref: stored.id } } }, () => {});
    const right = read.filter((token, index) => token.id === own[index]).length;
    return { noise, read, right, answer, sure: Math.exp(mean(answer.tokens.map((token) =>
      token.logprob))) };
  } finally {
    await forget(settings, stored.id);
  }
}

async function run(app, levels) {
  const { state, set } = app;
  const { settings } = state;
  const { text } = state.noise;
  const controller = new AbortController();
  const update = (change) => set({ noise: { ...state.noise, ...change } });
  set({ running: controller, problem: null });
  try {
    if (state.noise.ranText !== text) update({ results: [], ranText: text });
    const { tokens: own } = await ask("tokenize", { method: "POST", key: settings.key,
      body: { model: settings.model, messages: [{ role: "user", content: text }] } });
    const wanted = state.noise.results.some((result) => result.noise === 0) ? levels
      : [0, ...levels];
    for (const level of new Set(wanted)) {
      if (controller.signal.aborted) break;
      const found = state.noise.results.find((result) => result.noise === level)
        ?? await measure(settings, text, level, own, controller.signal);
      const others = state.noise.results.filter((result) => result.noise !== level);
      // Of a sweep the first level that spoils the answer is the one to look at.
      const clean = others.find((result) => result.noise === 0);
      const spoilt = clean && state.noise.shown !== null && levels.length > 1
        && others.find((result) => result.noise === state.noise.shown
          && result.answer.text !== clean.answer.text);
      const shown = spoilt ? state.noise.shown : level;
      update({ results: [...others, found].sort((a, b) => a.noise - b.noise), own,
        ...(levels.length > 1 ? showing(shown) : { shown }) });
    }
  } catch (error) {
    if (error.name !== "AbortError") app.failed(error);
  }
  set({ running: null });
}

function Reading({ result, own }) {
  return html`<p class="reading">${result.read.map((token, index) => html`<span
    class=${token.id === own[index] ? "right" : "wrong"}>${visible(token.text)}</span>`)}</p>`;
}

function Shown({ result, clean, own }) {
  return html`<div class="sides">
    <div class="side"><h3>Read from the rows with noise ${result.noise}</h3>
      <${Reading} result=${result} own=${own} />
      <p class="figures">${result.right} of ${own.length} tokens are still the nearest of their
        row</p></div>
    <div class="side"><h3>Answered</h3>
      <p class="text">${result.answer.text.trim() || html`<small>nothing</small>`}</p>
      <p class="figures">${result.answer.text === clean.answer.text ? "as without noise"
        : html`without noise: ${clean.answer.text}`} · mean probability of a token ${
        (100 * result.sure).toFixed(0)}%</p></div>
  </div>`;
}

function Table({ results, own, clean, choose, shown }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Noise by level">
    <table><thead><tr><th>noise</th><th>read</th><th>answer</th></tr></thead>
    <tbody>${results.map((result) => html`<tr data-chosen=${shown === result.noise ? "" : null}>
      <td><button class="quiet" onClick=${() => choose(result.noise)}>${result.noise}</button></td>
      <td>${Math.round(100 * result.right / own.length)}%</td>
      <td class="near">${result.answer.text.slice(0, 120)
        || html`<small>nothing</small>`}${" "}${result.answer.text
        === clean.answer.text ? html`<small>same</small>` : ""}</td></tr>`)}</tbody></table></div>`;
}

export function Noise({ app }) {
  const { state, set } = app;
  const { text, level, results, own, shown, ranText } = state.noise;
  if (!app.lookup()) return html`<${NeedsLookup} what="The slider" />`;
  const update = (change) => set({ noise: { ...state.noise, ...change } });
  const fresh = ranText === text ? results : [];
  const clean = fresh.find((result) => result.noise === 0);
  const result = fresh.find((entry) => entry.noise === shown);
  return html`<section aria-label="Noise">
    <p class="hint">Gaussian noise is added to each row, as a share of the rows' median length.
      The first box has the nearest token of each row, as a reader would see it; the second has the
      model's answer.</p>
    <p class="notice">The nearest token is the weakest of all readers. What it cannot read, others
      may: noise hides less than it seems to here, and is no proof of anything.</p>
    <${Questions} app=${app} ask=${(question) => {
      update({ text: question.text });
      run(app, [LEVELS[level]]);
    }} />
    <form class="composer" onSubmit=${(event) => {
      event.preventDefault();
      if (!state.running && text.trim()) run(app, [LEVELS[level]]);
    }}>
      <label for="noisy">Question</label>
      <textarea id="noisy" rows="2" value=${text}
        onInput=${(event) => update({ text: event.target.value })}></textarea>
      <label class="slider">Noise: <output>${LEVELS[level]}</output> of a row's length
        <input type="range" min="0" max=${LEVELS.length - 1} step="1" value=${level}
          aria-valuetext=${`${LEVELS[level]} of a row's length`}
          onInput=${(event) => update({ level: Number(event.target.value) })}
          onChange=${(event) => {
            update({ level: Number(event.target.value) });
            if (!state.running && text.trim()) run(app, [LEVELS[Number(event.target.value)]]);
          }} /></label>
      <div class="row">${state.running
        ? html`<button type="button" class="main" onClick=${() => state.running.abort()}>
          Stop</button>`
        : html`<button class="main" disabled=${!text.trim()}>Try</button>
          <button type="button" disabled=${!text.trim()} onClick=${() => run(app, SWEPT)}>
          Try all levels</button>`}</div>
    </form>
    ${result && clean && html`<${Shown} result=${result} clean=${clean} own=${own} />`}
    ${fresh.length > 1 && clean && html`<${Table} results=${fresh} own=${own} clean=${clean}
      shown=${shown} choose=${(noise) => update(showing(noise))} />`}
  </section>`;
}

// The playground: its state, its settings, and which view is shown.

import { ask, problemOf } from "./api.mjs";
import { Audit, openReports } from "./audit.mjs";
import { Beside } from "./beside.mjs";
import { Chat, draws } from "./chat.mjs";
import { Compare } from "./compare.mjs";
import { chipActions } from "./composer.mjs";
import { Header, KeyField, Problem, html, store } from "./dom.mjs";
import { Rows } from "./files.mjs";
import { Noise } from "./noise.mjs";

const TABS = { chat: "Chat", complete: "Completion", compare: "Text and embeddings",
  noise: "Noise", beside: "Two models", audit: "Audit" };
const VIEWS = { chat: Chat, complete: Chat, compare: Compare, noise: Noise, beside: Beside,
  audit: Audit };

// A link may bring a question: /#ask=What%20is%20this%3F
const asked = new URLSearchParams(location.hash.slice(1)).get("ask") ?? "";

const first = {
  models: null, problem: null, tab: "chat", running: null, dropping: false,
  settings: { model: "", key: "", system: "", temperature: "0", maxTokens: "", topP: "", seed: "",
    logprobs: true, draw: true },
  draft: asked, chips: [], nextChip: 1, uploading: null, inspected: null,
  turns: [], completions: [],
  compare: { text: asked, asText: null, asRows: null, stored: null },
  noise: { text: asked, level: 3, results: [], own: [], shown: null, ranText: null },
  beside: { text: asked, other: "", sides: [] },
  audit: { reports: [], metric: "tokens" },
};

const app = {
  failed(error) {
    app.set({ problem: problemOf(error) });
    if (error.status === 404) loadModels(true);
  },
  model: () => app.state.models?.find((model) => model.id === app.state.settings.model),
  lookup: () => app.model()?.capabilities.includes("embedding_lookup") ?? false,
};

async function loadModels(quietly = false) {
  const { state, set } = app;
  try {
    const { data } = await ask("v1/models", { key: state.settings.key });
    const generating = data.filter((model) => model.capabilities.includes("completions"));
    const kept = generating.some((model) => model.id === state.settings.model);
    set({ models: generating, others: data.length - generating.length,
      settings: { ...state.settings,
        model: kept ? state.settings.model : generating[0]?.id ?? "" } });
    if (!quietly) set({ problem: null });
  } catch (error) {
    if (!quietly) set({ problem: { ...problemOf(error), models: true } });
  }
}

// The question goes along: what was written here, or asked last, stands in the view that is opened.
function open(tab) {
  const { state, set } = app;
  const { turns, chips, compare, noise, beside } = state;
  const written = { compare: compare.text, noise: noise.text, beside: beside.text }[state.tab]
    ?? (state.draft || turns.at(-1)?.text || "");
  const text = written.replace(/⟦\d+⟧/g, "").trim();
  set({ tab });
  if (!text) return;
  if (tab === "compare" && text !== compare.text) {
    set({ compare: { text, asText: null, asRows: null, stored: null } });
  } else if (tab === "noise") {
    set({ noise: { ...noise, text } });
  } else if (tab === "beside") {
    set({ beside: { ...beside, text } });
  } else if (tab === "complete" || tab === "chat") {
    const answered = tab === "chat" && text === turns.at(-1)?.text;
    if (!chips.length && !answered) set({ draft: text });
  }
}

let keyTimer = 0;

function setting(name, value) {
  const { state, set } = app;
  set({ settings: { ...state.settings, [name]: value } });
  if (name !== "key") return;
  clearTimeout(keyTimer);
  keyTimer = setTimeout(loadModels, 400);
}

function NumberField({ name, label, placeholder, step = "any", min = "0", max }) {
  return html`<label>${label}<input type="number" inputmode="decimal" step=${step} min=${min}
    max=${max} placeholder=${placeholder} value=${app.state.settings[name]}
    onInput=${(event) => setting(name, event.target.value)} /></label>`;
}

function Settings({ state }) {
  const { settings, models } = state;
  const model = app.model();
  return html`<details class="settings" open=${matchMedia("(min-width: 60rem)").matches}>
    <summary><h2>Settings</h2></summary>
    <label>Model<select value=${settings.model}
      onChange=${(event) => setting("model", event.target.value)}>
      ${(models ?? []).map((entry) => html`<option value=${entry.id}>${entry.id}</option>`)}
      ${!models?.length && html`<option value="">none</option>`}
    </select></label>
    <button type="button" class="quiet" onClick=${() => loadModels()}>Refresh the list</button>
    ${model && html`<dl class="facts">
      <dt>context</dt><dd>${model.max_model_len} tokens</dd>
      <dt>hidden size</dt><dd>${model.hidden_size}, ${model.dtype}</dd>
      <dt>engine</dt><dd>${model.engine}</dd>
      <dt>prompt embeds</dt><dd>${model.capabilities.includes("prompt_embeds") ? "accepted"
        : "off (--enable-prompt-embeds)"}</dd></dl>`}
    <${KeyField} value=${settings.key} change=${(value) => setting("key", value)} />
    ${["chat", "beside"].includes(state.tab) && html`<label>System message<textarea rows="2"
      value=${settings.system}
      onInput=${(event) => setting("system", event.target.value)}></textarea></label>`}
    <div class="pair">
      <${NumberField} name="temperature" label="Temperature" placeholder="the model's" max="2"
        step="0.1" />
      <${NumberField} name="maxTokens" label="Max tokens" step="1" min="1"
        placeholder=${state.tab === "complete" ? "16" : "no limit"} />
      <${NumberField} name="topP" label="Top p" placeholder="the model's" max="1" step="0.05" />
      <${NumberField} name="seed" label="Seed" placeholder="random" step="1" />
    </div>
    <label class="check"><input type="checkbox" checked=${settings.logprobs}
      onChange=${(event) => setting("logprobs", event.target.checked)} />${" "}Colour tokens by
      probability</label>
    ${state.tab === "chat" && draws(state) && html`<label class="check"><input type="checkbox"
      checked=${settings.draw} onChange=${(event) => setting("draw", event.target.checked)}
      />${" "}Answer with an image too</label>`}
  </details>`;
}

function Inspected({ inspected }) {
  if (!inspected) return null;
  const { chip, facts, problem } = inspected;
  return html`<section class="inspected" aria-label=${`Rows of ${chip.name}`}>
    <h2>${chip.name}</h2>
    ${problem ? html`<${Problem} problem=${problem} />`
      : facts ? html`<${Rows} facts=${facts} />` : html`<p role="status">Reading …</p>`}
    <button class="quiet" onClick=${() => app.set({ inspected: null })}>Close</button>
  </section>`;
}

function again() {
  const { state, set } = app;
  const { models } = state.problem;
  set({ problem: null });
  if (models) loadModels();
  else if (state.tab === "chat" || state.tab === "complete") {
    document.querySelector(".composer")?.requestSubmit();
  }
}

function view(state) {
  const drops = {
    onDragOver: (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      if (!state.dropping) app.set({ dropping: true });
    },
    onDragLeave: (event) => {
      if (!event.relatedTarget) app.set({ dropping: false });
    },
    onDrop: (event) => {
      event.preventDefault();
      app.set({ dropping: false });
      const files = [...event.dataTransfer.files];
      if (state.tab === "audit") return openReports(app, files);
      if (state.tab !== "chat" && state.tab !== "complete") app.set({ tab: "chat" });
      app.actions.attach(files);
    },
  };
  const View = VIEWS[state.tab];
  // Nothing stands beside a single model.
  const tabs = Object.entries(TABS).filter(([name]) => name !== "beside" || name === state.tab
    || state.models?.length > 1);
  return html`<div class="page" data-dropping=${state.dropping ? "" : null} ...${drops}>
    <${Header} here="playground" />
    <div class="columns">
      <main id="main">
        <nav class="tabs" aria-label="Views">${tabs.map(([name, label]) => html`
          <button aria-current=${state.tab === name ? "true" : null}
            disabled=${Boolean(state.running && state.tab !== name)}
            onClick=${() => open(name)}>${label}</button>`)}
        </nav>
        <${Problem} problem=${state.problem} again=${again}
          close=${() => app.set({ problem: null })} />
        ${state.models && !state.models.length && html`<p class="notice">No model that generates
          text is served now. ${state.others ? html`<a href="start">Requests to try</a> has those
          for the other models.` : "Start one, then refresh the list of models."}</p>`}
        <${View} app=${app} />
        ${(state.tab === "chat" || state.tab === "complete") && html`
          <${Inspected} inspected=${state.inspected} />`}
      </main>
      <aside aria-label="Settings"><form onSubmit=${(event) => event.preventDefault()}>
        <${Settings} state=${state} /></form></aside>
    </div>
    ${state.dropping && html`<p class="drop" role="status">Drop to attach</p>`}
  </div>`;
}

Object.assign(app, store(first, view, document.getElementById("app")));
app.actions = chipActions(app);
app.draw();
loadModels();

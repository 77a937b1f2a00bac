// The workers, for admins: state and load as cards, orders, and who makes an answer.

import { ApiError, ask, problemOf } from "./api.mjs";
import { Header, KeyField, Problem, bytes, html, store } from "./dom.mjs";
import { generate } from "./generate.mjs";
import { Figures } from "./heat.mjs";

const EVERY_MS = 1500;

const app = {};
// Colours stay with the workers in the order they were first seen; the dead keep theirs.
const seen = [];

const colour = (id) => {
  if (!seen.includes(id)) seen.push(id);
  return seen.indexOf(id) % 6;
};

const first = {
  key: "", fleet: null, lost: [], problem: null, order: null, said: null, running: null,
  prompt: "", model: "", answer: null, asleepAt: 1, adapter: { name: "", path: "" }, asked: false,
};

async function look(everything = false) {
  const { state, set } = app;
  try {
    const fleet = await ask("workers", { key: state.key });
    fleet.data.forEach((worker) => colour(worker.id));
    const lost = [...seen].filter((id) => !fleet.data.some((worker) => worker.id === id)
      && !(id in (fleet.missing ?? {})));
    const models = [...new Set(fleet.data.map((worker) => worker.model))];
    set({ fleet, lost, models, asked: true, model: models.includes(state.model) ? state.model
      : models[0] ?? "", ...(state.problem?.looking ? { problem: null } : {}) });
  } catch (error) {
    const known = error instanceof ApiError && (error.status === 401 || error.status === 403);
    set({ asked: true, fleet: known ? null : state.fleet,
      ...(everything || state.fleet ? { problem: { ...problemOf(error), looking: true } } : {}),
      locked: known ? error.message : null });
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden && (app.state.fleet || !app.state.asked)) await look();
    await new Promise((next) => setTimeout(next, EVERY_MS));
  }
}

// Gives an order to the server. vLLM's adapter routes answer in words, the others in JSON with a
// status for each worker.
async function order(name, path, body) {
  const { state, set } = app;
  set({ order: null, said: `${name} …`, problem: null });
  try {
    const options = { method: "POST", key: state.key };
    if (body) options.body = body;
    const { workers = [] } = await ask(path, options);
    const failed = workers.filter((worker) => worker.error).map((worker) => worker.id);
    set({ said: `${name}: done${failed.length ? `, but not on ${failed.join(", ")}` : ""}` });
  } catch (error) {
    // An order names a worker, an adapter or a directory, which the chat's advice knows nothing of.
    const missing = error.status === 404 && { title: "There is no such thing.",
      advice: "Change what the order names, then give it again.", again: false };
    set({ said: null, problem: { ...problemOf(error), ...missing } });
  }
  look();
}

async function send() {
  const { state, set } = app;
  const controller = new AbortController();
  set({ running: controller, answer: null, problem: null });
  try {
    await generate({ path: "v1/chat/completions", key: state.key, signal: controller.signal,
      headers: { "x-show-workers": "1" },
      body: { model: state.model, temperature: 0,
        messages: [{ role: "user", content: state.prompt }] } },
    (answer) => set({ answer }));
  } catch (error) {
    if (error.name !== "AbortError") set({ problem: problemOf(error) });
  }
  set({ running: null });
}

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

// What a stage keeps for the next one, as long as the requests that made it are open.
const leases = ({ leases: count, held_payloads: held, held_bytes: size }) => (count
  ? `${count} on ${held} tensors, ${bytes(size)}` : count === 0 ? "none" : "–");

// An order that ends or refuses requests is given once it has been confirmed.
const confirm = (name, whom, path, after) => app.set({ order: { name, whom, path, after } });

const ASLEEP = "new ones are refused or wait until it is woken.";

// Where the order was chosen: on the card of its worker, or beside those for a model.
function Confirmation({ whom, asked }) {
  if (asked?.whom !== whom) return null;
  return html`<div class="problem" role="alertdialog" aria-label="Confirm">
    <p><strong>${asked.name} ${whom}?</strong> Its running requests end first; ${asked.after}</p>
    <p class="row"><button onClick=${() => order(`${asked.name} ${whom}`, asked.path)}>
      Yes, ${asked.name.toLowerCase()}</button>
      <button class="quiet" onClick=${() => app.set({ order: null })}>No</button></p></div>`;
}

function Card({ worker, drains, asked }) {
  const named = `?worker=${encodeURIComponent(worker.id)}`;
  const well = worker.state === "ok" || worker.state === "unprobed";
  const probe = worker.last_probe;
  return html`<li class="card" data-worker=${colour(worker.id)}>
    <h3>${worker.id} <span class="state" data-well=${well ? "" : null}
      data-ill=${well || worker.state === "asleep" ? null : ""}>${
        worker.state === "unprobed" ? "not checked yet" : worker.state}</span></h3>
    <dl class="facts">
      <dt>model</dt><dd>${worker.model}</dd>
      <dt>tasks</dt><dd>${worker.tasks.join(", ")}${
        worker.role === "both" ? "" : ` (${worker.role})`}</dd>
      <dt>engine</dt><dd>${worker.engine}, ${worker.dtype}</dd>
      <dt>weights</dt><dd>${worker.weights_id.slice(0, 8)}, ${
        share(worker.share, 1)} of requests</dd>
      <dt>running</dt><dd>${worker.running ?? "no answer"} of ${worker.max_num_seqs}</dd>
      <dt>waiting</dt><dd>${worker.waiting ?? "–"}</dd>
      <dt>cache</dt><dd>${!worker.blocks_total ? (worker.blocks_total === null ? "–" : "none")
        : `${share(worker.blocks_used, worker.blocks_total)} of ${worker.blocks_total} blocks${
          worker.prompt_tokens ? `; ${share(worker.cached_tokens, worker.prompt_tokens)
            } of prompt tokens were cached` : ""}`}</dd>
      <dt>tokens</dt><dd>${worker.generated_tokens ?? "–"} generated</dd>
      ${worker.stage && html`<dt>stage</dt><dd>${worker.stage}</dd>
        <dt>leases</dt><dd>${leases(worker)}</dd>
        <dt>fetched</dt><dd>${worker.fetched_payloads ?? "–"} tensors of stages before</dd>`}
      <dt>load</dt><dd>requests: ${worker.load.requests}; ${worker.load.prefill} prompt
        tokens to compute</dd>
      <dt>adapters</dt><dd>${worker.adapters.join(", ") || "none"}</dd>
      <dt>asleep</dt><dd>${worker.asleep ? `level ${worker.asleep}` : "no"}</dd>
      <dt>last check</dt><dd>${probe ? `${probe.age.toFixed(0)} s ago, ${
        (1000 * probe.seconds).toFixed(0)} ms${probe.error ? `: ${probe.error}` : ""}`
        : "none"}</dd>
    </dl>
    <p class="row">${worker.asleep
      ? html`<button class="quiet" aria-label=${`Wake ${worker.id}`}
          onClick=${() => order(`Wake ${worker.id}`, `wake_up${named}`)}>Wake</button>`
      : html`<button class="quiet" aria-label=${`Sleep ${worker.id}`} onClick=${() => confirm(
          "Sleep", worker.id, `sleep${named}&level=1&mode=wait`, ASLEEP)}>Sleep</button>`}
      ${drains && html`<button class="quiet" aria-label=${`Drain ${worker.id}`}
        onClick=${() => confirm("Drain", worker.id, `drain${named}`,
          "new ones go elsewhere, and then its process ends.")}>Drain</button>`}</p>
    <${Confirmation} whom=${worker.id} asked=${asked} />
  </li>`;
}

function Orders({ state }) {
  const { model, adapter } = state;
  const named = model ? `?model=${encodeURIComponent(model)}` : "";
  const field = (name, label, hint) => html`<label>${label}<input value=${adapter[name]}
    placeholder=${hint} onInput=${(event) => app.set({ adapter: { ...app.state.adapter,
      [name]: event.target.value } })} /></label>`;
  return html`<section class="side" aria-labelledby="orders"><h2 id="orders">Actions</h2>
    ${state.models?.length > 1 && html`<label>Model<select value=${model}
      onChange=${(event) => app.set({ model: event.target.value })}>
      ${state.models.map((name) => html`<option>${name}</option>`)}</select></label>`}
    <div class="row">
      <button disabled=${!model} onClick=${() => confirm("Sleep", model,
        `sleep${named}&level=1&mode=wait`, ASLEEP)}>Sleep</button>
      <button disabled=${!model} onClick=${() => order(`Wake ${model}`, `wake_up${named}`)}>
        Wake</button>
      <button onClick=${() => order("Clear the prefix cache", "reset_prefix_cache")}>
        Clear the prefix cache</button>
    </div>
    <${Confirmation} whom=${model} asked=${state.order} />
    <p role="status">${state.said ?? ""}</p>
    <h3>Adapters</h3>
    <div class="pair">${field("name", "Name", "my-adapter")}
      ${field("path", "Directory or address", "/adapters/mine")}</div>
    <div class="row">
      <button disabled=${!adapter.name || !adapter.path} onClick=${() => order("Load",
        "v1/load_lora_adapter", { lora_name: adapter.name, lora_path: adapter.path,
          base_model_name: model || null })}>Load</button>
      <button disabled=${!adapter.name} onClick=${() => order("Unload", "v1/unload_lora_adapter",
        { lora_name: adapter.name })}>Unload</button>
    </div>
    <p class="hint">A worker also drains when its process gets SIGTERM. Kill it instead
      (<code>kill -KILL PID</code>), and its answers go on at another.</p>
  </section>`;
}

function Asking({ state }) {
  const { answer } = state;
  const makers = [...new Set((answer?.pieces ?? []).map((piece) => piece.worker))];
  return html`<section class="side" aria-labelledby="asking">
    <h2 id="asking">Ask, and see which worker answers</h2>
    <form onSubmit=${(event) => {
      event.preventDefault();
      if (!state.running && state.prompt.trim()) send();
    }}>
      <label>Question<textarea rows="2" value=${state.prompt}
        onInput=${(event) => app.set({ prompt: event.target.value })}></textarea></label>
      <p class="row">${state.running ? html`<button type="button" class="main"
          onClick=${() => state.running.abort()}>Stop</button>`
        : html`<button class="main" disabled=${!state.prompt.trim() || !state.model}>
          Ask</button>`}</p>
    </form>
    ${answer && html`<p class="text">${answer.pieces.map((piece) => html`<span class="piece"
      data-worker=${colour(piece.worker)} title=${piece.worker}>${piece.text}</span>`)}</p>
      <${Figures} answer=${answer} />
      <p class="figures">generated by ${makers.join(", then ")}</p>`}
    <p class="hint">The line under the text has the colour of the worker that generated it. Kill
      that worker in the middle: the colour changes, the text does not.</p>
  </section>`;
}

function view(state) {
  const { fleet } = state;
  const waiting = Object.entries(fleet?.waiting ?? {});
  const missing = Object.entries(fleet?.missing ?? {});
  return html`<div class="page">
    <${Header} here="fleet" />
    <main id="main">
      <${Problem} problem=${state.problem} again=${() => {
        app.set({ problem: null });
        look(true);
      }} close=${() => app.set({ problem: null })} />
      ${!fleet && html`<form class="side" onSubmit=${(event) => {
        event.preventDefault();
        look(true);
      }}><h2>Workers</h2>
        <p>This page is for admins: it takes an admin key, or the admin port for looking alone.</p>
        ${state.locked && html`<p class="hint">The server says: ${state.locked}</p>`}
        <${KeyField} label="Admin key" value=${state.key} change=${(key) => app.set({ key })} />
        <p class="row"><button class="main">Show the workers</button></p></form>`}
      ${fleet && html`<h2>${fleet.data.length} worker${fleet.data.length === 1 ? "" : "s"}</h2>
        <ul class="cards">${fleet.data.map((worker) => html`<${Card} key=${worker.id}
          worker=${worker} drains=${fleet.drains} asked=${state.order} />`)}
          ${state.lost.map((id) => html`<li class="card" key=${id} data-gone=""
            data-worker=${colour(id)}><h3>${id} <span class="state" data-ill="">gone</span></h3>
            <p class="hint">Seen since this page was opened, and not there any more.</p>
            </li>`)}</ul>
        ${missing.length > 0 && html`<div class="notice"><b>Missing</b>${missing.map(([id, why]) =>
          html`<p>${id}: ${why}</p>`)}</div>`}
        <p>${waiting.length ? waiting.map(([model, count]) =>
          html`${count} requests wait for ${model}. `) : "No request waits for a worker."}</p>
        <div class="sides"><${Asking} state=${state} /><${Orders} state=${state} /></div>`}
    </main>
  </div>`;
}

Object.assign(app, store(first, view, document.getElementById("app")));
app.draw();
watch();

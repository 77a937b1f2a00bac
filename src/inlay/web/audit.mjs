// Reports of `inlay embeds audit`, drawn. They are read here and sent nowhere.

import { html } from "./dom.mjs";

const MOST_BYTES = 16 * 1024 * 1024;
const METRICS = { tokens: "tokens", names: "names", others: "numbers and addresses",
  "any-order": "tokens in any order", unseen: "tokens in no known text", exact: "whole texts" };
const NEEDS = { nothing: "guesses without the rows", table: "knows the table",
  model: "knows the model", pairs: "knows rows of other texts",
  weights: "knows the model and rows of other texts" };

const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const interval = ({ low, high }) => `95 % interval ${percent(low)} to ${percent(high)}`;

const isShare = (share) => share && (share.of === 0
  || [share.value, share.low, share.high].every(Number.isFinite));

// The report in a file. Raises TypeError where it is none.
export function reportIn(text, name) {
  const found = JSON.parse(text);
  const whole = Array.isArray(found?.transforms) && found.transforms.length > 0
    && found.transforms.every(({ transform, verdict, attackers, answers, not_run, samples }) =>
      typeof transform === "string" && typeof verdict?.word === "string"
      && Number.isFinite(verdict.share) && (!answers || isShare(answers.same))
      && [not_run ?? [], samples ?? [], attackers].every(Array.isArray)
      && attackers.every(({ attacker, shares }) =>
        typeof attacker === "string" && Object.keys(METRICS).every((metric) =>
          isShare(shares?.[metric]))));
  if (!whole) throw new TypeError("no report");
  return { ...found, name: name.replace(/\.json$/, "") };
}

export async function openReports(app, files) {
  const { state, set } = app;
  for (const file of files) {
    try {
      if (file.size > MOST_BYTES) throw new TypeError("too large");
      const report = reportIn(await file.text(), file.name);
      const others = state.audit.reports.filter((other) => other.name !== report.name);
      set({ problem: null, audit: { ...state.audit, reports: [...others, report] } });
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof SyntaxError
        || error instanceof DOMException)) throw error;
      set({ problem: { title: `${file.name} is no report of an audit.`,
        advice: "Choose a file that inlay embeds audit wrote with -o json." } });
    }
  }
}

function Bar({ share, guess }) {
  const [value, low, high] = [share.value, share.low, share.high].map((each) => 100 * each);
  return html`<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
    <rect class=${guess ? "guess" : "read"} y="1" width=${value} height="8" />
    <path d=${`M${low} 5H${high}M${low} 2V8M${high} 2V8`} /></svg>`;
}

function Attackers({ attackers, metric }) {
  const some = attackers.filter(({ shares }) => shares[metric].of)
    .sort((one, other) => other.shares[metric].value - one.shares[metric].value);
  if (!some.length) return html`<p class="hint">These texts hold none.</p>`;
  return html`<ul class="bars">${some.map(({ attacker, needs, shares }) => html`<li>
    <span class="name">${attacker}${" "}<small>${NEEDS[needs] ?? needs}</small></span>
    <${Bar} share=${shares[metric]} guess=${needs === "nothing"} />
    <span class="share" title=${interval(shares[metric])}>${percent(shares[metric].value)}
      <span class="hidden">, ${interval(shares[metric])}</span></span>
  </li>`)}</ul>`;
}

function Transform({ report, found, metric }) {
  const { verdict, attackers, answers, samples } = found;
  const read = verdict.word.startsWith("READ");
  const left = [...(found.not_run ?? []), ...Object.keys(found.not_applicable ?? {})];
  return html`<div class="side"><h3>${report.name}${" "}<span class="state"
      data-ill=${read ? "" : null}>${verdict.word}</span></h3>
    <p>${percent(verdict.share)} of ${METRICS[verdict.metric] ?? verdict.metric} by ${
      verdict.attacker}, which ${NEEDS[verdict.knows] ?? verdict.knows}.${answers?.same.of
      ? ` Answers that stay the same: ${percent(answers.same.value)}.` : ""}</p>
    <${Attackers} attackers=${attackers} metric=${metric} />
    ${left.length > 0 && html`<p class="hint">Not run, or not applicable: ${left.join(", ")}.</p>`}
    ${samples?.length > 0 && html`<details><summary>Texts, and what was read</summary>
      ${samples.map(({ text, read: seen }) => html`<dl class="facts"><dt>text</dt>
        <dd class="said">${text}</dd><dt>read</dt><dd class="said">${seen}</dd></dl>`)}</details>`}
  </div>`;
}

export function Audit({ app }) {
  const { state, set } = app;
  const { reports, metric } = state.audit;
  const names = [...new Set(reports.flatMap((report) =>
    report.transforms.map(({ transform }) => transform)))];
  return html`<section aria-label="Audit">
    <p class="hint">What known attacks read from the rows of your texts. This command measures it;
      open its reports here, of one model or of several. They stay in this page.</p>
    <pre>inlay embeds audit --model MODEL --texts texts.jsonl -o json > report.json</pre>
    <div class="row">
      <label class="button">Open reports<input type="file" multiple accept=".json" class="hidden"
        onChange=${(event) => {
          openReports(app, [...event.target.files]);
          event.target.value = "";
        }} /></label>
      ${reports.length > 0 && html`<label class="inline">Share of <select value=${metric}
          onChange=${(event) => set({ audit: { ...state.audit, metric: event.target.value } })}>
          ${Object.entries(METRICS).map(([name, label]) => html`
            <option value=${name}>${label}</option>`)}</select></label>
        <button class="quiet" onClick=${() => set({ audit: { ...state.audit, reports: [] } })}>
          Close all</button>`}
    </div>
    ${reports.map((report) => html`<p class="hint" key=${report.name}><b>${report.name}</b>: ${
      report.model}, ${report.texts} texts${report.complete === false ? ", interrupted" : ""}. ${
      (report.notes ?? [])[0]}</p>`)}
    ${names.map((name) => html`<h2 class="transform">${name}</h2><div class="sides">${
      reports.map((report) => {
        const found = report.transforms.find(({ transform }) => transform === name);
        return found && html`<${Transform} report=${report} found=${found} metric=${metric} />`;
      })}</div>`)}
  </section>`;
}

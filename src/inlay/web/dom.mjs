// The store and the few parts that every view shares.

import { h, render } from "./preact.mjs";
import htm from "./htm.mjs";

export const html = htm.bind(h);

// One state, drawn at most once a frame. `set` takes the fields that change; `draw` draws now.
export function store(first, view, root) {
  const state = first;
  let due = false;
  let drawn = false;
  const draw = () => {
    if (!drawn) root.replaceChildren();
    drawn = true;
    due = false;
    render(view(state), root);
  };
  const set = (change) => {
    Object.assign(state, change);
    if (due) return;
    due = true;
    // A hidden tab draws no frames; its state is drawn when it is shown.
    requestAnimationFrame(draw);
  };
  return { state, set, draw };
}

export const bytes = (count) =>
  count < 1000 ? `${count} B`
    : count < 1e6 ? `${(count / 1024).toFixed(1)} KB`
      : count < 1e9 ? `${(count / 1048576).toFixed(1)} MB`
        : `${(count / 1073741824).toFixed(1)} GB`;

export const millis = (value) =>
  value === null || value === undefined ? "–"
    : value < 10000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;

// Numbers a person compares: three digits.
export const short = (value) =>
  value === 0 ? "0" : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3
    ? value.toExponential(1) : Number(value.toPrecision(3)).toString();

// A vocabulary's spelling, or a token's text, with its white space made visible.
export const visible = (text) =>
  text.replace(/[Ġ▁]/g, " ").replace(/[Ċ\n]/g, "↵").replace(/\t/g, "⇥")
    .replace(/[\p{Cc}\u2028\u2029]/gu, "�")
    .replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)) || "∅";

// The server marks a page where somebody may be an admin: nobody else has a use for the fleet.
const HAS_ADMINS = "admins" in document.documentElement.dataset;

export function Header({ here, models }) {
  const link = (page, href, name) => html`
    <a href=${href} aria-current=${here === page ? "page" : null}>${name}</a>`;
  return html`<header>
    <a class="skip" href="#main">Skip to content</a>
    <h1><img src="web/icon.svg" alt="" width="22" height="22" /> inlay</h1>
    <nav aria-label="Pages">
      ${link("playground", "./", "Playground")}
      ${(HAS_ADMINS || here === "fleet") && link("fleet", "fleet", "Fleet")}
      ${link("start", "start", "Requests to try")} ${link("docs", "docs", "API")}
    </nav>
    ${models}
  </header>`;
}

// An error with what to do about it. `again` is offered where trying again may help.
export function Problem({ problem, again, close }) {
  if (!problem) return null;
  return html`<div class="problem" role="alert">
    <p><strong>${problem.title}</strong> ${problem.advice}</p>
    ${problem.said && html`<p class="said">${problem.said}</p>`}
    <p class="row">
      ${again && problem.again && html`<button onClick=${again}>Try again</button>`}
      ${close && html`<button class="quiet" onClick=${close}>Dismiss</button>`}
    </p>
  </div>`;
}

export function KeyField({ value, change, label = "API key" }) {
  return html`<label>${label}
    <input type="password" autocomplete="off" spellcheck="false" value=${value}
      placeholder="none" onInput=${(event) => change(event.target.value.trim())} />
    <small>Kept in this page's memory alone; gone when it is closed.</small>
  </label>`;
}

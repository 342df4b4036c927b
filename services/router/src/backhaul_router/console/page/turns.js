// Turns as they end, and what became of one.

import { $, el, facts, setText, walkable } from "./dom.js";
import { ago, count, plural, seconds } from "./format.js";
import { conversation } from "./conversation.js";

const MAX_ROWS = 200;

export const route = (turn) => el("span", { class: "route", "data-route": turn.route, vars: { of: `var(--${turn.route})` } }, turn.route);

export function parts(turn) {
  const whole = turn.prompt_tokens || 1;
  const title = `${count(turn.computed_tokens)} computed, ${count(turn.local_tokens)} in prefill's cache, ${count(turn.read_tokens)} read from decode, tokens`;
  return el("span", { class: "parts", title, role: "img", "aria-label": title }, ["computed", "local", "read"].map((part) => el("i", {
    vars: { share: `${(100 * turn[`${part}_tokens`]) / whole}%`, of: `var(--${part})` },
  })));
}

const path = (turn) => [turn.holder ? `${turn.holder} ⇢ ` : "", turn.prefill || "–", " → ", turn.decode || "–"].join("");

export class Turns {
  constructor(model, { key, openNode }) {
    this.model = model;
    this.key = key;
    this.openNode = openNode;
    this.body = $("turns-table").tBodies[0];
    this.paused = false;
    this.missed = 0;
    $("turns-pause").addEventListener("click", () => this.pause());
    $("turns-filter").addEventListener("input", () => this.draw(true));
    $("turns-route").addEventListener("change", () => this.draw(true));
    walkable(this.body, (id) => this.open(Number(id)));
  }

  clear() {
    this.body.replaceChildren();
  }

  pause() {
    this.paused = !this.paused;
    $("turns-pause").setAttribute("aria-pressed", String(this.paused));
    setText($("turns-pause"), this.paused ? "Go on" : "Pause");
    this.missed = 0;
    this.draw(true);
  }

  wanted(turn) {
    const chosen = $("turns-route").value;
    if (chosen && (chosen === "failed" ? turn.result === "ok" : turn.route !== chosen)) return false;
    const text = $("turns-filter").value.trim().toLowerCase();
    return !text || [turn.prefill, turn.decode, turn.holder, turn.model, turn.miss, turn.tenant ?? "", turn.result, String(turn.number)].some((value) => value.toLowerCase().includes(text));
  }

  draw(all = false) {
    if (this.paused && !all) {
      this.missed += this.model.fresh.length + this.model.leftOut;
      setText($("turns-note"), `paused; ${plural(this.missed, "newer turn")}`);
      return;
    }
    if (all) this.body.replaceChildren();
    const turns = (all ? this.model.turns : this.model.fresh).filter((turn) => this.wanted(turn)).slice(-MAX_ROWS);
    this.body.prepend(...turns.map((turn) => this.row(turn)).reverse());
    while (this.body.rows.length > MAX_ROWS) this.body.lastElementChild.remove();
    if (all || turns.length || this.model.fresh.length) {
      const left = this.model.leftOut ? `; ${plural(this.model.leftOut, "turn")} just now not shown` : "";
      setText($("turns-note"), `${plural(this.body.rows.length, "turn")} of this router${left}`);
    }
    for (const cell of this.body.querySelectorAll("td[data-at]")) setText(cell, ago(this.age(Number(cell.dataset.at))));
    $("turns-empty").hidden = this.body.rows.length > 0;
    setText($("turns-empty"), this.model.turns.length ? "No turn passes the filter." : "No turn has ended since this router started. Each router shows its own turns only.");
  }

  age(instant) {
    return this.model.now - instant;
  }

  row(turn) {
    const ended = turn.began_at + (turn.duration_s ?? 0);
    const failed = turn.result !== "ok";
    return el("tr", { tabindex: 0, "data-id": turn.number, "aria-selected": String(turn.number === this.opened) },
      el("td", { class: "n dim" }, String(turn.number)),
      el("td", { class: "n dim", "data-at": ended }, ago(this.age(ended))),
      el("td", {}, route(turn), turn.source === "cached" ? " (cached)" : ""),
      el("td", { title: this.model.reasons[turn.miss]?.meaning }, failed ? el("span", { class: "bad" }, `✖ ${turn.result}`) : turn.miss),
      el("td", { class: "n" }, turn.prompt_tokens ? count(turn.prompt_tokens) : "–"),
      el("td", {}, turn.prompt_tokens ? parts(turn) : ""),
      el("td", { class: "n" }, seconds(turn.ttft_s ?? turn.answer_s)),
      el("td", { class: "wide", title: path(turn) }, path(turn)));
  }

  close() {
    this.opened = undefined;
    $("turn-detail").hidden = true;
  }

  async open(number) {
    this.opened = number;
    for (const row of this.body.rows) row.setAttribute("aria-selected", String(Number(row.dataset.id) === number));
    const turn = this.model.turns.find((one) => one.number === number);
    const panel = $("turn-detail");
    const more = el("div", {}, el("p", { class: "note" }, "looking up the conversation"));
    panel.hidden = false;
    panel.replaceChildren(
      el("button", { class: "close", "aria-label": "Close", title: "Escape", on: { click: () => this.close() } }, "✕"),
      el("h2", {}, `Turn ${number}`),
      turn ? this.detail(turn) : "",
      more);
    try {
      more.replaceChildren(...conversation(this.model, await this.key.ask(`turns/${number}`), number, this.openNode));
    } catch (error) {
      more.replaceChildren(el("p", { class: "bad" }, error.message));
    }
  }

  detail(turn) {
    const { meaning = "", remedy = "" } = this.model.reasons[turn.miss] ?? {};
    return el("div", {},
      turn.miss ? el("div", { class: "explained" }, el("h3", {}, `Why it was cold: ${turn.miss}`), el("p", { class: "note" }, meaning), remedy ? el("p", { class: "note" }, `→ ${remedy}`) : "") : "",
      facts([
        ["Route", [route(turn), turn.source ? ` (${turn.source})` : "", turn.fallback ? ", decode computed the prompt" : "", turn.repeated ? ", repeated after a failure" : ""]],
        ["Result", turn.result],
        ["Model", turn.model],
        ["Tenant", turn.tenant ?? ""],
        ["API", turn.api],
        ["Prompt", turn.prompt_tokens ? `${count(turn.prompt_tokens)} tokens: ${count(turn.computed_tokens)} computed, ${count(turn.local_tokens)} in prefill's cache, ${count(turn.read_tokens)} read from decode` : "not counted"],
        ["First byte", turn.ttft_s === null ? "" : `${seconds(turn.ttft_s)}, estimated ${seconds(turn.estimate_s)}`],
        ["Whole answer", turn.answer_s === null ? "" : seconds(turn.answer_s)],
        ["Ran for", seconds(turn.duration_s)],
        ["Blocks from", turn.holder],
        ["Failed it", turn.tried.join(", ")],
        ["Prefill", turn.prefill || "none"],
        ["Decode", turn.decode || "none"],
        ["Trace", turn.trace_id ? el("code", {}, turn.trace_id) : ""],
      ]));
  }
}

// One conversation: its turns on this router, and what its next turn can find.

import { $, el } from "./dom.js";
import { ago, count, plural, seconds } from "./format.js";
import { parts, route } from "./turns.js";

const STATES = {
  held: "can be claimed", claimed: "granted to a prefill leg", fenced: "found after a restart, not granted yet",
  releasing: "being released", cached: "not retained; may still be cached", gone: "its owner has it no more", unknown: "its owner does not say",
};

// Elements for an answer of the API about a conversation; `current` is the turn that was asked about.
export function conversation(model, { turns, sets, problems }, current, openNode) {
  return [
    ...problems.map((problem) => el("p", { class: "bad" }, `✖ ${problem}`)),
    el("h3", {}, `Block sets: ${sets.length ? "what the next turn can find" : "none is findable now"}`),
    sets.length ? setsTable(sets, openNode) : el("p", { class: "note" }, "The next turn will be cold, unless a turn that runs now leaves one."),
    el("h3", {}, `History: ${plural(turns.length, "turn")} on this router`),
    turns.length ? turnsTable(model, turns, current) : el("p", { class: "note" }, `This router remembers its last ${count(model.keptTurns)} turns, and none of them is of this conversation. Other routers may know it.`),
  ];
}

function setsTable(sets, openNode) {
  return el("table", {}, el("tbody", {}, sets.map((set) => el("tr", {},
    el("td", {}, el("button", { title: `Engine ${set.engine}`, on: { click: () => openNode(set.node) } }, set.node)),
    el("td", { title: `${STATES[set.state] ?? ""}; block set ${set.id}` }, set.state),
    el("td", { class: "n" }, set.tokens ? `${count(set.tokens)} tokens` : ""),
    el("td", { class: "n" }, set.blocks === null ? "" : plural(set.blocks, "block")),
    el("td", { class: "n dim" }, set.remaining_s === null ? "" : `${seconds(set.remaining_s)} left`)))));
}

function turnsTable(model, turns, current) {
  return el("table", {}, el("tbody", {}, turns.map((turn) => el("tr", { "aria-selected": String(turn.number === current) },
    el("td", { class: "n dim" }, String(turn.number)),
    el("td", { class: "n dim" }, ago(model.now - turn.began_at)),
    el("td", {}, route(turn)),
    el("td", { title: model.reasons[turn.miss]?.meaning }, turn.result === "ok" ? turn.miss : turn.result),
    el("td", {}, parts(turn)),
    el("td", { class: "n" }, seconds(turn.ttft_s ?? turn.answer_s))))));
}

export class ConversationForm {
  constructor(model, { key, openNode }) {
    this.model = model;
    this.key = key;
    this.openNode = openNode;
    $("conversation-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.look();
    });
  }

  draw() {
    $("conversation-tenant").hidden = !this.model.tenants;
  }

  async look() {
    const answer = $("conversation-answer");
    const body = { id: $("conversation-id").value, model: $("conversation-model").value.trim(), tenant: $("conversation-tenant").value.trim() };
    try {
      const found = await this.key.ask("conversation", body);
      const nothing = !found.turns.length && !found.sets.length && !found.problems.length;
      const hint = nothing && this.model.tenants && !body.tenant ? "Name its tenant to look up what is retained: without it only turns that this router remembers are found." : "";
      answer.replaceChildren(el("div", { class: "card" }, hint ? el("p", {}, hint) : "", conversation(this.model, found, 0, this.openNode)));
    } catch (error) {
      answer.replaceChildren(el("p", { class: "bad" }, error.message));
    }
  }
}

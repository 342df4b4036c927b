// All nodes, one row each; only rows that changed are made anew.

import { $, el, facts, setText, walkable } from "./dom.js";
import { spark } from "./charts.js";
import { count, percent, plural, seconds, short } from "./format.js";
import { held, load } from "./model.js";

const STATES = { ready: ["good", "● ready"], not_ready: ["bad", "✖ not ready"], draining: ["doubtful", "▲ draining"], orphaned: ["doubtful", "▲ agent gone"] };
const BREAKERS = { open: "ejected", half_open: "on trial", starting: "starting" };
const reuses = (node) => node.engines.length > 0 && node.engines.every((engine) => engine.reuse);
const level = (share, text) => [el("span", { class: "level" }, el("i", { vars: { share: `${Math.min(100, 100 * share)}%` } })), text];

const COLUMNS = [
  ["Node", "", (node) => node.id, (node) => node.id],
  ["Role", "", (node) => node.role, (node) => node.role],
  ["State", "", (node) => `${node.state} ${node.breaker}`, (node) => {
    const [kind, text] = STATES[node.state] ?? ["dim", node.state];
    return el("span", { class: kind, title: node.reason }, text, BREAKERS[node.breaker] ? `, ${BREAKERS[node.breaker]}` : "");
  }],
  ["Reuse", "", (node) => (reuses(node) ? 1 : 0), (node) => (reuses(node) ? el("span", { class: "good" }, "● yes")
    : el("span", { class: "bad", title: node.engines.map((engine) => engine.problem).join("; ") }, "✖ no"))],
  ["Running", "n", (node) => load(node)?.running ?? -1, (node) => count(load(node)?.running)],
  ["Waiting", "n", (node) => load(node)?.waiting ?? -1, (node) => count(load(node)?.waiting)],
  ["KV in use", "", (node) => load(node)?.usage ?? -1, (node) => (load(node) ? level(load(node).usage, percent(load(node).usage, 1)) : "–")],
  ["Retained, of limit", "", (node) => held(node).blocks, (node) => {
    const { known, blocks, limit, tokens } = held(node);
    return known ? el("span", { title: `${count(blocks)} of ${count(limit)} blocks, ${count(tokens)} tokens` }, level(limit ? blocks / limit : 0, `${short(blocks)} / ${short(limit)}`)) : "–";
  }],
  ["Last 30 min", "", null, null],
  ["Model", "wide", (node) => node.models.join(), (node) => node.models.join(", ")],
];
const SPARK = COLUMNS.findIndex(([, , key]) => key === null);

export class Nodes {
  constructor(model) {
    this.model = model;
    this.body = $("nodes-table").tBodies[0];
    this.rows = new Map();
    this.sort = { column: 0, up: true };
    $("nodes-table").tHead.rows[0].append(...COLUMNS.map(([name, kind, key], index) => el("th", { class: kind, scope: "col" },
      key ? el("button", { on: { click: () => this.sortBy(index) } }, name) : name)));
    $("nodes-filter").addEventListener("input", () => this.arrange());
    walkable(this.body, (id) => this.open(id));
    this.sortBy(0, true);
  }

  clear() {
    this.rows.clear();
    this.body.replaceChildren();
  }

  sortBy(column, up) {
    this.sort = { column, up: up ?? (this.sort.column === column ? !this.sort.up : typeof this.sample(column) === "string") };
    [...$("nodes-table").tHead.rows[0].cells].forEach((cell, index) => {
      if (index === column) cell.setAttribute("aria-sort", this.sort.up ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    this.arrange();
  }

  sample(column) {
    const [first] = this.model.nodes.values();
    return first ? COLUMNS[column][2](first) : "";
  }

  draw(all = false) {
    const { model } = this;
    const before = this.rows.size;
    for (const id of all ? [...this.rows.keys()].filter((id) => !model.nodes.has(id)) : model.gone) {
      this.rows.get(id)?.remove();
      this.rows.delete(id);
    }
    for (const id of all ? model.nodes.keys() : model.changed) this.fill(model.nodes.get(id));
    if (all || model.sampled) for (const id of model.nodes.keys()) this.drawSpark(id);
    if (all || this.rows.size !== before || model.gone.length) this.arrange();
    if (model.changed.has(this.opened) || (this.opened && model.gone.includes(this.opened))) this.drawDetail();
  }

  fill(node) {
    const row = this.rows.get(node.id) ?? el("tr", { tabindex: 0, "data-id": node.id }, COLUMNS.map(([, kind]) => el("td", { class: kind })));
    COLUMNS.forEach(([, , key, show], index) => {
      if (!key) return;
      const shown = show(node);
      const cell = row.cells[index];
      if (typeof shown === "string") setText(cell, shown);
      else cell.replaceChildren(...[shown].flat());
    });
    if (!this.rows.has(node.id)) {
      this.rows.set(node.id, row);
      this.body.append(row);
      this.drawSpark(node.id);
    }
  }

  drawSpark(id) {
    const values = this.model.blocks.get(id) ?? [];
    this.rows.get(id)?.cells[SPARK].replaceChildren(values.length > 1 ? spark(values) : "");
  }

  arrange() {
    const text = $("nodes-filter").value.trim().toLowerCase();
    const key = COLUMNS[this.sort.column][2];
    const { nodes } = this.model;
    const compare = (one, other) => {
      const [a, b] = [key(nodes.get(one)), key(nodes.get(other))];
      const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      return (this.sort.up ? order : -order) || one.localeCompare(other, "en", { numeric: true });
    };
    const ids = [...this.rows.keys()].sort(compare);
    let shown = 0;
    for (const id of ids) {
      const { role, state, breaker, models } = nodes.get(id);
      const hidden = Boolean(text) && ![id, role, state, STATES[state]?.[1] ?? "", breaker, ...models].some((value) => value.toLowerCase().includes(text));
      this.rows.get(id).hidden = hidden;
      shown += hidden ? 0 : 1;
    }
    if (ids.some((id, index) => this.body.rows[index] !== this.rows.get(id))) this.body.append(...ids.map((id) => this.rows.get(id)));
    setText($("nodes-note"), text ? `${count(shown)} of ${plural(ids.length, "node")}` : plural(ids.length, "node"));
    $("nodes-empty").hidden = shown > 0;
    setText($("nodes-empty"), ids.length ? "No node passes the filter." : "No nodes are known. The overview says what to do.");
  }

  close() {
    this.opened = undefined;
    $("node-detail").hidden = true;
  }

  open(id) {
    this.opened = id;
    this.drawDetail();
    this.rows.get(id)?.scrollIntoView({ block: "nearest" });
  }

  drawDetail() {
    const node = this.model.nodes.get(this.opened);
    for (const [id, row] of this.rows) row.setAttribute("aria-selected", String(id === this.opened));
    const panel = $("node-detail");
    panel.hidden = false;
    panel.replaceChildren(
      el("button", { class: "close", "aria-label": "Close", title: "Escape", on: { click: () => this.close() } }, "✕"),
      el("h2", {}, this.opened),
      ...(node ? detail(node) : [el("p", { class: "note" }, "This node is not listed any more.")]));
  }
}

function detail(node) {
  return [
    facts([
      ["State", [STATES[node.state]?.[1] ?? node.state, node.reason ? `: ${node.reason}` : ""]],
      ["Breaker", node.breaker.replace("_", " ")],
      ["Agent", node.agent],
      ["Server", node.server],
      ["Models", node.models.join(", ")],
    ]),
    ...node.engines.flatMap((engine) => [
      el("h3", {}, `Engine of rank ${engine.rank}`),
      engine.reuse ? "" : el("p", { class: "bad" }, `✖ reuses nothing: ${engine.problem || "it runs without the connector"}`),
      facts([
        ["Id", el("code", {}, engine.id)],
        ["vLLM", engine.vllm],
        ["Connector", engine.connector || "none"],
        ["Requests", engine.load ? `${count(engine.load.running)} running, ${count(engine.load.waiting)} waiting` : "not told"],
        ["KV cache", `${count(engine.block_count)} blocks of ${count(engine.block_size)} tokens${engine.load ? `, ${percent(engine.load.kv_usage, 1)} in use` : ""}`],
        ["Retained", engine.retained ? `${count(engine.retained.blocks)} of at most ${count(engine.retained.block_limit)} blocks, ${plural(engine.retained.sets, "block set")}` : "not told"],
        ["Keeps for", engine.ttl_s ? seconds(engine.ttl_s) : ""],
        ["Second chances", engine.second_chance ? "yes" : "no"],
        ["Fence", engine.fenced ? "up: sets of before its agent's restart are not granted yet" : ""],
      ]),
    ]),
  ];
}

// The first section: what needs attention, how well reuse works, and where memory goes.

import { $, el } from "./dom.js";
import { River, ROUTES, chart, legend } from "./charts.js";
import { percent, perSecond, plural, seconds, short } from "./format.js";
import { held } from "./model.js";

const WINDOW_MIN = 5;
const SLOTS = 180;

export class Overview {
  constructor(model, { openNode }) {
    this.model = model;
    this.openNode = openNode;
    this.river = new River($("river"));
    this.open = new Set();
    this.shown = {};
    new ResizeObserver(() => this.model.tally && this.drawCharts()).observe($("retained-chart"));
    $("river-legend").replaceChildren(el("span", {}, "● a turn, larger with its prompt"), el("span", { class: "bad" }, "✕ failed"));
    $("retained-legend").replaceChildren(...legend([["retained", "append"], ["limit", "limit"]]));
    $("turns-legend").replaceChildren(...legend([...ROUTES.map((route) => [route, route]), ["hit rate, 0 to 100 %", "rate"]]));
  }

  // Draws what has changed; `all` after the section was hidden.
  draw(all = false) {
    this.drawWelcome();
    this.drawProblems();
    this.drawTiles();
    this.drawMisses();
    if (all || this.model.sampled) this.drawCharts();
  }

  frame() {
    this.river.draw(this.model.dots, performance.now());
  }

  // Replaces an element's children only when what they show is new.
  put(id, content, make) {
    const text = JSON.stringify(content);
    if (this.shown[id] === text) return;
    this.shown[id] = text;
    $(id).replaceChildren(...make());
  }

  drawWelcome() {
    const { nodes, tally, registry } = this.model;
    const turns = Object.values(tally.results).reduce((sum, one) => sum + one, 0);
    const state = nodes.size ? (turns || this.model.running ? "" : "no turns") : registry ? "no nodes" : "no registry";
    $("welcome").hidden = !state;
    $("tiles").hidden = $("charts").hidden = !nodes.size;
    this.put("welcome", state, () => welcome(state));
  }

  drawProblems() {
    const { problems } = this.model;
    this.put("problems", problems, () => problems.slice(0, 12).map((problem) => el("div", { class: `problem ${problem.severity}` },
      el("p", {}, el("b", {}, problem.text)),
      el("p", { class: "nodes" }, `→ ${problem.remedy} `, problem.node_count ? this.names(problem) : ""),
    )));
  }

  names({ nodes, node_count }) {
    const first = nodes.slice(0, 8).flatMap((id) => [el("button", { on: { click: () => this.openNode(id) } }, id), " "]);
    const rest = node_count - Math.min(8, nodes.length);
    return [...first, rest ? `and ${plural(rest, "other node")}` : ""];
  }

  drawTiles() {
    const samples = this.model.last(WINDOW_MIN);
    const sum = (name) => samples.reduce((total, sample) => total + sample[name], 0);
    const turns = samples.reduce((total, { routes }) => total + Object.values(routes).reduce((a, b) => a + b, 0), 0);
    const from = samples.length ? { continued: sum("continued"), reused: sum("reused"), prompt: sum("prompt_tokens"), read: sum("read_tokens"), local: sum("local_tokens") }
      : { continued: this.model.tally.continued, reused: this.model.tally.reused, prompt: this.model.tally.prompt_tokens, read: this.model.tally.read_tokens, local: this.model.tally.local_tokens };
    const all = [...this.model.nodes.values()].map(held).reduce((total, one) => ({
      sets: total.sets + one.sets, blocks: total.blocks + one.blocks, limit: total.limit + one.limit, tokens: total.tokens + one.tokens,
    }), { sets: 0, blocks: 0, limit: 0, tokens: 0 });
    const ttft = (route) => mean(samples, route);
    const tiles = [
      ["Hit rate", percent(from.reused, from.continued), `${short(from.reused)} of ${short(from.continued)} turns that could reuse`],
      ["Turns", samples.length ? perSecond(turns / (samples.length * this.model.stepS)) : "–", `${short(this.model.running)} running now, ${short(sum("failed"))} failed`],
      ["Prompt tokens not computed", percent(from.read + from.local, from.prompt), `${short(from.read)} read from decode, ${short(from.local)} in prefill's cache`],
      ["Time to first byte, reused", seconds(ttft("warm") ?? ttft("append")), `${seconds(ttft("cold"))} when cold (means)`],
      ["Retained", `${short(all.tokens)} tokens`, `${percent(all.blocks, all.limit)} of the limit, ${plural(all.sets, "block set")}`],
    ];
    this.put("tiles", tiles, () => tiles.map(([name, value, more]) => el("div", { class: "card tile" }, el("span", {}, name), el("b", {}, value), el("span", {}, more))));
  }

  drawMisses() {
    const { misses } = this.model.tally;
    const rows = Object.entries(misses).sort((one, other) => other[1] - one[1]).slice(0, 12);
    const total = rows.reduce((sum, [, number]) => sum + number, 0);
    this.put("misses", [rows, [...this.open], total], () => (rows.length ? rows.flatMap(([miss, number]) => this.miss(miss, number, total)) : [el("p", { class: "empty" }, "No turn was cold.")]));
  }

  miss(miss, number, total) {
    const { meaning = "", remedy = "" } = this.model.reasons[miss] ?? {};
    const open = this.open.has(miss);
    const toggle = () => {
      if (!this.open.delete(miss)) this.open.add(miss);
      this.drawMisses();
      [...$("misses").querySelectorAll("button")].find((button) => button.dataset.miss === miss)?.focus();
    };
    const row = el("button", { class: "miss", "aria-expanded": String(open), "data-miss": miss, title: meaning, on: { click: toggle } },
      el("span", {}, miss),
      el("span", { class: "track" }, el("i", { vars: { share: `${(100 * number) / total}%` } })),
      el("span", { class: "n" }, `${short(number)} · ${percent(number, total)}`));
    return open ? [row, el("div", { class: "explained" }, el("p", { class: "note" }, meaning), remedy ? el("p", { class: "note" }, `→ ${remedy}`) : "Nothing to do.")] : [row];
  }

  drawCharts() {
    const padded = (values) => [...new Array(Math.max(0, SLOTS - values.length)).fill(null), ...values];
    const { samples, stepS } = this.model;
    chart($("retained-chart"), {
      slots: SLOTS, stepS, label: "Blocks that finished turns retain, over the last half hour",
      stacks: [{ colour: "append", values: padded(samples.map(({ retained }) => retained.blocks)) }],
      lines: [{ colour: "limit", values: padded(samples.map(({ retained }) => retained.block_limit || null)), dash: "5 4" }],
    });
    chart($("turns-chart"), {
      slots: SLOTS, stepS, label: "Turns per second by route, and hit rate, over the last half hour", least: 0.1,
      stacks: ROUTES.map((route) => ({ colour: route, values: padded(samples.map(({ routes }) => (routes[route] ?? 0) / stepS)) })),
      lines: [{ colour: "rate", top: 1, values: padded(hitRates(samples)) }],
    });
  }
}

// The hit rate of the minute before each sample; null where no turn could reuse anything.
function hitRates(samples) {
  return samples.map((_, index) => {
    const minute = samples.slice(Math.max(0, index - 5), index + 1);
    const continued = minute.reduce((sum, sample) => sum + sample.continued, 0);
    return continued ? minute.reduce((sum, sample) => sum + sample.reused, 0) / continued : null;
  });
}

// The mean of the samples' means, each by its turns of the route.
function mean(samples, route) {
  const told = samples.filter((sample) => sample.ttft_s[route] !== undefined);
  const weight = told.reduce((sum, sample) => sum + (sample.routes[route] ?? 1), 0);
  return weight ? told.reduce((sum, sample) => sum + sample.ttft_s[route] * (sample.routes[route] ?? 1), 0) / weight : null;
}

const AGENT = "backhaul-node-agent --engine-url http://ENGINE:8200 --side-channel ENGINE:5600 \\\n  --role decode --node-id decode-1 --registry REGISTRY:7100 --listen AGENT:7201";
const TURN = "curl http://ROUTER:8080/v1/chat/completions -H 'content-type: application/json' \\\n  -d '{\"model\": \"MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'";

function welcome(state) {
  if (state === "no turns") {
    return [el("h2", {}, "No turn yet"), el("p", {}, "This router runs and knows its nodes. Send a turn to its HTTP address, then a second one of the same conversation:"), el("pre", {}, TURN)];
  }
  if (state === "no registry") {
    return [el("h2", {}, "No registry answers"), el("p", {}, "This router asks the addresses of its --registry for nodes, and has had no answer since it started. See that a registry listens there, that this machine reaches it, and that its etcd answers: the registry's log says what it waits for.")];
  }
  return [
    el("h2", {}, "No nodes yet"),
    el("p", {}, "The registry answers, and lists none. A node is a vLLM server with an agent beside it; two are needed, one of each role:"),
    el("ol", {}, el("li", {}, "start vLLM with Backhaul's connector (docs/engines.md);"), el("li", {}, "start a node agent beside it, with the registry of this router:")),
    el("pre", {}, AGENT),
    el("p", {}, "It is listed here within seconds. If it is not, its log says why it could not join, and whether it reached another cluster's registry (--cluster)."),
  ];
}

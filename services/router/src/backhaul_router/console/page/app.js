// Starts the page: key, stream, sections, keyboard, theme.

import { $, setText } from "./dom.js";
import { plural } from "./format.js";
import { ConversationForm } from "./conversation.js";
import { Model } from "./model.js";
import { Nodes } from "./nodes.js";
import { Overview } from "./overview.js";
import { Refused, ask, follow } from "./stream.js";
import { Turns } from "./turns.js";

const KEY = "backhaul-console-key";
const THEME = "backhaul-console-theme";
const SECTIONS = ["overview", "turns", "nodes", "conversation"];
const FILTERS = { turns: "turns-filter", nodes: "nodes-filter", conversation: "conversation-id" };

const key = { value: sessionStorage.getItem(KEY) ?? "", ask: (path, body) => ask(key.value, path, body) };
const model = new Model();
const openNode = (id) => { show("nodes"); sections.nodes.open(id); };
const sections = {
  overview: new Overview(model, { openNode }),
  turns: new Turns(model, { key, openNode }),
  nodes: new Nodes(model),
  conversation: new ConversationForm(model, { key, openNode }),
};
let shown = "overview";

function show(name, focus = false) {
  shown = name;
  for (const section of SECTIONS) {
    const tab = $(`tab-${section}`);
    tab.setAttribute("aria-selected", String(section === name));
    tab.tabIndex = section === name ? 0 : -1;
    $(section).hidden = section !== name;
    if (section === name && focus) tab.focus();
  }
  history.replaceState(null, "", `#${name}`);
  if (model.tally) sections[name].draw(true);
}

function take(event, data) {
  if (event === "state") {
    model.takeState(data);
    sections.turns.clear();
    sections.nodes.clear();
  } else {
    model.takeChanges(data);
  }
  document.body.classList.remove("stale");
  $("main").hidden = false;
  $("login").hidden = true;
  const ready = [...model.nodes.values()].filter((node) => node.state === "ready").length;
  setText($("facts"), `${ready} of ${plural(model.nodes.size, "node")} ready · ${plural(model.running, "turn")} running`);
  link("good", "● live");
  sections[shown].draw(event === "state");
}

function link(kind, text) {
  $("link").className = `link ${kind}`;
  setText($("link"), text);
}

async function run() {
  const lost = (why) => {
    document.body.classList.add("stale");
    link("bad", "✖ no connection");
    $("link").title = why;
  };
  try {
    await follow(key.value, { state: (data) => take("state", data), changes: (data) => take("changes", data), lost });
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    sessionStorage.removeItem(KEY);
    $("main").hidden = true;
    $("login").hidden = false;
    setText($("login-error"), key.value ? error.message : "");
    link("doubtful", "▲ key wanted");
    $("login-key").focus();
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key.value = $("login-key").value.trim();
  $("login-key").value = "";
  sessionStorage.setItem(KEY, key.value);
  run();
});

$("tabs").addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) show(tab.getAttribute("aria-controls"));
});

$("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) show(SECTIONS[(SECTIONS.indexOf(shown) + step + SECTIONS.length) % SECTIONS.length], true);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    document.activeElement?.blur();
    sections.turns.close();
    sections.nodes.close();
    return;
  }
  if (event.target.matches("input, select, textarea")) return;
  const number = Number(event.key);
  if (number >= 1 && number <= SECTIONS.length) show(SECTIONS[number - 1], true);
  if (event.key === "/" && FILTERS[shown]) {
    event.preventDefault();
    $(FILTERS[shown]).focus();
  }
  if (event.key === "p" && shown === "turns") sections.turns.pause();
});

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").value = name;
}
$("theme").addEventListener("change", () => {
  localStorage.setItem(THEME, $("theme").value);
  theme($("theme").value);
});
theme(["light", "dark"].includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto");

// The river moves ten times a second, once a second for those who want less motion, and not at all when nobody looks.
const still = matchMedia("(prefers-reduced-motion: reduce)");
let last = 0;
function frame(now) {
  if (now - last >= (still.matches ? 1000 : 100)) {
    last = now;
    if (shown === "overview" && model.tally) sections.overview.frame();
  }
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
addEventListener("resize", () => { if (model.tally) sections[shown].draw(true); });

show(SECTIONS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview");
run();

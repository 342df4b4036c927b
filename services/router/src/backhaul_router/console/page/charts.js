// Charts as SVG, and the river of turns on a canvas.

import { el, svg } from "./dom.js";
import { short } from "./format.js";

export const ROUTES = ["cold", "warm", "append"];
const LEFT = 44;
const BOTTOM = 18;
const TOP = 6;
const MINUTE_MS = 60_000;

export function legend(pairs) {
  return pairs.map(([name, colour]) => el("span", {}, el("i", { class: "swatch", vars: { of: `var(--${colour})` } }), name));
}

function niceTop(value) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * size).find((top) => top >= value) ?? 1;
}

// Draws over the last half hour. `stacks`: [{colour, values}], one upon the other; `lines`: [{colour, values, top?, dash?}],
// where a value may be null. Values are as many as `slots`, the newest last.
export function chart(holder, { slots, stepS, stacks = [], lines = [], label, least = 1 }) {
  const width = holder.clientWidth || 560;
  const height = holder.clientHeight || 130;
  const sums = Array.from({ length: slots }, (_, index) => stacks.reduce((sum, { values }) => sum + (values[index] ?? 0), 0));
  const plain = lines.filter((line) => !line.top).flatMap((line) => line.values.map((value) => value ?? 0));
  const top = niceTop(Math.max(least, ...sums, ...plain));
  const x = (index) => LEFT + ((width - LEFT - 4) * index) / slots;
  const y = (value, of = top) => TOP + (height - TOP - BOTTOM) * (1 - value / of);
  const step = (width - LEFT - 4) / slots;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    drawing.append(
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(top * share), y2: y(top * share) }),
      svg("text", { x: LEFT - 6, y: y(top * share) + 4, "text-anchor": "end" }, tick(top * share)),
    );
  }
  for (const minutes of [30, 20, 10]) {
    const index = slots - (minutes * 60) / stepS;
    if (index >= 0) drawing.append(svg("text", { x: x(index), y: height - 4 }, `−${minutes} min`));
  }
  drawing.append(svg("text", { x: width - 4, y: height - 4, "text-anchor": "end" }, "now"));
  const floor = new Array(slots).fill(0);
  for (const { colour, values } of stacks) {
    let path = "";
    values.forEach((value, index) => {
      if (!value) return;
      const low = y(floor[index]);
      floor[index] += value;
      path += `M${x(index).toFixed(1)} ${low.toFixed(1)}V${y(floor[index]).toFixed(1)}h${step.toFixed(2)}V${low.toFixed(1)}z`;
    });
    drawing.append(svg("path", { d: path, fill: `var(--${colour})` }));
  }
  for (const { colour, values, top: own, dash } of lines) {
    let path = "";
    values.forEach((value, index) => {
      if (value === null || value === undefined) return;
      const there = values[index - 1] !== null && values[index - 1] !== undefined && index > 0;
      const height = y(value, own).toFixed(1);
      path += there ? `L${(x(index) + step / 2).toFixed(1)} ${height}` : `M${x(index).toFixed(1)} ${height}h${step.toFixed(1)}`;
    });
    drawing.append(svg("path", { d: path, fill: "none", stroke: `var(--${colour})`, "stroke-width": 1.6, "stroke-dasharray": dash ?? "none" }));
  }
  holder.replaceChildren(drawing);
}

const tick = (value) => (value < 10 && !Number.isInteger(value) ? value.toFixed(1) : short(value));

export function spark(values) {
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => `${index},${(19 - (18 * value) / most).toFixed(1)}`).join(" ");
  return svg("svg", { class: "spark", viewBox: `0 0 ${Math.max(1, values.length - 1)} 20`, preserveAspectRatio: "none", "aria-hidden": true },
    svg("polyline", { points }));
}

// The last minute's turns as dots in lanes, one for each route; the larger, the longer the prompt; failed ones crossed.
export class River {
  constructor(canvas) {
    this.canvas = canvas;
    this.brush = canvas.getContext("2d");
  }

  draw(dots, now) {
    const { canvas, brush } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    brush.clearRect(0, 0, width, height);
    brush.font = "12px system-ui, sans-serif";
    const lane = (height - 16) / ROUTES.length;
    const counts = { cold: 0, warm: 0, append: 0 };
    ROUTES.forEach((route, index) => {
      brush.fillStyle = colour("line");
      brush.fillRect(64, lane * index + lane / 2, width - 64 - 50, 1);
    });
    for (const dot of dots) {
      const share = 1 - (now - dot.at) / MINUTE_MS;
      if (share < 0) continue;
      counts[dot.route] += 1;
      // Steps of the golden ratio spread whatever comes together.
      const jitter = ((dot.number * 0.618034) % 1) - 0.5;
      const x = 64 + (width - 64 - 56) * Math.min(1, share);
      const y = lane * ROUTES.indexOf(dot.route) + lane / 2 + jitter * lane * 0.5;
      const radius = 2.5 + Math.min(3.5, Math.log10(1 + dot.tokens / 100));
      this.dot(x, y, radius, colour(dot.failed ? "bad" : dot.route), dot.failed);
    }
    ROUTES.forEach((route, index) => {
      const middle = lane * index + lane / 2 + 4;
      brush.fillStyle = colour(route);
      brush.fillText(route, 4, middle);
      brush.fillStyle = colour("ink");
      brush.textAlign = "right";
      brush.fillText(short(counts[route]), width - 4, middle);
      brush.textAlign = "left";
    });
    brush.fillStyle = colour("dim");
    brush.fillText("−60 s", 64, height - 2);
    brush.textAlign = "right";
    brush.fillText("now", width - 56, height - 2);
    brush.textAlign = "left";
  }

  dot(x, y, radius, colour, failed) {
    const { brush } = this;
    brush.beginPath();
    if (failed) {
      brush.strokeStyle = colour;
      brush.lineWidth = 2;
      brush.moveTo(x - radius, y - radius);
      brush.lineTo(x + radius, y + radius);
      brush.moveTo(x + radius, y - radius);
      brush.lineTo(x - radius, y + radius);
      brush.stroke();
    } else {
      brush.fillStyle = colour;
      brush.globalAlpha = 0.8;
      brush.arc(x, y, radius, 0, 2 * Math.PI);
      brush.fill();
      brush.globalAlpha = 1;
    }
  }
}

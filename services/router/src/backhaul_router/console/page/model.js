// All that the page knows: what the stream brought, bounded.

const MAX_TURNS = 500;
const MINUTE_MS = 60_000;
const MAX_DOTS = 3000;

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    Object.assign(this, {
      now: 0, nowAt: performance.now(), running: 0, registry: true, stepS: 10, tenants: false, beganAt: 0, keptTurns: 0,
      nodes: new Map(), blocks: new Map(), changed: new Set(), gone: [], turns: [], fresh: [], dots: [], leftOut: 0,
      samples: [], sampled: false, problems: [], reasons: {}, tally: null,
    });
  }

  // Takes everything anew.
  takeState(state) {
    this.clear();
    Object.assign(this, {
      stepS: state.step_s, tenants: state.tenants, beganAt: state.began_at, keptTurns: state.kept_turns,
      samples: state.samples, blocks: new Map(Object.entries(state.nodes)),
    });
    this.takeChanges(state.changes);
  }

  // Takes what has changed. `changed`, `gone`, `fresh` and `sampled` are of these changes alone.
  takeChanges(changes) {
    this.now = changes.now;
    this.nowAt = performance.now();
    this.running = changes.running;
    this.registry = changes.registry;
    this.tally = changes.tally;
    this.leftOut = changes.left_out;
    this.problems = changes.problems ?? this.problems;
    Object.assign(this.reasons, changes.reasons);
    this.changed = new Set(changes.nodes.map((node) => node.id));
    for (const node of changes.nodes) this.nodes.set(node.id, node);
    this.gone = changes.gone;
    for (const id of changes.gone) {
      this.nodes.delete(id);
      this.blocks.delete(id);
    }
    this.fresh = changes.turns;
    this.turns = [...this.turns, ...changes.turns].slice(-MAX_TURNS);
    this.takeDots(changes.turns);
    this.takeSamples(changes.samples);
  }

  takeDots(turns) {
    const before = this.nowAt - MINUTE_MS;
    const dots = turns.map((turn) => ({
      number: turn.number, at: this.at(turn.began_at + (turn.duration_s ?? 0)), route: turn.route, failed: turn.result !== "ok", tokens: turn.prompt_tokens,
    }));
    this.dots = [...this.dots, ...dots].filter((dot) => dot.at > before).slice(-MAX_DOTS);
  }

  takeSamples(samples) {
    this.sampled = samples.length > 0;
    this.samples = [...this.samples, ...samples].slice(-180);
    for (const _ of samples) {
      for (const node of this.nodes.values()) {
        const series = this.blocks.get(node.id) ?? [];
        series.push(held(node).blocks);
        this.blocks.set(node.id, series.slice(-180));
      }
    }
  }

  // An instant of the router's clock, as performance.now() tells time here.
  at(instant) {
    return this.nowAt - (this.now - instant) * 1000;
  }

  // The samples of the last minutes.
  last(minutes) {
    return this.samples.slice(-Math.ceil((minutes * 60) / this.stepS));
  }
}

// What finished turns hold on a node; `known` tells whether its agent says so.
export function held(node) {
  const total = { sets: 0, blocks: 0, limit: 0, tokens: 0, known: false };
  for (const { retained, block_size } of node.engines) {
    if (!retained) continue;
    total.known = true;
    total.sets += retained.sets;
    total.blocks += retained.blocks;
    total.limit += retained.block_limit;
    total.tokens += retained.blocks * block_size;
  }
  return total;
}

// What a node's engines have to do together; null where nothing is known.
export function load(node) {
  const loads = node.engines.map((engine) => engine.load).filter(Boolean);
  if (!loads.length) return null;
  const sum = (name) => loads.reduce((total, one) => total + one[name], 0);
  return { running: sum("running"), waiting: sum("waiting"), usage: sum("kv_usage") / loads.length };
}

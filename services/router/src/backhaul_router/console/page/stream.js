// Talks to the router: one stream of changes, and questions. The key goes into a header, never into an address.

const SILENCE_MS = 6000;
const PAUSES_MS = [500, 1000, 2000, 5000];
const MAX_BUFFER = 32 * 1024 * 1024;

export class Refused extends Error {}

const headers = (key) => (key ? { authorization: `Bearer ${key}` } : {});

// Follows the router for ever. Calls on.state, on.changes and on.lost(why); throws Refused when the key is not taken.
export async function follow(key, on) {
  for (let failures = 0; ; failures += 1) {
    try {
      await once(key, on, () => { failures = 0; });
      on.lost("the stream ended");
    } catch (error) {
      if (error instanceof Refused) throw error;
      on.lost(error.name === "AbortError" ? "the router is silent" : error.message);
    }
    const pause = PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)];
    await new Promise((resolve) => { setTimeout(resolve, pause * (0.75 + Math.random() / 2)); });
  }
}

async function once(key, on, heard) {
  const abort = new AbortController();
  let timer = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    const response = await fetch("api/events", { headers: headers(key), cache: "no-store", signal: abort.signal });
    if (response.status === 401) throw new Refused(await problem(response));
    if (!response.ok) throw new Error(await problem(response));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_MS);
      buffer += value;
      if (buffer.length > MAX_BUFFER) throw new Error("the router sends more than a page can take");
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const event of events) take(event, on);
      if (events.length) heard();
    }
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
}

function take(event, on) {
  let name = "";
  let data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (name && data) on[name]?.(JSON.parse(data));
}

// Asks for JSON: GET, or POST of a body. Throws an Error that says what is wrong.
export async function ask(key, path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const type = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetch(`api/${path}`, { ...options, cache: "no-store", headers: { ...headers(key), ...type } });
  if (!response.ok) throw new Error(await problem(response));
  return response.json();
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answers ${response.status}`;
  }
}

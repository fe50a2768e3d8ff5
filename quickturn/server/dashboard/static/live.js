// The live view: tiles with a minute of history, the cache by group, and the requests.
const KEPT = 60;
const history = {};
let before = null;

const at = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");
const fixed = (value, digits) => (value === null || value === undefined ? "" : value.toFixed(digits));

export function showTrouble(message) {
  at("condition").textContent = message;
  at("condition").className = "bad";
}

export function show(state) {
  at("model").textContent = state.model;
  if (state.trouble) showTrouble(state.trouble);
  else {
    at("condition").textContent = "serving";
    at("condition").className = "good";
  }
  showTiles(state.stats);
  showPromise(state.promise, state.stats);
  showCache(state.stats);
  showRequests(state);
  showFigures(state);
}

function showTiles(stats) {
  const now = { time: performance.now() / 1000, ...stats };
  const elapsed = before ? now.time - before.time : 0;
  const grown = (name) => (before ? (now[name] ?? 0) - (before[name] ?? 0) : 0);
  const rate = (name) => (elapsed > 0 ? grown(name) / elapsed : 0);
  tile("out", "out-rate", rate("generated_tokens"), count);
  tile("in", "in-rate", rate("computed_tokens"), count);
  tile("step", "step", (stats.step_seconds ?? 0) * 1000, (value) => fixed(value, 2));
  const running = stats.requests_running ?? 0, waiting = stats.requests_waiting ?? 0;
  tile("load", "load", running + waiting, () => `${running} / ${waiting}`);
  const share = stats.prompt_tokens ? (100 * stats.cached_tokens) / stats.prompt_tokens : 0;
  tile("reuse", "reuse", share, (value) => `${fixed(value, 1)}%`);
  before = now;
}

function tile(name, output, value, text) {
  at(output).textContent = text(value);
  const values = (history[name] ??= []);
  values.push(value);
  if (values.length > KEPT) values.shift();
  const highest = Math.max(...values, 1e-9);
  const points = values.map((v, i) => `${(i / (KEPT - 1)) * 100},${34 - (v / highest) * 32}`).join(" ");
  const chart = at(`${name}-chart`);
  chart.setAttribute("viewBox", "0 0 100 36");
  chart.setAttribute("preserveAspectRatio", "none");
  const line = chart.firstChild ?? chart.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  line.setAttribute("points", points);
}

function showPromise(promise, stats) {
  tile("pace", "pace", promise.user_tokens_per_second, (value) => fixed(value, 1));
  const said = [];
  if (promise.promised_tokens_per_second) said.push(`${promise.promised_tokens_per_second} tokens/s for every user`);
  if (promise.promised_first_token_seconds) said.push(`a first token within ${promise.promised_first_token_seconds} s`);
  const milliseconds = (name) => fixed((stats[name] ?? 0) / 1000, 2);
  const held = (stats.requests_held_by_promise ?? 0) + (stats.prompts_held_by_promise ?? 0);
  at("promise").textContent =
    `${said.length ? `Promised: ${said.join(", ")}` : "Nothing is promised"}. ` +
    `${count(promise.queue_waiting)} wait for a place, ${count(held)} because of the promise; ` +
    `${count(promise.queue_refused_total)} were turned away` +
    `${promise.queue_retry_after_seconds ? `, the next one for ${count(promise.queue_retry_after_seconds)} s` : ""}. ` +
    `The last step was expected to take ${milliseconds("step_us_predicted")} ms and took ${milliseconds("step_us_measured")} ms.`;
}

function showCache(stats) {
  const names = Object.keys(stats).filter((name) => /^group_.*_slabs$/.test(name)).map((name) => name.slice(6, -6));
  const bar = at("slabs"), rows = at("groups").tBodies[0];
  bar.replaceChildren();
  rows.replaceChildren();
  names.forEach((name, index) => {
    const of = (what) => stats[`group_${name}_${what}`] ?? 0;
    const part = document.createElement("i");
    part.className = `c${index % 5}`;
    part.style.width = `${(100 * of("slabs")) / Math.max(stats.slabs_total, 1)}%`;
    part.title = `${name}: ${of("slabs")} slabs`;
    bar.append(part);
    const row = rows.insertRow();
    const label = row.insertCell();
    const swatch = document.createElement("span");
    swatch.className = `swatch c${index % 5}`;
    label.append(swatch, name);
    for (const what of ["slabs", "blocks", "blocks_evictable", "evictions"]) row.insertCell().textContent = count(of(what));
  });
  at("cache-note").textContent =
    `${count(stats.slabs_free ?? 0)} of ${count(stats.slabs_total ?? 0)} slabs free. ` +
    `${count(stats.cached_tokens ?? 0)} of ${count(stats.ceiling_tokens ?? 0)} tokens reused that an endless cache would have had. ` +
    `${count(stats.evictions ?? 0)} evictions, ${count(stats.retractions ?? 0)} retractions, ${count(stats.sessions ?? 0)} sessions known.`;
}

function showRequests(state) {
  at("open").textContent = `${state.open_requests} open`;
  const rows = at("requests").tBodies[0];
  rows.replaceChildren();
  for (const entry of [...state.live, ...state.ended]) {
    const row = rows.insertRow();
    if (!state.live.includes(entry)) row.className = "over";
    const cells = [
      entry.id, entry.phase, entry.session, count(entry.prompt_tokens),
      entry.cached_tokens < 0 ? "" : count(entry.cached_tokens), count(entry.answer_tokens),
      entry.tokens_per_second ? fixed(entry.tokens_per_second, 1) : "", fixed(entry.first_token, 2), fixed(entry.seconds, 1),
    ];
    for (const text of cells) row.insertCell().textContent = text;
  }
}

function showFigures(state) {
  const rows = at("figures").tBodies[0];
  rows.replaceChildren();
  const figures = { ...state.facts, ...state.stats };
  for (const name of Object.keys(figures).sort()) {
    const row = rows.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = String(figures[name]);
  }
}

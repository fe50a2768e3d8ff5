"use strict";
const { title, runs } = JSON.parse(document.getElementById("data").textContent);
const get = (run, ...path) => path.reduce((value, key) => (value == null ? null : value[key]), run);
const labels = [...new Set(runs.map((run) => run.label))];
const hidden = new Set();
const color = (label) => `var(--c${labels.indexOf(label) % 8})`;
const shown = () => runs.filter((run) => !hidden.has(run.label));
const users = (run) => run.load.concurrency;
const nameOf = (run) => `${run.label}, ${users(run)} user${users(run) === 1 ? "" : "s"}`;

function element(name, attributes = {}, ...children) {
  const space = name === "svg" || SHAPES.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const SHAPES = new Set(["g", "line", "path", "circle", "text", "rect"]);

function number(value, digits = 3) {
  if (value == null) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function ticks(most, count) {
  if (!(most > 0)) return [0, 1];
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const made = [];
  for (let at = 0; at < most + step; at += step) made.push(Number(at.toPrecision(12)));
  return made;
}

function plot(width, height, xMost, yMost, xName, yName) {
  const left = 62, right = 20, top = 12, bottom = 44;
  const xs = ticks(xMost, Math.max(3, Math.round(width / 130)));
  const ys = ticks(yMost, Math.max(3, Math.round(height / 70)));
  const x = (value) => left + (value / xs.at(-1)) * (width - left - right);
  const y = (value) => height - bottom - (value / ys.at(-1)) * (height - top - bottom);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const tick of ys) {
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    svg.append(element("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of xs) {
    svg.append(element("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: height - bottom }));
    svg.append(element("text", { x: x(tick), y: height - bottom + 18, "text-anchor": "middle" }, number(tick)));
  }
  svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  svg.append(element("text", { class: "name", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xName));
  svg.append(element("text", { class: "name", x: 14, y: (top + height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(top + height - bottom) / 2})` }, yName));
  return { svg, x, y, bottom: height - bottom };
}

const tip = document.getElementById("tip");
function explain(shape, text) {
  shape.addEventListener("pointermove", (event) => {
    tip.textContent = text;
    tip.style.opacity = 1;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  shape.addEventListener("pointerleave", () => (tip.style.opacity = 0));
  return shape;
}

const path = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
const put = (id, ...children) => document.getElementById(id).replaceChildren(...children);
const empty = (text) => element("div", { class: "empty" }, text);

function about(run) {
  const figures = run.figures;
  return [
    nameOf(run),
    `${number(get(figures, "user_tokens_per_second", "median"))} tokens/s a user (p10 ${number(get(figures, "user_tokens_per_second", "p10"))})`,
    `${number(figures.per_gpu.answer)} answer tokens/s a GPU`,
    `${number(figures.per_gpu.new_prompt)} new, ${number(figures.per_gpu.cached_prompt)} cached prompt tokens/s a GPU`,
    `gaps p50 ${number(get(figures, "gap_ms", "median"))}, p99 ${number(get(figures, "gap_ms", "p99"))} ms`,
    `cached / ceiling ${number(figures.cache.cached_over_ceiling, 4)}`,
  ].join("\n");
}

function pareto() {
  const points = shown()
    .map((run) => ({ run, speed: get(run, "figures", "user_tokens_per_second", "median"), all: run.figures.per_gpu.answer }))
    .filter((point) => point.speed != null);
  if (!points.length) return put("pareto", empty("no run has a rate"));
  const most = (key) => Math.max(...points.map((point) => point[key]));
  const { svg, x, y } = plot(1100, 430, most("speed") * 1.04, most("all") * 1.06, "tokens/s for one user (median)", "answer tokens/s per GPU");
  for (const label of labels) {
    const own = points.filter((point) => point.run.label === label).sort((a, b) => users(a.run) - users(b.run));
    if (own.length > 1) svg.append(element("path", { class: "series", stroke: color(label), d: path(own.map((point) => [x(point.speed), y(point.all)])) }));
  }
  const front = points
    .filter((point) => !points.some((other) => other.speed >= point.speed && other.all >= point.all && (other.speed > point.speed || other.all > point.all)))
    .sort((a, b) => a.speed - b.speed);
  svg.append(element("path", { class: "front", stroke: "color-mix(in srgb, var(--ink) 28%, transparent)", d: path(front.map((point) => [x(point.speed), y(point.all)])) }));
  for (const point of points) {
    const dot = element("circle", { class: "dot", cx: x(point.speed), cy: y(point.all), r: 7, fill: color(point.run.label) });
    svg.append(explain(dot, about(point.run)));
    svg.append(element("text", { class: "name", x: x(point.speed) + 10, y: y(point.all) - 8 }, String(users(point.run))));
  }
  put("pareto", svg);
}

function bars(id, rows, most, unit, draw) {
  if (!rows.length) return put(id, empty("nothing to show"));
  const width = 530, left = 175, row = 34, height = rows.length * row + 40;
  const xs = ticks(most, 4);
  const x = (value) => left + (value / xs.at(-1)) * (width - left - 24);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const tick of xs) {
    svg.append(element("line", { class: "grid", x1: x(tick), x2: x(tick), y1: 0, y2: height - 34 }));
    svg.append(element("text", { x: x(tick), y: height - 18, "text-anchor": "middle" }, number(tick)));
  }
  svg.append(element("text", { class: "name", x: (left + width) / 2, y: height - 2, "text-anchor": "middle" }, unit));
  rows.forEach((run, at) => {
    const name = element("text", { class: "name", x: left - 8, y: at * row + 21, "text-anchor": "end" }, short(nameOf(run)));
    svg.append(explain(name, about(run)));
    draw(svg, run, at * row + 5, x);
  });
  put(id, svg);
}
const short = (text) => (text.length > 27 ? `${text.slice(0, 14)}…${text.slice(-12)}` : text);

function firstTokens() {
  const kinds = [["first_turn", 1, "first turns"], ["later_turns", 0.5, "later turns"]];
  const rows = shown().filter((run) => kinds.some(([kind]) => get(run, "figures", "first_token_ms", kind)));
  const most = Math.max(1, ...rows.flatMap((run) => kinds.map(([kind]) => get(run, "figures", "first_token_ms", kind, "p90") ?? 0)));
  bars("first", rows, most, "ms", (svg, run, top, x) => {
    kinds.forEach(([kind, opacity, name], at) => {
      const spread = get(run, "figures", "first_token_ms", kind);
      if (!spread) return;
      const y = top + at * 12;
      const bar = element("rect", { x: x(0), y, width: Math.max(1, x(spread.median) - x(0)), height: 10, rx: 2, fill: color(run.label), opacity });
      svg.append(explain(bar, `${nameOf(run)}\n${name}: median ${number(spread.median)} ms, p90 ${number(spread.p90)}, p99 ${number(spread.p99)}`));
      svg.append(element("line", { x1: x(spread.median), x2: x(spread.p90), y1: y + 5, y2: y + 5, stroke: "var(--soft)", "stroke-width": 1.5 }));
    });
  });
}

function cacheUse() {
  const rows = shown().filter((run) => get(run, "figures", "tokens", "cached") != null && run.figures.tokens.prompt);
  const silent = shown().length - rows.length;
  bars("cache", rows, 100, "% of prompt tokens", (svg, run, top, x) => {
    const { prompt, cached, ceiling } = run.figures.tokens;
    const missed = Math.max(0, ceiling - cached);
    const parts = [["cached", cached, color(run.label)], ["missed", missed, "var(--missed)"], ["new", Math.max(0, prompt - cached - missed), "var(--fresh)"]];
    let at = 0;
    for (const [name, tokens, fill] of parts) {
      const share = (tokens / prompt) * 100;
      const bar = element("rect", { x: x(at), y: top, width: Math.max(0, x(at + share) - x(at)), height: 22, fill });
      svg.append(explain(bar, `${nameOf(run)}\n${name}: ${number(tokens)} tokens, ${number(share)}%\ncached / ceiling ${number(run.figures.cache.cached_over_ceiling, 4)}`));
      at += share;
    }
  });
  const keys = element("div", { class: "keys" });
  for (const [name, fill] of [["cached (the engine's colour)", "var(--c0)"], ["missed", "var(--missed)"], ["new", "var(--fresh)"]]) {
    keys.append(element("span", {}, element("i", { style: `background:${fill}` }), name));
  }
  if (silent) keys.append(element("span", {}, `${silent} run${silent > 1 ? "s" : ""} of servers that don't say what was cached`));
  document.getElementById("cache").prepend(keys);
}

const pick = document.getElementById("pick");
function overTime() {
  const all = shown();
  const chosen = pick.value === "all" ? all : all.filter((run) => String(runs.indexOf(run)) === pick.value);
  const end = Math.max(0.001, ...chosen.map((run) => run.over_time.bucket * run.over_time.gap_ms_p50.length));
  const lines = (key) => chosen.flatMap((run) => run.over_time[key].filter((value) => value != null));
  const gaps = plot(1100, 270, end, Math.max(1, ...(chosen.length === 1 ? lines("gap_ms_p99") : lines("gap_ms_p50"))), "seconds", "ms between tokens");
  const rate = plot(1100, 200, end, Math.max(1, ...lines("answer_tokens_per_second")), "seconds", "answer tokens/s, all users");
  for (const run of chosen) {
    const { bucket, gap_ms_p50: mid, gap_ms_p99: high, answer_tokens_per_second: speed } = run.over_time;
    const at = (index) => (index + 0.5) * bucket;
    const known = mid.map((value, index) => [index, value, high[index]]).filter(([, value]) => value != null);
    if (chosen.length === 1 && known.length) {
      const upper = known.map(([index, , value]) => [gaps.x(at(index)), gaps.y(value)]);
      const lower = known.map(([index, value]) => [gaps.x(at(index)), gaps.y(value)]).reverse();
      gaps.svg.append(element("path", { class: "shade", fill: color(run.label), d: `${path([...upper, ...lower])}Z` }));
    }
    const line = element("path", { class: "trace", stroke: color(run.label), d: path(known.map(([index, value]) => [gaps.x(at(index)), gaps.y(value)])) });
    gaps.svg.append(explain(line, about(run)));
    const steps = speed.map((value, index) => [rate.x(at(index)), rate.y(value)]);
    rate.svg.append(explain(element("path", { class: "trace", stroke: color(run.label), d: path(steps) }), about(run)));
  }
  put("gaps", gaps.svg);
  put("rate", rate.svg);
}

const COLUMNS = [
  ["users", users, 0],
  ["answers", (run) => run.figures.requests, 0],
  ["tokens/s a user, median", (run) => get(run, "figures", "user_tokens_per_second", "median"), 1],
  ["p10", (run) => get(run, "figures", "user_tokens_per_second", "p10"), 1],
  ["gap p50, ms", (run) => get(run, "figures", "gap_ms", "median"), -1],
  ["p90", (run) => get(run, "figures", "gap_ms", "p90"), -1],
  ["p99", (run) => get(run, "figures", "gap_ms", "p99"), -1],
  ["first token, first turn, ms", (run) => get(run, "figures", "first_token_ms", "first_turn", "median"), -1],
  ["later turns", (run) => get(run, "figures", "first_token_ms", "later_turns", "median"), -1],
  ["answer tokens/s a GPU", (run) => run.figures.per_gpu.answer, 1],
  ["new prompt tokens/s", (run) => run.figures.per_gpu.new_prompt, 0],
  ["cached prompt tokens/s", (run) => run.figures.per_gpu.cached_prompt, 0],
  ["cached / ceiling", (run) => run.figures.cache.cached_over_ceiling, 1],
  ["errors", (run) => Object.values(run.figures.errors).reduce((sum, count) => sum + count, 0), 0],
];

function table() {
  const head = element("tr", {}, element("th", {}, "engine"), ...COLUMNS.map(([name]) => element("th", {}, name)));
  const rows = shown();
  const body = rows.map((run) => {
    const mark = element("i", { style: `background:${color(run.label)}` });
    const rivals = rows.filter((other) => users(other) === users(run));
    const cells = COLUMNS.map(([name, value, better]) => {
      const own = value(run);
      const cell = element("td", {}, number(own, 4));
      const others = rivals.map(value).filter((other) => other != null);
      if (better && own != null && new Set(others).size > 1 && own * better === Math.max(...others.map((other) => other * better))) cell.className = "best";
      if (name === "errors" && own) {
        cell.className = "bad";
        explain(cell, Object.entries(run.figures.errors).map(([kind, count]) => `${count} × ${kind}: ${run.figures.error_examples[kind]}`).join("\n"));
      }
      return cell;
    });
    return element("tr", {}, element("td", {}, mark, run.label), ...cells);
  });
  put("table", element("thead", {}, head), element("tbody", {}, ...body));
}

function notes() {
  const list = element("ul");
  const each = element("ul");
  list.append(element("li", {}, "Times are the client's, read when the socket gave the bytes. A gap is a wait for text, however many tokens came with it. Bold: the best of the engines at the same number of users."));
  for (const run of runs) {
    const { environment, client, load, figures } = run;
    const parts = [`${nameOf(run)}: ${environment.time}, ${environment.processor}, load of the client's machine ${environment.load_1m}. `];
    if (client.cpu_share != null) parts.push(`The client took ${number(client.cpu_share * 100, 2)}% of a core, its loop was ${number(client.loop_lag_ms_p99)} ms late (p99). `);
    if (client.warning) parts.push(`Warning: ${client.warning}. `);
    if (!figures.exact_counts) parts.push("The server doesn't say how many tokens came at a time: shared out by length. ");
    if (figures.short_answers) parts.push(`${figures.short_answers} answers were shorter than asked. `);
    parts.push(`${load.turns} turns of ${load.sessions} sessions asked. `);
    const command = element("code", {}, `${environment.command} (commit ${environment.commit || "unknown"})`);
    each.append(element("li", {}, parts.join(""), command));
  }
  put("notes", list, element("details", runs.length < 4 ? { open: "" } : {}, element("summary", {}, "Each run"), each));
}

function legend() {
  put("legend", ...labels.map((label) => {
    const button = element("button", { "aria-pressed": String(!hidden.has(label)) }, element("i", { style: `background:${color(label)}` }), label);
    button.addEventListener("click", () => {
      if (!hidden.delete(label)) hidden.add(label);
      draw();
    });
    return button;
  }));
}

function draw() {
  legend();
  pareto();
  firstTokens();
  cacheUse();
  overTime();
  table();
}

document.title = title;
document.getElementById("title").textContent = title;
const machines = [...new Set(runs.map((run) => get(run, "machine", "gpu") || run.environment.processor))];
document.getElementById("subtitle").textContent = `${runs.length} run${runs.length === 1 ? "" : "s"}, ${labels.length} engine${labels.length === 1 ? "" : "s"} · ${machines.join(" · ")}`;
pick.append(element("option", { value: "all" }, "all"), ...runs.map((run, at) => element("option", { value: at }, nameOf(run))));
if (runs.length === 1) pick.value = "0";
pick.addEventListener("change", overTime);
const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.getElementById("theme").addEventListener("click", () => (root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"));
notes();
draw();

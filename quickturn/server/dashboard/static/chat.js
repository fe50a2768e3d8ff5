// The playground: one conversation over /v1/chat/completions, with reasoning, tool calls and their results.
import { events } from "/dashboard/sse.js";

const at = (id) => document.getElementById(id);
let conversation = [];
let waitingCalls = [];
let running = null;

export function startChat(headers) {
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("input").value;
    if (running || !text.trim()) return;
    at("input").value = "";
    say(text);
    answer(headers());
  });
  at("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      at("ask").requestSubmit();
    }
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    waitingCalls = [];
    at("messages").replaceChildren();
  });
}

// What a person types answers the oldest call that waits for a result, else it is a new question.
function say(text) {
  const call = waitingCalls.shift();
  conversation.push(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text });
  part(card(call ? `result of ${call.function.name}` : "you", "user"), "text").textContent = text;
}

async function answer(headers) {
  if (waitingCalls.length) return;
  let body;
  try {
    body = requestBody();
  } catch (error) {
    return fail(`the tools are not JSON: ${error.message}`);
  }
  running = new AbortController();
  at("stop").disabled = false;
  const shown = new Shown();
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const chunk of events(reply.body)) shown.take(chunk);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  } finally {
    running = null;
    at("stop").disabled = true;
  }
  if (!shown.empty()) conversation.push(shown.message());
  waitingCalls = shown.calls();
}

function requestBody() {
  const system = at("system").value.trim();
  const tools = at("tools").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
  return {
    model: at("model").textContent,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(at("temperature").value),
    max_completion_tokens: Number(at("max-tokens").value),
    ...(tools ? { tools: JSON.parse(tools) } : {}),
  };
}

// An answer as it forms.
class Shown {
  constructor() {
    this.started = performance.now();
    this.first = 0;
    this.card = card("model", "model");
    this.texts = { reasoning: "", content: "" };
    this.toolCalls = [];
    this.elements = {};
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.showUsage(chunk.usage);
    const delta = chunk.choices?.[0]?.delta ?? {};
    this.add("reasoning", delta.reasoning_content ?? delta.reasoning ?? "");
    this.add("content", delta.content ?? "");
    for (const piece of delta.tool_calls ?? []) this.addCall(piece);
    at("messages").scrollTop = at("messages").scrollHeight;
  }

  add(kind, text) {
    if (!text) return;
    this.first ||= performance.now();
    this.texts[kind] += text;
    this.elements[kind] ??= part(this.card, kind === "reasoning" ? "reasoning" : "text", kind === "reasoning" ? "thinking" : "");
    this.elements[kind].textContent = this.texts[kind];
  }

  addCall(piece) {
    this.first ||= performance.now();
    const call = (this.toolCalls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= piece.id ?? "";
    call.function.name ||= piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
    const element = (this.elements[`call${piece.index}`] ??= part(this.card, "call", `calls ${call.function.name}`));
    element.textContent = call.function.arguments;
  }

  showUsage(usage) {
    const seconds = (performance.now() - this.first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const line = document.createElement("div");
    line.className = "usage";
    line.textContent =
      `${usage.prompt_tokens} tokens in (${cached} reused), ${usage.completion_tokens} out, ` +
      `first after ${((this.first - this.started) / 1000).toFixed(2)} s, ${(usage.completion_tokens / Math.max(seconds, 1e-3)).toFixed(1)} tokens/s`;
    this.card.append(line);
  }

  empty() {
    return !this.texts.content && !this.texts.reasoning && !this.toolCalls.length;
  }

  calls() {
    return this.toolCalls.filter((call) => call?.id);
  }

  message() {
    const message = { role: "assistant", content: this.texts.content };
    if (this.texts.reasoning) message.reasoning_content = this.texts.reasoning;
    if (this.toolCalls.length) message.tool_calls = this.calls();
    return message;
  }
}

function card(title, kind) {
  const element = document.createElement("article");
  element.className = `message ${kind}`;
  const name = document.createElement("b");
  name.textContent = title;
  element.append(name);
  at("messages").append(element);
  return element;
}

// A block of text in a card; what a model writes is only ever set as text, never as markup.
function part(parent, kind, title = "") {
  const box = document.createElement(title ? "details" : "div");
  box.className = kind;
  if (title) {
    box.open = true;
    box.append(Object.assign(document.createElement("summary"), { textContent: title }));
  }
  const text = document.createElement("pre");
  box.append(text);
  parent.append(box);
  return text;
}

function fail(message) {
  part(card("error", "error"), "text").textContent = message;
}

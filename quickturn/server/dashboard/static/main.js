// Tabs, the API key, and the poll that keeps the live view fresh.
import { show, showTrouble } from "/dashboard/live.js";
import { startChat } from "/dashboard/chat.js";

const POLL_MS = 1000;
const key = document.getElementById("key");

function headers() {
  return key.value ? { authorization: `Bearer ${key.value}` } : {};
}

function openTab(name) {
  for (const button of document.querySelectorAll("nav button")) {
    const chosen = button.dataset.tab === name;
    button.setAttribute("aria-selected", String(chosen));
    document.getElementById(button.dataset.tab).hidden = !chosen;
  }
}

async function poll() {
  try {
    const reply = await fetch("/dashboard/state", { headers: headers() });
    if (reply.ok) show(await reply.json());
    else showTrouble(reply.status === 401 ? "the server asks for an API key" : `the server answers ${reply.status}`);
  } catch {
    showTrouble("no answer from the server");
  }
  setTimeout(poll, POLL_MS);
}

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => openTab(button.dataset.tab));
}
if (location.hash === "#chat") openTab("chat");
startChat(headers);
poll();

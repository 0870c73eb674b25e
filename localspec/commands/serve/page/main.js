/* Puts the page together: views, settings, the API key, and what the server is. */

import {serverStats, useKey} from "./api.js";
import {Chat} from "./chat.js";
import {Figures} from "./figures.js";
import {Race} from "./race.js";
import {drawLegend} from "./tokens.js";
import {$, alertIn, element} from "./words.js";

const LONGEST_DRAFT = 16;

const number = (id) => ($(id).value === "" || !$(id).checkValidity() ? undefined : Number($(id).value));

function settings() {
  const length = $("draft-length").value;
  return {
    speculate: $("speculate").checked,
    draftLength: length === "auto" ? length : Number(length),
    temperature: number("temperature"),
    maxTokens: number("max-tokens"),
  };
}

function failed(error) {
  if (error.status !== 401) return false;
  $("key-form").hidden = false;
  $("key").focus();
  return true;
}

const figures = new Figures();
const chat = new Chat(settings, figures, failed);
const race = new Race(settings, failed);

async function introduce() {
  try {
    const stats = await serverStats();
    const draft = stats.drafters.join(" + ") || "no draft";
    $("engine").textContent = [stats.model, stats.backend, draft, `context ${stats.context}`].join(" · ");
    document.title = `${stats.model} · localspec`;
    chat.plainSpeed = stats.plain_tokens_per_second;
    $("key-form").hidden = true;
  } catch (error) {
    if (!failed(error)) alertIn($("chat-alert"), error.message);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key").value = "";
  alertIn($("chat-alert"), "");
  introduce().then(() => {
    if ($("key-form").hidden) $("question").focus();
    else alertIn($("chat-alert"), "The server does not take that key.");
  });
});

for (let length = 1; length <= LONGEST_DRAFT; length++) $("draft-length").append(element("option", {}, String(length)));
$("speculate").addEventListener("change", () => ($("draft-length").disabled = !$("speculate").checked));
$("rejects").addEventListener("change", () => document.body.classList.toggle("no-rejects", !$("rejects").checked));
$("settings-toggle").addEventListener("click", () => {
  const open = document.body.classList.toggle("settings-open");
  $("settings-toggle").setAttribute("aria-expanded", String(open));
});

const tabs = [...document.querySelectorAll("[role=tab]")];

function open(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  document.body.classList.toggle("racing", tab === $("race-tab"));
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = tabs[(i + step + tabs.length) % tabs.length];
    open(next);
    next.focus();
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  chat.stop();
  race.stop();
});

drawLegend($("legend"));
introduce();
$("question").focus();

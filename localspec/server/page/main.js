/* Puts the page together: views, keys, the API key, and what the server is. */

import {serverStats, useKey} from "./api.js";
import {Chat} from "./chat.js";
import {copyOnClick} from "./copying.js";
import {Conversations} from "./conversations.js";
import {Figures} from "./figures.js";
import {Picker} from "./models.js";
import {Race} from "./race.js";
import {form, prepareForm, settings} from "./settings.js";
import {drawLegend} from "./tokens.js";
import {$, alertIn, count, drafterName} from "./words.js";

function failed(error) {
  if (error.status !== 401) return false;
  $("key-form").hidden = false;
  $("key").focus();
  return true;
}

const figures = new Figures();
const kept = new Conversations(form, failed);
prepareForm();
const chat = new Chat(settings, figures, failed, kept);
const race = new Race(settings, failed);
kept.prepare(chat);
const picker = new Picker(() => describe().catch(() => {})); // the next answer says what is wrong

/* What the model is that answers. */
async function describe() {
  const stats = await serverStats();
  document.title = `${stats.model || "no model"} · localspec`;
  chat.context = stats.context ?? null;
  if (!stats.loaded) {
    $("engine").textContent = stats.model ? "loaded with the next question" : "no model is here yet";
    $("engine").title = "";
    return;
  }
  const sources = [...new Set(stats.drafters.map(drafterName))];
  const guesses = sources.length ? `guesses: ${sources.join(", ")}` : "no guesses";
  $("engine").textContent = [picker.chosen ? "loaded" : stats.model, stats.backend, guesses, `context ${count(stats.context, "token")}`].join(" · ");
  $("engine").title = stats.drafters.join(", ");
  $("think-field").hidden = !stats.thinks;
  figures.isShared = stats.parallel.parallel > 1;
}

async function introduce() {
  try {
    await picker.start();
    await describe();
    $("key-form").hidden = true;
    await kept.start();
  } catch (error) {
    if (!failed(error)) alertIn($("chat-alert"), error.message);
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key").value = "";
  alertIn($("chat-alert"), "");
  kept.ready = introduce();
  kept.ready.then(() => {
    if ($("key-form").hidden) $("question").focus();
    else alertIn($("chat-alert"), "The server does not take that key.");
  });
});

function unfold(toggle, name) {
  $(toggle).addEventListener("click", () => {
    const open = document.body.classList.toggle(name);
    $(toggle).setAttribute("aria-expanded", String(open));
  });
}
unfold("settings-toggle", "settings-open");
unfold("list-toggle", "list-open");

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

const KEYS = {
  KeyN: () => kept.begin(),
  KeyK: () => {
    if (!$("search").offsetParent) $("list-toggle").click();
    $("search").focus();
  },
  KeyT: () => $("token-view").click(),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    chat.stop();
    race.stop();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && KEYS[event.code] && !$("chat").hidden) {
    event.preventDefault();
    KEYS[event.code]();
  }
});

copyOnClick($("talk"));
drawLegend($("legend"));
kept.ready = introduce();
$("question").focus();

/* How to decode and how to look: the fields of the settings, and what of them this browser remembers. */

import {$, element} from "./words.js";

const LONGEST_DRAFT = 16;

/* Name in a request -> field. */
const NUMBERS = {
  temperature: "temperature", maxTokens: "max-tokens", topP: "top-p", topK: "top-k", minP: "min-p", repeatPenalty: "repeat-penalty",
  seed: "seed",
};

const number = (id) => ($(id).value === "" || !$(id).checkValidity() ? undefined : Number($(id).value));

/* What is kept with a conversation: the numbers that are set, thinking, and the system prompt. */
export const form = {
  read() {
    const set = Object.entries(NUMBERS).map(([name, id]) => [name, number(id)]).filter(([, value]) => value !== undefined);
    const think = !$("think-field").hidden && $("think").value;
    return {...Object.fromEntries(set), ...(think ? {think} : {}), system: $("system").value.trim()};
  },
  write(values) {
    for (const [name, id] of Object.entries(NUMBERS)) $(id).value = values[name] ?? "";
    $("think").value = ["on", "off"].includes(values.think) ? values.think : "";
    $("system").value = values.system || "";
  },
};

/* All of it, for a request. */
export function settings() {
  const length = $("draft-length").value;
  return {...form.read(), speculate: $("speculate").checked, draftLength: length === "auto" ? length : Number(length)};
}

export function prepareForm() {
  for (let length = 1; length <= LONGEST_DRAFT; length++) $("draft-length").append(element("option", {}, String(length)));
  $("speculate").addEventListener("change", () => ($("draft-length").disabled = !$("speculate").checked));
  const views = {"token-view": "tokens-shown", rejects: "rejects-shown"};
  const apply = () => {
    document.documentElement.dataset.theme = $("theme").value;
    for (const [id, name] of Object.entries(views)) document.body.classList.toggle(name, $(id).checked);
  };
  recall();
  apply();
  for (const id of ["theme", ...Object.keys(views)]) {
    $(id).addEventListener("change", () => {
      apply();
      remember();
    });
  }
}

const REMEMBERED = "localspec.view";

function remember() {
  try {
    localStorage.setItem(REMEMBERED, JSON.stringify({theme: $("theme").value, tokens: $("token-view").checked}));
  } catch {
    // This browser keeps nothing.
  }
}

function recall() {
  try {
    const {theme, tokens} = JSON.parse(localStorage.getItem(REMEMBERED)) || {};
    if (["", "light", "dark"].includes(theme)) $("theme").value = theme;
    $("token-view").checked = tokens === true;
  } catch {
    // It kept nothing, or nothing of ours.
  }
}

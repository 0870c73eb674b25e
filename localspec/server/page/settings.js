/* How to decode and how to look: the fields of the settings, and what of them this browser remembers. */

import {allTabs} from "./browser.js";
import {$, alertIn, element} from "./words.js";

const LONGEST_DRAFT = 16;

/* Name in a request -> field. */
const NUMBERS = {
  temperature: "temperature", maxTokens: "max-tokens", topP: "top-p", topK: "top-k", minP: "min-p", repeatPenalty: "repeat-penalty",
  seed: "seed",
};

const number = (id) => ($(id).value === "" || !$(id).checkValidity() ? undefined : Number($(id).value));
const TEXTS = [...Object.values(NUMBERS), "draft-length", "think", "system"];

/* What is kept with a conversation: the numbers that are set, thinking, how it guesses, and the system prompt. */
export const form = {
  read() {
    const set = Object.entries(NUMBERS).map(([name, id]) => [name, number(id)]).filter(([, value]) => value !== undefined);
    const think = !$("think-field").hidden && $("think").value;
    const length = $("draft-length").value;
    return {
      ...Object.fromEntries(set), ...(think ? {think} : {}), system: $("system").value.trim(),
      speculate: $("speculate").checked, draftLength: length === "auto" ? length : Number(length),
    };
  },
  write(values) {
    for (const [name, id] of Object.entries(NUMBERS)) $(id).value = values[name] ?? "";
    $("think").value = ["on", "off"].includes(values.think) ? values.think : "";
    $("system").value = values.system || "";
    $("draft-length").value = values.draftLength > 0 && values.draftLength <= LONGEST_DRAFT ? values.draftLength : "auto";
    $("speculate").checked = values.speculate !== false;
    $("draft-length").disabled = !$("speculate").checked;
  },
  /* As it is typed, what no request may have included. */
  get typed() {
    return {...Object.fromEntries(TEXTS.map((id) => [id, $(id).value])), speculate: $("speculate").checked};
  },
  set typed(values) {
    for (const id of TEXTS) if (typeof values[id] === "string") $(id).value = values[id];
    $("speculate").checked = values.speculate !== false;
    $("draft-length").disabled = !$("speculate").checked;
  },
};

/* All of it, for a request. */
export const settings = () => form.read();

/* Whether a field has what it cannot have; then it is said in an alert, and the field is shown. */
export function showProblem(alert) {
  const wrong = Object.values(NUMBERS).map($).find((field) => !field.checkValidity());
  if (!wrong) return false;
  const name = wrong.closest("label").querySelector("span").textContent;
  const kind = wrong.step === "1" ? "a whole number" : "a number";
  alertIn(alert, `${name} must be ${kind} from ${Number(wrong.min).toLocaleString("en")} to ${Number(wrong.max).toLocaleString("en")}.`);
  if (wrong.closest("details")) wrong.closest("details").open = true;
  if (!wrong.offsetParent) $("settings-toggle").click();
  wrong.focus();
  return true;
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

function remember() {
  allTabs.set("view", {theme: $("theme").value, tokens: $("token-view").checked, rejects: $("rejects").checked});
}

function recall() {
  const {theme, tokens, rejects} = allTabs.get("view") || {};
  if (["", "light", "dark"].includes(theme)) $("theme").value = theme;
  $("token-view").checked = tokens === true;
  $("rejects").checked = rejects !== false;
}

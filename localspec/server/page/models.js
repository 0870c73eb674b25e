/* The models of a server that has several: which one answers, what is loaded, what fits, and what can be fetched. */

import {chooseModel, loadModel, models, pull, unloadModel} from "./api.js";
import {allTabs} from "./browser.js";
import {$, alertIn, element, percent, progressed, size} from "./words.js";

const POLL_MS = 1000; // while the list is open, or a model is being loaded

export class Picker {
  /* changed(): another model is chosen, or it was loaded or unloaded. */
  constructor(changed) {
    this.changed = changed;
    this.chosen = null;
    this.states = "";
    this.fetching = null; // the AbortController of the fetch that goes on
    this.timer = 0;
    $("models-toggle").addEventListener("click", () => this.open($("models").hidden));
    document.addEventListener("pointerdown", ({target}) => {
      if (!$("models").hidden && !target.closest("#models, #models-toggle")) this.open(false);
    });
    $("models").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.open(false);
      $("models-toggle").focus();
    });
    $("fetch-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.fetch($("fetch-name").value.trim());
    });
    $("fetch-stop").addEventListener("click", () => this.fetching?.abort());
    document.addEventListener("asked", () => this.refresh());
    document.addEventListener("answered", () => this.refresh());
  }

  /* Asks which models there are, and chooses the one that was used last. */
  async start() {
    const found = await models();
    $("models-toggle").hidden = !found.several;
    if (!found.several) return;
    const names = found.models.filter((model) => !model.embeds).map((model) => model.name);
    const kept = allTabs.get("model");
    this.choose(names.includes(kept) ? kept : names[0] ?? null);
    this.show(found);
  }

  choose(name) {
    this.chosen = name;
    chooseModel(name);
    $("models-toggle").textContent = name || "no model";
  }

  open(opened) {
    $("models").hidden = !opened;
    $("models").style.top = `${$("models-toggle").getBoundingClientRect().bottom + 4}px`; // a narrow page has it in a second row
    $("models-toggle").setAttribute("aria-expanded", String(opened));
    if (opened) this.refresh().then(() => $("models").querySelector("[aria-pressed=true]")?.focus());
  }

  async refresh() {
    clearTimeout(this.timer);
    if ($("models-toggle").hidden) return;
    try {
      this.show(await models());
    } catch (error) {
      alertIn($("models-alert"), error.message);
    }
  }

  show(found) {
    const had = document.activeElement?.closest("#models")?.contains(document.activeElement) && document.activeElement.dataset.of;
    $("model-list").replaceChildren(...found.models.map((model) => this.row(model)));
    if (had) $("models").querySelector(`[data-of="${CSS.escape(had)}"]`)?.focus();
    const parts = [[found.memory, ""], [found.gpu_memory, " on the GPU"]].filter(([{limit}]) => limit);
    const taken = parts.map(([{taken, limit}, where]) => `${size(taken)} of ${size(limit)}${where}`);
    $("model-memory").textContent = `Loaded models take ${taken.join(", ")}.`;
    $("fetch-form").hidden = !found.fetches;
    $("fetch-names").replaceChildren(
      ...found.catalog.map((model) => element("option", {value: model.name}, `${size(model.size)}, ${fit(model)}`)),
    );
    const states = JSON.stringify(found.models.map((model) => [model.name, model.state]));
    if (this.states && states !== this.states) this.changed();
    this.states = states;
    const loads = found.models.some((model) => ["loading", "unloading"].includes(model.state));
    if (loads || !$("models").hidden) this.timer = setTimeout(() => this.refresh(), POLL_MS);
  }

  row(model) {
    const name = element("button.name", {
      type: "button", "data-of": `name ${model.name}`, "aria-pressed": String(model.name === this.chosen),
    }, model.name);
    name.disabled = model.embeds;
    name.addEventListener("click", () => {
      this.choose(model.name);
      allTabs.set("model", model.name);
      this.changed();
      this.refresh();
    });
    const loaded = model.state === "loaded";
    const act = element("button", {type: "button", "data-of": `act ${model.name}`}, loaded ? "Unload" : "Load");
    act.setAttribute("aria-label", `${act.textContent} ${model.name}`);
    act.disabled = !loaded && (model.state !== "unloaded" || !model.fits);
    act.addEventListener("click", () => this.act(loaded ? unloadModel : loadModel, model.name));
    const notes = [size(model.size), model.embeds && "embeddings", state(model)].filter(Boolean);
    const row = element(`li.${model.state}`, {}, name, element("span.fine", {}, notes.join(" · ")), act);
    if (model.error) row.append(element("span.alert", {}, model.error));
    return row;
  }

  async act(action, name) {
    alertIn($("models-alert"), "");
    const done = action(name);
    setTimeout(() => this.refresh(), 100); // it shows that it is being done
    try {
      await done;
    } catch (error) {
      alertIn($("models-alert"), error.message);
    }
    this.refresh();
  }

  async fetch(name) {
    if (!name || this.fetching) return;
    this.fetching = new AbortController();
    alertIn($("models-alert"), "");
    this.progress(`Looking for ${name}…`, 0);
    try {
      for await (const step of pull(name, this.fetching.signal)) {
        if (!step.total) continue;
        const share = step.completed / step.total;
        this.progress(`${step.status.replace("pulling ", "")}: ${size(step.completed)} of ${size(step.total)}, ${percent(share)}`, share);
      }
      $("fetch-name").value = "";
    } catch (error) {
      const stopped = error.name === "AbortError";
      alertIn($("models-alert"), stopped ? "Stopped. What arrived is kept for the next time." : error.message);
    }
    this.fetching = null;
    $("fetch-progress").hidden = true;
    this.refresh();
  }

  progress(words, share) {
    $("fetch-progress").hidden = false;
    $("fetch-words").textContent = words;
    $("fetch-bar").value = share;
  }
}

const fit = (model) => (model.fits ? "fits" : "too big");

function state(model) {
  if (model.state === "loaded") return "loaded";
  if (model.state === "loading") return progressed(model);
  return model.state === "unloading" ? "unloading…" : fit(model);
}

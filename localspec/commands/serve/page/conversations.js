/* The conversations that the server keeps: the list, and what can be done with the open one. */

import {conversations as server} from "./api.js";
import {$, alertIn, count, element} from "./words.js";

const TITLE = 60; // characters of the first question
const PAUSE = 200; // milliseconds without a key until a search begins

export class Conversations {
  /* form: settings.read() and settings.write(values), what is kept with a conversation of how it is led. */
  constructor(form, failed) {
    this.form = form;
    this.failed = failed;
    this.present = null; // {id, revision, title, …} of the open one, as the server has it
    this.deleted = null;
    this.saved = Promise.resolve(); // once what was to be saved is
    $("new-chat").addEventListener("click", () => this.begin());
    $("search").addEventListener("input", () => {
      clearTimeout(this.pausing);
      this.pausing = setTimeout(() => this.list(), PAUSE);
    });
    $("title").addEventListener("change", () => this.rename());
    $("title").addEventListener("keydown", (event) => event.key === "Enter" && $("title").blur());
    $("delete").addEventListener("click", () => this.delete());
    $("undo").addEventListener("click", () => this.undo());
    $("deleted-close").addEventListener("click", () => {
      $("deleted").hidden = true;
      $("question").focus();
    });
    $("export-markdown").addEventListener("click", () => this.export("md"));
    $("export-json").addEventListener("click", () => this.export("json"));
    $("list").addEventListener("keydown", (event) => {
      const next = {ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling"}[event.key];
      const entry = event.target.closest("li")?.[next]?.querySelector("button");
      if (!entry) return;
      event.preventDefault();
      entry.focus();
    });
  }

  /* Shows what is kept; opens what the address names. */
  async start(chat) {
    this.chat = chat;
    await this.list();
    const name = location.hash.slice(1);
    if (name) await this.open(name);
  }

  async attempt(work) {
    try {
      await work();
      return true;
    } catch (error) {
      if (!this.failed(error)) alertIn($("chat-alert"), error.message);
      return false;
    }
  }

  async list() {
    const query = $("search").value;
    try {
      const {data} = await server.list(query);
      if (query !== $("search").value) return; // somebody has typed on
      $("list").replaceChildren(...data.map((each) => this.entry(each)));
      $("list-note").textContent = data.length ? "" : query ? "None has all of these words." : "None yet.";
      this.here = true;
    } catch (error) {
      this.here = error.status !== 403; // a server that other computers reach keeps none
      $("list-note").textContent = error.status === 401 ? "" : error.message;
    }
  }

  entry({id, title, updated, messages}) {
    const when = new Date(1000 * updated).toLocaleDateString("en", {day: "numeric", month: "short", year: "numeric"});
    const button = element("button", {type: "button", title: `${when}, ${count(messages, "message")}`}, title);
    if (id === this.present?.id) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => this.open(id));
    return element("li", {dir: "auto"}, button);
  }

  mark(present) {
    this.present = present;
    $("title").value = present?.title || "";
    for (const id of ["title", "delete", "export-markdown", "export-json"]) $(id).disabled = !present;
    history.replaceState(null, "", present ? `#${present.id}` : location.pathname);
  }

  async settle() {
    this.chat.stop();
    await this.chat.finished;
    await this.saved;
  }

  async begin() {
    await this.settle();
    this.mark(null);
    this.chat.open([]);
    document.body.classList.remove("list-open");
    await this.list();
    $("question").focus();
  }

  async open(id) {
    await this.settle();
    await this.attempt(async () => {
      const kept = await server.get(id);
      this.mark(kept);
      this.form.write({...kept.settings, system: kept.system});
      this.chat.open(kept.messages);
      document.body.classList.remove("list-open");
    });
    await this.list();
  }

  /* Keeps the open conversation as it is now; one after the other, since each must know the revision before it. */
  save() {
    const {system = "", ...settings} = this.form.read();
    const messages = this.chat.records;
    this.saved = this.saved.then(async () => {
      if (this.here === false) return;
      const title = this.present?.title || messages[0].content.split("\n")[0].slice(0, TITLE);
      await this.attempt(() => this.keep({title, system, settings, messages}));
      await this.list();
    });
    return this.saved;
  }

  async keep(content) {
    try {
      this.mark(this.present ? await server.replace(this.present, content) : await server.create(content));
    } catch (error) {
      if (error.status !== 409 && error.status !== 404) throw error;
      // Another tab has changed or deleted it: neither version is lost.
      this.mark(await server.create({...content, title: `${content.title} (from another tab)`}));
    }
  }

  async rename() {
    const title = $("title").value.trim();
    if (!this.present || !title) return this.mark(this.present);
    this.present = {...this.present, title};
    return this.save();
  }

  async delete() {
    const gone = this.present;
    await this.settle();
    if (!gone || gone.id !== this.present?.id) return;
    const deleted = await this.attempt(async () => {
      const kept = await server.get(gone.id);
      await server.delete(gone.id);
      this.deleted = kept;
    });
    if (!deleted) return;
    await this.begin();
    $("deleted-title").textContent = `“${gone.title}” is deleted.`;
    $("deleted").hidden = false;
    $("undo").focus();
  }

  async undo() {
    $("undo").disabled = true; // a second click would bring back a second one
    const undone = await this.attempt(async () => {
      const {id} = await server.create(this.deleted);
      await this.open(id);
    });
    $("undo").disabled = false;
    $("deleted").hidden = undone; // else it can be tried again: there is no other copy
    $(undone ? "question" : "undo").focus();
  }

  async export(kind) {
    const {id, title} = this.present;
    await this.saved;
    await this.attempt(async () => {
      const address = URL.createObjectURL(await server.export(id, kind === "md" ? "markdown" : "json"));
      const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
      element("a", {href: address, download: `${name}.${kind}`}).click();
      setTimeout(() => URL.revokeObjectURL(address), 10_000); // the download has begun by then
    });
  }
}

/* The conversations that the server keeps: the list, and what can be done with the open one. What the server has not taken
   yet is kept in this browser until it does. */

import {conversations as server} from "./api.js";
import {allTabs, newId, thisTab, typed} from "./browser.js";
import {merged, messagesOf, turnsOf} from "./versions.js";
import {$, alertIn, count, element, offerUndo} from "./words.js";

const TITLE = 60; // characters of the first question
const PAUSE = 200; // milliseconds without a key until a search begins
const EVERY = 2000, SELDOM = 20_000; // milliseconds between two savings of an answer that comes, at least and at most
const AGAIN = 3000; // milliseconds until a server that did not answer is tried again
const TRIES = 5; // at a conversation that others change all the time

export class Conversations {
  /* form: settings.form, what is kept with a conversation of how it is led. */
  constructor(form, failed) {
    this.form = form;
    this.failed = failed;
    this.chat = null; // once it is there
    this.present = null; // {id, revision, title, …} of the open one, as the server has it; of one that it has not, revision is 0
    this.opened = false; // whether what the address names is on the page
    this.ready = Promise.resolve(); // once it is, or cannot be
    this.tab = newId(); // several may have a conversation open
    this.changes = this.kept = 0; // number of the last change, and of the last one that the server has
    this.saved = Promise.resolve(); // once what was to be saved is, or cannot be
    this.saving = 0;
    this.held = null; // the state that is kept in this browser, as JSON
    this.pace = 0; // milliseconds that saving takes
    $("new-chat").addEventListener("click", () => this.begin());
    $("search").addEventListener("input", () => {
      clearTimeout(this.pausing);
      this.pausing = setTimeout(() => this.list(), PAUSE);
    });
    $("title").addEventListener("change", () => this.rename());
    $("title").addEventListener("keydown", (event) => event.key === "Enter" && $("title").blur());
    $("delete").addEventListener("click", () => this.delete());
    $("deleted-close").addEventListener("click", () => {
      $("deleted").hidden = true;
      $("question").focus();
    });
    $("export-markdown").addEventListener("click", () => this.export("md"));
    $("export-json").addEventListener("click", () => this.export("json"));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => {
      const files = [...$("import-file").files];
      $("import-file").value = ""; // at once: the same file can be chosen again while these are imported
      this.import(files);
    });
    $("list").addEventListener("keydown", (event) => {
      const next = {ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling"}[event.key];
      const entry = event.target.closest("li")?.[next]?.querySelector("button");
      if (!entry) return;
      event.preventDefault();
      entry.focus();
    });
    document.addEventListener("input", () => this.typed());
    addEventListener("pagehide", () => {
      this.typed();
      if (this.isUnsaved) this.hold();
    });
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.look();
      else if (this.isUnsaved) this.changed();
    });
  }

  // -- what is typed and not sent

  get name() {
    return this.present?.id || "new";
  }

  /* Something was typed, set or attached. */
  typed() {
    if (!this.chat || this.recalling) return;
    const {files, ...draft} = this.chat.draft;
    const before = this.opened ? {} : typed.get(`typed.${this.name}`); // in a turn that is not there yet
    typed.set(`typed.${this.name}`, {...before, ...draft, form: this.form.typed});
    const known = typed.get(`files.${this.name}`) || [];
    if (JSON.stringify(known) !== JSON.stringify(files)) typed.set(`files.${this.name}`, files.length ? files : null);
  }

  /* Puts back what was typed for the open conversation. settings: those it was kept with, for a browser that knows none. */
  recall(settings = null) {
    this.recalling = true; // it is no typing
    const {form, ...draft} = typed.get(`typed.${this.name}`) || {};
    if (form) this.form.typed = form;
    else if (settings) this.form.write(settings);
    this.chat.draft = {...draft, files: typed.get(`files.${this.name}`) || []};
    this.recalling = false;
  }

  forget(id) {
    for (const kind of ["typed", "files"]) typed.set(`${kind}.${id}`, null);
  }

  // -- the list

  /* Puts back what was typed before the server has said a word: it may want a key first. */
  prepare(chat) {
    this.chat = chat;
    const id = location.hash.slice(1);
    if (id) this.present = {id, revision: 0, title: ""};
    this.opened = !id;
    this.recall();
  }

  /* Saves what pages that are gone left unsaved, shows what is kept, opens what the address names. */
  async start() {
    await this.list();
    await this.rescue();
    if (this.present && !this.opened) await this.open(this.present.id);
    this.opened = true;
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
      this.here = true;
      this.note(data.length ? "" : query ? "None has all of these words." : "None yet.");
    } catch (error) {
      this.here = error.status !== 403; // a server that other computers reach keeps none
      if (!error.status && this.isUnsaved) return this.trouble(error); // which says where that is
      if (!this.here) {
        const own = this.unsaved().map(({id, title, time, messages}) => ({id, title, updated: time / 1000, messages: messages.length}));
        $("list").replaceChildren(...own.map((each) => this.entry(each)));
      }
      const words = this.here ? error.message : "Only a server that listens on this computer alone keeps any: what is said stays in this tab until it is closed.";
      this.note(error.status === 401 ? "" : words);
    }
  }

  note(words) {
    $("list-note").textContent = words;
  }

  entry({id, title, updated, messages}) {
    const when = new Date(1000 * updated).toLocaleDateString("en", {day: "numeric", month: "short", year: "numeric"});
    const button = element("button", {type: "button", title: `${when}, ${count(messages, "message")}`}, title);
    if (id === this.present?.id) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => this.open(id));
    return element("li", {dir: "auto"}, button);
  }

  mark(present) {
    this.present = present && {id: present.id, revision: present.revision, title: present.title};
    if (document.activeElement !== $("title") || !present) $("title").value = present?.title || "";
    for (const id of ["title", "delete", "export-markdown", "export-json"]) $(id).disabled = !present;
    history.replaceState(null, "", present ? `#${present.id}` : location.pathname);
  }

  /* Stops the answer and saves it; a question that is asked meanwhile, too. */
  async settle() {
    do {
      this.chat.stop();
      await this.chat.finished;
      await this.saved;
    } while (this.chat.running || this.saving);
  }

  async begin() {
    await this.settle();
    this.opened = true;
    this.mark(null);
    this.changes = this.kept = 0;
    this.chat.open([]);
    const form = this.form.typed; // goes on as it is
    this.recall();
    this.form.typed = form;
    this.typed();
    document.body.classList.remove("list-open");
    await this.list();
    $("question").focus();
  }

  async open(id) {
    await this.attempt(async () => {
      let kept;
      do {
        await this.settle();
        [kept] = this.unsaved(id);
        try {
          if (!kept) kept = await server.get(id);
        } catch (error) {
          if (error.status === 404 && !this.opened) {
            this.mark(null);
            if (!this.chat.draft.text) this.recall(); // else what is typed stays
          }
          throw error;
        }
      } while (this.chat.running || this.saving); // something was asked meanwhile
      this.mark(kept);
      this.changes = this.kept = 0;
      this.chat.open(kept.messages);
      this.recall({...kept.settings, system: kept.system});
      this.opened = true;
      document.body.classList.remove("list-open");
    });
    await this.list();
  }

  // -- saving

  /* The open conversation has changed. */
  changed() {
    this.changes += 1;
    if (!this.present) {
      if (!this.chat.turns.length) return;
      this.mark({id: newId(), revision: 0, title: this.chat.turns[0].content.split("\n")[0].slice(0, TITLE)});
      this.forget("new");
      this.typed();
    }
    this.hold();
    this.save();
  }

  /* An answer goes on: the part that is there is saved now and then. */
  going() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      if (!this.chat.running || !this.present) return;
      this.changes += 1;
      this.save();
    }, Math.min(SELDOM, Math.max(EVERY, 10 * this.pace)));
  }

  get isUnsaved() {
    const title = $("title").value.trim(); // no event comes before a title that is typed is left
    return this.present && (this.changes !== this.kept || this.chat.running || (title && title !== this.present.title));
  }

  /* Saves, one after the other, since each must know the revision before it. */
  save() {
    this.saving += 1;
    const work = () => this.put().finally(() => (this.saving -= 1));
    return (this.saved = this.saving > 1 ? this.saved.then(work) : work());
  }

  async put() {
    if (!this.present || this.changes === this.kept || this.here === false) return;
    const {id, revision, title} = this.present, upTo = this.changes, began = performance.now();
    try {
      await this.deliver({
        state: () => ({...this.present, ...this.content()}),
        merge: (theirs) => this.chat.merge(theirs),
        took: (stamps) => this.took(stamps && this.present.title !== title ? {...stamps, title: this.present.title} : stamps), // renamed meanwhile
      });
      this.kept = upTo;
      if (this.changes === upTo) this.release(id);
      if (!revision || !this.chat.running) await this.list();
    } catch (error) {
      this.trouble(error);
    }
    this.pace = performance.now() - began;
  }

  /* The server has it; null: no longer, since it has refused its only question, which is in its box again. */
  took(stamps) {
    if (stamps) return this.mark(stamps);
    const {id} = this.present;
    if (this.chat.turns.length) return this.mark({...this.present, revision: 0}); // it was asked again
    this.mark(null);
    this.typed();
    this.forget(id);
  }

  content() {
    const {system, ...settings} = this.form.read();
    const title = $("title").value.trim() || this.present.title;
    return {title, system, settings, messages: messagesOf(this.chat.nodes)};
  }

  /* Lets the server take a conversation, with what others have made of it meanwhile. state(): it as it is now; merge(theirs):
     takes their messages in; took(stamps): the server has it. */
  async deliver({state, merge, took}) {
    let revision = null;
    for (let n = 1; ; n++) {
      const whole = {...state(), ...(revision === null ? {} : {revision})};
      try {
        if (whole.messages.length) took(await (whole.revision ? server.replace(whole, whole) : server.create(whole)));
        else {
          if (whole.revision) await server.delete(whole.id);
          took(null); // the server has refused its only question, which is in its box again
        }
        return;
      } catch (error) {
        if (error.status === 404 && whole.revision) revision = 0; // it was deleted: it is made anew
        else if (error.status === 409 && n < TRIES) {
          const theirs = await server.get(whole.id);
          merge(theirs.messages);
          revision = theirs.revision;
        } else throw error;
      }
    }
  }

  /* Looks whether another tab has gone on with what is open here. */
  async look() {
    if (!this.present?.revision || this.chat.running || this.saving) return;
    const {id, revision} = this.present;
    try {
      const kept = await server.get(id);
      if (this.present?.id !== id || this.present.revision !== revision || kept.revision === revision || this.chat.running) return;
      this.chat.merge(kept.messages);
      this.mark(kept);
    } catch {
      // It is deleted, or the server is away: what is shown stays.
    }
  }

  // -- what the server has not taken yet

  /* Where it is kept: of a server that keeps none, no longer than the tab. */
  get box() {
    return this.here === false ? thisTab : allTabs;
  }

  /* What is held already is not written again: a page that goes late may run after another has saved it. */
  hold() {
    const content = this.content(), whole = JSON.stringify([this.present.id, content]);
    if (whole === this.held) return true;
    const kept = this.box.set(`unsaved.${this.present.id}.${this.tab}`, content.messages.length ? {...this.present, ...content, time: Date.now()} : null);
    this.held = kept ? whole : null;
    return kept;
  }

  release(id) {
    this.held = null;
    this.box.set(`unsaved.${id}.${this.tab}`, null);
  }

  /* The server has not taken it. */
  trouble(error) {
    if (this.failed(error)) return;
    const held = !this.present || this.hold() ? "kept in this browser until it is" : "not kept, since this browser has no room for it";
    if (error.status && error.status < 500) return alertIn($("chat-alert"), `This is not saved: ${error.message}. It is ${held}.`);
    this.note(`${error.message} What is not saved yet is ${held}.`);
    clearTimeout(this.again);
    this.again = setTimeout(() => this.save().then(() => this.rescue()), AGAIN);
  }

  /* What was left unsaved of a conversation, by whichever page, or of all; the latest first. */
  unsaved(id = "") {
    const states = [thisTab, allTabs].flatMap((box) => box.names(`unsaved.${id}`).map((name) => box.get(name))).filter(Boolean);
    const found = new Map();
    for (const state of states.toSorted((a, b) => b.time - a.time)) {
      const latest = found.get(state.id) || {...state, messages: []};
      found.set(state.id, {...latest, messages: messagesOf(merged(turnsOf(latest.messages), turnsOf(state.messages)))});
    }
    return [...found.values()];
  }

  /* Saves what other pages, or other conversations of this one, have left unsaved. */
  async rescue() {
    if (this.here === false) return;
    let saved = false;
    for (const [box, name] of [thisTab, allTabs].flatMap((box) => box.names("unsaved.").map((name) => [box, name]))) {
      let state = box.get(name);
      if (!state || (this.opened && name === `unsaved.${this.present?.id}.${this.tab}`)) continue;
      const before = JSON.stringify(state);
      const merge = (theirs) => (state = {...state, messages: messagesOf(merged(turnsOf(state.messages), turnsOf(theirs)))});
      try {
        await this.deliver({state: () => ({...state, time: undefined}), merge, took: () => {}});
        if (JSON.stringify(box.get(name)) === before) box.set(name, null);
        saved = true;
      } catch (error) {
        this.trouble(error);
      }
    }
    if (saved) await this.list();
  }

  // -- what can be done with the open one

  rename() {
    const title = $("title").value.trim();
    if (!this.present || !title) return this.mark(this.present);
    this.present = {...this.present, title};
    this.changed();
  }

  async delete() {
    const gone = this.present;
    await this.settle();
    if (!gone || gone.id !== this.present?.id) return;
    let kept = {...this.present, ...this.content()};
    const deleted = this.here === false || await this.attempt(async () => {
      try {
        kept = await server.get(gone.id);
        await server.delete(gone.id);
      } catch (error) {
        if (error.status !== 404) throw error; // it never was there, or somebody was faster
      }
    });
    if (!deleted) return;
    const draft = typed.get(`typed.${gone.id}`);
    for (const box of [thisTab, allTabs]) for (const name of box.names(`unsaved.${gone.id}.`)) box.set(name, null);
    this.forget(gone.id);
    this.present = null;
    await this.begin();
    offerUndo(`“${gone.title}” is deleted.`, () => this.attempt(async () => {
      if (this.here === false) this.box.set(`unsaved.${gone.id}.${this.tab}`, kept);
      else await server.create(kept);
      typed.set(`typed.${gone.id}`, draft);
      await this.open(gone.id);
    }));
    $("undo").focus();
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

  /* Takes in conversations that were exported as JSON, as new ones, and opens the last. */
  async import(files) {
    const problems = [];
    let last = null;
    for (const file of files) {
      let content;
      try {
        content = JSON.parse(await file.text());
        if (!Array.isArray(content.messages)) throw new Error();
      } catch {
        problems.push(`${file.name} is no conversation that was exported here as .json.`);
        continue;
      }
      const {title, system, settings, messages} = content;
      const id = newId();
      try {
        await server.create({id, title: title || file.name, system, settings, messages});
        last = id;
      } catch (error) {
        if (!this.failed(error)) problems.push(`${file.name} is not imported: ${error.message}`);
      }
    }
    if (last) await this.open(last);
    await this.list();
    alertIn($("chat-alert"), problems.join(" "));
  }
}

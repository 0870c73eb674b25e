/* The conversation that is open. */

import {answer} from "./api.js";
import {fileList, prediction, readText} from "./files.js";
import {following} from "./tokens.js";
import {Turn} from "./turns.js";
import {$, alertIn} from "./words.js";

export class Chat {
  /* settings(): how to decode, now. failed(error): hears of errors first; true if it dealt with them. changed(): the
     conversation has changed; resolves once it is kept. */
  constructor(settings, figures, failed, changed) {
    this.settings = settings;
    this.figures = figures;
    this.failed = failed;
    this.changed = changed;
    this.turns = [];
    this.files = []; // that go with the next question
    this.running = null; // the AbortController of the answer that is being made
    this.finished = Promise.resolve(); // once it is made
    this.actions = {
      edit: (turn, content) => this.again(turn, content),
      regenerate: (turn) => this.again(turn, turn.content),
    };
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    $("question").addEventListener("keydown", (event) => this.key(event));
    $("stop").addEventListener("click", () => this.stop());
    $("file").addEventListener("change", () => this.addFiles([...$("file").files]).then(() => ($("file").value = "")));
    $("add-file").addEventListener("click", () => $("file").click());
    // On the whole document: a browser opens a file that is dropped anywhere else, in place of the page.
    for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
      document.addEventListener(name, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        const here = !$("chat").hidden; // the race takes no files
        event.dataTransfer.dropEffect = here ? "copy" : "none";
        $("chat").classList.toggle("dropping", over && here);
        if (name === "drop" && here) this.addFiles([...event.dataTransfer.files]);
      });
    }
  }

  key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.ask();
    } else if (event.key === "ArrowUp" && !$("question").value && !this.running && this.turns.length) {
      event.preventDefault();
      this.turns.at(-1).edit();
    }
  }

  async addFiles(chosen) {
    alertIn($("chat-alert"), "");
    for (const file of chosen) {
      try {
        this.files.push(await readText(file));
      } catch (error) {
        alertIn($("chat-alert"), error.message);
      }
    }
    this.showFiles();
    $("question").focus();
  }

  showFiles() {
    const remove = (file) => {
      this.files = this.files.filter((each) => each !== file);
      this.showFiles();
      $("question").focus();
    };
    $("attached").replaceChildren(...(this.files.length ? [fileList(this.files, remove)] : []));
  }

  ask() {
    const question = $("question").value.trim();
    if (!question || this.running) return;
    const turn = new Turn(question, this.files, this.actions);
    $("question").value = "";
    this.files = [];
    this.showFiles();
    this.finished = this.answered(turn, this.turns.length, () => {
      $("question").value = [question, $("question").value].filter(Boolean).join("\n");
      this.files = [...turn.files, ...this.files];
      this.showFiles();
    });
  }

  /* Answers the question of a turn, or another in its place, once more; what followed goes. False while busy. */
  again(turn, content) {
    if (this.running) return false;
    const at = this.turns.indexOf(turn);
    this.finished = this.answered(new Turn(content, turn.files, this.actions), at, () => {});
    return true;
  }

  /* Lets a turn be answered, as the n-th. If nothing came of it, all is as it was before, and undo() is called. */
  async answered(turn, n, undo) {
    alertIn($("chat-alert"), "");
    const before = this.turns;
    this.turns = [...before.slice(0, n), turn];
    const {system, ...settings} = this.settings();
    const messages = [
      ...(system ? [{role: "system", content: system}] : []),
      ...this.turns.flatMap((each) => each.messages).slice(0, -1),
    ];
    this.show();
    $("talk").scrollTop = $("talk").scrollHeight;
    this.enter(new AbortController());
    this.figures.start(this.plainSpeed);
    const write = (writing) => following($("talk"), writing);
    let error = null;
    try {
      for await (const event of answer(messages, {...settings, prediction: prediction(turn.files)}, this.running.signal)) {
        write(() => turn.take(event));
        if (event.text) turn.draw(write);
        if (event.round) this.figures.show(turn.tally, event.round);
        if (event.stats) this.figures.finish(event.stats, event.explanation);
      }
    } catch (thrown) {
      if (thrown.name === "AbortError") turn.finish = "cancelled";
      else error = thrown;
    }
    write(() => turn.end());
    if (error && !turn.text && !turn.reasoning) {
      this.turns = before;
      this.show();
      undo();
    }
    if (error && !this.failed(error)) alertIn($("chat-alert"), error.message);
    if (this.turns !== before) await this.changed(); // who sees the answer as done may close the page at once
    this.enter(null);
  }

  stop() {
    this.running?.abort();
  }

  get records() {
    return this.turns.flatMap((turn) => turn.record);
  }

  /* Shows another conversation, of messages as they are kept; none begins a new one. */
  open(messages) {
    this.turns = [];
    for (const [i, message] of messages.entries()) {
      if (message.role !== "user") continue;
      const next = messages[i + 1];
      this.turns.push(Turn.kept(message, next?.role === "assistant" ? next : null, this.actions));
    }
    alertIn($("chat-alert"), "");
    this.show();
    this.enter(null);
    $("talk").scrollTop = $("talk").scrollHeight;
  }

  show() {
    $("welcome").hidden = this.turns.length > 0;
    $("talk").replaceChildren($("welcome"), ...this.turns.map((turn) => turn.element));
  }

  enter(running) {
    const hadFocus = !document.activeElement || [document.body, $("stop"), $("send")].includes(document.activeElement);
    this.running = running;
    $("talk").ariaBusy = running ? "true" : "false"; // a screen reader reads the answer when it is whole
    $("send").disabled = Boolean(running);
    $("stop").disabled = !running;
    $("new-chat").disabled = Boolean(running) || !this.turns.length;
    document.body.classList.toggle("answering", Boolean(running));
    if (hadFocus) (running ? $("stop") : $("question")).focus();
  }
}

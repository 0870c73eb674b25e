/* The conversation that is open. */

import {answer} from "./api.js";
import {fileList, isDocument, prediction, readText} from "./files.js";
import {showProblem} from "./settings.js";
import {follow, following} from "./tokens.js";
import {Turn} from "./turns.js";
import {chosen, merged, turnsOf, withVersion} from "./versions.js";
import {$, alertIn, offerUndo} from "./words.js";

const LEAVING = 2000; // milliseconds

export class Chat {
  /* settings(): how to decode, now. failed(error): hears of errors first; true if it dealt with them. kept: hears of all
     that is to be kept: changed(), going() while an answer comes, typed(). */
  constructor(settings, figures, failed, kept) {
    this.settings = settings;
    this.figures = figures;
    this.failed = failed;
    this.kept = kept;
    this.context = null; // tokens that the server's context holds
    this.turns = [];
    this.files = []; // that go with the next question
    this.reading = 0; // of those, how many groups are being read
    this.running = null; // the AbortController of the answer that is being made
    this.finished = Promise.resolve(); // once it is made
    this.actions = {
      edit: (turn, content) => this.again(turn, content),
      regenerate: (turn) => this.again(turn, turn.content),
      resume: (turn) => this.resume(turn),
      choose: (turn, version) => this.choose(this.turns.indexOf(turn), version),
      typed: () => kept.typed(),
    };
    this.leaving = false; // whether the page is going; a page that stays after all is soon back
    addEventListener("beforeunload", () => {
      this.leaving = true;
      setTimeout(() => (this.leaving = false), LEAVING);
    });
    follow($("talk"));
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
    const problems = [];
    this.reading += 1;
    for (const file of chosen) {
      if (isDocument(file)) alertIn($("chat-alert"), `Reading ${file.name} …`);
      try {
        this.files.push(await readText(file));
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.reading -= 1;
    alertIn($("chat-alert"), problems.join(" "));
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
    this.kept.typed();
  }

  /* What is typed and not sent: the question, its files, and a question that is being edited. */
  get draft() {
    const edited = this.turns.findIndex((turn) => turn.box);
    return {text: $("question").value, files: this.files, ...(edited < 0 ? {} : {edited, edit: this.turns[edited].box.value})};
  }

  set draft({text = "", files = [], edited, edit}) {
    $("question").value = text;
    this.turns[edited]?.edit(edit);
    this.files = files;
    this.showFiles();
  }

  async ask() {
    if (!this.kept.opened) await this.kept.ready; // it belongs to the conversation that the address names
    const question = $("question").value.trim();
    if (!question || this.running || this.reading || showProblem($("chat-alert"))) return;
    const turn = new Turn(question, this.files, this.actions);
    $("question").value = "";
    this.files = [];
    this.showFiles();
    this.finished = this.answered(turn, [...this.nodes, turn.node], () => {
      $("question").value = [question, $("question").value].filter(Boolean).join("\n");
      this.files = [...turn.files, ...this.files];
      this.showFiles();
    });
  }

  /* Answers the question of a turn, or another in its place, once more, as another version. False while busy. */
  again(turn, content) {
    if (this.running || showProblem($("chat-alert"))) return false;
    const n = this.turns.indexOf(turn), at = turn.at;
    const next = new Turn(content, turn.files, this.actions);
    const undo = () => content !== turn.content && this.turns[n].edit(content);
    this.finished = this.answered(next, withVersion(this.nodes, n, next.node), undo).then((answered) => {
      if (answered) offerUndo(`What stood here is kept as version ${at + 1}.`, () => !this.running && this.choose(n, at));
    });
    return true;
  }

  /* Goes on with an answer that was broken off, stopped, or reached its limit. */
  resume(turn) {
    if (this.running || showProblem($("chat-alert"))) return;
    if (turn.reasoning && !turn.text) this.again(turn, turn.content); // thoughts cannot be gone on with
    else this.finished = this.answered(turn, this.nodes);
  }

  /* Shows another version of the n-th turn. */
  choose(n, version) {
    if (this.running) return;
    this.take(chosen(this.nodes, n, version));
    this.show();
    this.turns[n].element.scrollIntoView({block: "nearest"});
    this.kept.changed();
  }

  /* Takes in what another tab has made of this conversation. */
  merge(messages) {
    this.take(merged(this.nodes, turnsOf(messages)));
    this.show();
  }

  get nodes() {
    return this.turns.map((turn) => turn.node);
  }

  /* nodes: turns as in versions.js; those that are on the page already are used again. */
  take(nodes) {
    const busy = this.running && this.turns.find((turn) => !turn.finish);
    this.turns = nodes.map((node, i) => {
      const turn = node.turn || (busy && busy === this.turns[i] ? busy : Turn.kept(node, this.actions));
      turn.stand(node.others, node.at);
      return turn;
    });
  }

  /* Lets a turn among nodes be answered, or its answer be gone on with. If nothing came of it, all is as it was before, and
     undo() is called. Resolves to whether something came. */
  async answered(turn, nodes, undo = () => {}) {
    alertIn($("chat-alert"), "");
    offerUndo("");
    const [before, end, length] = [this.nodes, turn.finish, turn.text.length];
    this.enter(new AbortController());
    if (end) turn.reopen();
    this.take(nodes);
    this.show();
    $("talk").scrollTop = $("talk").scrollHeight;
    this.kept.changed(); // what is sent is kept before it is answered
    const {system, ...settings} = this.settings();
    const n = this.turns.indexOf(turn), resumed = Boolean(turn.text);
    const messages = [
      ...(system ? [{role: "system", content: system}] : []),
      ...this.turns.slice(0, n + 1).flatMap((each) => each.messages),
    ].slice(0, resumed ? undefined : -1);
    this.figures.start();
    const write = (writing) => following($("talk"), writing);
    let error = null;
    try {
      for await (const event of answer(messages, {...settings, resumed, prediction: prediction(turn.files)}, this.running.signal)) {
        write(() => turn.take(event));
        if (event.text) turn.draw(write);
        if (event.round) this.figures.show(turn.tally, event.round);
        if (event.stats) this.figures.finish(turn.tally, event.stats, event.explanation);
        this.kept.going();
      }
    } catch (thrown) {
      if (thrown.name === "AbortError") turn.finish = "cancelled";
      else error = thrown;
    }
    if (error && this.leaving) return false; // the browser breaks off what a page that goes has asked for
    if (error) turn.finish = turn.text.length > length ? "broken" : end || "broken";
    write(() => turn.end());
    const came = turn.text.length > length || Boolean(turn.reasoning);
    const isNew = !before.some((each) => each.turn === turn);
    if (!came && isNew && (error || turn.others.length)) { // an earlier version is better than an empty one
      this.take(before);
      this.show();
      undo();
    }
    if (error && !this.failed(error)) alertIn($("chat-alert"), this.advice(error, turn));
    write(() => this.enter(null));
    this.kept.changed();
    return came;
  }

  /* What an error says, and what to do. */
  advice(error, turn) {
    if (error.code !== "context_length_exceeded") return error.message;
    const needed = Number(/ has (\d+) tokens/.exec(error.message)?.[1]);
    const what = needed ? `This has ${needed} tokens, and the context holds ${this.context}, answer included` : error.message;
    const files = {0: this.turns.length ? "begin a new chat" : "shorten the question", 1: "remove the file"};
    const size = needed ? 2 ** Math.ceil(Math.log2(needed + 512)) : "with more tokens"; // 512: for the answer
    return `${what}: ${files[turn.files.length] || "remove files"}, or start the server with --ctx ${size}.`;
  }

  stop() {
    this.running?.abort();
  }

  /* Shows another conversation, of messages as they are kept; none begins a new one. */
  open(messages) {
    this.turns = [];
    this.take(turnsOf(messages));
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

/* A question and its answer, on the page. */

import {Tally} from "./figures.js";
import {composed, fileList} from "./files.js";
import {ReadingText} from "./reading.js";
import {AnswerText} from "./tokens.js";
import {count, duration, element, progressed} from "./words.js";

const ENDS = {
  length: "the answer reached its limit",
  cancelled: "stopped",
  broken: "broken off",
};

export class Turn {
  /* actions: edit(turn, content), regenerate(turn), resume(turn), choose(turn, version), and typed() when an edit ends. */
  constructor(content, files, actions) {
    this.content = content;
    this.files = files;
    this.actions = actions;
    this.others = []; // what else stood in its place, and its number among that: see versions.js
    this.at = 0;
    this.box = null; // in which the question is edited
    this.tally = new Tally();
    this.text = this.reasoning = "";
    this.finish = null;
    this.drawing = 0;
    this.question = element("div.question", {dir: "auto"});
    this.thinking = element("pre.thoughts", {dir: "auto", tabindex: "0", "aria-label": "Thinking"});
    this.summary = element("summary", {}, "Thinking …");
    this.thought = element("details.thinking", {hidden: ""}, this.summary, this.thinking);
    this.reading = element("div.reading", {dir: "auto"});
    this.read = new ReadingText(this.reading);
    const box = element("div.answer", {dir: "auto"});
    this.answer = new AnswerText(box);
    this.line = element("p.turn-figures", {}, "reading …");
    this.version = element("span", {role: "status"});
    this.versions = element("span.versions", {hidden: ""},
      this.button("‹", "Earlier version", "earlier", () => actions.choose(this, this.at - 1)), this.version,
      this.button("›", "Later version", "later", () => actions.choose(this, this.at + 1)));
    this.buttons = element("div.actions", {},
      this.versions,
      this.button("Continue", "Continue the answer", "continue", () => actions.resume(this)),
      this.button("Copy", "Copy the answer", "copy-answer"),
      this.button("Edit", "Edit the question", "edit", () => this.edit()),
      this.button("Regenerate", "Regenerate the answer", "regenerate", () => actions.regenerate(this)));
    this.element = element("article.turn", {}, element("span.sr", {}, "You: "), this.question, element("span.sr", {}, "Answer: "),
      this.thought, this.reading, box, this.line, this.buttons);
    this.element.turn = this;
    this.showQuestion();
  }

  /* One that was kept, as in versions.js; of its rounds, nothing was. */
  static kept({question, answer}, actions) {
    const turn = new Turn(question.content, question.files || [], actions);
    turn.take({text: answer.content, reasoning: answer.reasoning_content, finish: answer.finish || "stop"});
    turn.end();
    turn.answer.box.append(turn.text);
    turn.answer.box.title = "Kept as text: which tokens it was made of is known only while the page stays open";
    return turn;
  }

  button(words, label, name, act = null) {
    const made = element(`button.${name}`, {type: "button", "aria-label": label}, words);
    if (act) made.addEventListener("click", act);
    return made;
  }

  /* What the model reads of it. */
  get messages() {
    return [{role: "user", content: composed(this.content, this.files)}, {role: "assistant", content: this.text}];
  }

  /* What is kept of it, as in versions.js. What is not ended yet is broken off, unless it is kept again. */
  get node() {
    const finish = this.finish || "broken";
    return {
      question: {role: "user", content: this.content, ...(this.files.length ? {files: this.files} : {})},
      answer: {
        role: "assistant", content: this.text, ...(this.reasoning ? {reasoning_content: this.reasoning} : {}),
        ...(finish in ENDS ? {finish} : {}),
      },
      others: this.others, at: this.at, turn: this,
    };
  }

  stand(others, at) {
    [this.others, this.at] = [others, at];
    this.versions.hidden = !others.length;
    this.version.textContent = `${at + 1}/${others.length + 1}`;
    this.versions.querySelector(".earlier").disabled = at === 0;
    this.versions.querySelector(".later").disabled = at === others.length;
  }

  showQuestion() {
    this.box = null;
    this.question.replaceChildren(element("p", {}, this.content));
    if (this.files.length) this.question.append(fileList(this.files));
  }

  /* Puts the question into a box of its own; what is sent from there, and what follows it, is another version. */
  edit(draft = this.content) {
    const box = this.box = element("textarea", {rows: "3", "aria-label": "The question, to be edited"});
    box.value = draft;
    const done = () => {
      this.showQuestion();
      this.actions.typed();
      this.buttons.querySelector(".edit").focus();
    };
    const send = () => {
      const content = box.value.trim();
      if (content && this.actions.edit(this, content)) this.showQuestion();
    };
    box.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key) || event.shiftKey) return;
      event.preventDefault();
      event.stopPropagation();
      if (event.key === "Enter") send();
      else done();
    });
    this.question.replaceChildren(element("p", {hidden: ""}, this.content), box, element("div.buttons", {}, this.button("Cancel", "Cancel the edit", "cancel", done),
      this.button("Send", "Send the edited question", "primary", send)));
    box.focus();
  }

  /* The answer is gone on with. */
  reopen() {
    this.finish = null;
    this.line.textContent = "reading …";
    this.showEnd();
  }

  /* Shows how far the prompt is read. */
  readTo({reader, total, cached, processed, tokens_per_second, seconds_left}) {
    const bar = element("progress", {max: total - cached, value: processed - cached, "aria-label": "Reading"});
    const parts = [`${reader === "draft" ? "draft model: " : ""}reading ${processed.toLocaleString("en")} of ${count(total, "token")}`];
    if (seconds_left !== null) {
      parts.push(`${Math.round(tokens_per_second).toLocaleString("en")} tok/s`, `${duration(Math.ceil(seconds_left))} left`);
    }
    this.line.replaceChildren(bar, parts.join(" · "));
  }

  /* Shows how far the model is loaded. */
  loadTo(loading) {
    const waits = loading.doing === "waiting" ? "waiting to be loaded …" : progressed(loading);
    this.line.textContent = loading.doing === "loaded" ? "reading …" : `${loading.model}: ${waits}`;
  }

  take(event) {
    if (event.loading) this.loadTo(event.loading);
    if (event.prompt) this.readTo(event.prompt);
    if (event.round) {
      this.tally.add(event.round);
      this.answer.add(event.round);
      this.line.textContent = this.tally.line();
    }
    if (event.reasoning) {
      this.reasoning += event.reasoning;
      this.thought.hidden = false;
      this.thinking.append(event.reasoning);
    }
    if (event.text) {
      this.text += event.text;
    }
    if (event.finish) this.finish = event.finish;
  }

  /* Draws the Markdown at most once a frame. within(write): what drawing happens in. */
  draw(within) {
    this.drawing ||= requestAnimationFrame(() => {
      this.drawing = 0;
      within(() => this.read.set(this.text, false));
    });
  }

  end() {
    cancelAnimationFrame(this.drawing);
    this.read.set(this.text, true);
    this.answer.finish();
    const n = this.tally.thoughts;
    this.summary.textContent = n ? `Thoughts, ${count(n, "token")}` : "Thoughts";
    const notes = [
      this.tally.rounds ? this.tally.line() : "",
      ENDS[this.finish],
      this.reasoning && !this.text.trim() ? "no answer came after the thoughts" : "",
    ];
    this.line.textContent = notes.filter(Boolean).join(" · ");
    this.showEnd();
  }

  showEnd() {
    this.element.classList.toggle("unfinished", this.finish in ENDS);
  }
}

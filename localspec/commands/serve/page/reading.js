/* An answer to read: Markdown that comes bit by bit. What stands already stays: the same nodes, at the same place. */

import {blocks} from "./markdown.js";

export class ReadingText {
  constructor(box) {
    this.box = box;
    this.sources = [];
  }

  /* Shows the text so far. complete: no more will come. */
  set(text, complete) {
    const found = blocks(complete ? text : steady(text), !complete);
    for (const [i, block] of found.entries()) {
      // At the end all are made once more: a link's address may have come after the link.
      if (!complete && this.sources[i] === block.source) continue;
      if (this.box.children[i]) settle(this.box.children[i], block.make());
      else this.box.append(block.make());
      this.sources[i] = block.source;
    }
    while (this.box.children.length > found.length) this.box.lastChild.remove();
    this.sources.length = found.length;
  }
}

/* A text that still comes, such that what is shown of it will not turn into something else: open marks are closed, and
   what can only be told from what follows waits. */
function steady(text) {
  const fences = text.match(/^ {0,3}(```|~~~)/gm) || [];
  if (fences.length % 2) return text;
  let calm = text
    .replace(/(^|\n\s*\n)\|[^\n]*(\n[-:| ]*)?$/, "$1") // the head of a table
    .replace(/(^|\n)\[[^\]\n]*(\](:[^\n]*)?)?$/, "$1") // where links lead
    .replace(/!?\[([^\]\n]*)(\](\([^)\n]*)?)?$/, "$1") // a link
    .replace(/(^|\n)[ \t]*(\d{1,9}[.)]?|[-+=]+|#+|>)?[ \t]*$/, "$1") // the mark of a list, a heading, a quotation, a rule
    .replace(/[*_~`$\\]+$/, "");
  const last = calm.slice(calm.lastIndexOf("\n\n") + 1);
  for (const mark of ["`", "**"]) {
    if ((last.split(mark).length - 1) % 2) calm = calm.trimEnd() + mark;
  }
  return calm;
}

/* Changes a node into another one with as few changes as that takes: a selection, or how far a box is scrolled, stays. */
function settle(old, made) {
  if (old.isEqualNode(made)) return;
  if (old.nodeType === Node.TEXT_NODE && made.nodeType === Node.TEXT_NODE) {
    if (made.data.startsWith(old.data)) old.appendData(made.data.slice(old.data.length));
    else old.data = made.data;
    return;
  }
  if (!old.cloneNode(false).isEqualNode(made.cloneNode(false))) {
    old.replaceWith(made);
    return;
  }
  const children = [...made.childNodes];
  for (const [i, child] of children.entries()) {
    if (old.childNodes[i]) settle(old.childNodes[i], child);
    else old.append(child);
  }
  while (old.childNodes.length > children.length) old.lastChild.remove();
}

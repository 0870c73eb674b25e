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
   what can only be told from what follows waits. All of that is in the last lines. */
function steady(text) {
  const fences = text.match(/^ {0,3}(```|~~~)/gm) || [];
  if (fences.length % 2) return text;
  const sure = text.slice(0, beforeTable(text));
  const start = sure.lastIndexOf("\n") + 1;
  const calm = sure.slice(0, start) + steadyLine(sure.slice(start));
  const last = calm.slice(calm.lastIndexOf("\n\n") + 1);
  const open = ["`", "**"].filter((mark) => (last.split(mark).length - 1) % 2);
  return open.length ? calm.trimEnd() + open.join("") : calm;
}

/* Where the head of a table begins that the text ends with; else its length. */
function beforeTable(text) {
  const isHead = (start) => {
    let blank = start - 2; // behind the line before, which must be blank
    while (" \t".includes(text[blank] || "\n")) blank--;
    return text[start] === "|" && (start === 0 || (blank >= 0 && text[blank] === "\n"));
  };
  const last = text.lastIndexOf("\n") + 1;
  const previous = text.lastIndexOf("\n", last - 2) + 1;
  if (last && /^[-:| ]*$/.test(text.slice(last)) && isHead(previous)) return previous;
  return isHead(last) ? last : text.length;
}

/* The last line, without what may turn into something else. Every expression begins at its beginning: one that may begin
   anywhere reads a row of brackets again for each of them. */
function steadyLine(line) {
  if (/^\[[^\]]*(\](:[^\n]*)?)?$/.test(line)) return ""; // where links lead
  const calm = withoutLink(line);
  if (/^(\d{1,9}[.)]?|[-+=]+|#+|>)?$/.test(calm.trim())) return ""; // the mark of a list, a heading, a quotation, a rule
  let end = calm.length;
  while (end && "*_~`$\\".includes(calm[end - 1])) end--;
  return calm.slice(0, end);
}

/* A line that ends within a link or an image: its words alone. */
function withoutLink(line) {
  const shut = line.lastIndexOf("]");
  const goesOn = line[shut + 1] === "(" && !line.includes(")", shut); // to where it leads
  let open = shut >= 0 && (shut === line.length - 1 || goesOn) ? line.indexOf("[", line.lastIndexOf("]", shut - 1) + 1) : -1;
  const within = open >= 0 && open < shut;
  if (!within) open = line.indexOf("[", shut + 1);
  if (open < 0) return line;
  return line.slice(0, line[open - 1] === "!" ? open - 1 : open) + line.slice(open + 1, within ? shut : line.length);
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

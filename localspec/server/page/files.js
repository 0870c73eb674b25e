/* Text files that go with a message, and the text of PDF and Word documents. */

import {textOf} from "./api.js";
import {element} from "./words.js";

const LARGEST = 512 * 1024; // bytes; about 150,000 tokens, more than any context here
const LARGEST_DOCUMENT = 5 * 1024 * 1024; // bytes; the server takes bodies of 8 MB, and Base64 adds a third

/* Whether the server reads it. */
export function isDocument(file) {
  return /\.(pdf|docx)$/i.test(file.name);
}

/* {name, text, edit} of a file that somebody has chosen; an Error says in a line why not. */
export async function readText(file) {
  if (isDocument(file)) return {name: file.name, text: await documentText(file), edit: false};
  if (file.size > LARGEST) throw new Error(`${file.name} is larger than ${LARGEST / 1024} KB.`);
  let text;
  try {
    text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text in UTF-8.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text.`);
  // To be changed unless somebody says otherwise: no words of a question tell reliably whether it asks for changes, and
  // what is wrongly predicted costs some rejected guesses, never another answer.
  return {name: file.name, text, edit: true};
}

async function documentText(file) {
  if (file.size > LARGEST_DOCUMENT) throw new Error(`${file.name} is larger than ${LARGEST_DOCUMENT / 1024 / 1024} MB.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  let binary = "";
  for (let i = 0; i < bytes.length; i += 0x8000) binary += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  const {text} = await textOf(file.name, btoa(binary));
  if (text.length > LARGEST) throw new Error(`The text of ${file.name} is longer than ${LARGEST / 1024} K.`);
  return text;
}

/* A message as the model reads it: its files first, each in a fence longer than any in it. */
export function composed(content, files) {
  const blocks = files.map(({name, text}) => {
    const longest = (text.match(/`+/g) || []).reduce((most, run) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name.replace(/[\r\n]/g, " ")}:\n${fence}\n${text.replace(/\n?$/, "\n")}${fence}\n\n`;
  });
  return blocks.join("") + content;
}

/* What the answer is likely to repeat: the files that a message wants changed. */
export function prediction(files) {
  return files.filter((file) => file.edit).map((file) => file.text).join("\n") || undefined;
}

/* The files of a message as a list; changed() where they can still be taken out. */
export function fileList(files, changed = null) {
  return element("ul.files", {"aria-label": "Files"}, ...files.map((file) => {
    const entry = element("li", {}, element("span", {dir: "auto"}, file.name), element("span.fine", {}, `${Math.ceil(file.text.length / 1024)} K`));
    if (!changed) return entry;
    const edit = element("input", {type: "checkbox"});
    edit.checked = file.edit;
    edit.addEventListener("change", () => (file.edit = edit.checked));
    const title = "The answer repeats much of it: what it repeats is drafted from the file";
    const out = element("button", {type: "button", "aria-label": `Take ${file.name} out`}, "×");
    out.addEventListener("click", () => changed(file));
    entry.append(element("label", {title}, edit, " to be changed"), out);
    return entry;
  }));
}

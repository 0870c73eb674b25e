/* Code in colours: highlight.js finds what is what, and elements are made of its tree. Its HTML is not used. */

import core from "./vendor/highlight.js/core.min.js";
import bash from "./vendor/highlight.js/languages/bash.min.js";
import c from "./vendor/highlight.js/languages/c.min.js";
import cpp from "./vendor/highlight.js/languages/cpp.min.js";
import csharp from "./vendor/highlight.js/languages/csharp.min.js";
import css from "./vendor/highlight.js/languages/css.min.js";
import diff from "./vendor/highlight.js/languages/diff.min.js";
import go from "./vendor/highlight.js/languages/go.min.js";
import ini from "./vendor/highlight.js/languages/ini.min.js";
import java from "./vendor/highlight.js/languages/java.min.js";
import javascript from "./vendor/highlight.js/languages/javascript.min.js";
import json from "./vendor/highlight.js/languages/json.min.js";
import markdown from "./vendor/highlight.js/languages/markdown.min.js";
import php from "./vendor/highlight.js/languages/php.min.js";
import python from "./vendor/highlight.js/languages/python.min.js";
import ruby from "./vendor/highlight.js/languages/ruby.min.js";
import rust from "./vendor/highlight.js/languages/rust.min.js";
import sql from "./vendor/highlight.js/languages/sql.min.js";
import typescript from "./vendor/highlight.js/languages/typescript.min.js";
import xml from "./vendor/highlight.js/languages/xml.min.js";
import yaml from "./vendor/highlight.js/languages/yaml.min.js";
import {element} from "./words.js";

const languages = {
  bash, c, cpp, csharp, css, diff, go, ini, java, javascript, json, markdown, php, python, ruby, rust, sql, typescript, xml, yaml,
};
for (const [name, grammar] of Object.entries(languages)) core.registerLanguage(name, grammar);

const LONGEST = 100_000; // characters; while an answer comes, its last block is read again with every frame

/* Text nodes and spans that show code; plain where the language is not known. */
export function highlighted(code, language) {
  if (code.length > LONGEST || !core.getLanguage(language)) return [code];
  // The tree is highlight.js's own affair (hence the underscore); the version is fixed, and a test looks at the colours.
  const tree = core.highlight(code, {language, ignoreIllegals: true})._emitter?.rootNode;
  return tree ? tree.children.map(node) : [code];
}

function node(branch) {
  if (typeof branch === "string") return branch;
  const children = branch.children.map(node);
  const kind = /^[a-z]+/.exec(branch.scope || "")?.[0];
  return element(kind && kind !== "language" ? `span.hl-${kind}` : "span", {}, ...children);
}

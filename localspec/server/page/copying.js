/* The buttons that copy: a block of code, or an answer as it was written. */

const SHOWN_MS = 1500; // "Copied"

export function copyOnClick(talk) {
  talk.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy, button.copy-answer");
    if (!button) return;
    const code = button.closest(".code")?.querySelector("code").textContent;
    const copied = await copy(code ?? button.closest(".turn").turn.text);
    button.textContent = copied ? "Copied" : "No access";
    setTimeout(() => (button.textContent = "Copy"), SHOWN_MS);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // only where the page is this computer's own, or comes by TLS
    return true;
  } catch {
    return false;
  }
}

"use strict";
const PAUSE_MS = 2000;
const LIMIT_MS = 10000;
const note = document.getElementById("note");
let told = new Date();

async function renew() {
  const answer = await fetch(location.href, {
    headers: { Accept: "text/html" },
    cache: "no-store",
    signal: AbortSignal.timeout(LIMIT_MS),
  });
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const main = page.querySelector("main");
  if (!answer.ok || main === null) throw new Error(`status ${answer.status}`);
  document.querySelector("main").replaceWith(main);
  document.title = page.title;
  told = new Date();
}

async function keepRenewing() {
  try {
    if (!getSelection().isCollapsed) {
      note.textContent = "Not renewed while text is selected.";
    } else if (!document.hidden) {
      await renew();
      note.textContent = "";
    }
  } catch {
    note.textContent = `No answer since ${told.toLocaleTimeString()}: this is what was told then.`;
  }
  setTimeout(keepRenewing, PAUSE_MS);
}

setTimeout(keepRenewing, PAUSE_MS);

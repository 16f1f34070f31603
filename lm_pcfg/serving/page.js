"use strict";
const form = document.querySelector("form");
const field = form.querySelector("input");
const said = document.getElementById("said");
const found = document.getElementById("found");
let asked = 0;

async function show() {
  const line = field.value.trim();
  if (!line) return;
  const number = ++asked;
  said.textContent = "…";
  try {
    const answer = await fetch("analyse", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ line }),
    });
    const body = await answer.json();
    if (number !== asked) return; // a later sentence was asked for meanwhile
    if (!answer.ok) {
      said.textContent = body.detail;
      found.replaceChildren();
      return;
    }
    said.textContent = "";
    found.innerHTML = body.html; // made by the service, words escaped
    history.replaceState(null, "", "#" + encodeURIComponent(line));
  } catch (error) {
    if (number === asked) said.textContent = "no answer: " + error.message;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  show();
});
try {
  if (location.hash.length > 1) field.value = decodeURIComponent(location.hash.slice(1));
} catch {
  // not one of our addresses
}
show();

// The frame of the page: tabs by the address's hash, light and dark.

import { h, icon, iconButton } from "./dom.js";
import "./chat.js";
import "./clips.js";
import "./reports.js";
import "./sentences.js";
import "./server.js";

const TABS = { chat: "Chat", clips: "Clips", sentences: "Sentences", server: "Server", reports: "Reports" };
const THEME = "verax-theme";

const made = {}; // each tab is made once and keeps its state
const main = document.querySelector("main");

function open(name) {
  const tab = (made[name] ??= document.createElement(`${name}-tab`));
  main.replaceChildren(tab);
  document.title = `${TABS[name]} · verax`;
  for (const link of document.querySelectorAll("nav a")) link.ariaCurrent = link.hash === `#${name}` ? "page" : null;
}

const chosen = () => (location.hash.slice(1) in TABS ? location.hash.slice(1) : "chat");

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
}

function switchTheme() {
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const shown = document.documentElement.dataset.theme ?? preferred;
  setTheme(shown === "dark" ? "light" : "dark");
}

if (localStorage.getItem(THEME)) setTheme(localStorage.getItem(THEME));
document.querySelector("nav").append(...Object.entries(TABS).map(([name, title]) =>
  h("a", { href: `#${name}` }, icon(name), h("span", {}, title))));
document.querySelector(".bar-end").append(iconButton("theme", "Light or dark", switchTheme));
addEventListener("hashchange", () => open(chosen()));
open(chosen());

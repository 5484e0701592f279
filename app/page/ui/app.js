// The page's table of contents: builds its parts and passes the live feed's events to them.

import { ApiError, follow, key } from "./api.js";
import { buildCharts, restart, take } from "./charts.js";
import { buildCompare } from "./compare.js";
import { byId, number } from "./dom.js";
import { buildPlayground, fitPlayground } from "./playground.js";
import { buildRequests, markChosen, refreshRequests } from "./requests.js";
import { fitStrip, showStrip } from "./strip.js";
import { buildTerms } from "./terms.js";
import { buildTiles, showTiles } from "./tiles.js";

let model = null;
let fittedTo = ""; // the model and policy that the form was last fitted to, as JSON

buildTiles();
buildCharts();
buildPlayground(open);
buildCompare(open);
buildRequests(open);
buildTerms();
buildKey();
follow({ state: begin, event: show, gone, locked });

function open(record) {
  showStrip(record);
  markChosen(record.id);
}

function begin(state) {
  model = state.model;
  byId("model").textContent = model.name;
  document.title = `${model.name} · Foretoken`;
  byId("change-key").hidden = !key.get();
  fitStrip(state.trace_viewer_url);
  restart(state);
  show(state);
  refreshRequests(state.now, true);
  performance.mark("useful");
}

function show(change) {
  const { now } = change;
  link("live", "live");
  trouble(now.healthy ? "" : `The engine makes no progress: ${now.reason}.`);
  showTiles(now);
  take(change);
  refreshRequests(now);
  const current = JSON.stringify([model, now.policy, now.speculation.unasked]);
  if (current !== fittedTo) fitPlayground(model, now);
  fittedTo = current;
}

function gone(error, wait) {
  link("gone", error.status ? "no live figures" : "no connection");
  if (!(error instanceof ApiError)) console.error(error);
  trouble(`${describe(error)} Trying again in ${number(wait / 1000, wait < 1000 ? 1 : 0)} s.`);
}

function describe(error) {
  if (!(error instanceof ApiError)) return `The page failed (${error.message}).`;
  if (error.status) return `The server refuses its live figures: ${error.message}.`;
  return `The server is gone (${error.message}).`;
}

function link(state, text) {
  if (byId("link").dataset.state === state) return;
  byId("link").dataset.state = state;
  byId("link").textContent = text;
}

function trouble(text) {
  if (byId("trouble").textContent === text) return;
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

let unlock = null; // called once the user has given a key; null while no key is needed

function buildKey() {
  byId("change-key").addEventListener("click", () => {
    key.drop();
    location.reload();
  });
  // Escape always closes a dialog, but the page needs the key, so it asks again.
  byId("key-dialog").addEventListener("close", askKey);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(byId("key").value.trim());
    byId("key").value = "";
    const unlocked = unlock;
    unlock = null;
    byId("key-dialog").close();
    unlocked?.();
  });
}

function locked() {
  link("locked", "key needed");
  if (key.get()) byId("key-why").textContent = "The server did not accept that key.";
  key.drop();
  const given = new Promise((resolve) => (unlock = resolve));
  askKey();
  return given;
}

function askKey() {
  if (unlock && !byId("key-dialog").open) byId("key-dialog").showModal();
}

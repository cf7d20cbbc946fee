"use strict";
(() => {
  // A box is a stop of the keyboard only while there is something to scroll in it.
  const stops = () => {
    for (const box of document.querySelectorAll(".scroll")) {
      box.tabIndex = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight ? 0 : -1;
    }
  };
  addEventListener("resize", stops);
  addEventListener("toggle", stops, true);
  stops();
})();
(() => {
  const block = document.getElementById("examples");
  if (!block) return;
  const { items, users, both: twoTasks } = JSON.parse(block.textContent);
  const query = document.getElementById("query");
  const cards = document.getElementById("cards");
  const found = document.getElementById("found");
  const more = document.getElementById("more");
  const PAGE = 4;
  let matches = [];
  let shown = 0;

  // Texts of tables go in as text, never as markup.
  const make = (tag, text, kind) => {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };
  const name = (place) => items[place][1] ?? items[place][0];
  const count = (n) => n.toLocaleString("en-US");
  const number = (n) => n.toFixed(2).replace("-", "\u2212");

  const item = (place) => {
    const span = make("span");
    span.append(make("bdi", name(place)));
    if (items[place][1] !== null) {
      const id = make("small");
      id.append(" ", make("bdi", items[place][0]));
      span.append(id);
    }
    return span;
  };

  const history = (user) => {
    const part = make("div");
    const all = user.history_items;
    const some = user.history.length;
    part.append(make("h4", all > some ? `History, the latest ${some} of ${count(all)}` : "History, latest first"));
    const list = make("ol", null, "history");
    for (const place of user.history) {
      const row = make("li");
      row.append(item(place));
      list.append(row);
    }
    part.append(list);
    return part;
  };

  const shelf = (user) => {
    const part = make("div");
    const some = user.items.length;
    part.append(make("h4", user.returned > some ? `Recommended, the first ${some} of ${count(user.returned)}` : "Recommended"));
    const list = make("ol", null, "shelf");
    for (const [place, score, source, fresh, labels] of user.items) {
      const row = make("li");
      const what = item(place);
      if (fresh) what.append(make("span", "new", "tag"));
      if (labels) what.append(make("small", ` ${labels}`));
      row.append(what, make("span", `${number(score)}${twoTasks ? ` ${source}` : ""}`, "score"));
      list.append(row);
    }
    part.append(list);
    return part;
  };

  const card = (user) => {
    const node = make("article", null, "card");
    const head = make("h3");
    const who = make("span", "User ");
    who.append(make("bdi", user.id));
    head.append(who);
    let state = user.status.replace("_", " ");
    if (user.status === "recommended") state = user.exact ? "proven exact" : "not proven exact";
    head.append(make("small", state));
    node.append(head);
    if (user.reason) node.append(make("p", user.reason.replaceAll("_", " "), "note"));
    const fields = make("p", null, "fields");
    for (const [key, value] of Object.entries(user.fields)) {
      const one = make("span", `${key}: `);
      one.append(make("bdi", value));
      fields.append(one);
    }
    if (fields.childNodes.length) node.append(fields);
    if (user.embedding) node.append(make("p", `${user.width} numbers: ${user.embedding.join(", ")}, …`));
    const both = make("div", null, "both");
    if (user.history.length) both.append(history(user));
    if (user.items && user.items.length) both.append(shelf(user));
    if (both.childNodes.length) node.append(both);
    return node;
  };

  const extend = () => {
    for (const user of matches.slice(shown, shown + PAGE)) cards.append(card(user));
    shown = Math.min(shown + PAGE, matches.length);
    more.hidden = shown >= matches.length;
    more.textContent = `Show ${Math.min(PAGE, matches.length - shown)} more`;
  };

  const search = () => {
    const text = query.value.trim().toLowerCase();
    const ranked = [[], [], [], []];
    for (const user of users) {
      const id = user.id.toLowerCase();
      const titles = (user.items ?? []).map(([place]) => `${items[place][0]} ${name(place)}`.toLowerCase());
      if (id === text) ranked[0].push(user);
      else if (id.startsWith(text)) ranked[1].push(user);
      else if (id.includes(text)) ranked[2].push(user);
      else if (titles.some((title) => title.includes(text))) ranked[3].push(user);
    }
    matches = ranked.flat();
    const named = ranked[3].length;
    cards.replaceChildren();
    shown = 0;
    extend();
    if (!text) found.textContent = `${count(users.length)} users on this page.`;
    else if (!matches.length) found.textContent = "None of the users on this page has such an id, or such a title.";
    else found.textContent = `${count(matches.length - named)} by id, ${count(named)} by a title they were recommended.`;
  };

  document.getElementById("search").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("search").addEventListener("reset", () => setTimeout(search));
  query.addEventListener("input", search);
  more.addEventListener("click", extend);
  const wanted = new URLSearchParams(location.hash.slice(1)).get("user");
  if (wanted !== null) query.value = wanted;
  search();
})();

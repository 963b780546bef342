/* The page's side of an explorer: it draws the controls, keeps the frames it was given, and asks for others.

A setting is a list of places: the index of a value for each control, the number itself for a number field. Its JSON is
the key of its frame. Messages: `{at, near}` asks for a frame to show and for others nearby, in order, when there is
time; `{at, alt}` with a PNG or its `url`, or `{at, error}`, answers; `{forget}` says that frames may be out of date.

The notebook's cell holds nothing but the picture, so a saved notebook does, too. Here the explorer takes the place of
that picture wherever the page shows it. What stands for the kernel (`model`) may as well be a book's stored frames. */

const LIMIT = 48e6; // bytes, for the frames of all explorers of a page: some thousand
const OPEN = 3; // requests on their way at once: more would queue up behind a drag
const SILENCE = 1000; // milliseconds after which a waiting reader is told
const GONE = "The kernel was restarted or has ended. Run this cell again; settings that were seen still show.";
const ALT = "The figure; the sentence below says what is to be seen.";
const BUSY = "The kernel is busy. The picture follows when it answers.";

/* Frames of all explorers in the page, the least used first. One that is shown or decoded is in use and stays. */
const nothing = { kept: new Map(), bytes: 0, limit: LIMIT, owners: new Map() };
const frames = (globalThis[Symbol.for("dlscale.frames")] ??= nothing);
let count = 0; // of controls, for their ids

function keep(key, url, bytes, alt) {
  forget(key);
  const frame = { url, bytes, users: 0, alt };
  frames.kept.set(key, frame);
  frames.bytes += frame.bytes;
  for (const [other, { users }] of frames.kept) {
    if (frames.bytes <= frames.limit) break;
    if (!users && other !== key) forget(other);
  }
  return frame;
}

function kept(key) {
  const frame = frames.kept.get(key);
  if (frame) frames.kept.delete(key), frames.kept.set(key, frame); // now the most recently used
  return frame;
}

function forget(key) {
  const frame = frames.kept.get(key);
  if (!frame) return;
  frames.kept.delete(key);
  frames.bytes -= frame.bytes;
  frame.gone = true;
  if (!frame.users) URL.revokeObjectURL(frame.url);
}

function release(frame) {
  if (frame && --frame.users === 0 && frame.gone) URL.revokeObjectURL(frame.url);
}

function element(kind, properties = {}, ...children) {
  const node = Object.assign(document.createElement(kind), properties);
  node.append(...children);
  return node;
}

class Explorer {
  constructor(model) {
    this.model = model;
    this.about = model.get("about"); // controls, picture, alt, whether it keeps frames, whether controls move alone
    this.controls = this.about.controls;
    this.at = this.controls.map((control) => control.start);
    this.name = crypto.randomUUID?.() ?? String(Math.random()); // tells its frames from others'
    this.wish = 0; // the number of the newest setting asked for, and of the one that is shown
    this.shown = 0;
    this.open = new Map(); // requests on their way: key to the number of the wish
    this.next = false; // whether the newest wish waits for one of them to return
    this.moved = [0, 1]; // the control last moved, and which way
    this.first = { url: this.about.picture, alt: this.about.alt, users: 1 };
    this.frame = this.first;
    this.views = new Set();
    this.waiters = [];
    model.on("msg:custom", (message, buffers) => this.receive(message, buffers));
    model.on("comm_live_update", () => this.waits() && this.say(GONE));
  }

  key(at = this.at) {
    return this.name + JSON.stringify(at);
  }

  waits() {
    return this.shown !== this.wish;
  }

  /* Set a control, as a reader does; in a book with one control at a time, the others go back to their start. */
  move(index, place) {
    if (this.about.alone) this.at = this.controls.map((control) => control.start);
    this.moved = [index, Math.sign(place - this.at[index]) || 1];
    this.at = this.at.with(index, place);
    this.wish += 1;
    this.next = false;
    const frame = kept(this.key());
    if (frame) this.paint(frame, this.wish), this.askAhead();
    else this.ask();
    this.refresh();
  }

  /* Ask for the newest wish; if enough are on their way, when one of them has returned. */
  ask() {
    this.next = this.open.size >= OPEN;
    if (this.next) return;
    this.open.set(this.key(), this.wish);
    this.send({ at: this.at, near: this.near() });
  }

  /* Ask for settings nearby, which are likely to be next. Each such request takes the place of the one before. */
  askAhead() {
    const near = this.near();
    if (near.length) this.send({ near });
  }

  near() {
    if (!this.about.keeps) return [];
    const [moved, way] = this.moved;
    const found = [];
    const add = (index, step) => {
      const place = this.at[index] + step;
      if (place < 0 || place >= this.controls[index].texts.length || this.controls[index].kind === "number") return;
      const at = this.at.with(index, place);
      if (!frames.kept.has(this.key(at))) found.push(at);
    };
    for (const step of [1, 2, 3, 4, -1, -2]) add(moved, way * step);
    this.controls.forEach((_, index) => index !== moved && [1, -1].forEach((step) => add(index, step)));
    return found.slice(0, 16);
  }

  send(message) {
    try {
      this.model.send(message);
    } catch {
      this.open.clear();
      if (message.at) this.say(GONE);
      return;
    }
    if (!message.at) return;
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.patience(SILENCE), SILENCE);
  }

  /* No answer came for a while. Should it never come (a lost connection), the newest wish is sent again in the end. */
  patience(waited) {
    if (!this.waits()) return;
    this.say(BUSY);
    if (waited > 20 * SILENCE) {
      this.open.clear();
      this.ask();
    } else this.silence = setTimeout(() => this.patience(4 * waited), 3 * waited);
  }

  receive(message, buffers) {
    if (message.forget) {
      for (const key of [...frames.kept.keys()]) if (key.startsWith(this.name)) forget(key);
      return;
    }
    clearTimeout(this.silence);
    this.say("");
    const key = this.key(message.at);
    const wish = key === this.key() ? this.wish : (this.open.get(key) ?? 0);
    this.open.delete(key);
    if (message.error) {
      if (wish === this.wish && this.waits()) this.fail(message.error);
    } else {
      const blob = new Blob(buffers.slice(0, 1), { type: "image/png" });
      const frame = keep(key, message.url ?? URL.createObjectURL(blob), blob.size, message.alt);
      if (wish > this.shown) this.paint(frame, wish);
      if (!this.about.keeps) forget(key);
    }
    if (this.next && this.waits()) this.ask();
    else if (this.open.size && this.waits()) this.silence = setTimeout(() => this.patience(SILENCE), SILENCE);
  }

  /* Show a frame once it is decoded, unless a newer wish was shown meanwhile. A busy browser may put decoding off for
  ever: then it is shown as it is. */
  async paint(frame, wish) {
    const image = element("img", { src: frame.url, alt: ALT });
    frame.users += 1;
    try {
      await Promise.race([image.decode(), new Promise((resolve) => setTimeout(resolve, SILENCE))]);
    } catch (error) {
      release(frame);
      if (wish === this.wish) this.fail(String(error));
      return;
    }
    if (wish < this.shown) return release(frame);
    release(this.frame);
    this.frame = frame;
    this.settle(wish, { image, alt: frame.alt });
  }

  fail(error) {
    this.playing = undefined;
    this.settle(this.wish, { error });
  }

  settle(wish, { image, alt = "", error = "" }) {
    this.shown = wish;
    for (const view of this.views) {
      if (image) view.screen.replaceChildren(this.views.size > 1 ? image.cloneNode() : image);
      view.screen.hidden = Boolean(error);
      view.alert.hidden = !error;
      view.alert.textContent = error;
      view.caption.textContent = alt;
    }
    this.refresh();
    if (!this.waits()) this.waiters.splice(0).forEach((resolve) => resolve());
  }

  say(text) {
    for (const view of this.views) if (view.note.textContent !== text) view.note.textContent = text;
  }

  /* Play a control from what is shown to its end; no frame is left out, however long it takes. */
  async play(index) {
    const last = this.controls[index].texts.length - 1;
    const run = (this.playing = { index });
    if (this.at[index] === last) this.move(index, 0);
    this.refresh();
    while (this.playing === run && this.at[index] < last) {
      const shown = this.waits() ? new Promise((resolve) => this.waiters.push(resolve)) : undefined;
      await Promise.all([shown, new Promise((resolve) => setTimeout(resolve, this.controls[index].interval))]);
      if (this.playing !== run || ![...this.views].some((view) => view.root.isConnected)) break;
      this.move(index, this.at[index] + 1);
    }
    if (this.playing === run) this.playing = undefined;
    this.refresh();
  }

  /* Let every view show where the controls stand. */
  refresh() {
    for (const { root, inputs, caption } of this.views) {
      root.dataset.waits = this.waits(); // not aria-busy, which would silence the notes below
      caption.ariaLive = this.playing ? "off" : "polite"; // a running picture is not read aloud
      inputs.forEach(({ input, output, button }, index) => {
        const { texts, label } = this.controls[index];
        if (input.value !== String(this.at[index])) input.value = this.at[index];
        if (output) output.textContent = texts[this.at[index]];
        if (output) input.setAttribute("aria-valuetext", texts[this.at[index]]);
        if (!button) return;
        const plays = this.playing?.index === index;
        button.textContent = plays ? "❚❚" : "▶";
        button.setAttribute("aria-label", `${plays ? "Stop" : "Play"} ${label}`);
      });
    }
  }

  /* A new element with controls, picture and caption. Several may show one explorer: they move together. */
  view() {
    const inputs = this.controls.map((control, index) => this.control(control, index));
    const view = {
      inputs,
      screen: element("div", { className: "dlscale-screen" }),
      alert: element("pre", { role: "alert", hidden: true }),
      caption: element("p", { role: "status", className: "dlscale-caption", textContent: this.frame.alt }),
      note: element("p", { role: "status", className: "dlscale-note" }),
    };
    const controls = element("div", { className: "dlscale-controls", role: "group", ariaLabel: "Controls" });
    controls.append(...inputs.map(({ row }) => row));
    const figure = element("div", { className: "dlscale-figure" }, view.screen, view.alert, view.caption, view.note);
    view.root = element("div", { className: "dlscale-explorer", picture: this.first.url });
    view.root.append(element("div", { className: "dlscale-layout" }, controls, figure));
    view.screen.append(element("img", { src: this.frame.url, alt: ALT }));
    // What is near is asked for as soon as a reader comes close, not for a whole notebook at once.
    for (const coming of ["pointerenter", "focusin"]) controls.addEventListener(coming, () => this.askAhead());
    this.views.add(view);
    this.refresh();
    return view.root;
  }

  control({ kind, label, texts, interval }, index) {
    const input = element(kind === "menu" ? "select" : "input", { id: `dlscale-${this.name}-${(count += 1)}` });
    const made = { input, row: element("div", { className: `dlscale-control dlscale-${kind}` }) };
    made.row.append(element("label", { htmlFor: input.id, textContent: label }));
    const set = (place) => {
      this.playing = undefined; // a reader's hand stops the player
      this.move(index, place);
    };
    if (kind === "menu") {
      input.append(...texts.map((text, place) => element("option", { value: place, textContent: text })));
      input.addEventListener("change", () => set(Number(input.value)));
    } else if (kind === "number") {
      Object.assign(input, { type: "number", step: "any", min: texts[0], max: texts[1] });
      const [low, high] = texts.map(Number);
      const commit = () => {
        const wanted = input.valueAsNumber; // what is no number gives way to the one before
        set(Number.isNaN(wanted) ? this.at[index] : Math.min(Math.max(wanted, low), high));
      };
      input.addEventListener("change", commit);
      input.addEventListener("keydown", (event) => event.key === "Enter" && commit());
    } else {
      Object.assign(input, { type: "range", min: 0, max: texts.length - 1, step: 1 });
      input.addEventListener("input", () => set(Number(input.value)));
      made.output = element("output", { htmlFor: input.id, ariaLive: "off" }); // the slider itself is read
      made.row.append(made.output);
    }
    if (kind === "player") {
      made.button = element("button", { type: "button", title: `Play to the end, a step each ${interval} ms` });
      made.button.addEventListener("click", () => {
        if (this.playing?.index === index) this.playing = undefined;
        else this.play(index);
        this.refresh();
      });
      made.row.append(made.button);
    }
    made.row.append(input);
    // Jupyter would take arrows and letters for itself.
    for (const control of [input, made.button]) control?.setAttribute("data-lm-suppress-shortcuts", "true");
    return made;
  }

  /* Take the place of the picture wherever it stands in the page, now and later. Returns how to stop that. A kernel
  started again makes equal pictures: then the newest explorer takes the places of the one before. */
  follow() {
    const url = this.first.url;
    frames.owners.set(url, this);
    const place = (node) => {
      const here = node.matches("img") ? node.src === url && !node.closest(".dlscale-explorer") : node.picture === url;
      if (here && frames.owners.get(url) === this) node.replaceWith(this.view());
    };
    const look = (node) => node.querySelectorAll?.("img, .dlscale-explorer").forEach(place);
    const observer = new MutationObserver((changes) => {
      for (const { target, type, addedNodes } of changes) {
        if (type === "attributes") target.matches("img") && place(target);
        else addedNodes.forEach((node) => (node.matches?.("img") ? place(node) : look(node)));
      }
    });
    look(document);
    observer.observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["src"] });
    return () => observer.disconnect();
  }
}

/* anywidget calls `initialize` for each explorer, and `render` only where the explorer itself is displayed. Each gets
a module of its own. */
let explorer;
const initialize = ({ model }) => (explorer = new Explorer(model)).follow();
const render = ({ el }) => el.append(explorer.view());

export default { initialize, render };

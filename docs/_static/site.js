/* Of every page of the site: explorers that take their frames from a pack, and predictions that are answered. The code
of dlscale/page/explorer.js stands above this, in the same function. */

const root = document.documentElement.dataset.content_root;

/* A script beside the page, once; modules and files cannot be read from a file:// address, scripts can. */
const scripts = new Map();
function load(source) {
  if (!scripts.has(source)) {
    const loading = new Promise((resolve, reject) => {
      const script = Object.assign(document.createElement("script"), { src: source, onload: resolve });
      script.onerror = () => (scripts.delete(source), reject(new Error(`${source} could not be loaded.`)));
      document.head.append(script);
    });
    scripts.set(source, loading);
  }
  return scripts.get(source);
}

const packs = new Map();
globalThis.dlscalePack = (name, frames) => packs.set(name, frames);

/* Stands for the kernel: answers from a pack, which is loaded when a reader comes near the controls, with its pictures. */
class Pack {
  constructor(name, about) {
    Object.assign(this, { name, about, folder: `${root}_static/frames/` });
  }
  get() {
    return this.about;
  }
  on(event, receive) {
    if (event === "msg:custom") this.receive = receive;
  }
  frame(at) {
    const [image, alt] = packs.get(this.name)[JSON.stringify(at)] ?? [];
    return { alt, url: `${this.folder}${this.name}-${image}.webp` };
  }
  async send({ at, near }) {
    try {
      await load(`${this.folder}${this.name}.js`);
      if (at) this.receive({ at, ...this.frame(at) }, []);
      for (const other of near) if (this.frame(other).alt) new Image().src = this.frame(other).url;
    } catch (error) {
      if (at) this.receive({ at, error: String(error.message ?? error) }, []);
    }
  }
}

/* The picture is the last one before what tells about its explorer; what says that it is still, goes. */
for (const script of document.querySelectorAll("script.dlscale-about")) {
  const { name, ...about } = JSON.parse(script.textContent);
  const image = [...document.images].findLast((image) => image.compareDocumentPosition(script) & 4);
  const made = new Explorer(new Pack(name, { ...about, picture: image.src, keeps: true })).view();
  const word = about.alone ? "On this page, one control moves at a time; the others go back to their start." : "";
  made.append(element("p", { className: "dlscale-note", textContent: word }));
  image.replaceWith(made);
  script.closest(".cell_output")?.querySelectorAll(".dlscale-still").forEach((still) => still.remove());
}

for (const asked of document.querySelectorAll(".dlscale-question")) {
  const question = asked.querySelector("legend").textContent;
  const answers = [...document.querySelectorAll(".dlscale-answer")].filter((answer) => answer.dataset.guess === question);
  asked.addEventListener("change", ({ target: { value } }) => {
    asked.querySelector(".dlscale-note").textContent = `Noted: ${value}`;
    for (const answer of answers) answer.replaceChildren("You said ", element("em", { textContent: value }), ". Measured: ");
  });
}

/* Paper is white. */
const { dataset } = document.documentElement, paper = matchMedia("print");
function printing(now) {
  if (now && dataset.theme !== "light") [dataset.screen, dataset.theme] = [dataset.theme, "light"];
  else if (!now && dataset.screen) (dataset.theme = dataset.screen), delete dataset.screen;
}
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));
paper.addEventListener("change", () => printing(paper.matches));

/* What can be scrolled can be focused, and what is read aloud of a button or fold is what it shows. */
for (const named of document.querySelectorAll("summary[aria-label], .search-button-field")) named.removeAttribute("aria-label");
globalThis.MathJax?.startup?.promise?.then(() => {
  for (const formula of document.querySelectorAll("mjx-container[display]"))
    if (formula.scrollWidth > formula.clientWidth) formula.tabIndex = 0;
});

/* Of every page of the book: search over all notebooks, and explorers that take their frames from a pack. The code of
dlscale/page/explorer.js stands above this, in the same module. */

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
globalThis.dlscalePack = (name, content) => packs.set(name, content);

/* Stands for the kernel: answers from a pack, which is loaded when a reader comes near the controls. */
class Pack {
  constructor(name, about) {
    Object.assign(this, { name, about });
  }
  get() {
    return this.about;
  }
  on(event, receive) {
    if (event === "msg:custom") this.receive = receive;
  }
  async send({ at }) {
    try {
      await load(`${this.name}.js`);
      if (!at) return;
      const { frames, images } = packs.get(this.name);
      const [image, alt] = frames[JSON.stringify(at)];
      this.receive({ at, alt, mime: "image/webp" }, [Uint8Array.from(atob(images[image]), (c) => c.charCodeAt(0))]);
    } catch (error) {
      if (at) this.receive({ at, error: String(error.message ?? error) }, []);
    }
  }
}

for (const script of document.querySelectorAll("script.explorer")) {
  const { name, ...about } = JSON.parse(script.textContent);
  const image = script.parentElement.querySelector("img");
  const made = new Explorer(new Pack(name, { ...about, picture: image.src, keeps: true })).view();
  const word = about.alone
    ? "Without a kernel, one control moves at a time; the others go back to their start."
    : "Every setting is here, without a kernel.";
  made.append(element("p", { className: "dlscale-note", textContent: word }));
  image.replaceWith(made);
}

/* Search: all words must stand in a section; those with a word in their heading come first. */
const field = document.querySelector("#search"), found = document.querySelector("#found");
const plain = (text) => text.toLowerCase().normalize("NFKD");
async function search() {
  const words = plain(field.value).split(/\s+/).filter(Boolean);
  await load("search.js");
  const hasAll = ({ plainText }) => words.every((word) => plainText.includes(word));
  const hits = words.length ? globalThis.dlscaleSections.filter(hasAll) : [];
  const inHeading = ({ heading }) => words.some((word) => plain(heading).includes(word));
  hits.sort((one, other) => inHeading(other) - inHeading(one));
  const items = hits.slice(0, 30).map(({ page, id, title, heading, text, plainText }) => {
    const start = Math.max(0, plainText.indexOf(words[0]) - 60);
    const link = element("a", { href: `${page}.html#${id}` }, element("b", { textContent: heading }), ` ${title}`);
    return element("li", {}, link, element("p", { textContent: `… ${text.slice(start, start + 160)} …` }));
  });
  const told = words.length ? `${hits.length} section${hits.length === 1 ? "" : "s"}` : "";
  found.replaceChildren(element("p", { role: "status", textContent: told }), element("ul", {}, ...items));
  found.hidden = !words.length;
}
globalThis.dlscaleSearch = (sections) => {
  const withPlainText = (section) => ({ ...section, plainText: plain(`${section.heading} ${section.text}`) });
  globalThis.dlscaleSections = sections.map(withPlainText);
};
field.addEventListener("focus", () => load("search.js"));
field.addEventListener("input", search);
field.addEventListener("keydown", (event) => event.key === "Escape" && ((field.value = ""), search()));

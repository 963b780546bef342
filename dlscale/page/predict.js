/* A question with its options, answered by mouse or keyboard. Jupyter would take arrows and Space for itself: each radio
button asks it not to. */

let count = 0;
const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const render = ({ model, el }) => {
  const name = `dlscale-question-${(count += 1)}-${Math.random()}`;
  const noted = element("p", { role: "status", className: "dlscale-note" });
  const inputs = model.get("options").map((option) => {
    const input = element("input", { type: "radio", name, value: option });
    input.setAttribute("data-lm-suppress-shortcuts", "true");
    input.addEventListener("change", () => {
      model.set("value", option);
      model.save_changes();
    });
    return input;
  });
  const labels = inputs.map((input) => element("label", {}, input, ` ${input.value}`));
  const show = () => {
    const value = model.get("value");
    inputs.forEach((input) => (input.checked = input.value === value));
    noted.textContent = value === null ? "" : `Noted: ${value}`;
  };
  model.on("change:value", show);
  show();
  const legend = element("legend", { textContent: model.get("question") });
  el.append(element("fieldset", { className: "dlscale-question" }, legend, ...labels, noted));
  return () => model.off("change:value", show);
};

export default { render };

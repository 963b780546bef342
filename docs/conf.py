"""The site's settings for Sphinx. `tools/book.py` puts the pages together that it is made of, and calls it."""

from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = "https://github.com/dlscale/dlscale"
LAUNCH = {"binderhub_url": "https://mybinder.org", "colab_url": "https://colab.research.google.com"}

project, author, language = "dlscale", "The dlscale authors", "en"
html_title = "dlscale: why training deep networks stops scaling"
extensions = ["myst_nb"]
nb_execution_mode, nb_render_markdown_format = "off", "myst"
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
myst_enable_extensions, myst_heading_anchors = ["attrs_inline", "dollarmath"], 4
suppress_warnings = ["myst.xref_missing"]  # claims are marked in HTML, as GitHub reads it; tests follow the links
exclude_patterns = ["README.md", "_doctrees"]  # of which the front page includes parts

html_theme = "sphinx_book_theme"
html_static_path = ["_static", "../dlscale/page/explorer.css", "../node_modules/mathjax/es5/tex-svg-full.js"]
html_css_files = ["explorer.css", "site.css"]
html_js_files = [("dlscale.js", {"defer": "defer"})]
html_favicon = html_logo = "_static/icon.svg"
html_search_scorer = str(HERE / "scorer.js")
html_context = {"default_mode": "auto"}
html_copy_source = html_use_index = smartquotes = False
mathjax_path, mathjax_options = "tex-svg-full.js", {"defer": "defer"}  # all of TeX in one file, beside the pages
mathjax3_config = {"options": {"enableMenu": False}}
html_theme_options = {
    "repository_url": REPOSITORY,
    "repository_branch": "main",
    "launch_buttons": LAUNCH | {"notebook_interface": "jupyterlab"},
    "use_download_button": False,
    "use_repository_button": True,
    "logo": {"text": "dlscale"},
    "show_toc_level": 2,
    "extra_footer": "Cite as: The dlscale authors, <cite>dlscale, a course that you run</cite>, version 0.1.0, 2026. "
    f'<a href="{REPOSITORY}/issues/new">Report an error</a>. Texts and figures: CC BY 4.0, code: MIT.',
}


def setup(app) -> None:
    """Write dlscale.js: what explorers do in a notebook's page, and what stands for a kernel here, in one function."""
    parts = (HERE.parent / "dlscale" / "page" / "explorer.js", HERE / "_static" / "site.js")
    explorer, site = (part.read_text(encoding="utf-8").partition("export default")[0] for part in parts)
    (app.outdir / "_static" / "dlscale.js").write_text(f"(() => {{\n{explorer}\n{site}\n}})();\n", encoding="utf-8")

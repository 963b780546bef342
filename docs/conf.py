"""The site's settings for Sphinx. `tools/book.py` puts the pages together that it is made of, and calls it."""

from pathlib import Path

REPOSITORY = "https://github.com/dlscale/dlscale"

project = "dlscale"
author = "The dlscale authors"
html_title = "dlscale: why training deep networks stops scaling"
html_baseurl = "https://dlscale.github.io/dlscale/"
language = "en"
smartquotes = False

extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["README.md"]  # of which the front page includes parts

html_theme = "sphinx_book_theme"
html_static_path = ["_static", "../dlscale/page/explorer.css"]
html_css_files = ["explorer.css", "site.css"]
html_js_files = [("dlscale.js", {"defer": "defer"})]
html_favicon = "_static/icon.svg"
html_logo = "_static/icon.svg"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_context = {"default_mode": "auto"}
html_show_sourcelink = False
mathjax_path = "tex-svg-full.js"  # beside the pages, as all that they load
mathjax_options = {"defer": "defer"}
mathjax3_config = {"options": {"enableMenu": False}}
html_theme_options = {
    "repository_url": REPOSITORY,
    "repository_branch": "main",
    "path_to_docs": "",
    "launch_buttons": {
        "notebook_interface": "jupyterlab",
        "binderhub_url": "https://mybinder.org",
        "colab_url": "https://colab.research.google.com",
    },
    "use_repository_button": True,
    "use_issues_button": True,
    "logo": {"text": "dlscale"},
    "show_toc_level": 2,
    "toc_title": "On this page",
    "search_bar_text": "Search the course",
    "extra_footer": "Cite as: The dlscale authors, <cite>dlscale, a course that you run</cite>, version 0.1.0, 2026. "
    f'<a href="{REPOSITORY}/issues/new">Report an error</a>. Texts and figures: CC BY 4.0, code: MIT.',
}

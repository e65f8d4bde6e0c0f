"""Questions that a reader answers before the page does.

A question is an admonition before the cells that answer it, the last of which calls
`naranhi.show.answer` with its name. What the page has to know about it is in comments, which
JupyterLab does not show:

    :::{admonition} Predict, then see
    :class: predict
    % name: gpipe-bubble
    % range: 0 100
    % unit: %

    For what share of their time do the four ranks sit idle?
    :::

``% scale: log`` is for what spans several powers of ten. In place of a range, ``% choices:`` has
the possible answers, separated by ``|``; they are counted from 0. ``naranhi-predict.js`` asks for
the guess, and until then covers what the cells show from the question to its answer. Without it, in
a notebook and on paper there is the question, and the answer where the cell shows it.

``{predictions}`` is a table of all chapters, in which the script says how well the reader guesses.
"""

import re
from html import escape
from math import isfinite
from typing import NamedTuple

import naranhi_site  # noqa: F401 (it puts the book's modules in reach)
from docutils import nodes
from languages import BY_CODE, Language
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
ANSWER = re.compile(r'data-answer="([\w-]+)"')


class Prediction(nodes.General, nodes.Element):
    """A question; its children are its text."""


class Predictions(nodes.General, nodes.Element):
    """The place of the table of all chapters."""


def asked(comments: str) -> dict[str, object]:
    """What the comments of a question say.

    Raises:
        ValueError: they do not say what they have to, or more.
    """
    lines = [line.partition(":") for line in comments.splitlines()]
    found = {key.strip(): value.strip() for key, _, value in lines}
    if unknown := found.keys() - {"name", "range", "choices", "unit", "scale"}:
        raise ValueError(f"unknown key in a prediction: {', '.join(sorted(unknown))}")
    if not NAME.fullmatch(found.get("name", "")) or ("range" in found) == ("choices" in found):
        raise ValueError("a prediction needs a name such as a-name, and either a range or choices")
    if found.get("scale", "log") != "log":
        raise ValueError(f"a scale is log, or not given; not {found['scale']!r}")
    if "choices" in found:
        found["choices"] = [choice.strip() for choice in found["choices"].split("|")]
        if len(found["choices"]) < 2 or not all(found["choices"]):
            raise ValueError("two choices or more are separated by |")
    else:
        low, high = found["range"] = _bounds(found["range"])
        if not low < high or ("scale" in found and low <= 0):
            raise ValueError(f"range {low:g} {high:g} must rise, and start above 0 with a scale")
    return found


def _bounds(text):
    try:
        low, high = map(float, text.split())
        if isfinite(low) and isfinite(high):
            return low, high
    except ValueError:
        pass
    raise ValueError(f"a range is two numbers, such as 0 100, not {text!r}")


class Questions(SphinxTransform):
    """Make an admonition of the class ``predict`` a question."""

    default_priority = 390  # before `Covered` looks for them

    def apply(self, **kwargs) -> None:
        for box in list(self.document.findall(nodes.admonition)):
            if "predict" not in box["classes"]:
                continue
            comments = [part for part in box.children if isinstance(part, nodes.comment)]
            try:
                question = Prediction(**asked("\n".join(part.astext() for part in comments)))
            except ValueError as error:
                logger.warning(str(error), location=box)
                continue
            title, *rest = box.children
            question["title"] = title.astext()
            question += [part for part in rest if part not in comments]
            box.replace_self(question)


class PredictionsTable(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return [Predictions()]


class Covered(SphinxTransform):
    """Mark what cells show from a question to its answer. Each has to have the other."""

    default_priority = 400  # with the other transforms of cells, before any of them is folded

    def apply(self, **kwargs) -> None:
        open_questions: dict[str, None] = {}
        for node in self.document.findall():
            if isinstance(node, Prediction):
                open_questions[node["name"]] = None
            elif isinstance(node, nodes.container) and node.get("nb_element") == "cell_code_output":
                node["classes"] += ["naranhi-covered"] if open_questions else []
                node["classes"] += [f"naranhi-covered-{name}" for name in open_questions]
                for raw in node.findall(nodes.raw):
                    for name in {*ANSWER.findall(raw.astext())}:  # also in another's record
                        if open_questions.pop(name, 0) == 0:
                            logger.warning(f"no question before the answer {name}", location=raw)
        for name in open_questions:
            logger.warning(f"no answer after the question {name}", location=self.env.docname)


def described(node: Prediction) -> str:
    """The attribute by which a field says what is asked: a page has several questions."""
    return f'aria-describedby="predict-{node["name"]}"'


class Form(NamedTuple):
    """What a reader fills in below a question."""

    node: Prediction
    language: Language

    def html(self) -> str:
        words = self.language.predict
        fields = self._choices() if "choices" in self.node else self._number()
        return (
            f'<form novalidate>{fields}<div class="naranhi-predict-buttons">'
            f'<button type="submit" data-show>{words["show"]}</button>'
            f'<button type="button" data-skip>{words["skip"]}</button></div></form>'
            '<div class="naranhi-predict-said" role="status"></div>'
        )

    def _choices(self):
        radios = "".join(
            f'<label><input type="radio" name="guess" value="{n}"> {escape(choice)}</label>'
            for n, choice in enumerate(self.node["choices"])
        )
        legend = self.language.predict["guess"]
        named = f"<fieldset {described(self.node)}><legend>{legend}</legend>"
        return f"{named}{radios}</fieldset>"

    def _number(self):
        low, high = (f"{bound:g}" for bound in self.node["range"])
        words, unit = self.language.predict, self.node.get("unit", "")
        return (
            f'<label>{words["guess"]} <span><input name="guess" inputmode="decimal" size="8" '
            f'autocomplete="off" {described(self.node)}> {escape(unit)}</span></label>'
            '<div class="naranhi-predict-slider"><input type="range" min="0" max="1" step="0.01" '
            f'value="0" aria-label="{words["slider"]}">'
            f"<div><span>{low}</span><span>{high}</span></div></div>"
        )


def visit(self, node: Prediction) -> None:
    data = {"predict": node["name"], "state": "asking", "chapter": self.builder.current_docname}
    data |= {key: node[key] for key in ("unit", "scale") if key in node}
    if "range" in node:
        data["low"], data["high"] = map(repr, node["range"])
    attributes = "".join(f' data-{key}="{escape(value)}"' for key, value in data.items())
    title = f'<p class="naranhi-predict-title">{escape(node["title"])}</p>'
    question = f'<div class="naranhi-predict-question" id="predict-{node["name"]}">'
    self.body.append(f'<div class="naranhi-predict"{attributes}>{title}{question}')


def depart(self, node: Prediction) -> None:
    form = Form(node, BY_CODE[self.config.language]).html()
    self.body.append(f"</div>{form}</div>")


class Overview(SphinxPostTransform):
    """Fill in the table of all chapters, when all have been read."""

    default_priority = 20
    formats = ("html",)

    def run(self, **kwargs) -> None:
        for place in list(self.document.findall(Predictions)):
            words = BY_CODE[self.config.language].predict
            heads = "".join(f"<th>{head}</th>" for head in words["columns"])
            rows = "".join(filter(None, map(self._row, sorted(self.env.found_docs))))
            buttons = f'<button type="button" data-clear>{words["clear"]}</button>'
            table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
            html = f'<div class="naranhi-predictions">{table}{buttons}<p role="status"></p></div>'
            place.replace_self(nodes.raw("", html, format="html"))

    def _row(self, page):
        asked = [*self.env.get_doctree(page).findall(Prediction)]
        if not asked:
            return ""
        number = int(re.match(r"\d+", page)[0])  # a chapter has its file's
        title = f"{number}. {escape(self.env.titles[page].astext())}"
        names = " ".join(node["name"] for node in asked)  # a guess at another does not count
        return (
            f'<tr data-chapter="{page}" data-questions="{names}">'
            f'<th scope="row"><a href="{page}.html">{title}</a></th>'
            f'<td data-output="asked">{len(asked)}</td>'
            '<td data-output="guessed">–</td><td data-output="close">–</td></tr>'
        )


def configure(app, config) -> None:
    config.html_css_files.append("naranhi-predict.css")
    config.html_js_files.append("naranhi-predict.js")


def setup(app) -> dict:
    app.connect("config-inited", configure, priority=400)
    app.add_directive("predictions", PredictionsTable)
    app.add_node(Prediction, html=(visit, depart))
    app.add_node(Predictions)
    app.add_transform(Questions)
    app.add_transform(Covered)
    app.add_post_transform(Overview)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Numbers for the tables that cells show: "Table 12.3", in both languages the same.

The table that a cell shows (``naranhi.show.table``) is called after the chapter and the cell's id:
the text refers to what cell ``sizes`` of chapter 12 shows by {numref}`table-12-sizes`. The caption
is what the cell says, or none.
"""

import naranhi_site  # noqa: F401 (it puts the book's modules in reach)
from docutils import nodes
from sphinx.transforms import SphinxTransform
from tables import TABLE, numbered


class NumberedTable(nodes.General, nodes.Element):
    """An output of a cell that is a table."""


class TablesOfCells(SphinxTransform):
    """Make what shows a table a node that Sphinx counts and the text can refer to."""

    default_priority = 400  # before labels are collected

    def apply(self, **kwargs) -> None:
        for cell in list(self.document.findall(nodes.container)):
            name = cell.get("cell_metadata", {}).get("naranhi", {}).get("table")
            if not name:
                continue
            shown = next(raw for raw in cell.findall(nodes.raw) if TABLE.search(raw.astext()))
            bundle = shown.parent
            while bundle.get("nb_element") != "mime_bundle":
                bundle = bundle.parent
            caption = TABLE.search(shown.astext())[3] or ""
            table = NumberedTable(names=[name], caption=caption)
            bundle.replace_self(table)
            table += bundle
            self.document.note_explicit_target(table)


def visit(self, node: NumberedTable) -> None:
    node["begins"] = len(self.body)


def depart(self, node: NumberedTable) -> None:
    anchor = node["ids"][0]
    count = ".".join(map(str, self.builder.fignumbers["table"][anchor]))
    number = self.config.numfig_format["table"] % count
    shown = "".join(self.body[node["begins"] :])
    title = self.config.html_permalinks_icon
    link = f'<a class="headerlink" href="#{anchor}" title="{number}">{title}</a>'
    self.body[node["begins"] :] = [numbered(shown, number, anchor, link)]


def title(node: NumberedTable) -> str:
    return node["caption"] or node["ids"][0]  # Sphinx does not number what has no title


def setup(app) -> dict:
    app.add_enumerable_node(NumberedTable, "table", title, html=(visit, depart))
    app.add_transform(TablesOfCells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
